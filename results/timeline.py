"""When each operator of a call ran, and on which stream, as a trace that Perfetto and chrome://tracing open."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .cell import Cell, Conditions
from .document import JSON, cell_from_json, cell_to_json, part_from_json, part_to_json
from .limits import Limits
from .older import cell_of_title

COMPUTE, MEMORY, UNKNOWN = "compute-intensive", "memory-intensive", "unknown"
KINDS = (COMPUTE, MEMORY, UNKNOWN)
CLOCK = "virtual clock"  # in the source of what no machine timed
STREAMS = 100_000  # thread numbers a process: Perfetto wants each of them once in a trace


@dataclass(frozen=True)
class Bar:
    """One operator or kernel. start and duration in milliseconds from the beginning of the call's first; kind: of KINDS."""

    stream: int
    name: str
    start: float
    duration: float
    kind: str
    details: dict[str, object] = field(default_factory=dict)

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class Timeline:
    """One call of one cell.

    Args:
        cell: what ran.
        source: where the times come from.
        bars: operators or kernels.
        num_scheduled_streams: of the schedule that ran, where there is one. The streams that were seen may be fewer.
        limits: of the operators that ran, where they are known.
        machine: the GPU or the CPU that it was seen on, and torch: "NVIDIA H200, torch 2.11.0"; "" of a virtual clock.
    """

    cell: Cell
    source: str
    bars: tuple[Bar, ...]
    num_scheduled_streams: int | None = None
    limits: Limits | None = None
    machine: str = ""

    @property
    def streams(self) -> list[int]:
        return sorted({bar.stream for bar in self.bars})

    @property
    def title(self) -> str:
        """ "googlenet, nimble, batch 1, cuda", with what is unusual of the conditions before the device."""
        cell, usual = self.cell, Conditions(self.cell.batch, self.cell.device)
        unusual = [
            getattr(cell.conditions, key)
            for key in ("precision", "layout", "algorithms")
            if getattr(cell.conditions, key) != getattr(usual, key)
        ]
        return ", ".join([cell.model.label, cell.system.label, f"batch {cell.batch}", *unusual, cell.device])

    @property
    def about(self) -> list[str]:
        """The machine and the arithmetic of what no virtual clock timed, the model and the batch."""
        conditions, usual = self.cell.conditions, Conditions(self.cell.batch, self.cell.device)
        unusual = [getattr(conditions, k) for k in ("layout", "algorithms") if getattr(conditions, k) != getattr(usual, k)]
        where = [] if CLOCK in self.source else [self.machine or self.cell.device, conditions.precision, *unusual]
        return [*where, self.cell.model.label, f"batch {self.cell.batch}"]

    @classmethod
    def from_json(cls, document: object) -> "Timeline":
        """Raises NotARecord."""
        return part_from_json(document, cls)

    def to_json(self) -> JSON:
        return part_to_json(self)


def shared_of(timelines: Sequence[Timeline]) -> list[str]:
    """What of `about` all of them have."""
    return [part for part in timelines[0].about if all(part in other.about for other in timelines)]


def to_trace(timelines: Sequence[Timeline]) -> dict[str, object]:
    """The timelines as one trace in Chrome's JSON format: a process a system, a thread a stream, all beginning at 0.

    A moment in each process stands for each of its limits.
    """
    events: list[dict[str, object]] = []
    for number, timeline in enumerate(timelines, start=1):
        about = {"name": timeline.title, "labels": timeline.source}
        for key, value in about.items():
            events.append({"ph": "M", "name": f"process_{key}", "pid": number, "args": {key: value}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}})
        for stream in timeline.streams:
            thread = {"ph": "M", "pid": number, "tid": number * STREAMS + stream}
            events.append({**thread, "name": "thread_name", "args": {"name": f"stream {stream}"}})
            events.append({**thread, "name": "thread_sort_index", "args": {"sort_index": stream}})
        for bar in sorted(timeline.bars, key=lambda bar: (bar.start, bar.stream)):
            place = {"ph": "X", "pid": number, "tid": number * STREAMS + bar.stream, "name": bar.name, "cat": bar.kind}
            events.append({**place, "ts": bar.start * 1e3, "dur": bar.duration * 1e3, "args": bar.details})
        for name, limit_ms in (timeline.limits.bounds if timeline.limits else {}).items():
            moment = {"ph": "i", "s": "p", "pid": number, "tid": number * STREAMS, "name": f"limit: {name}"}
            events.append({**moment, "ts": limit_ms * 1e3, "args": {"milliseconds": limit_ms}})
    about_each = {
        str(number): {
            "cell": cell_to_json(timeline.cell),
            "num_scheduled_streams": timeline.num_scheduled_streams,
            "limits": None if timeline.limits is None else part_to_json(timeline.limits),
            "machine": timeline.machine,
        }
        for number, timeline in enumerate(timelines, start=1)
    }
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": {"timelines": about_each}}


def from_trace(document: Any) -> list[Timeline]:
    """Read a trace of `to_trace` back, also one that names its cells in titles alone. Raises ValueError where it is none."""
    try:
        events, other = document["traceEvents"], document.get("otherData", {})
        titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        sources = {e["pid"]: e["args"]["labels"] for e in events if e["name"] == "process_labels"}
        bars: dict[int, list[Bar]] = {pid: [] for pid in titles}
        for e in events:
            if e["ph"] == "X":
                if e["cat"] not in KINDS:
                    raise ValueError(f"not a timeline: {e['name']} is of the category {e['cat']}")
                stream = e["tid"] - e["pid"] * STREAMS
                bars[e["pid"]].append(Bar(stream, e["name"], e["ts"] / 1e3, e["dur"] / 1e3, e["cat"], e["args"]))
        timelines = []
        for pid in sorted(titles):
            about = other.get("timelines", {}).get(str(pid))
            if about is None:
                cell, num_streams, limits = cell_of_title(titles[pid]), other.get("scheduled", {}).get(str(pid)), None
                machine = ""
            else:
                cell, num_streams = cell_from_json(about["cell"]), about["num_scheduled_streams"]
                document, machine = about.get("limits"), about.get("machine", "")
                limits = None if document is None else part_from_json(document, Limits)
            timeline = Timeline(cell, sources[pid], tuple(bars[pid]), num_streams, limits, machine)
            timelines.append(Timeline.from_json(timeline.to_json()))  # each of its parts is of its type
        return timelines
    except (KeyError, TypeError, AttributeError) as error:
        lacks = f"it lacks {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"not a timeline, as runner=timeline writes one: {lacks}") from error
