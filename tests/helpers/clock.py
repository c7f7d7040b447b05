"""A clock that moves only when a test moves it."""


class ManualClock:
    """Stand in for `time.time`: calling it returns `now`, in seconds."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Move by `seconds` (backwards where negative) and return the new time."""
        self.now += seconds
        return self.now
