"""Opara's stream allocator: as many streams as let independent operators run at once, in one pass."""

from collections.abc import Sequence

from systems.scheduling.graph.operator_graph import OperatorGraph


def allocate_streams(graph: OperatorGraph) -> tuple[int, ...]:
    """The stream of each operator, numbered from 0 as they are launched (Opara, Section 3.1, Algorithm 1).

    In the order of capture, an operator goes into the stream of the first of its predecessors, in argument order, whose
    first successor it is, and into a new stream where there is none. The first successor of an operator is the one that
    this order comes to first, so an operator is followed by at most one other and a stream is a chain of dependent
    operators. One look at each dependency: O(|V| + |E|), which is O(n) where operators have a bounded number of arguments.
    """
    successors = graph.successors
    streams: list[int] = []
    count = 0
    for v, predecessors in enumerate(graph.predecessors):
        for p in predecessors:
            if successors[p][0] == v:
                streams.append(streams[p])
                break
        else:
            streams.append(count)
            count += 1
    return tuple(streams)


def needed_waits(graph: OperatorGraph, streams: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The waits, as (producer, consumer), that order every dependency between two of `allocate_streams`' streams.

    The paper asks for "the necessary synchronization operators" (Section 3.4) and leaves open which these are. Here they
    are the edges of the minimum equivalent graph that no stream orders. Where v is the first successor of p, no other path
    leads from p to v, so whatever a stream orders is an edge of that graph too; hence no wait can be left out, and the
    schedule orders two operators exactly when one depends on the other, whatever the launch order.
    """
    return tuple((u, v) for u, v in graph.minimum_equivalent.edges if streams[u] != streams[v])


def waits_between(graph: OperatorGraph, order: Sequence[int], streams: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The waits that order every dependency, for any streams and any topological launch order.

    Invariant: an operator waits for a predecessor only if neither its stream nor another of its waits orders the two.
    """
    before = [0] * len(graph)  # bit mask of the operators that have ended when this one starts
    place = {v: i for i, v in enumerate(order)}
    last: dict[int, int] = {}  # of each stream, the operator launched last on it
    waits: list[tuple[int, int]] = []
    for v in order:
        previous = [last[streams[v]]] if streams[v] in last else []
        _, reached = graph.reach(previous, before)
        latest_first = sorted(graph.predecessors[v], key=place.__getitem__, reverse=True)
        needed, before[v] = graph.reach(latest_first, before, reached)
        waits += [(u, v) for u in needed]
        last[streams[v]] = v
    return tuple(waits)
