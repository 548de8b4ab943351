"""Factorization machines (Rendle 2010); matrix factorization is one over two one-hot fields."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn


class Factorization(nn.Module):
    """w0 + w·x + the sum over pairs of <v_i, v_j> x_i x_j: [B, F] -> [B, 1].

    The sum over pairs is half of (sum of v_i x_i)² minus the sum of (v_i x_i)², over the rank.

    Args:
        weight: [F].
        factors: [F, rank].
        bias: one number.
    """

    def __init__(self, weight: ArrayLike, factors: ArrayLike, bias: float, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.as_tensor(np.asarray(weight, dtype=np.float64)).to(dtype)[:, None])
        self.factors = nn.Parameter(torch.as_tensor(np.asarray(factors, dtype=np.float64)).to(dtype))
        self.bias = nn.Parameter(torch.tensor([bias], dtype=dtype))

    def reset_parameters(self) -> None:
        """A cold start."""
        nn.init.zeros_(self.weight)
        nn.init.normal_(self.factors, std=0.01)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, F] -> [B, 1]"""
        pairs = (x @ self.factors).square() - x.square() @ self.factors.square()
        return torch.addmm(self.bias, x, self.weight) + pairs.sum(1, keepdim=True) / 2
