"""A GPT block's operators by kernels of our own, where a library's take longer: norms, and products of one token.

The addition to the residual stream and the norm after it are one kernel. A library's product takes the activation with it. A
single token's products take norm, activation and addition with them (`gemv.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional

from .gemv import product


@triton.jit
def _add_and_norm(x, addend, total, out, weight, bias, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, PADDED)
    is_column = column < WIDTH
    values = tl.load(x + begin + column, mask=is_column, other=0.0)
    gain = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
    if addend is not None:
        values = (values.to(tl.float32) + tl.load(addend + begin + column, mask=is_column, other=0.0).to(tl.float32)).to(
            total.dtype.element_ty
        )
        tl.store(total + begin + column, values, mask=is_column)
    wide = values.to(tl.float32)
    mean = tl.sum(wide, axis=0) / WIDTH
    centred = tl.where(is_column, wide - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / WIDTH + eps)
    tl.store(out + begin + column, (centred * scale * gain + shift).to(out.dtype.element_ty), mask=is_column)


class KernelOperators:
    """As models.gpt.Operators, for tokens [N, hidden] on a GPU.

    is_early: kernels of one token's products are launched while the one before them ends.
    """

    def __init__(self, is_early: bool):
        self.is_early = is_early

    def enter(
        self, x: Tensor, addend: Tensor | None, norm: nn.LayerNorm, linear: nn.Linear, is_gelu: bool = False
    ) -> tuple[Tensor, Tensor]:
        if len(x) == 1 and addend is None:
            return x, product(x, linear, norm, None, is_gelu, self.is_early)
        x, normed = self.norm(x, addend, norm)
        if len(x) == 1:
            return x, product(normed, linear, None, None, is_gelu, self.is_early)
        if is_gelu and x.is_cuda and linear.bias is not None:  # there it is the tanh form
            return x, torch._addmm_activation(linear.bias, normed, linear.weight.t(), use_gelu=True)
        output = linear(normed)
        return x, functional.gelu(output, approximate="tanh") if is_gelu else output

    def leave(
        self, x: Tensor, linear: nn.Linear, y: Tensor, sum_parts: Callable[[Tensor, Tensor | None], None] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if len(x) > 1:
            output = linear(y)
            if sum_parts is not None:
                sum_parts(output, None)
            return x, output
        if sum_parts is None:
            return product(y, linear, None, x, False, self.is_early), None
        output = product(y, linear, None, None, False, self.is_early)
        sum_parts(output, x)
        return output, None

    def norm(self, x: Tensor, addend: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
        width = x.shape[-1]
        total = x if addend is None else torch.empty_like(x)
        out = torch.empty_like(x)
        _add_and_norm[(len(x),)](
            x, addend, total, out, norm.weight, norm.bias, norm.eps, WIDTH=width, PADDED=triton.next_power_of_2(width),
            num_warps=8,
        )  # fmt: skip
        return total, out
