"""Ratios over several processes a system: the two-level bootstrap beside a slow one, closed forms, and what it covers."""

import random
from dataclasses import replace
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import median, stdev

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from made_records import cell, latency, record, rounds

from results.comparison import Speedup, of_processes, over_processes, speedup
from results.record import Record
from results.selection import Selection, read
from results.store import Store
from results.warning import Warning

STUDENT = {2: 12.7062, 3: 4.3027, 4: 3.1824, 5: 2.7764}  # 97.5 % quantiles, by processes
NORMAL = 1.95996
ROW = ("squeezenet", 1)
PROFILED = Warning("profiled_before_timing")


def wider(num_processes: int) -> float:
    """By how much an interval of few processes is widened, from a table of quantiles."""
    return STUDENT[num_processes] / NORMAL * (num_processes / (num_processes - 1)) ** 0.5


def slowly(ratios: list[list[float]], draws: int, seed: int) -> tuple[float, float]:
    """The ends of the interval by a plain loop: draw processes, and rounds within each that was drawn."""
    generator = random.Random(seed)
    means = []
    for _ in range(draws):
        processes = generator.choices(ratios, k=len(ratios))
        means.append(sum(log(median(generator.choices(one, k=len(one)))) for one in processes) / len(ratios))
    low, high = np.quantile(means, [0.025, 0.975])
    middle = sum(log(median(one)) for one in ratios) / len(ratios)
    factor = wider(len(ratios))
    return exp(middle + factor * min(0.0, low - middle)), exp(middle + factor * max(0.0, high - middle))


@pytest.mark.parametrize("num_processes", [2, 3, 4])
def test_two_levels_as_a_plain_loop_draws_them(num_processes: int) -> None:
    generator = random.Random(num_processes)
    ratios = [[exp(generator.gauss(between, 0.02)) for _ in range(5)] for between in (0.0, 0.05, 0.2, 0.1)[:num_processes]]
    low, ratio, high = of_processes(ratios)
    slow_low, slow_high = slowly(ratios, 20_000, seed=1)
    assert ratio == pytest.approx(exp(sum(log(median(one)) for one in ratios) / num_processes))
    span = log(slow_high / slow_low)
    assert log(low) == pytest.approx(log(slow_low), abs=0.06 * span)
    assert log(high) == pytest.approx(log(slow_high), abs=0.06 * span)


@given(st.lists(st.floats(0.5, 4), min_size=2, max_size=4))
@examples(30)
def test_rounds_that_are_alike_leave_the_processes_alone(levels: list[float]) -> None:
    """A closed form: every one of the n to the n draws of processes is as likely, so that all of them can be counted."""
    low, ratio, high = of_processes([[level] * 5 for level in levels])
    n, logs = len(levels), [log(level) for level in levels]
    means = sorted(sum(drawn) / n for drawn in product(logs, repeat=n))
    middle = sum(logs) / n
    assert ratio == pytest.approx(exp(middle))
    # Between the counted quantiles at probabilities that 2,000 draws may take for 2.5 %.
    ends = [np.quantile(means, share, method="inverted_cdf") for share in (0.013, 0.038, 0.962, 0.987)]
    out = [middle + wider(n) * (end - middle) for end in ends]
    off = 1e-4 * (out[3] - out[0]) + 1e-9  # of the table of quantiles
    assert out[0] - off <= log(low) <= out[1] + off and out[2] - off <= log(high) <= out[3] + off


@pytest.mark.parametrize("num_processes", [3, 5])
def test_the_interval_holds_the_truth_as_often_as_it_says(num_processes: int) -> None:
    """Of processes that differ by 5 % and rounds that do by 1 %: a single process leaves the truth out mostly."""
    generator = random.Random(0)
    trials, inside, inside_one = 300, 0, 0
    for _ in range(trials):
        ratios = []
        for _ in range(num_processes):
            level = generator.gauss(log(1.2), 0.05)
            ratios.append([exp(generator.gauss(level, 0.01)) for _ in range(5)])
        low, _, high = of_processes(ratios)
        inside += low <= 1.2 <= high
        inside_one += min(ratios[0]) <= 1.2 <= max(ratios[0])
    assert inside / trials >= 0.95 - 3 * (0.95 * 0.05 / trials) ** 0.5
    assert inside_one / trials < 0.5


def test_more_processes_tell_more() -> None:
    generator = random.Random(3)
    levels = [generator.gauss(0, 0.05) for _ in range(12)]
    spans = []
    for n in (3, 12):
        low, _, high = of_processes([[exp(level)] * 5 for level in levels[:n]])
        spans.append(log(high / low) / stdev(levels[:n]))
    assert spans[1] < spans[0] / 2


def pair(process: int, fast: list[float], slow: list[float], code: str = "c") -> tuple[Record, Record]:
    """A system and its baseline in the rounds of one process."""
    when = f"2026-01-0{process + 1}T00:00:00+00:00"
    made = []
    for system, milliseconds in (("nimble", fast), ("eager", slow)):
        one = record(
            of=cell(system, ROW[0], device="cuda"),
            when=when,
            comparison=rounds(f"g{process}", *([ms] for ms in milliseconds)),
        )
        made.append(replace(one, environment=replace(one.environment, code=code)))
    return made[0], made[1]


def test_records_of_several_processes_are_one_ratio() -> None:
    pairs = [pair(0, [1, 1, 1], [2, 2, 2]), pair(1, [1, 1, 1], [2.2, 2.2, 2.2]), pair(2, [1, 1, 1], [1.8, 1.8, 1.8])]
    measured = Selection([one for both in pairs for one in both])
    nimble, eager = pairs[0][0].cell.system.key, pairs[0][1].cell.system.key
    ratio = measured.over(ROW, nimble, eager)
    assert ratio == over_processes(pairs[::-1]) and ratio is not None and ratio.processes == 3
    assert ratio.ratio == pytest.approx((2 * 2.2 * 1.8) ** (1 / 3)) and ratio.low < 1.8 < 2.2 < ratio.high
    one = Selection([*pairs[2]]).over(ROW, nimble, eager)
    assert one == speedup(*pairs[2]) and isinstance(one, Speedup) and one.processes == 1
    # What other code was measured with is of another system, and an older one's failure takes nothing back.
    older = pair(0, [1, 1, 1], [9, 9, 9], code="before")
    mixed = Selection([*older, *pairs[1], *pairs[2]]).over(ROW, nimble, eager)
    assert mixed is not None and mixed.processes == 2 and mixed.high < 9
    broken = replace(pairs[2][0], status="incorrect", reason="wrong")
    assert Selection([*pairs[0], broken, pairs[2][1]]).over(ROW, nimble, eager) is None


def test_a_process_that_was_not_measured_together_counts_nothing() -> None:
    pairs = [pair(0, [1, 1, 1], [2, 2, 2]), pair(1, [1, 1, 1], [2.2, 2.2, 2.2])]
    (fast, _), (_, slow) = pairs
    ratio = over_processes([(fast, slow), *pairs])
    assert ratio == over_processes(pairs) and ratio is not None and ratio.processes == 2
    assert over_processes([(fast, slow)]) is over_processes([]) is None


def test_what_was_measured_alone_is_one_process() -> None:
    """A profiler had been in one of them: the newest pair's latencies stand in, each measured alone."""
    pairs = [pair(0, [1, 1, 1], [2, 2, 2]), pair(1, [1, 1, 1], [9, 9, 9])]
    profiled = [
        (replace(fast, latency=latency(1, 1, 1)), replace(slow, latency=latency(3, 3, 3), warnings=(PROFILED,)))
        for fast, slow in pairs
    ]
    ratio = over_processes(profiled)
    assert ratio == Speedup(3.0, 3.0, 3.0, is_in_turn=False)


def test_sides_that_were_measured_alone_scatter_each_by_itself() -> None:
    """The same samples on both sides are no ratio of exactly 1."""
    fast, slow = (replace(one, latency=latency(1, 2, 3, 4, 5), warnings=(PROFILED,)) for one in pair(0, [1], [1]))
    ratio = speedup(fast, slow)
    assert ratio is not None and ratio.ratio == 1 and ratio.low < 0.7 and ratio.high > 1.4


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("kind", ["busy_rounds", "apart_in_rounds"])
def test_one_side_whose_rounds_are_unsound_gives_no_ratio(place: int, kind: str) -> None:
    sides = list(pair(0, [1, 1, 1], [2, 2, 2]))
    sides[place] = replace(sides[place], warnings=(Warning(kind, {"ratio": 2.0, "load": 0.5, "cores": 2}),))
    assert speedup(*sides) is None


def test_an_interval_holds_its_middle() -> None:
    """Resampled rounds may all lie to one side of the medians: three of five rounds are 1."""
    ratios = [[1.0, 1.0, 1.0, 1.5, 1.5]] * 12
    low, ratio, high = of_processes(ratios)
    assert low == ratio == 1.0 and 1.0 < high < 1.5
    low, ratio, high = of_processes([[1 / each for each in rounds] for rounds in ratios])
    assert high == ratio == 1.0 and 1 / 1.5 < low < 1.0


def test_records_of_several_folders_are_read_as_several_processes(tmp_path: Path) -> None:
    """Of the same id, since each process measured the same in the same place; a copy of one is not read twice."""
    pairs = [pair(process, [1, 1, 1], [slow] * 3) for process, slow in enumerate((2.0, 2.2, 1.8))]
    for number, both in enumerate([*pairs, pairs[0]]):
        (tmp_path / str(number)).mkdir()
        for one in both:
            Store(tmp_path / str(number)).write(replace(one, id=pairs[0][both.index(one)].id))
    measured = Selection(read([tmp_path / str(number) for number in range(4)]))
    assert len(measured.records) == 6
    ratio = measured.over(ROW, pairs[0][0].cell.system.key, pairs[0][1].cell.system.key)
    assert ratio is not None and ratio.processes == 3 and ratio == over_processes(pairs[::-1])
