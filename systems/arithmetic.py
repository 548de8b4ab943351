"""How exactly PyTorch computes, where an answer is compared with its own."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_tf32() -> Iterator[None]:
    """Within it no convolution or matrix product of fp32 tensors is rounded to TF32, and cuDNN times no algorithms."""
    products = torch.backends.cuda.matmul
    allowed = products.allow_tf32
    products.allow_tf32 = False
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
            yield
    finally:
        products.allow_tf32 = allowed
