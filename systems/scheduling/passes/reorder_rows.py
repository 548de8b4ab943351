"""Has matrix products read rows in the order in which they are needed afterwards, where that is faster."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import networkx as nx
from torch import Tensor

from systems.scheduling.decision import Decision
from systems.scheduling.graph.part import part
from systems.scheduling.graph.patterns import COPIES, reads_tensors
from systems.scheduling.graph.program import Call, Program
from systems.scheduling.graph.rewrite import Replacement, without
from systems.scheduling.graph.rewrite import replace as replaced

from .context import Context, Rewritten
from .patterns import name_operators
from .row_places import RowPlace, row_places
from .strides import is_uncomputed, readers_of_changed, with_strides

AS_CAPTURED, REORDERED = "as captured", "reordered"


@dataclass(frozen=True)
class _Cluster:
    """Places whose operators meet.

    Args:
        captured: the old program's operators that are replaced, left out, or read other strides.
        reordered: the new program's in their stead.
    """

    places: list[RowPlace]
    captured: list[int]
    reordered: list[int]


@dataclass(frozen=True)
class _Reordered:
    """A program with some places done."""

    program: Program
    clusters: list[_Cluster]


def reorder_rows(program: Program, context: Context) -> Rewritten:
    """Let a product read its rows in the order in which others read its result, and leave out copies around it.

    Off its fast path `nn.MultiheadAttention` has the sequence first inside, and its callers the batch. So it copies tokens
    before its products, and queries, keys and values behind them. A product computes each row
    alone, in whichever order they come.

    Invariants:
        - The rows and what is read of them are the same; a row is computed as before.
        - No caller sees what is rearranged, and nothing writes to what is read without its copy.
        - Places whose operators meet are decided together. Equal ones are measured once.
    """
    done = _with(program, row_places(program))
    decisions: list[Decision] = []
    chosen: list[RowPlace] = []
    times_by_signature: dict[str, dict[str, float]] = {}
    copies = {v for v, call in enumerate(program.calls) if call.function in COPIES}
    for cluster in done.clusters:
        captured, reordered = part(program, cluster.captured), part(done.program, cluster.reordered)
        signature = "; ".join(captured.signature(i) for i in range(len(cluster.captured)))
        if signature not in times_by_signature:
            costs = {AS_CAPTURED: captured, REORDERED: reordered}
            times_by_signature[signature] = {name: context.cost(context.later(p)) for name, p in costs.items()}
        computed = [v for v in cluster.captured if v not in copies and not is_uncomputed(program.calls[v].function)]
        pattern = f"around {name_operators(program, computed)}"
        linears = tuple(place.linear for place in cluster.places)
        decision = context.decide("reorder_rows", pattern, linears, signature, times_by_signature[signature])
        decisions.append(decision)
        if decision.chosen == REORDERED:
            chosen += cluster.places
    return _with(program, chosen).program, decisions


def _with(program: Program, places: Sequence[RowPlace]) -> _Reordered:
    """The program with these places, without those whose readers cannot take the strides."""
    done = _all_with(program, places)
    if done is not None:
        return done
    fitting: list[RowPlace] = []
    done = _Reordered(program, [])
    for place in places:
        if (more := _all_with(program, [*fitting, place])) is not None:
            done = more
            fitting.append(place)
    return done


def _all_with(program: Program, places: Sequence[RowPlace]) -> _Reordered | None:
    """None where a reader cannot take the strides."""
    if not places:
        return _Reordered(program, [])
    replacements, moved = [], dict[int, Tensor]()
    for place in places:
        for u, call in place.results.items():
            # Its readers know its strides once `with_strides` has told them.
            known = replace(call, produces=program.calls[u].produces)
            replacements.append(Replacement((u,), _name(call), str(call.function), known, {u: None}))
            moved[u] = call.produces
    rewritten, new_ids = replaced(program, replacements)
    unread = _unread(rewritten, [new_ids[u] for place in places for u in (place.linear, *place.before, *place.after)])
    rewritten = without(rewritten, unread)
    remaining = (v for v in range(len(rewritten.graph) + len(unread)) if v not in unread)
    shifted = {v: i for i, v in enumerate(remaining)}
    ids = {u: shifted[new] for u, new in new_ids.items() if new in shifted}
    strided = with_strides(rewritten, {ids[u]: value for u, value in moved.items()})
    if strided is None:
        return None
    reading = readers_of_changed(rewritten, strided, [ids[u] for u in moved])
    if not all(reads_tensors(strided, v) for v in reading):  # such as one that reads `.item()`, which no part has
        return None
    unmoved = {new for u, new in ids.items() if u not in moved}
    changed = sorted({*(v for v in range(len(strided.graph)) if v not in unmoved), *reading})
    return _Reordered(strided, _clusters(strided, places, changed, ids))


def _name(call: Call) -> str:
    return str(call.function._schema.name.split("::")[1])  # type: ignore[attr-defined]


def _unread(program: Program, candidates: Sequence[int]) -> set[int]:
    """Those of the candidates that nothing reads but others of them."""
    unread, kept = set[int](), program.kept_operators()
    for v in sorted(set(candidates), reverse=True):
        if v not in kept and set(program.graph.successors[v]) <= unread:
            unread.add(v)
    return unread


def _clusters(after: Program, places: Sequence[RowPlace], changed: Sequence[int], ids: dict[int, int]) -> list[_Cluster]:
    """The places by which changed operators read each other.

    Args:
        after: the new program.
        places: all that are done in it.
        changed: its operators that are new, or read other strides.
        ids: in it, by those in the old program of all that remain.
    """
    meeting = nx.Graph()
    meeting.add_nodes_from(changed)
    meeting.add_edges_from((u, v) for v in changed for u in after.graph.predecessors[v] if u in meeting)
    old_ids = {new: u for u, new in ids.items()}
    clusters = []
    for group in nx.connected_components(meeting):
        own = [place for place in places if ids[next(iter(place.results))] in group]
        gone = {u for place in own for u in (place.linear, *place.before, *place.after) if u not in ids}
        clusters.append(_Cluster(own, sorted({old_ids[v] for v in group if v in old_ids} | gone), sorted(group)))
    return clusters
