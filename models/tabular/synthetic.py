"""Clicks that are drawn: categories by Zipf's law, a planted interaction of two fields, a smooth effect of a number.

They are for speed and scale. What a system reaches on them says nothing of a paper's data.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from .dataset import Dataset

EXPONENT = 1.2  # of Zipf's law


def synthetic(num_rows: int, num_fields: int = 6, num_categories: int = 100, seed: int = 0) -> Dataset:
    """Rows of two numbers and some fields, in an order that means nothing.

    Args:
        num_rows: of the table.
        num_fields: of categories, at least 2.
        num_categories: of each field.
    """
    generator = np.random.default_rng(seed)
    shares = np.arange(1, num_categories + 1) ** -EXPONENT
    fields = generator.choice(num_categories, size=(num_rows, num_fields), p=shares / shares.sum())
    numbers = generator.normal(size=(num_rows, 2))
    main = generator.normal(size=(num_fields, num_categories)) / np.sqrt(num_fields)
    tastes = generator.normal(size=(2, num_categories, 3))
    score = main[np.arange(num_fields), fields].sum(1)
    score += (tastes[0, fields[:, 0]] * tastes[1, fields[:, 1]]).sum(1)
    score += np.sin(2 * numbers[:, 0]) + 0.5 * numbers[:, 1]
    label = (score + generator.logistic(size=num_rows) > 1).astype(np.int64)
    numeric = ("x0", "x1")
    categorical = tuple(f"field{i}" for i in range(num_fields))
    rows = pd.DataFrame(numbers, columns=numeric).join(pd.DataFrame(fields, columns=categorical))
    return Dataset("synthetic", rows, label, numeric, categorical)
