from collections.abc import Callable

from kalos_ctx._device import Device
from kalos_ctx._device_rows import DeviceRows
from kalos_ctx._reader import StoreReader
from kalos_ctx._store_scan import StoreScan

KIND_NAMES: tuple[str, ...]

class DeviceScan(StoreScan):
    def __init__(
        self,
        reader: StoreReader,
        device: Device,
        progress: Callable[[int, int], object] | None = None,
    ) -> None: ...
    @property
    def device(self) -> Device: ...
    @property
    def cpu_scans(self) -> int: ...
    @property
    def scans(self) -> dict[str, int]: ...
    @property
    def num_resident(self) -> int: ...
    def load(self, progress: Callable[[int, int], None] | None = None) -> None: ...
    def find_kernels(self, rows: DeviceRows) -> None: ...
    def close(self) -> None: ...
