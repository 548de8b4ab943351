"""Python's garbage collector, switched off for a while."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Turn Python's garbage collector off within.

    1. Freeing a tensor or a graph during a CUDA Graph capture breaks the capture.
    2. During import and tracing nothing can be freed, and collecting takes a sixth of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
