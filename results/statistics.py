"""What is said of a list of samples: its median with an interval, and how far it scatters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, log, sqrt
from statistics import mean, median, stdev
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np

Samples: TypeAlias = tuple[float, ...]

RESAMPLES = 2000
ENDS = (0.025, 0.975)  # quantiles of a 95 % interval
STUDENT = {2: 12.7062, 3: 4.3027, 4: 3.1824}  # the upper quantile of Student's distribution, by samples
FEW = 5
LARGEST_EXPONENT = 700.0  # whose power a float holds


@dataclass(frozen=True)
class Statistics:
    """Of `n` samples, in their unit. ci95: the ends of the median's 95 % interval, as `median_interval` takes it."""

    median: float
    ci95: tuple[float, float]
    min: float
    p10: float
    p90: float
    p99: float
    mean: float
    n: int


def describe(samples: Sequence[float]) -> Statistics:
    """The statistics of samples, resampled with a fixed seed. Raises ValueError for none."""
    import numpy as np

    if not samples:
        raise ValueError("no samples")
    x = np.asarray(samples, dtype=float)
    p10, p90, p99 = np.quantile(x, [0.1, 0.9, 0.99])
    return Statistics(
        median=float(np.median(x)),
        ci95=median_interval(samples),
        min=float(x.min()),
        p10=float(p10),
        p90=float(p90),
        p99=float(p99),
        mean=float(x.mean()),
        n=len(x),
    )


def resampled_medians(samples: Sequence[float] | np.ndarray, seed: int = 0) -> np.ndarray:
    """[RESAMPLES]: the medians of samples that are drawn anew from these, with replacement. Read-only."""
    return _resampled_medians(tuple(map(float, samples)), seed)


@lru_cache(maxsize=1024)  # each chart and table of a report asks for the same ratios
def _resampled_medians(samples: tuple[float, ...], seed: int) -> np.ndarray:
    import numpy as np

    x = np.asarray(samples)
    medians: np.ndarray = np.median(np.random.default_rng(seed).choice(x, (RESAMPLES, len(x))), axis=1)
    medians.flags.writeable = False
    return medians


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """The ends of the median's 95 % interval: a bootstrap's percentiles, or Student's of the logarithms of fewer than FEW
    positive samples, which a bootstrap cannot draw as far apart as they may lie. Of one sample it is that.
    """
    if not 1 < len(samples) < FEW or min(samples) <= 0:
        return interval(resampled_medians(samples))
    logs = [log(sample) for sample in samples]
    half = STUDENT[len(logs)] * stdev(logs) / sqrt(len(logs))
    low, high = exp(mean(logs) - half), exp(min(mean(logs) + half, LARGEST_EXPONENT))
    return min(low, median(samples)), max(high, median(samples))  # rounding may leave it out where all are alike


def interval(estimates: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of a bootstrap's estimates."""
    import numpy as np

    low, high = np.quantile(estimates, ENDS)
    return float(low), float(high)


def spread(samples: Sequence[float]) -> float:
    """How far samples scatter: (p90 - p10) / median."""
    import numpy as np

    p10, p50, p90 = np.quantile(np.asarray(samples, dtype=float), [0.1, 0.5, 0.9])
    return float((p90 - p10) / p50)
