"""The probe behind the `needs_gpu` marker tells a missing driver from one that fails."""

import pytest
from helpers.gpu import NoGpuError, require_gpu


def test_require_gpu_missing_driver_is_no_gpu():
    with pytest.raises(NoGpuError, match="no CUDA driver"):
        require_gpu("libkalos-no-such-driver.so.1")


def test_require_gpu_library_without_the_calls_is_no_skip():
    with pytest.raises(AttributeError):
        require_gpu("libc.so.6")
