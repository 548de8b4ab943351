"""Proof, before anything runs, that a schedule computes what the model does."""

from collections.abc import Sequence
from dataclasses import dataclass

from conf.text import counted
from systems.scheduling.graph.operator_graph import OperatorGraph

from .priorities import MOST
from .schedule import Schedule


class InvalidSchedule(ValueError):
    """The schedule may give a wrong answer; the message names the two operators."""


@dataclass(frozen=True)
class Buffer:
    """A range of memory, and the operators that touch it.

    Args:
        start: In bytes from the arena's beginning.
        size: In bytes.
        writer: The operator that fills it.
        touched: Bit mask of the operators that read or write it, the writer among them.
        outlives_run: It holds an output of the model.
    """

    start: int
    size: int
    writer: int
    touched: int
    outlives_run: bool = False


def verify(graph: OperatorGraph, schedule: Schedule, buffers: Sequence[Buffer] = ()) -> None:
    """Prove that every dependency of `graph` is ordered by a stream or a wait, and that no buffer is reused too early.

    What operators change in place is proved from `graph.state`, whichever dependencies the graph has: each writer comes
    after all that touch the state before it in the order of capture, and before all that touch it later.

    Stages hold every operator once, in the launch order; no operator is in two merges, or launched early twice; each has a
    priority, or none has.

    Raises:
        InvalidSchedule: The message names the two operators of the first violation.
    """
    if schedule.graph != graph:
        raise InvalidSchedule(f"the schedule is of another graph: {_first_difference(graph, schedule.graph)}")
    n = len(graph)
    if len(schedule.streams) != n:
        raise InvalidSchedule(f"{n} operators, but streams for {len(schedule.streams)}")
    if sorted(schedule.order) != list(range(n)):
        missing = sorted(set(range(n)) - set(schedule.order))
        what = f"operator {graph.label(missing[0])} is never launched" if missing else "an operator is launched twice"
        raise InvalidSchedule(what)
    if sorted(set(schedule.streams)) != list(range(schedule.stream_count)):
        raise InvalidSchedule(f"the streams are not numbered 0..{schedule.stream_count - 1}")
    position = {v: i for i, v in enumerate(schedule.order)}
    for u, v in schedule.waits:
        if not (0 <= u < n and 0 <= v < n):
            raise InvalidSchedule(f"a wait between {u} and {v}, of operators 0..{n - 1}")
        if position[u] >= position[v]:
            raise InvalidSchedule(f"operator {graph.label(v)} waits for {graph.label(u)}, which is launched after it")
    if schedule.stages and tuple(v for stage in schedule.stages for group in stage for v in group) != schedule.order:
        raise InvalidSchedule("the stages do not hold every operator once, in the launch order")
    merged = [v for operators in schedule.merges or () for v in operators]
    if outside := set(merged) - set(range(n)):
        raise InvalidSchedule(f"a merge of {min(outside)}, of operators 0..{n - 1}")
    if twice := [v for v in merged if merged.count(v) > 1]:
        raise InvalidSchedule(f"operator {graph.label(twice[0])} is merged twice")
    if outside := set(schedule.early) - set(range(n)):
        raise InvalidSchedule(f"an early launch of {min(outside)}, of operators 0..{n - 1}")
    if len(set(schedule.early)) < len(schedule.early):
        raise InvalidSchedule("an operator is launched early twice")
    if schedule.priorities and len(schedule.priorities) != n:
        raise InvalidSchedule(f"{n} operators, but priorities for {len(schedule.priorities)}")
    if (most := max(schedule.priorities, default=0)) > MOST:
        raise InvalidSchedule(f"a priority of {most}, and the highest is {MOST}")
    before = schedule.happens_before()
    _verify_state(graph, before)
    for u, v in graph.edges:
        if not before[v] >> u & 1:
            raise InvalidSchedule(
                f"operator {graph.label(v)} on stream {schedule.streams[v]} reads the output of {graph.label(u)} on "
                f"stream {schedule.streams[u]}, and neither a stream nor a wait orders them"
            )
    _verify_buffers(graph, before, buffers)


def _verify_state(graph: OperatorGraph, before: list[int]) -> None:
    for piece in graph.state:
        touched = writers = 0  # so far, in the order of capture
        for v, writes in piece.accesses():
            if late := (touched if writes else writers) & ~before[v]:
                u = late.bit_length() - 1
                verb, other = ("writes" if yes else "reads" for yes in (writes, writers >> u & 1))
                raise InvalidSchedule(
                    f"operator {graph.label(v)} {verb} {piece.name} after {graph.label(u)}, which {other} it, and neither a "
                    "stream nor a wait orders them"
                )
            touched |= 1 << v
            writers |= writes << v


def _verify_buffers(graph: OperatorGraph, before: list[int], buffers: Sequence[Buffer]) -> None:
    """Two buffers that share bytes: all that touch the one are finished before the other is written."""
    live: list[Buffer] = []
    for b in sorted(buffers, key=lambda b: b.start):
        live = [a for a in live if a.start + a.size > b.start]
        for a in live:
            if not (_finished(a, before[b.writer]) or _finished(b, before[a.writer])):
                first, second = (a, b) if a.writer < b.writer else (b, a)
                late = first.touched & ~before[second.writer] or 1 << first.writer
                reader = late.bit_length() - 1
                raise InvalidSchedule(
                    f"operator {graph.label(second.writer)} writes into the output of {graph.label(first.writer)} while "
                    f"{graph.label(reader)} may still touch it"
                )
        live.append(b)


def _finished(buffer: Buffer, before: int) -> bool:
    return not buffer.outlives_run and not buffer.touched & ~before


def _first_difference(graph: OperatorGraph, other: OperatorGraph) -> str:
    if len(graph) != len(other):
        return f"it has {counted(len(other), 'operator')}, this model {len(graph)}"
    for v, (a, b) in enumerate(zip(graph.operators, other.operators, strict=True)):
        if a != b:
            return f"its operator {v} is {b.target}, this model's is {a.target}"
    for v, (p, q) in enumerate(zip(graph.predecessors, other.predecessors, strict=True)):
        if p != q:
            return f"its operator {other.label(v)} reads {list(q)}, this model's reads {list(p)}"
    raise AssertionError("the graphs are equal")
