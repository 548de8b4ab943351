"""How a published figure stands beside ours: the rules, by hand and by their properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from results.finding import CANNOT, DOES_NOT_HOLD, HOLDS, IN_PART, RULES, Finding, half_a_digit, overall

ratios = st.floats(0.1, 50)


def verdict(rule: str, published: float, ours: float | None, low: float | None = None, high: float | None = None) -> str:
    return Finding("a figure", rule, "x", published, ours, low, high).verdict


@pytest.mark.parametrize(
    ("rule", "published", "ours", "low", "high", "expected"),
    [
        ("ratio", 4.0, 4.1, 4.0, 4.2, HOLDS),
        ("ratio", 4.0, 3.2, 3.1, 3.3, HOLDS),  # 80 %
        ("ratio", 4.0, 3.1, 3.0, 3.2, IN_PART),
        ("ratio", 4.0, 1.1, 0.9, 1.3, DOES_NOT_HOLD),  # not faster for sure
        ("ratio", 1.09, 1.02, 1.01, 1.03, HOLDS),
        ("ratio", 1.09, 0.98, 0.97, 0.99, DOES_NOT_HOLD),  # 80 % of 1.09, and slower
        ("ratio", 1.0, 1.09, 1.08, 1.1, HOLDS),
        ("ratio", 0.99, 1.2, 1.1, 1.3, DOES_NOT_HOLD),  # a difference where the paper has none
        ("ratio", 0.5, 0.55, 0.5, 0.6, HOLDS),  # slower, as in the paper
        ("ratio", 0.5, 0.9, 0.85, 0.95, IN_PART),
        ("ratio", 0.5, 1.1, 1.05, 1.2, DOES_NOT_HOLD),
        ("direction", 1.0, 1.2, 1.1, 1.3, HOLDS),
        ("direction", 1.0, 1.2, 0.9, 1.3, DOES_NOT_HOLD),
        ("direction", 1.0, 1.02, 1.01, 1.03, HOLDS),
        ("direction", 1.0, 1.02, 1.02, 1.02, IN_PART),  # one measurement: no interval says how sure it is
        ("direction", 1.0, 1.06, None, None, HOLDS),
        ("not_slower", 1.0, 0.98, 0.95, 0.99, HOLDS),
        ("not_slower", 1.0, 0.97, 0.95, 0.99, IN_PART),
        ("not_slower", 1.0, 0.75, 0.62, 1.25, IN_PART),  # so wide an interval tells of no speed
        ("not_slower", 1.0, 0.96, 0.95, 0.97, DOES_NOT_HOLD),
        ("count", 12, 12, None, None, HOLDS),
        ("count", 12, 13, None, None, IN_PART),
        ("count", 12, 16, None, None, DOES_NOT_HOLD),
        ("count", 5.7, 5.713, None, None, HOLDS),
        ("count", 0.5, 0.549, None, None, HOLDS),  # printed as 0.5
        ("count", 0.5, 0.56, None, None, IN_PART),
        ("at_least", 91, 80, None, None, HOLDS),
        ("at_least", 91, 50, None, None, IN_PART),
        ("at_least", 91, 40, None, None, DOES_NOT_HOLD),
        ("at_most", 20, 24, None, None, HOLDS),
        ("at_most", 20, 39, None, None, IN_PART),
        ("at_most", 20, 41, None, None, DOES_NOT_HOLD),
        ("ratio", 4.0, None, None, None, CANNOT),
    ],
)
def test_rules(
    rule: str, published: float, ours: float | None, low: float | None, high: float | None, expected: str
) -> None:
    assert verdict(rule, published, ours, low, high) == expected


@given(ratios, ratios, st.floats(1, 1.5), st.floats(1, 1.5))
def test_a_ratio_and_its_inverse_stand_alike(published: float, ours: float, down: float, up: float) -> None:
    """Which of two systems is named first says nothing, but where the two directions tell "no difference" apart."""
    if abs(published - 1) <= 0.06 or abs(1 / published - 1) <= 0.06:
        return
    low, high = ours / down, ours * up
    if min(abs(low - 1), abs(high - 1), abs(ours / published - 0.8), abs(published / ours - 0.8)) < 1e-9:
        return
    assert verdict("ratio", published, ours, low, high) == verdict("ratio", 1 / published, 1 / ours, 1 / high, 1 / low)


@given(st.floats(1.1, 50), ratios, ratios)
def test_more_is_never_worse(published: float, one: float, other: float) -> None:
    order = [DOES_NOT_HOLD, IN_PART, HOLDS]
    less, more = sorted((one, other))
    for rule in ("ratio", "direction", "not_slower", "at_least"):
        assert order.index(verdict(rule, published, less)) <= order.index(verdict(rule, published, more))
    assert order.index(verdict("at_most", published, less)) >= order.index(verdict("at_most", published, more))


@given(st.sampled_from(["ratio", "direction", "not_slower", "count", "at_least", "at_most"]), st.floats(1.1, 50))
def test_the_papers_own_figure_holds(rule: str, published: float) -> None:
    assert verdict(rule, published, published) == HOLDS


def test_what_a_number_is_printed_to() -> None:
    assert half_a_digit(5.7) == pytest.approx(0.05) and half_a_digit(23.95) == pytest.approx(0.005)
    assert half_a_digit(12.0) == 0


def test_an_exhibit_stands_as_its_measured_figures_do() -> None:
    whole, part, fails = (Finding("", "ratio", "x", 4.0, ours) for ours in (4.0, 2.0, 0.5))
    missing = Finding("", "ratio", "x", 4.0, reason="no GPU")
    assert overall([whole, missing]) == HOLDS and overall([whole, whole]) == HOLDS
    assert overall([whole, fails]) == overall([whole, part]) == overall([part]) == IN_PART
    assert overall([fails, fails, missing]) == DOES_NOT_HOLD
    assert overall([missing]) == overall([]) == CANNOT


def test_the_rules_as_they_are_told_name_their_thresholds() -> None:
    assert "80 %" in RULES["ratio"] and "5 %" in RULES["ratio"] and "10 %" in RULES["ratio"]
    assert "2 %" in RULES["count"] and "20 %" in RULES["count"]
    assert "25 %" in RULES["at_most"] and "100 %" in RULES["at_most"] and "50 %" in RULES["at_least"]
