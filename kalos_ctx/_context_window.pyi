from typing import Any

from kalos_ctx._window_parts import WindowParts
from kalos_ctx._windows import Window
from kalos_ctx.reports import Report

class ContextWindow(Window):
    @property
    def session(self) -> str | bytes: ...
    @property
    def tenant(self) -> str | bytes: ...
    @property
    def parts(self) -> WindowParts: ...
    @property
    def report(self) -> Report: ...

def use_report(cls: Any) -> None: ...
