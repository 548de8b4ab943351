"""Undoes what runs change."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def restored(tensors: Iterable[Tensor], devices: Sequence[int | torch.device]) -> Iterator[None]:
    """Give tensors and the random state the values back that they have on entry.

    Args:
        tensors: They keep their memory; their values are copied.
        devices: GPUs whose random state is restored, beside the CPU's.
    """
    copies = [(t, t.detach().clone()) for t in tensors]
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for t, copy in copies:
                t.copy_(copy)
