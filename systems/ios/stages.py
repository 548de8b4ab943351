"""Stages, as the schedulers of IOS's paper make them, and the schedule that executes them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from systems.scheduling.operator_graph import OperatorGraph
from systems.scheduling.program import Program
from systems.scheduling.rewrite import Replacement
from systems.scheduling.rewrite import replace as rewrite
from systems.scheduling.schedule import Schedule

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


def to_schedule(graph: OperatorGraph, stages: Sequence[Stage], search: dict[str, Any]) -> Schedule:
    """A stream for each group of a stage, and before each stage a barrier: its groups wait for all groups of the last.

    What shares a stream needs no wait, and a group that begins after a wait for one operator waits for all before it.
    `stages` and `merges` of the schedule number operators as captured; `lower` executes the merges.
    """
    order: list[int] = []
    streams = [0] * len(graph)
    waits: list[tuple[int, int]] = []
    before: Sequence[tuple[int, ...]] = ()
    for stage in stages:
        for s, group in enumerate(stage.groups):
            for v in group:
                streams[v] = s
            waits += [(other[-1], group[0]) for t, other in enumerate(before) if t != s]
            order += group
        before = stage.groups
    merges = tuple(stage.groups[0] for stage in stages if stage.merged)
    grouped = tuple(stage.groups for stage in stages)
    return Schedule(graph, "ios", tuple(order), tuple(streams), tuple(waits), grouped, merges, search)


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
