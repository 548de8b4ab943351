"""Stages, as the schedulers of IOS's paper make them, and the schedule that executes them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.graph.program import Program
from systems.scheduling.graph.rewrite import Replacement
from systems.scheduling.graph.rewrite import replace as rewrite
from systems.scheduling.plans.schedule import Schedule

from .merge import merge
from .units import CONVOLUTIONS


@dataclass(frozen=True)
class Stage:
    """groups: of operators; the groups run at once, the operators of a group one after the other. merged: they run as one
    operator instead, and there is one group (IOS, Section 3).
    """

    groups: tuple[tuple[int, ...], ...]
    merged: bool = False


def greedy(predecessors: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Every unit in the earliest stage it can be in (IOS, Section 6.1): the units of each stage, a group each."""
    depth: list[int] = []
    for producers in predecessors:
        depth.append(1 + max((depth[u] for u in producers), default=-1))
    return [tuple(v for v, d in enumerate(depth) if d == level) for level in range(max(depth, default=-1) + 1)]


def to_schedule(graph: OperatorGraph, stages: Sequence[Stage], search: dict[str, Any], barriers: bool = True) -> Schedule:
    """A stream for each group of a stage, and before each stage a barrier: its groups wait for all groups of the last.

    What shares a stream needs no wait, and a group that begins after a wait for one operator waits for all before it.
    barriers: False has every operator wait for what it depends on alone, which is not in the paper; the stages still say
    what is launched when. `stages` and `merges` of the schedule number operators as captured; `lower` executes the merges.
    """
    order = tuple(v for stage in stages for group in stage.groups for v in group)
    streams, waits = _between_barriers(graph, stages) if barriers else _by_dependencies(graph, stages)
    merges = tuple(stage.groups[0] for stage in stages if stage.merged)
    grouped = tuple(stage.groups for stage in stages)
    return Schedule(graph, "ios", order, tuple(streams), tuple(waits), grouped, merges, search)


def _between_barriers(graph: OperatorGraph, stages: Sequence[Stage]) -> tuple[list[int], list[tuple[int, int]]]:
    """The stream of each operator, and the waits."""
    streams = [0] * len(graph)
    waits: list[tuple[int, int]] = []
    before: Sequence[tuple[int, ...]] = ()
    for stage in stages:
        for s, group in enumerate(stage.groups):
            for v in group:
                streams[v] = s
            waits += [(other[-1], group[0]) for t, other in enumerate(before) if t != s]
        before = stage.groups
    return streams, waits


def _by_dependencies(graph: OperatorGraph, stages: Sequence[Stage]) -> tuple[list[int], list[tuple[int, int]]]:
    """The stream of each operator, and the waits, where no stage waits for another.

    A group follows on a stream whose last operator its first one depends on, directly if there is such a stream, and else
    begins one: no stream orders two groups that are independent. An operator waits for those that it depends on and that
    neither its stream nor another of its waits has it come after.
    """
    streams = [0] * len(graph)
    waits: list[tuple[int, int]] = []
    before = [0] * len(graph)  # the operators that are finished before this one starts, as a bit mask
    place = {v: i for i, v in enumerate(v for stage in stages for group in stage.groups for v in group)}
    last: list[int] = []  # of each stream, the operator launched last on it
    for stage in stages:
        free = set(range(len(last)))
        for group in stage.groups:
            first = group[0]
            behind = [s for s in free if graph.ancestors[first] >> last[s] & 1]
            if behind:
                stream = max(behind, key=lambda s: (last[s] in graph.predecessors[first], place[last[s]], s))
                free.remove(stream)
            else:
                stream = len(last)
                last.append(-1)
            for v in group:
                reached = before[last[stream]] | 1 << last[stream] if last[stream] >= 0 else 0
                for u in sorted(graph.predecessors[v], key=place.__getitem__, reverse=True):
                    if not reached >> u & 1:
                        waits.append((u, v))
                        reached |= before[u] | 1 << u
                streams[v], before[v], last[stream] = stream, reached, v
    return streams, waits


def lower(program: Program, schedule: Schedule) -> tuple[Program, Schedule]:
    """The program and the schedule with every merge carried out: what an executor runs.

    Raises ValueError where the operators of a merge cannot be merged in this program.
    """
    replacements = [_merged(program, group) for group in schedule.merges or ()]
    if not replacements:
        return program, schedule
    lowered, place = rewrite(program, replacements)
    order = tuple(dict.fromkeys(place[v] for v in schedule.order))
    streams = {place[v]: s for v, s in enumerate(schedule.streams)}
    waits = dict.fromkeys((place[u], place[v]) for u, v in schedule.waits if place[u] != place[v])
    stages = tuple(
        tuple(tuple(dict.fromkeys(place[v] for v in group)) for group in stage) for stage in schedule.stages or ()
    )
    return lowered, replace(
        schedule,
        graph=lowered.graph,
        order=order,
        streams=tuple(streams[v] for v in range(len(lowered.graph))),
        waits=tuple(waits),
        stages=stages,
        merges=(),
    )


def _merged(program: Program, operators: Sequence[int]) -> Replacement:
    units: dict[int, list[int]] = {}
    of: dict[int, int] = {}
    for v in operators:
        if program.calls[v].function in CONVOLUTIONS:
            of[v] = v
        else:
            inside = [of[u] for u in program.graph.predecessors[v] if u in of]
            if not inside:
                raise ValueError(f"operator {program.graph.label(v)} is merged, and follows no merged convolution")
            of[v] = inside[0]
        units.setdefault(of[v], []).append(v)
    replacement = merge(program, list(units.values()))
    if replacement is None:
        raise ValueError(f"operators {', '.join(program.graph.label(v) for v in operators)} cannot be merged")
    return replacement
