"""What each metric of a published value is here: a number of one cell, or why there is none."""

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import numpy as np

import conf
from results.cell import Choice, named
from results.latencies import latency_ms, request_throughput
from results.limits import Limits
from results.occupation import ActiveWarps, SmEfficiency
from results.quantity import Quantity as Described
from results.record import Record
from results.schedule import BlockSearch, Search
from results.selection import Row, quantity_of
from results.serving import ServedRequests
from results.statistics import median_interval

from .evidence import Evidence
from .missing import Missing, lack

PERCENT = 100.0
LARGEST_BATCH = "max_batch_size"  # the option of systems that serve
IOS = named("system", "ios")  # whose blocks a value without a system is about
SEQUENTIAL = named("system", "sequential")  # whose schedule is the graph
Part = TypeVar("Part")


# A number of one cell; None as the system asks for the model's own, which any system's record holds.
Quantity: TypeAlias = Callable[[Evidence, Row, Choice | None], float]


def part_of(evidence: Evidence, row: Row, system: Choice | None, part: Callable[[Record], Part | None]) -> Part:
    """A part of a cell's newest record that has it; of any system's where `system` is None. None of it counts where a newer
    record is not ok.
    """
    if evidence.measured is None:
        raise Missing("not measured")
    if row not in evidence.measured.rows:
        raise Missing(f"{row[0]} was not measured at batch {row[1]}")
    systems = [system] if system is not None else evidence.measured.systems
    for one in systems:
        if value := evidence.measured.part(row, one, part):
            return value
    raise lack(evidence.measured, row, systems[0]) or Missing(f"no record of {systems[0]} holds it")


def efficiency_of(evidence: Evidence, row: Row, system: Choice | None) -> SmEfficiency:
    return part_of(evidence, row, system, lambda record: record.sm_efficiency)


def warps_of(evidence: Evidence, row: Row, system: Choice | None) -> ActiveWarps:
    return part_of(evidence, row, system, lambda record: record.active_warps)


def sm_efficiency(evidence: Evidence, row: Row, system: Choice | None) -> float:
    efficiency = efficiency_of(evidence, row, system)
    if efficiency.value is None:
        raise Missing(efficiency.reason or "no SM efficiency")
    return PERCENT * efficiency.value


def active_warps(evidence: Evidence, row: Row, system: Choice | None) -> float:
    warps = warps_of(evidence, row, system)
    if warps.value is None:
        raise Missing(warps.reason or "no active warps")
    return warps.value


def idle(evidence: Evidence, row: Row, system: Choice | None) -> float:
    """The share of a call in which the GPU has nothing to do, %: all but the time that its kernels take."""
    latency = part_of(evidence, row, system, lambda record: record.latency)
    return PERCENT * max(0.0, 1 - busy_ms(evidence, row) / latency.host.median)


def limit(evidence: Evidence, row: Row, what: str, read: Callable[[Limits], float | None]) -> float:
    """One of the limits of a model, which are the same for every system."""
    value = read(part_of(evidence, row, None, lambda record: record.limits))
    if value is None:
        raise Missing(f"no record holds the model's {what}")
    return float(value)


def busy_ms(evidence: Evidence, row: Row) -> float:
    return limit(evidence, row, "busy time", lambda limits: limits.busy_ms)


def width(evidence: Evidence, row: Row, _: Choice | None) -> float:
    return limit(evidence, row, "width", lambda limits: limits.width)


def giga_macs(evidence: Evidence, row: Row, _: Choice | None) -> float:
    return limit(evidence, row, "MACs", lambda limits: limits.macs) / 1e9


def parallelism(evidence: Evidence, row: Row, _: Choice | None) -> float:
    """How many times shorter than the kernels' time the critical path is: what full parallelism would gain."""
    return busy_ms(evidence, row) / limit(evidence, row, "critical path", lambda limits: limits.critical_path_ms)


def search_of(evidence: Evidence, row: Row, system: Choice) -> Search:
    """The search that found a cell's schedule: by its schedule file, or by the summary in its record."""
    if (file := evidence.schedule(row, system)) is not None:
        return file.search
    if evidence.schedules:
        raise Missing(f"no schedule of {system} for {row[0]} at batch {row[1]}")
    return part_of(evidence, row, system, lambda record: record.schedule).search


def search_seconds(evidence: Evidence, row: Row, system: Choice | None) -> float:
    return _known(search_of(evidence, row, _some(system)).seconds, "its search does not tell of its time")


def assignment_ms(evidence: Evidence, row: Row, system: Choice | None) -> float:
    """What assigning streams took, without what a scheduler does beside it."""
    search = search_of(evidence, row, _some(system))
    if search.allocation_seconds is not None:
        return 1e3 * search.allocation_seconds
    return 1e3 * search_seconds(evidence, row, system)


def profiling_ms(evidence: Evidence, row: Row, system: Choice | None) -> float:
    """What Opara's profiler took."""
    seconds = part_of(evidence, row, _some(system), lambda record: record.schedule).search.profile_seconds
    return 1e3 * _known(seconds, "its record does not tell of profiling")


def streams(evidence: Evidence, row: Row, system: Choice | None) -> float:
    """Of the schedule; those that were seen where a timeline does not tell."""
    chosen = _some(system)
    if (timeline := evidence.timeline(row, chosen)) is not None:
        return float(timeline.num_scheduled_streams or len(timeline.streams))
    if (file := evidence.schedule(row, chosen)) is not None:
        return float(file.streams)
    search_of(evidence, row, chosen)  # raises where schedules are there, and not this one
    return float(part_of(evidence, row, chosen, lambda record: record.schedule).streams)


def makespan(evidence: Evidence, row: Row, system: Choice | None) -> float:
    """Milliseconds from the beginning of a call's first operator to the end of its last."""
    timeline = evidence.timeline(row, _some(system))
    if timeline is None:
        raise Missing(f"no timeline of {system} on {row[0]}")
    return max(bar.end for bar in timeline.bars)


def blocks(evidence: Evidence, row: Row, system: Choice | None) -> list[BlockSearch]:
    """The blocks of several units that IOS cut a model into."""
    parts = search_of(evidence, row, system or IOS).parts
    if not parts:
        raise Missing("its search does not tell of blocks")
    return [part for part in parts if part.units > 1]


def largest_block(evidence: Evidence, row: Row, system: Choice | None) -> BlockSearch:
    return max(blocks(evidence, row, system), key=lambda block: (block.transitions or 0, block.units))


def transitions(evidence: Evidence, row: Row, system: Choice | None) -> float:
    return _known(largest_block(evidence, row, system).transitions, "its search does not tell of transitions")


def units(evidence: Evidence, row: Row, system: Choice | None) -> float:
    return _known(search_of(evidence, row, system or IOS).units, "its search does not tell of units")


def operations_per_convolution(evidence: Evidence, row: Row, system: Choice | None) -> float:
    """Millions of floating-point operations, two a multiply-accumulate, for each convolution of the graph."""
    file = evidence.schedule(row, system or SEQUENTIAL)
    if file is None or file.convolution_macs is None:
        raise Missing(f"no schedule of {row[0]} tells of its convolutions' operations")
    convolutions = sum(operator.target.startswith("aten.conv") for operator in file.operators)
    if not convolutions:
        raise Missing(f"{row[0]} has no convolution")
    return 2e-6 * file.convolution_macs / convolutions


def block_gain(evidence: Evidence, row: Row, system: Choice | None) -> float:
    """The largest gain of a block's stages over its units one after the other."""
    pairs = [(block.sequential_milliseconds, block.milliseconds) for block in blocks(evidence, row, system)]
    return max(sequential / staged for sequential, staged in pairs if sequential and staged)


def parameters(evidence: Evidence, row: Row, _: Choice | None) -> float:
    """Billions of a GPT of that size: its blocks, and the embeddings of tokens and places."""
    options = conf.options("model", row[0])
    if options.get("name") != "gpt":
        raise Missing(f"{row[0]} is no GPT")
    layers, hidden, vocabulary, positions = (
        int(str(options[key])) for key in ("layers", "hidden", "vocabulary", "positions")
    )
    return (layers * (12 * hidden**2 + 13 * hidden) + (vocabulary + positions + 2) * hidden) / 1e9


def served(evidence: Evidence, row: Row, system: Choice | None, name: str, is_best: bool = False) -> float:
    """A quantity of a system that served, by "MEASUREMENT.NAME".

    is_best: the largest over all of the choice's largest batches, as the paper takes each system at its best.
    """
    return _served(evidence, row, system, name, is_best).value or 0.0


def served_ends(evidence: Evidence, row: Row, system: Choice | None, quantity: Quantity) -> tuple[float, float, float]:
    """A quantity of SERVED between the ends of its interval, which are itself where it has none.

    Of a quantity that has a value for each trace the interval is taken from these.
    """
    one = _served(evidence, row, system, *SERVED_NAMES[quantity])
    value = one.value or 0.0
    measured = evidence.measured
    serving = measured.part(row, _some(system), lambda record: record.serving) if measured is not None else None
    if quantity in OF_TRACES and serving is not None:
        low, high = median_interval([OF_TRACES[quantity](trace.requests) for trace in serving.traces])
        return low, value, high
    return (value if one.low is None else one.low, value, value if one.high is None else one.high)


def ratios_of_traces(evidence: Evidence, row: Row, over: Choice, under: Choice, quantity: Quantity) -> list[float]:
    """A quantity under one system over that under another, of each trace; empty where they did not serve the same traces."""
    if quantity not in OF_TRACES or evidence.measured is None:
        return []
    records = [evidence.measured.part(row, one, lambda record: record if record.serving else None) for one in (over, under)]
    loads, traces = [], []  # what each system was sent, and what its clients saw
    for record in filter(None, records):
        assert record.serving is not None
        traces.append([trace.requests for trace in record.serving.traces])
        seeds_and_lengths = [
            (trace.seed, trace.requests.prompt_tokens, trace.requests.max_new_tokens) for trace in record.serving.traces
        ]
        loads.append((record.cell.runner, seeds_and_lengths))
    if len(loads) < 2 or loads[0] != loads[1]:
        return []
    return [OF_TRACES[quantity](one) / OF_TRACES[quantity](other) for one, other in zip(*traces, strict=True)]


def served_from(evidence: Evidence, row: Row, system: Choice | None, quantity: Quantity) -> int:
    """How many a quantity of SERVED is the best of."""
    return len(_all_served(evidence, row, system, *SERVED_NAMES[quantity]))


def _served(evidence: Evidence, row: Row, system: Choice | None, name: str, is_best: bool) -> Described:
    return max(_all_served(evidence, row, system, name, is_best), key=lambda quantity: quantity.value or 0.0)


def _all_served(evidence: Evidence, row: Row, system: Choice | None, name: str, is_best: bool) -> list[Described]:
    """That of the system, or of its choice with each of its largest batches."""
    chosen = _some(system)
    if evidence.measured is None:
        raise Missing("not measured")
    alike = [other for other in evidence.measured.systems if other.choice == chosen.choice] if is_best else [chosen]
    read = quantity_of(name)
    newest = [quantity for one in alike if (quantity := evidence.measured.part(row, one, read)) is not None]
    if not newest:
        reasons = [reason for one in alike if (reason := lack(evidence.measured, row, one))]
        raise next(iter(reasons), Missing(f"no record of {chosen} holds its {name.partition('.')[2]}"))
    return newest


def slo_rate(evidence: Evidence, row: Row, system: Choice | None) -> float:
    """The largest rate at twice the latency of a request alone, of the best of a system's largest batches."""
    return served(evidence, row, system, *SERVED_NAMES[slo_rate])


def saturation(evidence: Evidence, row: Row, system: Choice | None) -> float:
    """Requests finished a second where there is always another one."""
    return served(evidence, row, system, *SERVED_NAMES[saturation])


def itl_p99(evidence: Evidence, row: Row, system: Choice | None) -> float:
    """Milliseconds between two tokens of a request, the 99th percentile."""
    return served(evidence, row, system, *SERVED_NAMES[itl_p99])


def batch_time(evidence: Evidence, row: Row, system: Choice | None) -> float:
    """Milliseconds of a batch of equal requests."""
    return served(evidence, row, system, *SERVED_NAMES[batch_time])


def increment_time(evidence: Evidence, row: Row, system: Choice | None) -> float:
    """Milliseconds of an iteration without prompts."""
    return served(evidence, row, system, *SERVED_NAMES[increment_time])


def peak_throughput(evidence: Evidence, row: Row, system: Choice | None) -> float:
    """Requests finished a second at most, at any rate that was tried and with any largest batch."""
    return served(evidence, row, system, "capacity.peak_throughput", is_best=True)


def max_batch(evidence: Evidence, row: Row, system: Choice | None) -> float:
    """Requests of the largest batch that the engine had room for, where it had none for a larger one.

    A system counts under each largest batch that it was asked for: what has room is told by the batch.
    """
    chosen, measured = _some(system), evidence.measured
    if measured is None:
        raise Missing("not measured")
    alike = [system for system in measured.systems if _of_any_size(system) == _of_any_size(chosen)]
    batches = [batch for model, batch in measured.rows if model == row[0]]
    fitting = [batch for batch in batches if any(lack(measured, (row[0], batch), system) is None for system in alike)]
    if not fitting:
        raise lack(measured, row, chosen) or Missing("not measured")
    most = max(fitting)
    larger = [r for b in batches if b > most for system in alike for r in measured.records_of((row[0], b), system)]
    if not any(record.status == "out_of_memory" for record in larger):
        raise Missing(f"{chosen} ran out of memory at no batch above {most}")
    return float(most)


def _of_any_size(system: Choice) -> tuple[str, conf.Options]:
    """A system without its largest batch."""
    return system.choice, {key: value for key, value in system.key.values if key != LARGEST_BATCH}


def _some(system: Choice | None) -> Choice:
    if system is None:
        raise Missing("of no single system")
    return system


def _known(value: float | None, reason: str) -> float:
    if value is None:
        raise Missing(reason)
    return float(value)


# A metric -> the quantity whose ratio it is, None for speed; in COSTS less is better.
SOURCED: dict[Quantity, Callable[[Evidence, Row, Choice | None], SmEfficiency | ActiveWarps]] = {
    sm_efficiency: efficiency_of,
    active_warps: warps_of,
}
COSTS: tuple[Quantity, ...] = (assignment_ms, search_seconds, makespan, itl_p99, batch_time, increment_time)
# Of systems that served one after another: no ratio of theirs is of turns.
SERVED: dict[str, Quantity] = {
    "slo_rate": slo_rate,
    "saturation": saturation,
    "itl_p99": itl_p99,
    "batch_time": batch_time,
    "increment_time": increment_time,
}
SERVED_NAMES: dict[
    Quantity, tuple[str, bool]
] = {  # what each reads, and whether it is the best of a system's largest batches
    slo_rate: ("capacity.slo_rate", True),
    saturation: ("serving.request_throughput", False),
    itl_p99: ("serving.itl_p99_ms", False),
    batch_time: ("engine.batch_ms", False),
    increment_time: ("engine.increment_ms", False),
}
OF_TRACES: dict[Quantity, Callable[[ServedRequests], float]] = {
    saturation: request_throughput,
    itl_p99: lambda requests: float(np.percentile(latency_ms(requests, "itl"), 99)),
}
RATIOS: dict[str, Quantity | None] = {
    **dict.fromkeys(("speedup", "speedup_min", "speedup_max", "latency_reduction")),
    **dict.fromkeys(("sm_efficiency_gain", "sm_efficiency_min", "sm_efficiency_max"), sm_efficiency),
    "active_warps": active_warps,
    "makespan": makespan,
    **SERVED,
}
# A metric of one system that becomes a ratio where the preset says to which.
COMPARED: dict[str, Quantity | None] = {
    **dict.fromkeys(("latency", "images_per_second", "normalized_throughput")),
    "optimization_hours": search_seconds,
    "stream_assignment_time": assignment_ms,
    "optimization_cost": search_seconds,
    "streams": streams,
}
# A metric -> what it is, and the rule that it stands by.
PLAIN: dict[str, tuple[Quantity, str]] = {
    "sm_efficiency": (sm_efficiency, "at_most"),
    "gpu_idle": (idle, "at_least"),
    "profiling_time": (profiling_ms, "at_most"),
    "parallelism": (parallelism, "at_least"),
    "degree_of_logical_concurrency": (width, "count"),
    "macs": (giga_macs, "count"),
    "blocks": (lambda evidence, row, system: len(blocks(evidence, row, system)), "count"),
    "operators": (units, "count"),
    "largest_block_operators": (lambda evidence, row, system: largest_block(evidence, row, system).units, "count"),
    "largest_block_width": (lambda evidence, row, system: largest_block(evidence, row, system).width, "count"),
    "transitions": (transitions, "count"),
    "operations_per_convolution": (operations_per_convolution, "count"),
    "block_speedup": (block_gain, "at_least"),
    "parameters": (parameters, "count"),
    "throughput": (slo_rate, "at_least"),
    "peak_throughput": (peak_throughput, "at_least"),
    "max_batch": (max_batch, "at_least"),
}
# Of several networks: what their speedups rank with, and whether upwards (1) or downwards (-1).
TRENDS: dict[str, tuple[Quantity, int]] = {"concurrency_trend": (width, 1), "macs_trend": (giga_macs, -1)}
