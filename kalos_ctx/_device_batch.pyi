from kalos_ctx._device_rows import DeviceRows

class BatchScan:
    def __init__(self, rows: DeviceRows, metric: int) -> None: ...
