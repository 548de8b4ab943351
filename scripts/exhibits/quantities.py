"""What each metric of a published value is here: a number of one cell, or why there is none."""

from collections.abc import Callable, Sequence
from typing import Any

from scripts.charts.measured import Measured, Row

from .evidence import Evidence

PERCENT = 100.0
LIMITS = {"busy_ms": "busy time", "critical_path_ms": "critical path", "width": "width", "macs": "MACs"}


class Missing(Exception):
    """A figure is not there; the message says why, in a line."""


Quantity = Callable[[Evidence, Row, str], float]


def why_not(measured: Measured, row: Row, system: str) -> str:
    """Why a system has no speed; "" where it has."""
    records = measured.records_of(row, system)
    if not records:
        return f"{system} was not measured"
    record = records[0]
    return "" if record["status"] == "ok" else f"{system} is {record['status']}: {record['reason']}"


def part_of(evidence: Evidence, row: Row, system: str, part: str) -> dict[str, Any]:
    """A measurement of a cell; of any system where `system` is "": the model's own."""
    if evidence.measured is None:
        raise Missing("not measured")
    if row not in evidence.measured.rows:
        raise Missing(f"{row[0]} was not measured at batch {row[1]}")
    systems: Sequence[str] = [system] if system else evidence.measured.systems
    for one in systems:
        for record in evidence.measured.records_of(row, one):
            if record["status"] == "ok" and record.get(part):
                return dict(record[part])
    raise Missing(why_not(evidence.measured, row, systems[0]) or f"no record of {systems[0]} holds it")


def sm_efficiency(evidence: Evidence, row: Row, system: str) -> float:
    found = part_of(evidence, row, system, "sm_efficiency")
    if found["value"] is None:
        raise Missing(found["reason"] or "no SM efficiency")
    return PERCENT * float(found["value"])


def active_warps(evidence: Evidence, row: Row, system: str) -> float:
    found = part_of(evidence, row, system, "active_warps")
    if found["value"] is None:
        raise Missing(found["reason"])
    return float(found["value"])


def idle(evidence: Evidence, row: Row, system: str) -> float:
    """The share of a call in which the GPU has nothing to do, %: all but the time that its kernels take."""
    busy = limit(evidence, row, "busy_ms")
    latency = part_of(evidence, row, system, "latency")["statistics"]["host"]["median"]
    return PERCENT * max(0.0, 1 - busy / latency)


def limit(evidence: Evidence, row: Row, key: str) -> float:
    """One of the limits of a model, which are the same for every system."""
    found = part_of(evidence, row, "", "limits").get(key)
    if found is None:
        raise Missing(f"no record holds the model's {LIMITS[key]}")
    return float(found)


def parallelism(evidence: Evidence, row: Row, _: str) -> float:
    """How many times shorter than the kernels' time the critical path is: what full parallelism would gain."""
    return limit(evidence, row, "busy_ms") / limit(evidence, row, "critical_path_ms")


def schedule_of(evidence: Evidence, row: Row, system: str) -> dict[str, Any]:
    """The schedule file of a cell, or the summary in its record."""
    if (found := evidence.schedules.get((*row, system))) is not None:
        return found
    if evidence.schedules:
        raise Missing(f"no schedule of {system} for {row[0]} at batch {row[1]}")
    return part_of(evidence, row, system, "schedule")


def search_seconds(evidence: Evidence, row: Row, system: str) -> float:
    return float(schedule_of(evidence, row, system)["search"]["seconds"])


def assignment_ms(evidence: Evidence, row: Row, system: str) -> float:
    """What assigning streams took, without what a scheduler does beside it."""
    search = schedule_of(evidence, row, system)["search"]
    return 1e3 * float(search.get("allocation_seconds", search["seconds"]))


def streams(evidence: Evidence, row: Row, system: str) -> float:
    """Of the schedule; those that were seen where a timeline does not tell."""
    for timeline in evidence.timelines:
        model, of, *_ = timeline.title.split(", ")
        if (model, of) == (row[0], system):
            return float(timeline.scheduled or len(timeline.streams))
    return float(schedule_of(evidence, row, system)["streams"])


def makespan(evidence: Evidence, row: Row, system: str) -> float:
    """Milliseconds from the beginning of a call's first operator to the end of its last."""
    for timeline in evidence.timelines:
        model, of, *_ = timeline.title.split(", ")
        if (model, of) == (row[0], system):
            return max(bar.end for bar in timeline.bars)
    raise Missing(f"no timeline of {system} on {row[0]}")


def _blocks(evidence: Evidence, row: Row, system: str) -> list[dict[str, Any]]:
    """The blocks of several units that IOS cut a model into."""
    search = schedule_of(evidence, row, system or "ios")["search"]
    if "parts" not in search:
        raise Missing("its search does not tell of blocks")
    return [part for part in search["parts"] if part["units"] > 1]


def _largest(evidence: Evidence, row: Row, system: str) -> dict[str, Any]:
    return max(_blocks(evidence, row, system), key=lambda part: (part.get("transitions", 0), part["units"]))


def block_gain(evidence: Evidence, row: Row, system: str) -> float:
    """The largest gain of a block's stages over its units one after the other."""
    return max(part["sequential_milliseconds"] / part["milliseconds"] for part in _blocks(evidence, row, system))


# A metric -> the quantity whose ratio it is, None for speed; in COSTS less is better.
SOURCED: dict[Quantity, str] = {sm_efficiency: "sm_efficiency", active_warps: "active_warps"}
COSTS: tuple[Quantity, ...] = (assignment_ms, search_seconds, makespan)
RATIOS: dict[str, Quantity | None] = {
    **dict.fromkeys(("speedup", "speedup_min", "speedup_max", "latency_reduction")),
    "sm_efficiency_gain": sm_efficiency,
    "active_warps": active_warps,
    "makespan": makespan,
}
# A metric of one system that becomes a ratio where the preset says to which.
COMPARED: dict[str, Quantity | None] = {
    "latency": None,
    "stream_assignment_time": assignment_ms,
    "optimization_cost": search_seconds,
    "streams": streams,
}
# A metric -> what it is, and the rule that it stands by.
PLAIN: dict[str, tuple[Quantity, str]] = {
    "sm_efficiency": (sm_efficiency, "at_most"),
    "gpu_idle": (idle, "at_least"),
    "parallelism": (parallelism, "at_least"),
    "degree_of_logical_concurrency": (lambda evidence, row, _: limit(evidence, row, "width"), "count"),
    "macs": (lambda evidence, row, _: limit(evidence, row, "macs") / 1e9, "count"),
    "blocks": (lambda evidence, row, system: len(_blocks(evidence, row, system)), "count"),
    "operators": (lambda evidence, row, system: schedule_of(evidence, row, system or "ios")["search"]["units"], "count"),
    "largest_block_operators": (lambda evidence, row, system: _largest(evidence, row, system)["units"], "count"),
    "largest_block_width": (lambda evidence, row, system: _largest(evidence, row, system)["width"], "count"),
    "transitions": (lambda evidence, row, system: _largest(evidence, row, system)["transitions"], "count"),
    "block_speedup": (block_gain, "at_least"),
}
