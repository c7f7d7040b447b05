from kalos_ctx._device import Device
from kalos_ctx._device_array import DeviceArray
from kalos_ctx._windows import Window

class Arranger:
    def __init__(self, device: Device) -> None: ...
    def arrange(
        self, windows: list[Window | None], layout: str, pad_id: int, wide: bool
    ) -> dict[str, DeviceArray]: ...
