"""How models stand: by what schedulers, compilers and weave gain over one stream, and why."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from conf.text import counted
from results.cell import Choice, named
from results.limits import Limits
from results.record import Record
from results.selection import Row, Selection, latency_of

from .charts.style import short

ONE_STREAM = named("system", "cuda_graph")
STREAMS = tuple(named("system", name) for name in ("nimble", "opara", "ios"))  # the model's own kernels, on more streams
WEAVE = named("system", "weave")  # which does both
NEITHER = (WEAVE, *(named("system", name) for name in ("eager", "torchscript", "sequential", "nimble_single_stream")))
GAIN = 1.05  # over one stream, below which a way does not help
SECTIONS = ("Where streams help", "Where fusion helps", "Where nothing is left")


@dataclass(frozen=True)
class Standing:
    """How one model stands at one batch.

    Args:
        precision: Of the arithmetic.
        streams, fusion, both: The largest ratio over one stream, and its system; None where nothing was measured in turn.
        limits: Of the model's own operators; None where no record has them.
        latency_ms: Of one stream.
    """

    row: Row
    precision: str
    streams: tuple[float, Choice] | None
    fusion: tuple[float, Choice] | None
    both: tuple[float, Choice] | None
    limits: Limits | None
    latency_ms: float | None

    @property
    def name(self) -> str:
        return f"{self.row[0]} b{self.row[1]} {self.precision}"

    @property
    def section(self) -> str:
        """One of SECTIONS: by the way that gains more alone, if anything gains at all.

        What weave alone makes faster stands with what fusion does: more streams for the model's own kernels do not help it.
        """
        gains = [way[0] if way is not None else 1.0 for way in (self.streams, self.fusion, self.both)]
        if max(gains) <= GAIN:
            return SECTIONS[2]
        return SECTIONS[0] if gains[0] > max(GAIN, gains[1]) else SECTIONS[1]

    @property
    def reason(self) -> str:
        """The width and the limits."""
        limits = self.limits
        if limits is None or not limits.critical_path_ms or not limits.busy_ms:
            return "no limits"
        said = f"width {limits.width}, critical path {limits.critical_path_ms / limits.busy_ms:.0%} of the kernels' time"
        largest = next(iter(limits.bounds.items()), None)
        if largest is not None and self.latency_ms is not None:
            said += f", one stream {self.latency_ms / largest[1]:.1f} times the {largest[0]}"
        return said

    @property
    def text(self) -> str:
        ways = [f"{way[0]:.2f}x ({short(way[1])})" for way in (self.streams, self.fusion, self.both) if way is not None]
        return f"{self.name}: {', '.join(ways)}; {self.reason}"


def standings(settings: Iterable[Selection]) -> list[Standing]:
    """Of every model, batch and precision that was measured in turn with one stream, the largest gains first."""
    rows = [row for measured in settings for row in _standings(measured)]
    return sorted(rows, key=lambda row: -max(way[0] for way in (row.streams, row.fusion, row.both) if way is not None))


def _standings(measured: Selection) -> list[Standing]:
    fusing = [s for s in measured.systems if s not in (ONE_STREAM, *STREAMS, *NEITHER)]

    def best(row: Row, systems: Sequence[Choice]) -> tuple[float, Choice] | None:
        ratios = [(ratio.ratio, s) for s in systems if (ratio := measured.over(row, s, ONE_STREAM)) is not None]
        return max(ratios, key=lambda pair: pair[0], default=None)

    rows = []
    for row in measured.rows:
        ways = best(row, STREAMS), best(row, fusing), best(row, [WEAVE])
        if any(ways):
            latency = measured.part(row, ONE_STREAM, latency_of)
            limits = measured.part(row, ONE_STREAM, _limits)
            latency_ms = latency.host.median if latency is not None else None
            rows.append(Standing(row, measured.setting.precision, *ways, limits, latency_ms))
    return rows


def _limits(record: Record) -> Limits | None:
    return record.limits


def by_precision(records: Iterable[Record]) -> list[Selection]:
    """Of one kind of GPU; each model's whole group is of one host, and models may be of several."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.cell.conditions.precision, []).append(record)
    return [Selection(groups[precision]) for precision in sorted(groups)]


def sections(rows: Sequence[Standing]) -> str:
    """Markdown: a heading, a sentence and a list for each of SECTIONS."""
    meaning = (
        "Schedulers, which put the model's own kernels on more streams, gain more over one stream than compilers",
        "Compilers, which make fewer and other kernels, gain more over one stream than schedulers, or weave alone gains",
        f"No system gains more than {GAIN - 1:.0%} over one stream",
    )
    made = []
    for section, words in zip(SECTIONS, meaning, strict=True):
        own = [row for row in rows if row.section == section]
        said = "\n".join(f"- {row.text}" for row in own)
        number = f"{len(own)} of {counted(len(rows), 'model')}, each batch and precision counted"
        made += [f"## {section}", f"{words}: {number}.", *([said] if own else [])]
    return "\n\n".join(made)
