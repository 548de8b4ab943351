"""How a published figure stands beside ours: the rules' borders, and their properties against oracles of their own."""

import random
from math import exp, log
from statistics import NormalDist

import pytest
from conftest import ROOT
from hypothesis import assume, example, given
from hypothesis import strategies as st

from results.comparison import margin
from results.finding import (
    CANNOT,
    DIRECTION,
    DOES_NOT_HOLD,
    EXCEEDS,
    HOLDS,
    IN_PART,
    NOT_COMPARABLE,
    OF_RATIOS,
    ONE_PROCESS,
    RULES,
    UNDECIDED,
    UNJUDGED,
    Finding,
    half_a_digit,
    overall,
    percent,
)
from results.selection import read
from results.siblings import siblings

RESULTS = ROOT / "results"
REFERENCE = RESULTS / "reference"
MANY = 3  # processes: an interval that is taken as it is
ratios = st.floats(0.1, 50)


def verdict(
    rule: str,
    published: float,
    ours: float | None,
    low: float | None = None,
    high: float | None = None,
    unit: str = "x",
    **more: int,
) -> str:
    return Finding("a figure", rule, unit, published, ours, low, high, **{"processes": MANY} | more).verdict  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "published", "ours", "low", "high", "expected"),
    [
        ("ratio", 4.0, 4.1, 4.0, 4.2, HOLDS),
        ("ratio", 4.0, 4**0.701, 2.6, 2.7, HOLDS),  # 70 % of the gain
        ("ratio", 4.0, 4**0.699, 2.6, 2.7, IN_PART),
        ("ratio", 4.0, 4**0.301, 1.4, 1.6, IN_PART),  # 30 %
        ("ratio", 4.0, 4**0.299, 1.4, 1.6, DIRECTION),
        ("ratio", 4.0, 1.1, 0.9, 1.3, DOES_NOT_HOLD),  # not faster for sure
        ("ratio", 4.0, 2.0, 1.0, 4.0, UNDECIDED),  # nor slower than the paper's
        ("ratio", 4.0, 2.0, 1.0, 3.999, DOES_NOT_HOLD),
        ("ratio", 0.5, 0.7, 0.5, 1.0, UNDECIDED),
        ("at_least", 4.0, 2.0, 0.9, 4.1, UNDECIDED),
        ("ratio", 4.0, 8.0, 7.2, 9.0, HOLDS),  # 4 to the power of 1 / 0.7 is 7.25
        ("ratio", 4.0, 8.0, 7.3, 9.0, EXCEEDS),
        ("ratio", 1.29, 1.006, 1.0055, 1.0101, DIRECTION),  # 2 % of the gain
        ("ratio", 1.19, 1.0004, None, None, DOES_NOT_HOLD),  # one measurement: up to 1.1004
        ("ratio", 1.09, 1.0, None, None, UNDECIDED),
        ("ratio", 1.09, 1.02, 1.01, 1.03, DIRECTION),
        ("ratio", 1.09, 0.98, 0.97, 0.99, DOES_NOT_HOLD),
        ("ratio", 1.0, 1.09, 1.08, 1.1, HOLDS),
        ("ratio", 1.0, 1.0, 0.3, 3.0, UNDECIDED),  # so wide an interval tells of a difference neither way
        ("ratio", 1.0, 1.2, 1.1, 1.3, DOES_NOT_HOLD),  # a difference where the paper has none
        ("ratio", 0.99, 1.2, 1.15, 1.3, DOES_NOT_HOLD),
        ("ratio", 0.951, 0.88, 0.87, 0.89, EXCEEDS),  # on either side of the border of "no difference" alike
        ("ratio", 0.944, 0.88, 0.87, 0.89, EXCEEDS),
        ("ratio", 0.5, 0.55, 0.5, 0.6, HOLDS),  # slower, as in the paper
        ("ratio", 0.5, 0.8, 0.75, 0.85, IN_PART),
        ("ratio", 0.5, 1.1, 1.05, 1.2, DOES_NOT_HOLD),
        ("ratio", 4.0, 0.0, None, None, DOES_NOT_HOLD),
        ("direction", 1.0, 0.0, 0.0, 2.0, DOES_NOT_HOLD),
        ("direction", 1.0, 0.9, 0.8, 1.0, DOES_NOT_HOLD),
        ("direction", 1.0, 0.9, 0.8, 1.01, UNDECIDED),
        ("direction", 1.0, 1.2, 1.1, 1.3, HOLDS),
        ("direction", 1.0, 1.2, 0.9, 1.3, UNDECIDED),
        ("direction", 1.0, 1.02, 1.01, 1.03, HOLDS),
        ("direction", 1.0, 1.09, None, None, UNDECIDED),  # one measurement: no interval says how sure it is
        ("direction", 1.0, 1.11, None, None, HOLDS),
        ("fastest", 1.0, 1.1, 1.01, 1.2, HOLDS),
        ("fastest", 1.0, 1.1, 0.99, 1.2, UNDECIDED),
        ("fastest", 1.0, 0.5, 0.1, 1.0, DOES_NOT_HOLD),  # at most as fast
        ("fastest", 1.0, 0.989, 0.986, 0.99, DOES_NOT_HOLD),  # another one is
        ("not_slower", 1.0, 1.0, 0.98, 1.02, HOLDS),
        ("not_slower", 1.0, 0.98, 0.95, 0.99, UNDECIDED),
        ("not_slower", 1.0, 0.96, 0.62, 1.25, UNDECIDED),  # so wide an interval tells of no speed
        ("not_slower", 1.0, 0.75, 0.62, 1.25, UNDECIDED),
        ("not_slower", 1.0, 0.96, 0.95, 0.97, DOES_NOT_HOLD),
        ("alike", 1.0, 1.0, 0.95, 1.08, HOLDS),
        ("alike", 1.0, 1.09, 1.02, 1.16, UNDECIDED),
        ("alike", 1.0, 1.64, 1.55, 1.87, DOES_NOT_HOLD),  # faster by more than hardly
        ("alike", 1.0, 0.8, 0.7, 1.3, UNDECIDED),
        ("alike", 1.0, 0.8, 0.7, 0.9, DOES_NOT_HOLD),
        ("count", 12, 12, None, None, HOLDS),
        ("count", 12, 13, None, None, IN_PART),
        ("count", 12, 16, None, None, DOES_NOT_HOLD),
        ("count", 5.7, 5.713, None, None, HOLDS),
        ("count", 0.5, 0.549, None, None, HOLDS),  # printed as 0.5
        ("count", 0.5, 0.55, None, None, HOLDS),
        ("count", 0.5, 0.56, None, None, IN_PART),
        ("count", 50, 51, None, None, HOLDS),  # 2 %
        ("count", 1000, 1021, None, None, IN_PART),
        ("count", 10, 12, None, None, IN_PART),  # 20 %
        ("count", 1000, 1201, None, None, DOES_NOT_HOLD),
        ("at_least", 3.0, 3**0.71, None, None, HOLDS),
        ("at_least", 3.0, 3**0.69, None, None, IN_PART),
        ("at_most", 20, 24, None, None, HOLDS),
        ("at_most", 20, 39, None, None, IN_PART),
        ("at_most", 20, 41, None, None, DOES_NOT_HOLD),
        ("gain", 0.010, 0.0071, 0.001, 0.02, HOLDS),
        ("gain", 0.010, 0.0069, 0.001, 0.02, IN_PART),
        ("gain", 0.010, 0.0029, 0.001, 0.02, DIRECTION),
        ("gain", 0.010, 0.02, 0.015, 0.03, EXCEEDS),
        ("gain", 0.010, 0.02, -0.001, 0.03, UNDECIDED),
        ("gain", 0.010, 0.005, -0.001, 0.009, DOES_NOT_HOLD),
        ("gain_direction", 0.0, 0.02, 0.001, 0.03, HOLDS),
        ("gain_direction", 0.0, 0.02, -0.001, 0.03, UNDECIDED),
        ("gain_direction", 0.0, -0.01, -0.02, 0.03, UNDECIDED),
        ("gain_direction", 0.0, -0.01, -0.02, 0.0, DOES_NOT_HOLD),
        ("trend", 0.4, 0.2, 0.1, 0.4, HOLDS),
        ("trend", 0.4, 0.2, -0.2, 0.4, UNDECIDED),
        ("trend", 0.4, -0.2, -0.4, 0.2, UNDECIDED),
        ("trend", 0.4, -0.2, -0.4, -0.1, DOES_NOT_HOLD),
        ("ratio", 4.0, None, None, None, CANNOT),
    ],
)
def test_borders(
    rule: str, published: float, ours: float | None, low: float | None, high: float | None, expected: str
) -> None:
    assert verdict(rule, published, ours, low, high) == expected


@pytest.mark.parametrize(
    ("published", "ours", "unit", "expected"),
    [
        (91, 91, "%", HOLDS),
        (91, 81.5, "%", HOLDS),  # a call is 5.41 times its busy time, and 11.1 times in the paper, to whose 0.7th power
        (91, 81.4, "%", IN_PART),  # that is 5.38
        (91, 40, "%", DIRECTION),
        (91, 0, "%", DOES_NOT_HOLD),
        (91, 100, "%", EXCEEDS),
        (6.81, 5.5, "req/s", HOLDS),
        (6.81, 5.4, "req/s", IN_PART),
        (6.8, 3.4, "req/s", IN_PART),
        (6.81, 3.4, "req/s", DOES_NOT_HOLD),
    ],
)
def test_bounds_that_are_no_ratio(published: float, ours: float, unit: str, expected: str) -> None:
    assert verdict("at_least", published, ours, unit=unit) == expected
    if unit != "%":  # by what was measured itself, whatever its interval
        assert verdict("at_least", published, ours, ours / 2, ours * 2, unit=unit) == expected


# Of a normal variable, within how many standard deviations all of several lie with 95 %: quantiles of 0.05 / 2 / several.
BONFERRONI = {1: 1.95996, 2: 2.24140, 4: 2.49771, 8: 2.73437}


@pytest.mark.parametrize("several", BONFERRONI)
def test_an_interval_of_the_largest_is_as_wide_as_all_of_them_need(several: int) -> None:
    one = Finding("", "ratio", "x", 4.0, 2.0, 1.6, 3.0, processes=MANY, chosen_from=several)
    wider = BONFERRONI[several] / BONFERRONI[1]
    assert one.bounds == pytest.approx((2 * 0.8**wider, 2 * 1.5**wider), rel=1e-5)


def test_a_bound_that_is_a_ratio_is_widened_as_a_ratio_is_and_no_other_value() -> None:
    assert Finding("", "at_least", "x", 3.0, 2.0).bounds == pytest.approx((2 / 1.1, 2 * 1.1))
    for rule, unit in (("at_least", "%"), ("at_least", "req/s"), ("count", "count"), ("gain", "AUC")):
        assert Finding("", rule, unit, 3.0, 2.0, 1.9, 2.2).bounds == (1.9, 2.2)
    assert Finding("", "ratio", "x", 3.0, 0.0).bounds == (0.0, 0.0)


def by_hand(published: float, ours: float, low: float, high: float) -> str:
    """The rule of ratios above 1.05 as a person would say it: how often has the paper's gain to be multiplied by itself?"""
    if low <= 1:
        return UNDECIDED if high >= published else DOES_NOT_HOLD
    if low > published ** (10 / 7):
        return EXCEEDS
    if ours >= published ** (7 / 10):
        return HOLDS
    return IN_PART if ours >= published ** (3 / 10) else DIRECTION


@given(st.floats(1.051, 50), st.floats(0.5, 100), st.floats(1.0001, 1.5), st.floats(1.0001, 1.5))
def test_a_ratio_stands_by_powers_of_the_papers(published: float, ours: float, down: float, up: float) -> None:
    low, high = ours / down, ours * up
    borders = (published**0.7, published**0.3)
    assume(all(abs(ours - border) > 1e-9 for border in borders) and abs(low - published ** (10 / 7)) > 1e-9)
    assume(abs(high - published) > 1e-9)
    assert verdict("ratio", published, ours, low, high) == by_hand(published, ours, low, high)


@given(ratios, ratios, st.floats(1.0001, 1.5), st.floats(1.0001, 1.5), st.integers(1, 3), st.integers(1, 9))
def test_a_ratio_and_its_inverse_stand_alike(
    published: float, ours: float, down: float, up: float, processes: int, several: int
) -> None:
    """Which of two systems is named first says nothing."""
    one = Finding("", "ratio", "x", published, ours, ours / down, ours * up, "", processes, several)
    other = Finding("", "ratio", "x", 1 / published, 1 / ours, 1 / ours / up, down / ours, "", processes, several)
    ends = (log(end) for end in one.bounds)
    near = [abs(log(ours)) - log(1.1), *(end - share * log(published) for end in ends for share in (0, 1, 10 / 7))]
    near += [log(ours) - share * log(published) for share in (0.7, 0.3)] + [abs(log(published)) - log(1.05)]
    assume(all(abs(distance) > 1e-9 for distance in near))
    assert one.verdict == other.verdict
    assert one.bounds == pytest.approx([1 / end for end in reversed(other.bounds)])


@given(st.floats(1.06, 50), ratios, ratios, st.floats(1.01, 1.4))
def test_more_is_never_worse(published: float, one: float, other: float, width: float) -> None:
    order = [DOES_NOT_HOLD, UNDECIDED, DIRECTION, IN_PART, HOLDS, EXCEEDS]
    less, more = sorted((one, other))
    for rule in ("ratio", "direction", "fastest", "not_slower", "at_least"):
        ranks = [order.index(verdict(rule, published, ours, ours / width, ours * width)) for ours in (less, more)]
        assert ranks == sorted(ranks), rule
    assert order.index(verdict("at_most", published, less)) >= order.index(verdict("at_most", published, more))


@given(st.sampled_from(sorted(RULES.keys() - {"alike"})), st.floats(1.1, 50))  # whose own figure is 1
def test_the_papers_own_figure_holds(rule: str, published: float) -> None:
    assert verdict(rule, published, published, published / 1.001, published * 1.001) == HOLDS


@given(st.sampled_from(OF_RATIOS), ratios, ratios, st.floats(1.001, 2), st.floats(1.001, 2), st.integers(1, 20))
@example("ratio", 1.29, 1.006, 1.0005, 1.004, 4)
def test_an_interval_of_one_process_is_never_judged_better(
    rule: str, published: float, ours: float, down: float, up: float, several: int
) -> None:
    """What is less sure, since it is of one process or the largest of several, holds nowhere where the surer does not."""
    sure = Finding("", rule, "x", published, ours, ours / down, ours * up, processes=MANY)
    for vague in (
        Finding("", rule, "x", published, ours, ours / down, ours * up, processes=1),
        Finding("", rule, "x", published, ours, ours / down, ours * up, processes=MANY, chosen_from=several),
    ):
        assert vague.bounds[0] <= sure.bounds[0] and sure.bounds[1] <= vague.bounds[1]
        assert vague.verdict != EXCEEDS or sure.verdict == EXCEEDS
        if rule != "ratio":
            assert vague.verdict != HOLDS or sure.verdict in (HOLDS, EXCEEDS)
        elif sure.verdict == DOES_NOT_HOLD:
            assert vague.verdict in (DOES_NOT_HOLD, UNDECIDED)
    one = Finding("", rule, "x", published, ours, ours / down, ours * up, processes=1)
    assert one.bounds == pytest.approx((ours / down / 1.1, ours * up * 1.1))


@pytest.mark.parametrize("several", [1, 2, 4, 8])
def test_the_largest_of_several_that_are_all_level_is_rarely_a_gain(several: int) -> None:
    """By plain simulation: networks whose true ratio is 1, each measured with an error; the largest is told as a gain in one
    of forty at most. Without chosen_from that would be up to one of five.
    """
    draw, error, trials = random.Random(several), 0.03, 4000
    margin = NormalDist().inv_cdf(0.975) * error
    gains = naive = 0
    for _ in range(trials):
        largest = max(draw.gauss(0, error) for _ in range(several))
        ends = [exp(largest + sign * margin) for sign in (0, -1, 1)]
        gains += verdict("ratio", 1.3, *ends, chosen_from=several) not in (DOES_NOT_HOLD, UNDECIDED)
        naive += verdict("ratio", 1.3, *ends) not in (DOES_NOT_HOLD, UNDECIDED)
    sampling = 3 * (0.025 * 0.975 / trials) ** 0.5
    assert gains / trials <= 0.025 + sampling
    expected = 1 - 0.975**several
    assert naive / trials == pytest.approx(expected, abs=4 * (expected * (1 - expected) / trials) ** 0.5)


def test_what_is_not_comparable_is_never_judged() -> None:
    beside = Finding("", "ratio", "x", 1.21, 8.0, 7.9, 8.1, is_comparable=False)
    assert beside.verdict == NOT_COMPARABLE and not beside.is_judged
    assert Finding("", "ratio", "x", 1.21, is_comparable=False).verdict == NOT_COMPARABLE


def test_what_a_number_is_printed_to() -> None:
    assert half_a_digit(5.7) == pytest.approx(0.05) and half_a_digit(23.95) == pytest.approx(0.005)
    assert half_a_digit(12.0) == 0


def made(ours: float | None, is_comparable: bool = True) -> Finding:
    low, high = (None, None) if ours is None else (ours / 1.01, ours * 1.01)
    return Finding("", "ratio", "x", 4.0, ours, low, high, processes=MANY, is_comparable=is_comparable)


WHOLE, MORE, PART, LITTLE, FAILS = (made(ours) for ours in (4.0, 16.0, 2.0, 1.2, 0.5))
MISSING, OTHER = made(None), made(4.0, is_comparable=False)
OPEN = Finding("", "ratio", "x", 1.08, 1.02, 0.95, 1.1, processes=MANY)


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        ([WHOLE, MISSING], HOLDS),  # half of it
        ([WHOLE, MISSING, MISSING], UNJUDGED),
        ([WHOLE, OTHER, OTHER], UNJUDGED),
        ([WHOLE, OPEN], IN_PART),
        ([MORE, OPEN], IN_PART),
        ([LITTLE, OPEN], DIRECTION),
        ([FAILS, OPEN, OPEN], UNJUDGED),
        ([OPEN, OTHER, MISSING], UNJUDGED),
        ([WHOLE, MORE], HOLDS),
        ([MORE, MORE], EXCEEDS),
        ([WHOLE, FAILS], IN_PART),
        ([WHOLE, PART], IN_PART),
        ([PART, LITTLE], IN_PART),
        ([LITTLE, FAILS], DIRECTION),
        ([PART, LITTLE, LITTLE, LITTLE], DIRECTION),  # as one of table 1 of Opara is
        ([WHOLE, WHOLE, LITTLE, FAILS], IN_PART),
        ([WHOLE, FAILS, FAILS], DOES_NOT_HOLD),
        ([MORE, MORE, WHOLE, FAILS, FAILS], IN_PART),
        ([FAILS, FAILS, MISSING], DOES_NOT_HOLD),
        ([MISSING], CANNOT),
        ([], CANNOT),
        ([OTHER, MISSING], NOT_COMPARABLE),
    ],
)
def test_an_exhibit_stands_as_its_judged_figures_do(findings: list[Finding], expected: str) -> None:
    assert overall(findings) == expected


@given(st.lists(st.sampled_from([WHOLE, MORE, PART, LITTLE, FAILS]), min_size=1, max_size=7))
def test_half_of_the_figures_reach_what_an_exhibit_is_said_to(findings: list[Finding]) -> None:
    """By counting, of every verdict, how many figures are as good."""
    rank = {HOLDS: 3, EXCEEDS: 3, IN_PART: 2, DIRECTION: 1, DOES_NOT_HOLD: 0}
    ranks = [rank[finding.verdict] for finding in findings]
    stands = rank[overall(findings)]
    assert 2 * sum(r >= stands for r in ranks) >= len(ranks)
    better = [r for r in (1, 2, 3) if r > stands and 2 * sum(one >= r for one in ranks) >= len(ranks)]
    assert not better or (better == [3] and min(ranks) < 3)
    assert (stands == 3) == (min(ranks) == 3)


def test_the_rules_as_they_are_told_name_their_thresholds() -> None:
    assert all(f"{share} %" in RULES["ratio"] for share in (70, 30, 143, 5, 10))
    assert "2 %" in RULES["count"] and "20 %" in RULES["count"] and "98 %" in RULES["not_slower"]
    page = " ".join((RESULTS / "README.md").read_text(encoding="utf-8").split())
    assert all(f"{share} %" in page for share in (70, 30, 143))
    assert f"one process is {percent(ONE_PROCESS)} wider at both ends" in page
    assert "25 %" in RULES["at_most"] and "100 %" in RULES["at_most"] and "50 %" in RULES["at_least"]


@pytest.mark.slow
def test_two_processes_of_one_system_rarely_differ_by_more_here() -> None:
    """Of the A/A margins of all committed groups at least 90 % are within what an interval of one process is widened by."""
    packs = sorted((REFERENCE / "h200").glob("*.jsonl.gz"))
    margins = [m.ratio for group in siblings(read(packs)) if (m := margin([*group.records.values()])) is not None]
    within = [ratio for ratio in margins if 1 / (1 + ONE_PROCESS) <= ratio <= 1 + ONE_PROCESS]
    assert len(margins) >= 27 and len(within) >= 0.9 * len(margins)
