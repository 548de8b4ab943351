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
DRAWS = 6  # for each schedule that is chosen


def random_schedules(graph: OperatorGraph, count: int, seed: int) -> list[Schedule]:
    """`count` valid schedules: their longest chains of operators lie evenly, up to that of all operators.

    How long a schedule takes goes with its longest chain, so latencies lie evenly too. No profile and no simulation has a
    part in the choice, which would favour the simulator.

    Args:
        graph: Of the operators.
        seed: The same schedules for the same seed.
    """
    random, num_draws = Random(seed), DRAWS * count
    nimbles = assign_streams(graph).streams if count else ()
    drawn = [random_schedule(graph, random, i / max(1, num_draws - 1), nimbles) for i in range(num_draws)]
    drawn.sort(key=longest_chain)
    return [drawn[i] for i in _evenly([longest_chain(schedule) for schedule in drawn], count)]


def longest_chain(schedule: Schedule) -> int:
    """Operators of the longest chain that a schedule orders one after the other."""
    chain = [0] * len(schedule.graph)
    last = dict.fromkeys(schedule.streams, 0)
    waits: dict[int, list[int]] = {}
    for u, v in schedule.waits:
        waits.setdefault(v, []).append(u)
    for v in schedule.order:
        before = max((chain[u] for u in waits.get(v, ())), default=0)
        chain[v] = last[schedule.streams[v]] = 1 + max(before, last[schedule.streams[v]])
    return max(chain, default=0)


def random_schedule(
    graph: OperatorGraph, random: Random, ordered_share: float, nimbles: Sequence[int] | None = None
) -> Schedule:
    """One valid schedule, in a random topological launch order.

    Invariant: every wait points forward in that order, and those of `waits_between` order every dependency; what is added
    only takes concurrency away.

    1. Streams are Nimble's, or drawn for each operator from a few.
    2. A share of the operators, drawn at random, runs one after the other.
    3. In one of three schedules, barriers part the launch order: what stands behind one waits for all before it.

    Args:
        ordered_share: Of the operators that step 2 orders, 0 to 1.
        nimbles: Nimble's streams, where they are known already.
    """
    order = _topological(graph, random)
    if random.random() < 0.5:
        streams: Sequence[int] = assign_streams(graph).streams if nimbles is None else nimbles
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


def _evenly(values: Sequence[int], count: int) -> list[int]:
    """Places of `count` of the ascending values, as near as there are to equal steps from the least to the largest.

    Invariant: places ascend, and as many values are left as are still to be chosen.
    """
    places: list[int] = []
    for i in range(count):
        wanted = values[0] + (values[-1] - values[0]) * (i / max(1, count - 1))
        first = places[-1] + 1 if places else 0
        free = range(first, len(values) - (count - i) + 1)
        places.append(min(free, key=lambda place: abs(values[place] - wanted)))
    return places


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
