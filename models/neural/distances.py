"""Operators that compare a row with rows they have kept: centroids and support vectors."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """||x - y||² by one matrix product, at least 0: [B, F], [K, F] -> [B, K]."""
    products = torch.addmm(y.square().sum(1), x, y.t(), alpha=-2.0)
    return (products + x.square().sum(1, keepdim=True)).clamp_min(0)


class Centroids(nn.Module):
    """How near each centroid is: [B, F] -> [B, K].

    Args:
        centroids: [K, F].
        as_scores: -||x - c||² / temperature, whose softmax is a soft choice of the nearest; otherwise ||x - c||.
    """

    def __init__(self, centroids: ArrayLike, dtype: torch.dtype, as_scores: bool, temperature: float = 1.0):
        super().__init__()
        self.centroids = nn.Parameter(torch.as_tensor(np.asarray(centroids, dtype=np.float64)).to(dtype))
        self.as_scores, self.temperature = as_scores, temperature

    def reset_parameters(self) -> None:
        """A cold start."""
        nn.init.normal_(self.centroids)

    def forward(self, x: Tensor) -> Tensor:
        """[B, F] -> [B, K]"""
        squared = squared_distances(x, self.centroids)
        if self.as_scores:
            return -squared / self.temperature
        tiny = torch.finfo(x.dtype).tiny  # the gradient of a square root at 0 is infinite
        return squared.clamp_min(tiny).sqrt()


KERNELS = ("linear", "poly", "rbf", "sigmoid")


class KernelMachine(nn.Module):
    """sum of dual weights · kernel(x, support vector) + bias: [B, F] -> [B, K].

    Args:
        vectors: [V, F], support vectors.
        weight: [K, V], dual weights.
        bias: [K].
        kernel: one of KERNELS, with libsvm's `gamma`, `coef0` and `degree`.
    """

    def __init__(
        self,
        vectors: ArrayLike,
        weight: ArrayLike,
        bias: ArrayLike,
        dtype: torch.dtype,
        kernel: str,
        gamma: float,
        coef0: float,
        degree: int,
    ):
        super().__init__()
        if kernel not in KERNELS:
            raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, not {kernel!r}")
        arrays = (vectors, weight, bias)
        tensors = (nn.Parameter(torch.as_tensor(np.asarray(a, dtype=np.float64)).to(dtype)) for a in arrays)
        self.vectors, self.weight, self.bias = tensors
        self.kernel, self.gamma, self.coef0, self.degree = kernel, gamma, coef0, degree

    def reset_parameters(self) -> None:
        """A cold start."""
        nn.init.normal_(self.vectors)
        nn.init.normal_(self.weight, std=len(self.vectors) ** -0.5)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, F] -> [B, K]"""
        if self.kernel == "rbf":
            similarity = torch.exp(-self.gamma * squared_distances(x, self.vectors))
        else:
            similarity = x @ self.vectors.t()
            if self.kernel == "poly":
                similarity = (self.gamma * similarity + self.coef0) ** self.degree
            elif self.kernel == "sigmoid":
                similarity = torch.tanh(self.gamma * similarity + self.coef0)
        return torch.addmm(self.bias, similarity, self.weight.t())


class Votes(nn.Module):
    """Scores of classes from those of pairs of classes, as scikit-learn makes them: [B, K(K-1)/2] -> [B, K].

    A class has its votes, plus the sum of its confidences brought below a third, which breaks ties. Votes have no gradient.
    """

    pairs: Tensor

    def __init__(self, num_classes: int):
        super().__init__()
        self.num_classes = num_classes
        self.register_buffer("pairs", torch.tensor([(i, j) for i in range(num_classes) for j in range(i + 1, num_classes)]))

    def forward(self, x: Tensor) -> Tensor:
        """[B, K(K-1)/2] -> [B, K], positive scores for the first class of a pair"""
        first, second = (nn.functional.one_hot(self.pairs[:, side], self.num_classes).to(x.dtype) for side in (0, 1))
        confidences = x @ first - x @ second
        is_second = (x < 0).to(x.dtype)
        votes = (1 - is_second) @ first + is_second @ second
        return votes + confidences / (3 * (confidences.abs() + 1))
