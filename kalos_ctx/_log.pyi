from kalos_ctx._segment import SegmentSet

class Log:
    @property
    def files(self) -> SegmentSet: ...
    @property
    def end(self) -> int: ...
