"""How exactly PyTorch computes, where an answer is compared with its own."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from models.model import TF32

TF32_EPSILON = 2.0**-10  # TF32 keeps ten bits


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


def epsilon(tensor: Tensor, precision: str) -> float:
    """The relative distance of neighbouring numbers, as the arithmetic sees a weight; 0 for whole numbers.

    Under TF32 a GPU may round what it multiplies: under tf32 eager does in convolutions, other systems in products too.
    So this is TF32's for every fp32 tensor of two or more dimensions.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    if precision in TF32 and tensor.is_cuda and tensor.dim() > 1 and tensor.dtype == torch.float32:
        return TF32_EPSILON
    return torch.finfo(tensor.dtype).eps


@torch.no_grad()
def disturb(tensor: Tensor, seed: int, by: float) -> None:
    """Move each element up or down by this fraction, in place."""
    generator = torch.Generator(tensor.device).manual_seed(seed)
    signs = torch.randint(2, tensor.shape, generator=generator, device=tensor.device) * 2 - 1
    tensor.mul_(1 + by * signs)
