"""Which devices this machine has, without an import of torch: python -m runners.machine.device prints their number."""

import ctypes
import os
import sys
from functools import cache

CUDA_SUCCESS = 0


@cache
def cuda_device_count() -> int:
    """The number of CUDA devices that the driver shows; 0 where there is no driver."""
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) != CUDA_SUCCESS or driver.cuDeviceGetCount(ctypes.byref(count)) != CUDA_SUCCESS:
        return 0
    return count.value


def visible(index: int) -> str:
    """The value of CUDA_VISIBLE_DEVICES that shows a process only one device.

    Args:
        index: of the devices that are visible here, from 0.
    """
    devices = [device.strip() for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device.strip()]
    return devices[index] if devices else str(index)


if __name__ == "__main__":
    print(cuda_device_count())
