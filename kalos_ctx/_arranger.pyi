from typing import final

from kalos_ctx._device import Device
from kalos_ctx._device_array import DeviceArray
from kalos_ctx._windows import Window

LAYOUT_CODES: dict[str, int]

@final
class Arranger:
    def __new__(cls, device: Device) -> Arranger: ...
    def arrange(
        self, windows: list[Window | None], layout: str, pad_id: int, wide: bool
    ) -> dict[str, DeviceArray]: ...
