"""The pages' tables: each is a declaration of its columns, over groups of records that were measured in turn."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean, median
from typing import TypeAlias, TypeVar

from results.cell import Choice, Conditions, Value, named
from results.comparison import Speedup, margin
from results.record import Record
from results.schedule import Search
from results.siblings import Siblings

from .commits import code_state
from .table import DASH, Lacking, Made, Table, made, table


def system(choice: str, **changes: Value) -> Choice:
    return named("system", choice, **changes)


def systems(*choices: str) -> tuple[Choice, ...]:
    return tuple(map(system, choices))


EAGER, CUDA_GRAPH, NIMBLE, OPARA, IOS, NIMBLE_FUSED = systems(
    "eager", "cuda_graph", "nimble", "opara", "ios", "nimble_fused"
)
(TORCH_COMPILE,) = systems("torch_compile")
SYSTEMS = systems("eager", "torchscript", "torch_compile", "cuda_graph", "nimble")
# Systems that launch one graph a call, and so hardly depend on what else the host does.
GRAPHS = (
    (NIMBLE, CUDA_GRAPH),
    (NIMBLE, system("nimble_single_stream")),
    (OPARA, NIMBLE),
    (NIMBLE_FUSED, NIMBLE),
    (NIMBLE_FUSED, TORCH_COMPILE),
    (NIMBLE_FUSED, system("torch_compile_channels_last")),
)
TRAINERS = systems("eager", "torchscript", "torch_compile", "nimble")
COMPILERS = systems(
    *("torch_compile", "onnxruntime", "onnxruntime_parallel", "onnxruntime_cuda_graph", "tvm", "tvm_cuda_graph")
)
SCHEDULES = (NIMBLE, IOS, OPARA)
SCHEDULERS = (CUDA_GRAPH, *SCHEDULES)
PREPARED = systems("torch_compile", "onnxruntime", "tvm", "nimble", "ios")
TVM, TVM_TUNED = systems("tvm", "tvm_tuned")
TUNED = systems("tvm", "tvm_cuda_graph", "tvm_tuned", "tvm_tuned_cuda_graph")
BEST = system("torch_compile_best")
TUNED_COMPILERS = (TORCH_COMPILE, BEST, system("onnxruntime_cuda_graph"))
FUSED = systems("nimble_fused", "ios_fused", "opara_fused")
WEAVE = named("system", "weave")
WITHOUT_REDUCTIONS = system("nimble_fused", fuse_reductions=False)
LAUNCH_ORDERS = {
    order: OPARA if order == "opara" else system("opara", launch_order=order)
    for order in ("depth_first", "breadth_first", "reverse", "opara", "critical_path")
}
SIDE_BY_SIDE = (CUDA_GRAPH, TORCH_COMPILE, NIMBLE, OPARA, IOS, NIMBLE_FUSED)
OVER = "ios over sequential"

Part = TypeVar("Part")
Columns: TypeAlias = Sequence[Made[Siblings]]


# Columns that several tables have.

MODEL: Made[Siblings] = made("model", lambda group: group.group.model.label, number=False)
NAME: Made[Siblings] = made("model", lambda group: group.group.model.name, number=False)
BATCH: Made[Siblings] = made("batch", lambda group: str(group.group.conditions.batch))


def in_rounds(record: Record) -> float:
    """Median milliseconds of a call, of all rounds."""
    return needed(record.comparison).median_ms


def needed(part: Part | None) -> Part:
    """A part that an entry shows. Raises Lacking where it is not there."""
    if part is None:
        raise Lacking
    return part


def search_of(record: Record) -> Search:
    """Of a record's schedule. Raises Lacking where it has none."""
    return needed(record.schedule).search


def milliseconds(of: Choice, heading: str = "") -> Made[Siblings]:
    """A system's median call in its rounds, or why it has none."""

    def entry(group: Siblings) -> str:
        record = group.get(of)
        if record is None:
            return DASH
        return f"{in_rounds(record):.3f}" if record.is_ok else record.status

    return made(heading or of.label, entry)


def times(ratio: Speedup | None, star: str = "") -> str:
    """ "1.25x [1.20, 1.31]"; with `star` behind it where the two were not measured in turn."""
    if ratio is None:
        return DASH
    return f"{ratio.ratio:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]{'' if ratio.is_in_turn else star}"


def ratio(better: Choice, worse: Choice, heading: str = "", star: str = "") -> Made[Siblings]:
    return made(heading or f"{better} over {worse}", lambda group: times(group.over(better, worse), star))


def fastest(heading: str, schedules: Iterable[Choice], compilers: Iterable[Choice]) -> Made[Siblings]:
    """The fastest of some systems over the fastest of others, and which two these are."""

    def entry(group: Siblings) -> str:
        schedule, compiled = needed(group.fastest(schedules)), needed(group.fastest(compilers))
        which = f"{schedule} over {compiled}"
        if any(map(differs_in_rounds, (group[schedule], group[compiled]))):
            which += f", {needed(group[compiled].host_ms) / needed(group[schedule].host_ms):.2f}x alone"
        return f"{times(group.over(schedule, compiled))} ({which})"

    return made(heading, entry)


def differs_in_rounds(record: Record) -> bool:
    """Does it warn that its rounds took another time than its calls alone?"""
    return any(warning.kind == "differs_in_rounds" for warning in record.warnings)


def of_record(heading: str, of: Choice, text: Callable[[Record], str | None]) -> Made[Siblings]:
    """What a system's record says; a dash where it has no record, or where that says nothing."""

    def entry(group: Siblings) -> str:
        record = group.get(of)
        return DASH if record is None else text(record) or DASH

    return made(heading, entry)


# A second process of one system over the first, in the same rounds.
MARGIN: Made[Siblings] = made("two processes of one system", lambda group: times(margin(list(group.records.values()))))


# The tables, in the order of the pages.


def sweeps(records_by_sweep: Mapping[str, Sequence[Record]]) -> Table:
    """What each sweep holds, and which code measured it: a row a sweep, by name."""

    def values(of: Callable[[Record], str | None]) -> Callable[[tuple[str, Sequence[Record]]], str]:
        return lambda row: ", ".join(sorted({text for record in row[1] if (text := of(record))})) or DASH

    columns: Sequence[Made[tuple[str, Sequence[Record]]]] = [
        made("sweep", lambda row: row[0], number=False),
        made("records", lambda row: str(len(row[1]))),
        made("networks", lambda row: str(len({record.cell.model.label for record in row[1]}))),
        made("measured on", values(lambda record: record.when[:10]), number=False),
        made("commits", values(lambda record: (code_state(record.environment)[0] or "")[:7]), number=False),
        made("modified", lambda row: str(sum(code_state(record.environment)[1] is not False for record in row[1]))),
    ]
    return table(columns, sorted(records_by_sweep.items()))


def overview(groups: Iterable[Siblings]) -> Table:
    """Latency by system, what Nimble gains, and its memory."""

    def latency(record: Record) -> str:
        return f"{record.host_ms:.2f}" if record.is_ok else record.status

    def mebibytes(of: Callable[[Record], float]) -> Callable[[Record], str | None]:
        return lambda record: f"{of(record) / 2**20:.0f}" if record.is_ok and record.memory is not None else None

    peak, everything = (
        mebibytes(lambda r: needed(r.memory).peak_bytes),
        mebibytes(lambda r: needed(needed(r.memory).system.get("keep_all"))),
    )
    columns: Columns = [
        *(NAME, BATCH, *(of_record(s.label, s, latency) for s in SYSTEMS)),
        ratio(NIMBLE, CUDA_GRAPH, "Nimble over CUDA Graph", star=" *"),
        made("critical path", lambda group: f"{needed(needed(group.any.limits).critical_path_ms):.2f}"),
        of_record("MiB: CUDA Graph", CUDA_GRAPH, peak),
        of_record("Nimble", NIMBLE, peak),
        of_record("nothing reused", NIMBLE, everything),
    ]
    return table(columns, groups)


def turns(groups: Iterable[Siblings]) -> Table:
    """Ratios between systems that launch a graph."""
    return table([NAME, BATCH, *(ratio(better, worse) for better, worse in GRAPHS)], groups)


def compilers(groups: Iterable[Siblings]) -> Table:
    """Compilers and schedulers in their rounds, and seconds until a system was ready."""
    columns: Columns = [
        *(MODEL, BATCH, *(milliseconds(s) for s in (EAGER, *COMPILERS, *SCHEDULERS))),
        fastest("fastest schedule over fastest compiler", SCHEDULES, COMPILERS),
        *(of_record(f"seconds to prepare {s}", s, lambda record: f"{needed(record.preparation_s):.0f}") for s in PREPARED),
    ]
    return table(columns, groups)


def reductions(groups: Iterable[Siblings]) -> Table:
    """The rewritten model without fused reductions and with them."""
    both = {"without": WITHOUT_REDUCTIONS, "with": NIMBLE_FUSED}

    def kernels(record: Record) -> str:
        return f"{needed(needed(record.kernels).count):.0f}"

    columns: Columns = [
        *(MODEL, *(milliseconds(s, f"milliseconds {how}") for how, s in both.items())),
        *(of_record(f"kernels {how}", s, kernels) for how, s in both.items()),
        ratio(NIMBLE_FUSED, WITHOUT_REDUCTIONS, "with over without"),
    ]
    return table(columns, groups)


def tuned(groups: Iterable[Siblings]) -> Table:
    """TVM before and after its tuning, and what tuning took."""

    def over_fastest(group: Siblings) -> str:
        return times(group.over(NIMBLE, needed(group.fastest(TUNED))))

    def error(of: Choice) -> Made[Siblings]:
        heading = f"{of}'s relative error against eager"
        return of_record(heading, of, lambda record: f"{needed(record.correctness).relative_error:.1e}")

    columns: Columns = [
        *(MODEL, *(milliseconds(s) for s in (*TUNED, CUDA_GRAPH, NIMBLE))),
        of_record("trials", TVM_TUNED, lambda record: str(needed(record.compilation).trials)),
        of_record("seconds of tuning", TVM_TUNED, lambda record: f"{needed(needed(record.compilation).tuning_s):.0f}"),
        of_record(
            "functions tuned",
            TVM_TUNED,
            lambda record: f"{needed(record.compilation).tuned} of {needed(record.compilation).functions}",
        ),
        made("nimble over the fastest tvm", over_fastest),
        *map(error, (TVM, TVM_TUNED)),
    ]
    return table(columns, [group for group in groups if TVM_TUNED in group])


def algorithms(sweeps: Iterable[Iterable[Siblings]]) -> Table:
    """The CUDA Graph by how cuDNN chose its algorithms, a latency of each sweep and so of a process of its own."""
    by_model: dict[str, dict[str, list[float]]] = {}
    for group in (group for sweep in sweeps for group in sweep):
        if (record := group.get(CUDA_GRAPH)) is None or record.latency is None:
            continue
        how = by_model.setdefault(group.group.model.label, {}).setdefault(group.group.conditions.algorithms, [])
        how.append(median(record.latency.host_ms))

    def of(how: str) -> Made[tuple[str, dict[str, list[float]]]]:
        return made(how, lambda pair: ", ".join(f"{ms:.3f}" for ms in needed(pair[1].get(how))))

    columns = [
        made("model", lambda pair: pair[0], number=False),
        *(of("timed"), of("heuristic")),
        made(
            "mean of timed over mean of heuristic",
            lambda pair: f"{mean(needed(pair[1].get('timed'))) / mean(needed(pair[1].get('heuristic'))):.2f}x",
        ),
    ]
    return table(columns, sorted(by_model.items()))


def training(groups: Iterable[Siblings]) -> Table:
    """Samples a second of the steps in their rounds."""

    def throughput(of: Choice) -> Made[Siblings]:
        return made(of.label, lambda group: f"{group.group.conditions.batch / in_rounds(needed(group.get(of))) * 1e3:,.0f}")

    def kernels(heading: str, of: Choice) -> Made[Siblings]:
        return of_record(heading, of, lambda record: f"{needed(needed(record.kernels).covered_ms):.2f}")

    columns: Columns = [
        *(NAME, BATCH, *map(throughput, TRAINERS)),
        *(ratio(NIMBLE, EAGER), ratio(NIMBLE, TORCH_COMPILE)),
        kernels("kernels, ms: eager", EAGER),
        kernels("torch_compile", TORCH_COMPILE),
        kernels("nimble", NIMBLE),
    ]
    return table(columns, sorted(groups, key=lambda g: (g.group.model.name, g.group.conditions.batch)))


def side_by_side(groups: Iterable[Siblings]) -> Table:
    """The schedulers in their rounds, and what IOS's search took."""
    columns: Columns = [
        *(NAME, *map(milliseconds, SIDE_BY_SIDE)),
        of_record("IOS's search: stages measured", IOS, lambda record: f"{needed(search_of(record).measured):,}"),
        of_record("seconds", IOS, lambda record: f"{needed(search_of(record).seconds):.1f}"),
    ]
    return table(columns, groups)


def stages(groups: Iterable[Siblings], unhindered: Iterable[Siblings]) -> Table:
    """IOS over the sequential schedule, captured and not, what its searches took, and what barriers cost.

    Args:
        groups: with IOS's strategies.
        unhindered: with IOS without its barriers.
    """
    free = {group.group.model.label: group.over(system("ios", barriers=False), IOS) for group in unhindered}
    strategies = [system(name) for name in ("ios_merge", "ios_parallel", "ios")]

    def both(before: str, **changes: Value) -> list[Made[Siblings]]:
        sequential, ios = system("sequential", **changes), system("ios", **changes)
        return [milliseconds(sequential, f"{before}sequential"), milliseconds(ios, "ios"), ratio(ios, sequential, OVER)]

    def searched(heading: str, number: Callable[[Record], float | None]) -> Made[Siblings]:
        return made(heading, lambda group: f"{sum(number(needed(group.get(s))) or 0 for s in strategies):,.0f}")

    columns: Columns = [
        *(MODEL, *both("")),
        searched("stages measured", lambda record: search_of(record).measured),
        searched("seconds of search", lambda record: search_of(record).seconds),
        *both("uncaptured: ", capture=False),
        made("without barriers over with them", lambda group: times(free[group.group.model.label])),
    ]
    shown = [group for group in groups if group.group.model.label in free and group.group.conditions.batch == 1]
    return table(columns, shown)


def launch_orders(groups: Iterable[Siblings]) -> Table:
    """Opara's streams in each launch order, in their rounds, and Opara in other rounds.

    Args:
        groups: of groups of the same cells the first makes the row.
    """
    first = LAUNCH_ORDERS["depth_first"]
    same: dict[tuple[Choice, Conditions], list[Siblings]] = {}
    for group in groups:
        if OPARA in group and group[OPARA].comparison is not None:
            same.setdefault((group.group.model, group.group.conditions), []).append(group)

    def elsewhere(group: Siblings) -> str:
        _, *others = same[group.group.model, group.group.conditions]
        times = (f"{in_rounds(other[OPARA]):.3f}" for other in others)
        return ", ".join(sorted(times)) or DASH

    columns: Columns = [
        *(MODEL, BATCH, made("algorithms", lambda group: group.group.conditions.algorithms)),
        of_record("mean achieved occupancy", OPARA, lambda record: f"{needed(search_of(record).occupancy):.0%}"),
        *(milliseconds(s, order) for order, s in LAUNCH_ORDERS.items()),
        made("opara in other rounds", elsewhere),
        *(ratio(LAUNCH_ORDERS[o], first, f"{o} over depth_first") for o in ("opara", "critical_path")),
    ]
    return table(columns, [group for group, *_ in same.values() if first in group])


# Sentences beneath tables.


def measured_alone(groups: Iterable[Siblings], among: Iterable[Choice]) -> str:
    """How far the latencies of cells are from their rounds."""
    records = [record for group in groups for s in set(among) if (record := group.get(s)) is not None]
    shares = [
        median(r.latency.host_ms) / in_rounds(r) for r in records if r.comparison is not None and r.latency is not None
    ]
    middle = f"a cell alone takes {median(shares):.1%} of its time in the rounds in the middle"
    return f"Of these {len(shares)} cells, {middle}, and {max(shares):.0%} at most."


def equal_to_eager(groups: Iterable[Siblings]) -> str:
    """How many cells of systems that run the model's own operators give eager's outputs bit for bit, and which do not."""
    parts = {
        f"{group.group.model.name} under {s}": record.correctness
        for group in groups
        for s in SIDE_BY_SIDE
        if s not in (TORCH_COMPILE, NIMBLE_FUSED) and (record := group.get(s)) is not None and record.correctness is not None
    }
    # Where a record does not say so, its error is against eager itself.
    others = [
        f"{cell} ({part.relative_error:.1e})"
        for cell, part in parts.items()
        if not (part.relative_error == 0 if part.equals_eager is None else part.equals_eager)
    ]
    equal = f"{len(parts) - len(others)} of the {len(parts)} cells that run the model's own operators do"
    return f"Outputs equal eager's bit for bit: {equal}" + (f"; not {', '.join(others)}." if others else ".")
