from kalos_ctx._device import Device
from kalos_ctx._gathering import Gatherer
from kalos_ctx._registered import RegisteredSegments

class DeviceGatherer(Gatherer):
    zero_copy_from: int
    def __init__(self, device: Device, segments: RegisteredSegments | None = None) -> None: ...
    @property
    def device(self) -> Device: ...
    @property
    def segments(self) -> RegisteredSegments | None: ...
