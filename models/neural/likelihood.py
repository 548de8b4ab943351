"""Naive Bayes as the joint log-likelihood of each class; those of counts are linear maps."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn


class GaussianLikelihood(nn.Module):
    """log p(class) + the sum over features of log N(x; mean, variance): [B, F] -> [B, classes]. Variances train as logs."""

    def __init__(self, mean: ArrayLike, variance: ArrayLike, prior: ArrayLike, dtype: torch.dtype):
        super().__init__()
        arrays = (np.asarray(mean), np.log(np.asarray(variance)), np.log(np.asarray(prior)))
        tensors = (nn.Parameter(torch.as_tensor(a, dtype=torch.float64).to(dtype)) for a in arrays)
        self.mean, self.log_variance, self.log_prior = tensors

    def reset_parameters(self) -> None:
        """A cold start: classes of unit variance and equal shares, at random places."""
        nn.init.normal_(self.mean)
        nn.init.zeros_(self.log_variance)
        nn.init.constant_(self.log_prior, -math.log(len(self.log_prior)))

    def forward(self, x: Tensor) -> Tensor:
        """[B, F] -> [B, classes]"""
        deviations = (x[:, None, :] - self.mean).square() * torch.exp(-self.log_variance)  # [B, classes, F]
        normalizers = (self.log_variance + math.log(2 * math.pi)).sum(1)
        return self.log_prior - (normalizers + deviations.sum(2)) / 2


class Binarize(nn.Module):
    """1 where x is above a threshold, else 0; NaN stays: [B, F] -> [B, F].

    Args:
        threshold: of all columns.
        temperature: above 0, of the sigmoid whose gradient the result has; None for a result without one.
    """

    def __init__(self, threshold: float, temperature: float | None = None):
        super().__init__()
        self.threshold, self.temperature = threshold, temperature

    def forward(self, x: Tensor) -> Tensor:
        """[B, F] -> [B, F]"""
        sides = torch.where(x.isnan(), x, (x > self.threshold).to(x.dtype))
        if self.temperature is None:
            return sides
        soft = torch.sigmoid((x - self.threshold) / self.temperature)
        return sides.detach() + soft - soft.detach()  # exact in its value, soft in its gradient
