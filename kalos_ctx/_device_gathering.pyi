from kalos_ctx._device import Device
from kalos_ctx._gathering import Gatherer
from kalos_ctx._registered import RegisteredSegments
from kalos_ctx._window_parts import WindowParts
from kalos_ctx.errors import StoreCorrupt

class DeviceGatherer(Gatherer):
    zero_copy_from: int
    def __init__(self, device: Device, segments: RegisteredSegments | None = None) -> None: ...
    @property
    def device(self) -> Device: ...
    @property
    def segments(self) -> RegisteredSegments | None: ...
    def damage(self, parts: WindowParts, bad: int) -> StoreCorrupt: ...
