"""How a cell's arithmetic is rounded, and by which algorithms cuDNN does it."""

import torch


def set_arithmetic(precision: str, algorithms: str) -> None:
    """The same for every system. tf32 is PyTorch's default: TF32 in convolutions, not in matrix products.

    tf32_products has TF32 in both, as XLA has by default.

    algorithms: `heuristic`, PyTorch's default too, is cuDNN's own choice, the same in every process; `timed` takes the
    fastest of one timing each, on whose scatter the choice turns, so that two processes run different kernels.
    """
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32_products"
    torch.backends.cudnn.benchmark = algorithms == "timed"
