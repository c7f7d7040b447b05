from kalos_ctx._reader import StoreReader
from kalos_ctx._vectors import RowMap

def newest_rows(reader: StoreReader, known: RowMap | None = None) -> RowMap: ...
