"""What is the whole process's while something is made ready in it: tracing, allocator, collector, environment, timer."""

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from conf.text import first_line, words_of

from .base import Unsupported

# Held by whoever traces a module, or captures on a GPU. Neither torch.export nor torch's pools of memory serve two threads.
one_at_a_time = threading.RLock()
TRITONS_FOLDER = "TRITON_CACHE_DIR"  # of Triton's cache; TorchInductor moves it where nobody has named one
AGAIN_SECONDS = 5.0  # after which what swallowed being interrupted is interrupted once more
# In the words of allocators and libraries, which have no type of error for it.
NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "Failed to allocate memory",
    "ALLOC_FAILED",
    "Storage size calculation overflowed",
)
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
def as_captured(kind: str) -> Iterator[None]:
    """Run operators within as a program has them, whatever the host's thread is in: autocast, or inference mode.

    Autocast is captured as operators that cast. What is made in inference mode can be written nowhere else.

    Args:
        kind: of device, cpu or cuda.
    """
    if torch.is_inference_mode_enabled() or torch.is_autocast_enabled(kind):
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(kind, enabled=False):
            yield
    else:
        yield


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


def lacks_memory(error: BaseException) -> bool:
    """Is it for want of memory?"""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, Exception) and any(words in words_of(error) for words in NO_MEMORY)


def give_back() -> None:
    """Return to the GPU what torch's allocator keeps of it for later."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def uncapturable(error: RuntimeError, what: str = "it") -> RuntimeError | Unsupported:
    """Why a run under capture failed; memory that ran out is no such reason."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return error
    return Unsupported(f"{what} cannot be captured into a CUDA Graph: {first_line(error)}")


class OverBudget(BaseException):
    """The budget is over. It is no Exception: compilers take those for failures of a candidate, and go on."""


@contextmanager
def at_most(seconds: float | None) -> Iterator[None]:
    """Raise OverBudget within, once so many seconds have passed. Only the main thread hears signals: elsewhere, no limit.

    Args:
        seconds: None for no limit.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise OverBudget

    handler = signal.signal(signal.SIGALRM, end)
    other = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6), AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *other)
        signal.signal(signal.SIGALRM, handler)
