"""Carries out the merges and the early launches of a schedule: what an executor runs."""

from collections.abc import Sequence
from dataclasses import replace

from systems.scheduling.graph.patterns import CONVOLUTIONS
from systems.scheduling.graph.program import Program
from systems.scheduling.graph.rewrite import Replacement
from systems.scheduling.graph.rewrite import replace as rewrite

from .launch_early import launch_early
from .merge import merge
from .schedule import Schedule


def lower(program: Program, schedule: Schedule) -> tuple[Program, Schedule]:
    """The program and the schedule with the operators of every merge as one operator, and kernels that are launched early.

    Invariant: the lowered schedule keeps the launch order, the streams and the waits of what it merges, and the highest of
    its priorities; a wait within a merge falls away.

    Raises:
        ValueError: the operators of a merge cannot be merged in this program, or an operator cannot be launched early.
    """
    replacements = [_merged(program, operators) for operators in schedule.merges or ()]
    if not replacements:
        return launch_early(program, schedule.early), schedule
    lowered, place = rewrite(program, replacements)
    order = tuple(dict.fromkeys(place[v] for v in schedule.order))
    streams = {place[v]: s for v, s in enumerate(schedule.streams)}
    waits = dict.fromkeys((place[u], place[v]) for u, v in schedule.waits if place[u] != place[v])
    stages = tuple(
        tuple(tuple(dict.fromkeys(place[v] for v in group)) for group in stage) for stage in schedule.stages or ()
    )
    early = tuple(dict.fromkeys(place[v] for v in schedule.early))
    priorities: dict[int, int] = {}
    for v, priority in enumerate(schedule.priorities):
        priorities[place[v]] = max(priority, priorities.get(place[v], 0))
    return launch_early(lowered, early), replace(
        schedule,
        graph=lowered.graph,
        order=order,
        streams=tuple(streams[v] for v in range(len(lowered.graph))),
        waits=tuple(waits),
        stages=stages,
        merges=(),
        early=early,
        priorities=tuple(priority for _, priority in sorted(priorities.items())),
    )


def _merged(program: Program, operators: Sequence[int]) -> Replacement:
    """One operator for those of a merge: each convolution with the operators that follow it is a unit of the merge."""
    units: dict[int, list[int]] = {}
    convolution_of: dict[int, int] = {}
    for v in operators:
        if program.calls[v].function in CONVOLUTIONS:
            convolution_of[v] = v
        else:
            followed = [convolution_of[u] for u in program.graph.predecessors[v] if u in convolution_of]
            if not followed:
                raise ValueError(f"operator {program.graph.label(v)} is merged, and follows no merged convolution")
            convolution_of[v] = followed[0]
        units.setdefault(convolution_of[v], []).append(v)
    replacement = merge(program, list(units.values()))
    if replacement is None:
        raise ValueError(f"operators {', '.join(program.graph.label(v) for v in operators)} cannot be merged")
    return replacement
