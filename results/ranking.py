"""The area under the ROC curve with DeLong's interval (DeLong et al. 1988; midranks as in Sun and Xu 2014).

Invariant: a pair of a positive and a negative row counts 1 where the positive one has the higher score, 1/2 where both are
equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm, rankdata


@dataclass(frozen=True)
class Area:
    """An AUC, or a difference of two, with its 95 % interval.

    Attributes:
        value: the area, or the difference.
        variance: DeLong's, over draws of the rows.
        low, high: the interval's ends.
    """

    value: float
    variance: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, variance: float) -> Area:
        margin = float(norm.ppf(0.975)) * max(variance, 0.0) ** 0.5
        return cls(value, variance, value - margin, value + margin)


def areas(
    scores: Sequence[NDArray[np.float64]], label: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The AUC of each of K scores over the same rows, [K], and their covariance, [K, K].

    Raises:
        ValueError: the rows are not of two classes, 0 and 1, with at least two rows each.
    """
    is_positive = np.asarray(label) == 1
    m, n = int(is_positive.sum()), int((~is_positive).sum())
    if min(m, n) < 2:
        raise ValueError(f"an AUC needs two rows of each class at least, and there are {m} positive and {n} negative ones")
    by_positive, by_negative = [], []
    for score in scores:
        ranks = rankdata(score)
        # For each row the share of the other class's rows that it is on the right side of.
        by_positive.append((ranks[is_positive] - rankdata(score[is_positive])) / n)
        by_negative.append(1 - (ranks[~is_positive] - rankdata(score[~is_positive])) / m)
    values = np.array([shares.mean() for shares in by_positive])
    covariance = np.atleast_2d(np.cov(by_positive)) / m + np.atleast_2d(np.cov(by_negative)) / n
    return values, covariance


def auc(score: NDArray[np.float64], label: NDArray[np.int64]) -> Area:
    """The AUC of one score. Raises as `areas`."""
    (value,), ((variance,),) = areas([score], label)
    return Area.of(float(value), float(variance))


def auc_difference(score: NDArray[np.float64], other: NDArray[np.float64], label: NDArray[np.int64]) -> Area:
    """AUC(score) - AUC(other) over the same rows, with the variance of the difference. Raises as `areas`."""
    values, covariance = areas([score, other], label)
    variance = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
    return Area.of(float(values[0] - values[1]), float(variance))


def over_seeds(each: Sequence[Area]) -> Area:
    """The mean over seeds. Its variance is that of the test rows, the mean of DeLong's, and that of the mean of seeds.

    The seeds' test rows overlap, so that their variance does not shrink with the number of seeds.
    """
    values = np.array([area.value for area in each])
    between = float(values.var(ddof=1)) / len(values) if len(values) > 1 else 0.0
    return Area.of(float(values.mean()), float(np.mean([area.variance for area in each])) + between)


def log_loss(positive: NDArray[np.float64], label: NDArray[np.int64]) -> float:
    """The mean of -log of the probability that the rows' own class was given; probabilities are kept 1e-15 from 0 and 1."""
    clipped = np.clip(positive, 1e-15, 1 - 1e-15)
    return float(-np.where(np.asarray(label) == 1, np.log(clipped), np.log1p(-clipped)).mean())
