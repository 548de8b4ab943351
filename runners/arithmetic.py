"""How arithmetic is rounded while a cell runs."""

import torch


def set_precision(precision: str) -> None:
    """The same arithmetic for every system. tf32 is PyTorch's default: TF32 in convolutions, not in matrix products."""
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
