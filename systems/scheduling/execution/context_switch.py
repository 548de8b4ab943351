"""Have a GPU change to another context and back, which makes CUDA Graphs captured before faster."""

from typing import Any

import torch
from cuda.bindings import driver

REFUSED = (driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, driver.CUresult.CUDA_ERROR_NOT_SUPPORTED)


def switch_contexts(device: torch.device) -> bool:
    """Run something in a second context on `device` and drop that context; False where the GPU has no room for one.

    From its capture on a CUDA Graph takes longer than after the GPU has run another context's work, be it of this process or
    of another, and be it gone by then; the README's tables say by how much. The reason is not known. Takes some tenths of a
    second, and some hundred MiB of the GPU meanwhile. Raises RuntimeError where the driver fails.
    """
    torch.cuda.synchronize(device)
    index = device.index if device.index is not None else torch.cuda.current_device()
    status, context = _new_context(_checked(driver.cuDeviceGet(index)))
    if status in REFUSED:
        return False
    _checked((status,))
    try:
        status, memory = driver.cuMemAlloc(4)
        if status in REFUSED:
            return False
        _checked((status,))
        _checked(driver.cuMemsetD8(memory, 0, 4))
        _checked(driver.cuCtxSynchronize())
    finally:
        _checked(driver.cuCtxDestroy(context))  # with its memory; the one before becomes current again
    return True


def _new_context(device: Any) -> tuple[Any, Any]:
    """Becomes the current one of this thread. In CUDA 13 cuCtxCreate has one more parameter."""
    try:
        created: tuple[Any, Any] = driver.cuCtxCreate(None, 0, device)
    except TypeError:
        created = driver.cuCtxCreate(0, device)  # type: ignore[call-arg]
    return created


def _checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA: {status.name}")
    return values[0] if values else None
