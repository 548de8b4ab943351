"""Speedups of systems that took turns, and their intervals."""

from dataclasses import replace
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_records import latency, record, rounds

from results.comparison import speedup
from results.statistics import FEW, median_interval
from results.warning import Warning


def test_speedup_is_the_median_over_rounds_of_ratios_within_a_round() -> None:
    eager = record("eager", comparison=rounds("g", [4.0, 4.0, 9.0], [8.0, 8.0, 8.0], [2.0, 2.0]))
    nimble = record("nimble", comparison=rounds("g", [2.0, 2.0, 2.0], [2.0, 2.0], [2.0, 1.0, 2.0]))
    measured = speedup(nimble, eager)
    assert measured is not None and measured.ratio == pytest.approx(2.0)  # of 2, 4 and 1
    assert (measured.low, measured.high) == median_interval([2.0, 4.0, 1.0])
    inverse = speedup(eager, nimble)
    assert inverse is not None and inverse.ratio == pytest.approx(0.5)


ROUND = st.lists(st.floats(0.01, 100), min_size=1, max_size=5)


def test_rounds_after_a_profiler_give_way_to_latencies_alone() -> None:
    """In the process that a profiler was in, eager took twice as long as before."""
    profiled = (Warning("profiled_before_timing"),)
    eager = record("eager", comparison=rounds("g", [8.0], [8.0]), latency=latency(4.0, 4.0, 9.0), warnings=profiled)
    nimble = record("nimble", comparison=rounds("g", [2.0], [2.0]), latency=latency(2.0, 2.0), warnings=profiled)
    measured = speedup(nimble, eager)
    assert measured is not None and measured.ratio == 2.0 and measured.low <= 2.0 <= measured.high
    assert not measured.is_in_turn
    measured = speedup(replace(nimble, warnings=()), replace(eager, warnings=()))
    assert measured is not None and measured.ratio == 4.0 and measured.is_in_turn


@given(st.lists(st.tuples(ROUND, ROUND), min_size=1, max_size=8), st.floats(0.01, 100))
def test_speedup_of_any_rounds(pairs: list[tuple[list[float], list[float]]], factor: float) -> None:
    slow, fast = (record(s, comparison=rounds("g", *(p[i] for p in pairs))) for i, s in enumerate(("eager", "nimble")))
    ratio = speedup(fast, slow)
    assert ratio is not None
    ratios = [median(a) / median(b) for a, b in pairs]
    assert ratio.ratio == pytest.approx(median(ratios))
    assert ratio.low <= ratio.ratio * 1.001 and ratio.ratio * 0.999 <= ratio.high
    if len(ratios) == 1 or len(ratios) >= FEW:
        assert min(ratios) * 0.999 <= ratio.low and ratio.high <= max(ratios) * 1.001
    else:
        assert (ratio.low, ratio.high) == median_interval(ratios)
    same = speedup(slow, slow)
    assert same is not None and same.ratio == same.low == same.high == 1.0
    # A machine that is slower for a round, by any factor, slows both sides and leaves the ratio.
    slower = [
        record(s, comparison=rounds("g", *([x * factor for x in p[i]] for p in pairs)))
        for i, s in enumerate(("eager", "nimble"))
    ]
    again = speedup(slower[1], slower[0])
    assert again is not None and again.ratio == pytest.approx(ratio.ratio)


@pytest.mark.parametrize(
    "other",
    [
        record("eager"),
        record("eager", comparison=rounds("another", [4.0])),
        record("eager", comparison=rounds("g", [4.0], [4.0])),
        record("eager", status="incorrect", comparison=rounds("g", [4.0])),
    ],
    ids=["alone", "another sweep", "other rounds", "incorrect"],
)
def test_no_speedup_without_shared_rounds(other: Any) -> None:
    mine = record(comparison=rounds("g", [2.0]))
    assert speedup(mine, other) is None and speedup(other, mine) is None
