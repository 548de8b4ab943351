"""Valid schedules of one program with different edges, drawn by a seed, from the most concurrent to the most sequential."""

from collections.abc import Sequence
from itertools import pairwise
from random import Random

from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.graph.patterns import CONVOLUTION
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.merge import mergeable
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.stream_allocator import waits_between
from systems.scheduling.plans.stream_assignment import assign_streams

MOST_STREAMS = 16  # that are drawn at random
MOST_BARRIERS = 6


def random_schedules(graph: OperatorGraph, count: int, seed: int) -> list[Schedule]:
    """`count` valid schedules; a larger share of the operators is ordered at random from one to the next.

    Args:
        graph: Of the operators.
        seed: The same schedules for the same seed.
    """
    random = Random(seed)
    return [random_schedule(graph, random, i / max(1, count - 1)) for i in range(count)]


def random_schedule(graph: OperatorGraph, random: Random, ordered_share: float) -> Schedule:
    """One valid schedule, in a random topological launch order.

    Invariant: every wait points forward in that order, and those of `waits_between` order every dependency; what is added
    only takes concurrency away.

    1. Streams are Nimble's, or drawn for each operator from a few.
    2. A share of the operators, drawn at random, runs one after the other.
    3. In one of three schedules, barriers part the launch order: what stands behind one waits for all before it.

    Args:
        ordered_share: Of the operators that step 2 orders, 0 to 1.
    """
    order = _topological(graph, random)
    if random.random() < 0.5:
        streams: Sequence[int] = assign_streams(graph).streams
    else:
        num_streams = random.randint(2, MOST_STREAMS)
        streams = [random.randrange(num_streams) for _ in order]
    streams = _without_gaps(streams)
    chain = set(random.sample(order, round(ordered_share * len(order))))
    waits = dict.fromkeys(waits_between(graph, order, streams))
    waits |= dict.fromkeys(pairwise(v for v in order if v in chain))
    if random.random() < 1 / 3 and len(order) > 1:
        num_barriers = random.randint(1, min(MOST_BARRIERS, len(order) - 1))
        waits |= dict.fromkeys(_barriers(order, streams, random.sample(range(1, len(order)), num_barriers)))
    between = tuple((u, v) for u, v in waits if streams[u] != streams[v])
    return Schedule(graph, "random", tuple(order), tuple(streams), between)


def random_merges(program: Program, random: Random) -> tuple[tuple[int, ...], ...]:
    """Some of the groups of convolutions that can run as one: each convolution is in or out by the toss of a coin."""
    by_input: dict[object, list[int]] = {}
    for v, call in enumerate(program.calls):
        if call.function is CONVOLUTION:
            by_input.setdefault(call.args[0], []).append(v)
    groups = (tuple(v for v in group if random.random() < 0.5) for group in by_input.values())
    return tuple(group for group in groups if mergeable(program, [(v,) for v in group]))


def _topological(graph: OperatorGraph, random: Random) -> list[int]:
    missing = [len(p) for p in graph.predecessors]
    ready = [v for v, m in enumerate(missing) if not m]
    order = []
    while ready:
        place = random.randrange(len(ready))
        ready[place], ready[-1] = ready[-1], ready[place]
        order.append(v := ready.pop())
        for s in graph.successors[v]:
            missing[s] -= 1
            if not missing[s]:
                ready.append(s)
    return order


def _barriers(order: Sequence[int], streams: Sequence[int], places: Sequence[int]) -> list[tuple[int, int]]:
    """Waits of each stream's first operator behind a barrier for each stream's last one before it."""
    waits = []
    for place in places:
        last = {streams[v]: v for v in order[:place]}
        first = {streams[v]: v for v in reversed(order[place:])}
        waits += [(u, v) for u in last.values() for v in first.values()]
    return waits


def _without_gaps(streams: Sequence[int]) -> list[int]:
    number = {s: i for i, s in enumerate(dict.fromkeys(streams))}
    return [number[s] for s in streams]
