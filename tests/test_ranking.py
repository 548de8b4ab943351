"""AUC, DeLong's variance and log loss, against their definitions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from results.ranking import Area, areas, auc, auc_difference, log_loss, over_seeds

scored = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 1)), min_size=6, max_size=40).filter(
    lambda rows: 2 <= sum(row[2] for row in rows) <= len(rows) - 2
)


def by_pairs(score: np.ndarray, label: np.ndarray) -> np.ndarray:
    """[positive, negative], 1, 1/2 or 0."""
    difference = score[label == 1][:, None] - score[label == 0][None]
    return (difference > 0) + 0.5 * (difference == 0)


@given(scored)
def test_area_and_variance_are_those_of_the_definition(rows: list[tuple[int, int, int]]) -> None:
    first, second, label = (np.array(column) for column in zip(*rows, strict=True))
    values, covariance = areas([first.astype(float), second.astype(float)], label)
    pairs = [by_pairs(first, label), by_pairs(second, label)]
    np.testing.assert_allclose(values, [p.mean() for p in pairs])
    m, n = pairs[0].shape
    want = np.cov([p.mean(1) for p in pairs]) / m + np.cov([p.mean(0) for p in pairs]) / n
    np.testing.assert_allclose(covariance, want, atol=1e-12)
    difference = auc_difference(first.astype(float), second.astype(float), label)
    assert difference.value == pytest.approx(values[0] - values[1])
    assert difference.variance == pytest.approx(want[0, 0] + want[1, 1] - 2 * want[0, 1], abs=1e-12)


def test_the_interval_covers_what_it_says() -> None:
    """Normal scores a unit apart have an AUC of Φ(1/√2)."""
    generator = np.random.default_rng(0)
    label = np.repeat([0, 1], 100)
    hits = sum(
        area.low <= 0.7602 <= area.high for area in (auc(generator.normal(size=200) + label, label) for _ in range(400))
    )
    assert 365 <= hits <= 395


def test_equal_scores_differ_by_nothing() -> None:
    score, label = np.arange(10.0), np.arange(10) % 2
    assert auc_difference(score, score, label) == Area(0.0, 0.0, 0.0, 0.0)
    assert auc(-score, label).value == pytest.approx(1 - auc(score, label).value)


def test_seeds_add_their_own_variance() -> None:
    same, apart = over_seeds([Area.of(0.7, 1e-6)] * 5), over_seeds([Area.of(v, 1e-6) for v in (0.6, 0.7, 0.8)])
    assert same.variance == pytest.approx(1e-6) and apart.variance == pytest.approx(1e-6 + 0.01 / 3)
    assert same.value == pytest.approx(apart.value) == pytest.approx(0.7)


def test_one_class_has_no_area() -> None:
    with pytest.raises(ValueError, match="there are 3 positive and 1 negative"):
        auc(np.arange(4.0), np.array([1, 1, 1, 0]))


def test_log_loss() -> None:
    assert log_loss(np.array([0.9, 0.2]), np.array([1, 0])) == pytest.approx(-(np.log(0.9) + np.log(0.8)) / 2)
    assert np.isfinite(log_loss(np.array([0.0, 1.0]), np.array([1, 0])))
