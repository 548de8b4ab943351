"""Python's collector of cycles, put aside."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Nothing is collected within: not under a capture, which a tensor or graph that is freed would break, nor while PyTorch
    is imported or a model traced, where each pass of the collector finds all in use, for a sixth of the time.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
