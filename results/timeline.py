"""When each operator of a call ran, and on which stream, as a trace that Perfetto and chrome://tracing open."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

COMPUTE, MEMORY, UNKNOWN = "compute-intensive", "memory-intensive", "unknown"
KINDS = (COMPUTE, MEMORY, UNKNOWN)
STREAMS = 100_000  # thread numbers a process: Perfetto wants each of them once in a trace


@dataclass(frozen=True)
class Bar:
    """One operator or kernel. start and duration in milliseconds from the beginning of the call's first; kind: of KINDS."""

    stream: int
    name: str
    start: float
    duration: float
    kind: str
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class Timeline:
    """One call of one system. title: what ran; source: where the times come from; scheduled: how many streams the schedule
    has that was run, where there is one, which need not be those that were seen.
    """

    title: str
    source: str
    bars: tuple[Bar, ...]
    scheduled: int | None = None

    @property
    def streams(self) -> list[int]:
        return sorted({bar.stream for bar in self.bars})

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "Timeline":
        bars = tuple(Bar(**bar) for bar in document["bars"])
        return cls(document["title"], document["source"], bars, document["scheduled"])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def to_trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The timelines as one trace in Chrome's JSON format: a process a system, a thread a stream, all beginning at 0."""
    events: list[dict[str, Any]] = []
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
    scheduled = {str(number): timeline.scheduled for number, timeline in enumerate(timelines, start=1)}
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": {"scheduled": scheduled}}


def from_trace(document: Any) -> list[Timeline]:
    """Read a trace of `to_trace` back. Raises ValueError where it is none."""
    try:
        events = document["traceEvents"]
        titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        sources = {e["pid"]: e["args"]["labels"] for e in events if e["name"] == "process_labels"}
        bars: dict[int, list[Bar]] = {pid: [] for pid in titles}
        for e in events:
            if e["ph"] == "X":
                if e["cat"] not in KINDS:
                    raise ValueError(f"not a timeline: {e['name']} is of the category {e['cat']}")
                stream = e["tid"] - e["pid"] * STREAMS
                bars[e["pid"]].append(Bar(stream, e["name"], e["ts"] / 1e3, e["dur"] / 1e3, e["cat"], e["args"]))
        scheduled = document.get("otherData", {}).get("scheduled", {})
        return [Timeline(titles[p], sources[p], tuple(bars[p]), scheduled.get(str(p))) for p in sorted(titles)]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a timeline: {type(error).__name__}: {error}") from error
