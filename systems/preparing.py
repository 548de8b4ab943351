"""What is the whole process's while something is made ready in it: its tracing, its allocator, its garbage collector."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from conf.text import first_line

from .base import Unsupported

# Held by whoever traces a module, or captures on a GPU. Neither torch.export nor torch's pools of memory serve two threads.
one_at_a_time = threading.RLock()


@contextmanager
def collector_off() -> Iterator[None]:
    """Turn Python's garbage collector off within, in one thread at a time.

    1. Freeing a tensor or a graph during a CUDA Graph capture breaks the capture.
    2. During import and tracing nothing can be freed, and collecting takes a sixth of the time.
    """
    with one_at_a_time:
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()


def uncapturable(error: RuntimeError, what: str = "it") -> RuntimeError | Unsupported:
    """Why a run under capture failed; memory that ran out is no such reason."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return error
    return Unsupported(f"{what} cannot be captured into a CUDA Graph: {first_line(error)}")
