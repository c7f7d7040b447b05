from kalos_ctx._lookup import Lookup

INDEX_NAMES: tuple[str, ...]

class Index(Lookup): ...
