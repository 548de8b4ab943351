"""The report's answer for one setting: the fastest system of each model, and its distance from the bound."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from conf.text import counted
from results.calls import Latency
from results.cell import Choice
from results.comparison import Speedup, margin, speedup
from results.finding import ONE_PROCESS
from results.limits import Limits
from results.selection import Row, Selection, latency_of
from scripts.charts.style import short
from scripts.table import DASH, Entry, Table, made, table

OF_TWO_SWEEPS = "the newest records are of two sweeps"


@dataclass(frozen=True)
class Fastest:
    """The fastest system of a model at a batch.

    Args:
        row: the model and the batch.
        system: the fastest in the rounds that it shared with each other; by median latency where there are none.
        latency: its own, measured alone.
        level: systems that are not slower beyond the 95 % interval of their ratio, or those of both latencies where they
            shared no rounds, and beyond what two processes of one system differ by; the fastest alone first.
        systems: how many systems have a latency.
        over: its speedup over the baseline as the report's table of cells has it; None without one.
        bounds: milliseconds that no schedule of any system's operators is below, by name, the largest first.
        not_in_turn: why it and the next fastest have no ratio from rounds in turn; None where they have one.
    """

    row: Row
    system: Choice
    latency: Latency
    level: tuple[Choice, ...]
    systems: int
    over: Entry | None
    bounds: Mapping[str, float]
    not_in_turn: str | None

    @property
    def distance(self) -> float | None:
        """Its latency over the largest bound; None where no record holds limits."""
        largest_ms = next(iter(self.bounds.values()), None)
        return self.latency.host.median / largest_ms if largest_ms else None


@dataclass(frozen=True)
class Answer:
    """A sentence, and a table with a row for each model and batch."""

    sentence: str
    table: Table


def fastest(measured: Selection, baseline: Choice) -> list[Fastest]:
    """The fastest system of each row with at least two systems to compare."""
    rows = []
    for row in measured.rows:
        timed = {s: latency for s in measured.systems if (latency := measured.part(row, s, latency_of)) is not None}
        if len(timed) < 2:
            continue
        by_speed = sorted(timed, key=lambda s: timed[s].host.median)
        first = by_speed[0]
        for other in by_speed[1:]:
            if (gain := _in_turn(measured, row, other, first)) is not None and gain.ratio > 1:
                first = other
        latency, others = timed[first], [s for s in by_speed if s != first]
        within = 1 + _margin(measured, row)
        level = tuple(s for s in others if _slower_at_least(measured, row, s, first, timed) <= within)
        ratio = measured.over(row, first, baseline)
        over = None if ratio is None else Entry(f"{ratio.ratio:.2f}{'' if ratio.is_in_turn else ' *'}", ratio.ratio)
        limits = (measured.part(row, s, lambda record: record.limits) for s in measured.systems)
        bounds = Limits.least(each for each in limits if each is not None)
        is_in_turn = _in_turn(measured, row, first, others[0]) is not None
        not_in_turn = None if is_in_turn else measured.why_not_in_turn(row, first, others[0]) or OF_TWO_SWEEPS
        rows.append(Fastest(row, first, latency, level, len(timed), over, bounds, not_in_turn))
    return rows


def _margin(measured: Selection, row: Row) -> float:
    """By how much two processes of one system differ in the rounds of a row; ONE_PROCESS where nobody has measured it."""
    one = margin([record for system in measured.systems for record in measured.records_of(row, system)])
    return ONE_PROCESS if one is None else abs(one.ratio - 1)


def _slower_at_least(measured: Selection, row: Row, system: Choice, first: Choice, alone: Mapping[Choice, Latency]) -> float:
    """How many times slower than the first a system is at least, by the 95 % interval, or by that of each set of rounds:
    of two processes a common interval is wide, however clear each is."""
    ratio = _in_turn(measured, row, first, system)
    if ratio is None:
        return alone[system].host.ci95[0] / alone[first].host.ci95[1]
    sets = [one for pair in measured.pairs(row, first, system) if (one := speedup(*pair)) is not None]
    return max(ratio.low, min(one.low for one in sets))


def _in_turn(measured: Selection, row: Row, system: Choice, baseline: Choice) -> Speedup | None:
    """As `over`, of rounds that the newest records of both shared: older ones tell of other code than the latencies do."""
    newest = [measured.record(row, one, latency_of) for one in (system, baseline)]
    own, other = (None if record is None or record.comparison is None else record.comparison.group for record in newest)
    ratio = measured.over(row, system, baseline)
    return ratio if own == other is not None and ratio is not None and ratio.is_in_turn else None


def answer(measured: Selection, baseline: Choice) -> Answer | None:
    """The answer of a setting; None where no row has two systems to compare."""
    rows = fastest(measured, baseline)
    return Answer(_sentence(rows), _table(rows, baseline)) if rows else None


def _sentence(rows: list[Fastest]) -> str:
    wins = Counter(short(one.system) for one in rows).most_common()
    (first, most), others = wins[0], [f"{system} for {number}" for system, number in wins[1:]]
    pairs = "pair of a model and a batch" if len(rows) == 1 else "pairs of a model and a batch"
    text = f"{first} is the fastest for {most} of {len(rows)} {pairs}" + "".join(f", {other}" for other in others) + "."
    if undecided := sum(bool(one.level) for one in rows):
        text += (
            f" In {undecided} of {len(rows)} the fastest is level with another: two processes of one system may differ so."
        )
    if reasons := [one.not_in_turn for one in rows if one.not_in_turn is not None]:
        why = reasons[0] if len(set(reasons)) == 1 else "the remarks say why"
        verb = "is" if len(reasons) == 1 else "are"
        text += f" {len(reasons)} of {len(rows)} {verb} decided without rounds, by latencies each measured alone: {why}."
    distances = [one.distance for one in rows if one.distance is not None]
    if distances:
        low, middle, high = (f"{of(distances):.2f}" for of in (min, median, max))
        extent = low if low == high else f"{low} to {high}"
        number = counted(len(distances), "row")
        among = number if low == high else f"median {middle}, {number}"
        text += f" The fastest takes {extent} times the bound of the operators that were profiled ({among})."
    return text


def _table(rows: list[Fastest], baseline: Choice) -> Table:
    def distance(one: Fastest) -> Entry:
        return Entry(DASH) if one.distance is None else Entry(f"{one.distance:.2f}", one.distance)

    def bounded(one: Fastest) -> Entry:
        every = ", ".join(f"{name} {ms:.3f} ms" for name, ms in one.bounds.items())
        return Entry(next(iter(one.bounds), DASH), title=every)

    def level(one: Fastest) -> Entry:
        return Entry(", ".join(map(short, one.level)) or DASH)

    def latency(one: Fastest) -> Entry:
        host = one.latency.host
        low, high = host.ci95
        return Entry(f"{host.median:.3f} [{low:.3f}, {high:.3f}]", host.median)

    columns = [
        made("model", lambda one: one.row[0], number=False),
        made("batch", lambda one: Entry(str(one.row[1]), one.row[1])),
        made("fastest", lambda one: short(one.system), "in rounds in turn; without them by median latency", number=False),
        made("latency, ms", latency, "host time of a call: median and 95 % interval of one process's calls"),
        made(f"over {baseline}", lambda one: one.over or Entry(DASH), "speedup; * from latencies, each measured alone"),
        made(
            "over the bound",
            distance,
            "latency over the bound of the operators that were profiled: no schedule of them takes less than 1; "
            "a system below it runs fewer or faster kernels",
        ),
        made(
            "bounded by",
            bounded,
            "the largest of critical path, SM area, memory traffic and launch, each the least of any system's operators",
            number=False,
        ),
        made(
            "level with it",
            level,
            f"not slower beyond a 95 % interval and the A/A margin, or {ONE_PROCESS:.0%} where nobody measured that",
            number=False,
            words=True,
        ),
        made("of systems", lambda one: Entry(str(one.systems), one.systems), "how many have a latency"),
    ]
    return table(columns, rows).without_empty_columns()
