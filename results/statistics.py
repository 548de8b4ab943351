"""What is said of a list of samples."""

from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000


def describe(samples: Sequence[float]) -> dict[str, object]:
    """Median with a bootstrap 95 % interval (percentile method, fixed seed), min, p10, p90, p99, mean and count.

    In the unit of `samples`. Raises ValueError for none.
    """
    if not samples:
        raise ValueError("no samples")
    x = np.asarray(samples, dtype=float)
    resampled = np.random.default_rng(0).choice(x, (RESAMPLES, len(x)))
    low, high = np.quantile(np.median(resampled, axis=1), [0.025, 0.975])
    p10, p90, p99 = np.quantile(x, [0.1, 0.9, 0.99])
    return {
        "median": float(np.median(x)),
        "ci95": [float(low), float(high)],
        "min": float(x.min()),
        "p10": float(p10),
        "p90": float(p90),
        "p99": float(p99),
        "mean": float(x.mean()),
        "n": len(x),
    }


def spread(samples: Sequence[float]) -> float:
    """How far samples scatter: (p90 - p10) / median."""
    p10, p50, p90 = np.quantile(np.asarray(samples, dtype=float), [0.1, 0.5, 0.9])
    return float((p90 - p10) / p50)
