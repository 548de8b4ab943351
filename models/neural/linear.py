"""Operators that are affine maps: linear models, scalers, projections; and those that pick or normalize."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

LEAST_NORM = 10 * float(np.finfo(np.float64).eps)  # scikit-learn leaves rows below it as they are


def linear(weight: ArrayLike, bias: ArrayLike, dtype: torch.dtype) -> nn.Linear:
    """x -> weight·x + bias: [B, F] -> [B, K].

    Args:
        weight: [K, F].
        bias: [K], or one number for all.
    """
    matrix = torch.as_tensor(np.asarray(weight, dtype=np.float64)).to(dtype)
    module = nn.Linear(matrix.shape[1], matrix.shape[0], dtype=dtype)
    with torch.no_grad():
        module.weight.copy_(matrix)
        module.bias.copy_(torch.as_tensor(np.asarray(bias, dtype=np.float64)))
    return module


def projection(components: ArrayLike, mean: ArrayLike, dtype: torch.dtype) -> nn.Linear:
    """x -> components·(x - mean): [B, F] -> [B, K]; `components` is [K, F]."""
    matrix = np.asarray(components, dtype=np.float64)
    return linear(matrix, -matrix @ np.broadcast_to(np.asarray(mean, dtype=np.float64), matrix.shape[1]), dtype)


class _ByColumn(nn.Module):
    """Two numbers a column, and limits of the result if there are any."""

    def __init__(
        self,
        shift: ArrayLike,
        scale: ArrayLike,
        num_features: int,
        dtype: torch.dtype,
        limits: tuple[float, float] | None = None,
    ):
        super().__init__()
        columns = [np.broadcast_to(np.asarray(a, dtype=np.float64), num_features).copy() for a in (shift, scale)]
        self.shift, self.scale = (nn.Parameter(torch.from_numpy(column).to(dtype)) for column in columns)
        self.limits = limits

    def reset_parameters(self) -> None:
        """A cold start: the identity."""
        nn.init.zeros_(self.shift)
        nn.init.ones_(self.scale)

    def within(self, x: Tensor) -> Tensor:
        return x.clamp(*self.limits) if self.limits else x


class Standardize(_ByColumn):
    """(x - shift) / scale: [B, F] -> [B, F]. It rounds as scikit-learn does, which decides ties of trees behind it."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, F] -> [B, F]"""
        return self.within((x - self.shift) / self.scale)


class Affine(_ByColumn):
    """x · scale + shift: [B, F] -> [B, F]."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, F] -> [B, F]"""
        return self.within(x * self.scale + self.shift)


class Normalize(nn.Module):
    """Each row over its norm; one of a norm below LEAST_NORM stays: [B, F] -> [B, F]. `norm` is "l1", "l2" or "max"."""

    def __init__(self, norm: str):
        super().__init__()
        self.order = {"l1": 1.0, "l2": 2.0, "max": torch.inf}[norm]

    def forward(self, x: Tensor) -> Tensor:
        """[B, F] -> [B, F]"""
        # At 0 the gradient of a norm is not defined: there the square root of it would make NaN.
        is_zero = (x == 0).all(1, keepdim=True)
        norms = torch.linalg.vector_norm(torch.where(is_zero, torch.ones_like(x), x), self.order, dim=1, keepdim=True)
        return x / torch.where(is_zero | (norms < LEAST_NORM), torch.ones_like(norms), norms)


class Columns(nn.Module):
    """Some columns, in the order given: [B, F] -> [B, K]."""

    places: Tensor

    def __init__(self, places: Sequence[int]):
        super().__init__()
        self.register_buffer("places", torch.tensor(list(places), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        """[B, F] -> [B, K]"""
        return x[:, self.places]
