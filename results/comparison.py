"""Ratios between systems that were measured in turn, in interleaved rounds, on one machine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from statistics import NormalDist, median

import numpy as np

from .record import Record
from .statistics import ENDS, RESAMPLES, interval, median_interval, resampled_medians


@dataclass(frozen=True)
class Speedup:
    """How many times faster, with a bootstrap 95 % interval.

    Args:
        ratio: the median over rounds; over several processes the geometric mean of their medians.
        low, high: the ends of the interval; that of one process holds nothing of what differs between processes.
        is_in_turn: False where the rounds are not to be trusted, and latencies that were each measured alone stand in.
        processes: of each system.
    """

    ratio: float
    low: float
    high: float
    is_in_turn: bool = True
    processes: int = 1


# Warnings of a cell whose rounds give no ratio.
UNSOUND = ("busy_rounds", "apart_in_rounds")


def has_sound_rounds(record: Record) -> bool:
    """Was it measured in rounds, on a machine that did nothing else?"""
    return record.is_in_rounds and not any(warning.kind in UNSOUND for warning in record.warnings)


def comparable(a: Record, b: Record) -> bool:
    """Were the two measured in turn, in the same rounds, and are both sound?"""
    x, y = a.comparison, b.comparison
    if x is None or y is None or not (has_sound_rounds(a) and has_sound_rounds(b)):
        return False
    return x.group == y.group and len(x.rounds) == len(y.rounds)


def is_disturbed(record: Record) -> bool:
    """Had a profiler been in its process before the rounds? It slows launches for as long as the process lives."""
    return any(warning.kind == "profiled_before_timing" for warning in record.warnings)


def speedup(record: Record, baseline: Record) -> Speedup | None:
    """How many times faster `record`'s system is than `baseline`'s, or None where they were not measured together.

    Each round gives one ratio, of the two systems' medians in that round, so that what slows the machine for a while slows
    both sides of a ratio.
    """
    if not record.is_ok or not baseline.is_ok or not comparable(record, baseline):
        return None
    if is_disturbed(record) or is_disturbed(baseline):
        if record.latency is None or baseline.latency is None:
            return None
        slow, fast = baseline.latency.host_ms, record.latency.host_ms
        low, high = interval(resampled_medians(slow, seed=0) / resampled_medians(fast, seed=1))
        return Speedup(median(slow) / median(fast), low, high, is_in_turn=False)
    ratios = round_ratios(record, baseline)
    return Speedup(float(np.median(ratios)), *median_interval(ratios))


def margin(records: Sequence[Record]) -> Speedup | None:
    """The A/A margin: how many times faster a second process of one system was in the same rounds, with its interval.

    records: of one group of rounds, of which one has the second process. None where none has.
    """
    for record in records:
        comparison = record.comparison
        if comparison is not None and comparison.again is not None and has_sound_rounds(record):
            one = speedup(replace(record, comparison=replace(comparison, rounds=comparison.again)), record)
            return one if one is not None and one.is_in_turn else None
    return None


def round_ratios(record: Record, baseline: Record) -> list[float]:
    """How many times faster in each of the rounds that the two share."""
    assert record.comparison is not None and baseline.comparison is not None
    pairs = zip(baseline.comparison.rounds, record.comparison.rounds, strict=True)
    return [median(slow) / median(fast) for slow, fast in pairs]


def over_processes(pairs: Sequence[tuple[Record, Record]]) -> Speedup | None:
    """How many times faster one system is than another, over the processes that both were measured in.

    Args:
        pairs: the system's record and the baseline's, a pair for each set of rounds that they shared.

    Returns:
        None where no pair was measured together.
    """
    speedups = [(pair, one) for pair in pairs if (one := speedup(*pair)) is not None]
    if not speedups:
        return None
    if len(speedups) == 1 or not all(one.is_in_turn for _, one in speedups):  # what was measured alone has no rounds
        return speedups[0][1]
    low, ratio, high = of_processes([round_ratios(*pair) for pair, _ in speedups])
    return Speedup(ratio, low, high, processes=len(speedups))


def of_processes(ratios: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """The geometric mean of processes' medians between the ends of its 95 % interval, by a two-level bootstrap.

    A resample draws processes, and rounds within each that it drew: the calls of a round go together, since a machine
    drifts from round to round. Of few processes a bootstrap is too narrow, by sqrt((n - 1) / n) and by the normal's quantile
    in the place of Student's; both are put right.

    Args:
        ratios: of each process, two at least, those of its rounds.
    """
    from scipy.special import stdtrit

    generator = np.random.default_rng(0)
    num_processes = len(ratios)
    medians = [
        np.log(np.median(generator.choice(np.asarray(rounds), (RESAMPLES, num_processes, len(rounds))), axis=2))
        for rounds in ratios
    ]  # of each process [RESAMPLES, num_processes]: anew for each place that it may be drawn for
    places = generator.integers(num_processes, size=(RESAMPLES, num_processes))
    means = np.take_along_axis(np.stack(medians), places[None], axis=0)[0].mean(axis=1)
    middle = float(np.mean([log(float(np.median(rounds))) for rounds in ratios]))
    wider = sqrt(num_processes / (num_processes - 1)) * stdtrit(num_processes - 1, ENDS[1]) / NormalDist().inv_cdf(ENDS[1])
    low, high = interval(means)
    return exp(middle + wider * min(0.0, low - middle)), exp(middle), exp(middle + wider * max(0.0, high - middle))
