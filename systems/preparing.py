"""What is the whole process's while something is made ready in it: tracing, allocator, garbage collector, environment."""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from conf.text import first_line

from .base import Unsupported

# Held by whoever traces a module, or captures on a GPU. Neither torch.export nor torch's pools of memory serve two threads.
one_at_a_time = threading.RLock()
TRITONS_FOLDER = "TRITON_CACHE_DIR"  # of Triton's cache; TorchInductor moves it where nobody has named one
FROZEN_BY_PYTHON = 1000  # objects, at most: Python 3.12 freezes some hundred when it starts


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


@contextmanager
def collector_spared() -> Iterator[None]:
    """Leave what is alive now out of Python's garbage collections within.

    A collection of all objects takes 0.17 s once PyTorch is loaded, and requests wait for it. What a host has frozen stays
    frozen.
    """
    is_first = gc.get_freeze_count() < FROZEN_BY_PYTHON
    if is_first:
        gc.freeze()
    try:
        yield
    finally:
        if is_first:
            gc.unfreeze()


@contextmanager
def variable_kept(name: str, value: str | None = None) -> Iterator[None]:
    """Leave an environment variable as it is after this, whatever sets it within.

    Args:
        value: that it has meanwhile; None is its own.
    """
    before = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before
        else:
            os.environ.pop(name, None)


def uncapturable(error: RuntimeError, what: str = "it") -> RuntimeError | Unsupported:
    """Why a run under capture failed; memory that ran out is no such reason."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return error
    return Unsupported(f"{what} cannot be captured into a CUDA Graph: {first_line(error)}")
