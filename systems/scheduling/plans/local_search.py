"""Local search: a schedule is changed a little again and again, and stays changed where that does not cost."""

import random
from collections.abc import Callable
from dataclasses import replace

from systems.scheduling.graph.operator_graph import OperatorGraph

from .schedule import Schedule
from .stream_allocator import waits_between

MOST_MOVES = 3  # of a change
MORE_STREAMS = 8  # that operators may move to, where a schedule has fewer


def improved(schedule: Schedule, cost: Callable[[Schedule], float], trials: int, seed: int = 0) -> Schedule:
    """Of the schedules tried, the one that costs least.

    A move gives an operator another stream, or another place in the launch order. A stream may then order operators that do
    not depend on each other: at once they would slow down a third that others wait for.

    Invariant: what it returns costs no more than what it was given. Each wait of a schedule that it made is a dependency.

    Args:
        schedule: without merges or stages, which a move would break.
        cost: of a schedule, such as simulated microseconds.
        trials: changed schedules whose cost is asked for.
        seed: of the moves; the same seed gives the same schedule.
    """
    graph, chance = schedule.graph, random.Random(seed)
    order, streams = list(schedule.order), list(schedule.streams)
    num_streams = max(MORE_STREAMS, schedule.stream_count)
    best, best_cost = schedule, cost(schedule)
    for _ in range(trials if len(graph) > 1 else 0):
        other_order, other_streams = list(order), list(streams)
        for _ in range(chance.randint(1, MOST_MOVES)):
            v = chance.randrange(len(graph))
            if chance.random() < 0.5:
                other_streams[v] = chance.randrange(num_streams)
            else:
                _move(graph, other_order, v, chance)
        other = _made(schedule, other_order, other_streams)
        if (other_cost := cost(other)) <= best_cost:
            order, streams, best, best_cost = other_order, other_streams, other, other_cost
    return best


def _move(graph: OperatorGraph, order: list[int], v: int, chance: random.Random) -> None:
    """Give an operator another place between those that it depends on and those that depend on it."""
    place = {u: i for i, u in enumerate(order)}
    first = max((place[u] for u in graph.predecessors[v]), default=-1) + 1
    last = min((place[u] for u in graph.successors[v]), default=len(order)) - 1
    del order[place[v]]
    order.insert(chance.randint(first, last), v)


def _made(like: Schedule, order: list[int], streams: list[int]) -> Schedule:
    number = {s: i for i, s in enumerate(sorted(set(streams)))}  # without gaps
    numbered = tuple(number[s] for s in streams)
    waits = waits_between(like.graph, order, numbered)
    return replace(like, order=tuple(order), streams=numbered, waits=waits)
