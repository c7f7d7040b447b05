from typing import Any

NAME: str

def boot_id() -> bytes: ...

class Control:
    @property
    def config(self) -> dict[str, Any]: ...
