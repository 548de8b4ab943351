"""A number that was measured, with its interval, and what becomes of several."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import exp, hypot, log

from results.cell import Choice
from results.finding import Finding
from results.selection import Row, Selection
from scripts.charts.style import short

from .missing import Missing, lack


@dataclass(frozen=True)
class Number:
    """A measured number.

    Args:
        value: the number.
        low, high: the ends of its 95 % interval; the value itself where it has none.
        which: of several it is: "on nasnet", "at batch 8".
        chosen_from: of how many it is the largest or the smallest.
        is_in_turn, processes: as of a Speedup.
        rounds_differ: which systems took how many times as long in the rounds as alone, in words.
    """

    value: float
    low: float
    high: float
    which: str = ""
    chosen_from: int = 1
    is_in_turn: bool = True
    processes: int = 1
    rounds_differ: str = ""

    @property
    def counted(self) -> str:
        """How many processes of each system it is over."""
        return "one process" if self.processes == 1 else f"{self.processes} processes"

    @classmethod
    def exact(cls, value: float) -> "Number":
        return cls(value, value, value)


def geometric_mean(numbers: Sequence[Number]) -> Number:
    """Of one or more, all above 0."""
    ends = zip(*((n.value, n.low, n.high) for n in numbers), strict=True)
    value, low, high = (exp(sum(map(log, end)) / len(numbers)) for end in ends)
    fewest = min(number.processes for number in numbers)
    return Number(value, low, high, is_in_turn=all(number.is_in_turn for number in numbers), processes=fewest)


def least(numbers: Sequence[Number]) -> Number:
    """The least of one or more, as sure as the least sure of them: what is said of all holds where it holds of this."""
    smallest = min(numbers, key=lambda number: number.value)
    low, high, fewest = (min(getattr(number, end) for number in numbers) for end in ("low", "high", "processes"))
    which = f"the least of {len(numbers)}, {smallest.which}" if smallest.which else ""
    are_in_turn = all(number.is_in_turn for number in numbers)
    return replace(smallest, low=low, high=high, processes=fewest, which=which, is_in_turn=are_in_turn)


def rank_correlation(ranks: Sequence[float], speedups: Sequence[Number]) -> Number:
    """Kendall's. Networks whose intervals overlap may be of either order, which gives its ends.

    Args:
        ranks: of each network.
        speedups: of the same networks, two or more.
    """
    bounds = [Finding("", "ratio", "x", 1, s.value, s.low, s.high, processes=s.processes).bounds for s in speedups]
    num_pairs, tau, settled, num_open = 0, 0, 0, 0
    for i, j in combinations(range(len(ranks)), 2):
        order = _sign(ranks[i] - ranks[j])
        concordance = order * _sign(speedups[i].value - speedups[j].value)
        is_settled = bounds[i][1] < bounds[j][0] or bounds[j][1] < bounds[i][0]
        num_pairs, tau = num_pairs + 1, tau + concordance
        settled, num_open = (settled + concordance, num_open) if is_settled else (settled, num_open + abs(order))
    return Number(
        tau / num_pairs,
        (settled - num_open) / num_pairs,
        (settled + num_open) / num_pairs,
        is_in_turn=all(number.is_in_turn for number in speedups),
        processes=min(number.processes for number in speedups),
    )


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def ratio_of_ends(over: tuple[float, float, float], under: tuple[float, float, float]) -> Number:
    """The ratio of two values that were measured apart, each between its ends: what they are off adds up as squares do."""
    ratio = over[1] / under[1]
    if min(*over, *under) <= 0:
        return Number.exact(ratio)
    down, up = (hypot(log(over[1] / over[end]), log(under[1] / under[2 - end])) for end in (0, 2))
    return Number(ratio, ratio * exp(-down), ratio * exp(up))


def speedup(measured: Selection, row: Row, system: Choice, baseline: Choice) -> Number:
    """How many times as fast a system is as another, in turn where they were. Raises Missing where there is no ratio."""
    ratio = measured.over(row, system, baseline)
    if ratio is None:
        reasons = [lack(measured, row, s) for s in (system, baseline)]
        no_turns = f"{system} and {baseline} have no ratio: {measured.why_not_in_turn(row, system, baseline)}"
        raise next(filter(None, reasons), Missing(no_turns))
    number = Number(ratio.ratio, ratio.low, ratio.high, is_in_turn=ratio.is_in_turn, processes=ratio.processes)
    if not ratio.is_in_turn:
        return number
    times = {one: time for one in (baseline, system) if (time := _times_alone(measured, row, one)) != 1}
    change = times.get(system, 1) / times.get(baseline, 1)  # of the ratio, with each side's time alone
    rounds_differ = ", ".join(f"{short(one)} {time:.2f} times as long in the rounds as alone" for one, time in times.items())
    return replace(number, low=number.low * min(1, change), high=number.high * max(1, change), rounds_differ=rounds_differ)


def _times_alone(measured: Selection, row: Row, system: Choice) -> float:
    """How many times as long a call took in the rounds as alone: the farthest from 1 over the processes whose records doubt
    one for the other, and 1 where none does.
    """
    warnings = [warning for record in measured.records_of(row, system) for warning in record.warnings if record.is_in_rounds]
    ratios = [float(str(warning.values["ratio"])) for warning in warnings if warning.kind == "differs_in_rounds"]
    return max(ratios, key=lambda ratio: abs(log(ratio)), default=1.0)
