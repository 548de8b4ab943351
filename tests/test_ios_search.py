"""IOS's dynamic programme: exact, and with as few stages measured as can be."""

import itertools
import random
from collections.abc import Callable
from math import comb, inf

import networkx as nx
import pytest
from dags import as_networkx, dags, members
from drawing import examples
from hypothesis import assume, given
from hypothesis import strategies as st

from systems.ios import endings as endings_module
from systems.ios.endings import TooManyTransitions, enumerate_endings
from systems.ios.search import LEAST_RATIOS, Estimates, find_schedule
from systems.scheduling.graph.operator_graph import OperatorGraph


def endings(graph: OperatorGraph, state: frozenset[int]) -> list[frozenset[int]]:
    """By the definition: non-empty subsets of `state` that no edge leaves into the rest of it."""
    return [
        frozenset(chosen)
        for size in range(1, len(state) + 1)
        for chosen in itertools.combinations(sorted(state), size)
        if not any(u in chosen and v in state and v not in chosen for u, v in graph.edges)
    ]


def allowed(graph: OperatorGraph, ending: frozenset[int], r: int | None, s: int | None) -> bool:
    groups = list(nx.weakly_connected_components(as_networkx(graph).subgraph(ending)))
    return (s is None or len(groups) <= s) and (r is None or all(len(g) <= r for g in groups))


def brute_force(
    graph: OperatorGraph, cost: Callable[[frozenset[int]], float], r: int | None, s: int | None
) -> tuple[float, int, int, int]:
    """Over all partitions into stages: the least cost, and how many states, transitions and schedules there are."""
    seen: dict[frozenset[int], list[frozenset[int]]] = {}

    def solve(state: frozenset[int]) -> tuple[float, int]:
        if not state:
            return 0.0, 1
        seen[state] = [e for e in endings(graph, state) if allowed(graph, e, r, s)]
        solved = [(solve(state - e), cost(e)) for e in seen[state]]
        return min((t + c for (t, _), c in solved), default=inf), sum(n for (_, n), _ in solved)

    least, schedules = solve(frozenset(range(len(graph))))
    return least, len(seen), sum(len(e) for e in seen.values()), schedules


LIMITS = st.sampled_from([(None, None), (1, None), (None, 2), (2, 1), (3, 2), (3, 8)])


@examples(30)
@given(dags(max_nodes=8, max_edges=14), LIMITS, st.integers(0, 99))
@pytest.mark.slow
def test_the_search_is_exact(graph: OperatorGraph, limits: tuple[int | None, int | None], seed: int) -> None:
    assume(len(graph) < 7 or len(graph.edges) > 4)  # brute force takes minutes on eight operators without edges
    r, s = limits

    def cost(ending: frozenset[int]) -> float:
        return random.Random(f"{seed} {sorted(ending)}").randint(1, 50)

    groups_by_ending: dict[int, tuple[int, ...]] = {}

    def stage_cost(ending: int, groups: tuple[int, ...]) -> float:
        groups_by_ending[ending] = groups
        return cost(members(ending))

    schedule = find_schedule(graph.predecessors, stage_cost, r, s)
    least, states, transitions, schedules = brute_force(graph, cost, r, s)
    assert (schedule.cost, schedule.counts.states, schedule.counts.transitions) == (least, states, transitions)
    assert schedule.counts.schedules == schedules
    assert sum(cost(members(sum(groups))) for groups in schedule.stages) == least
    assert sorted(v for groups in schedule.stages for g in groups for v in members(g)) == list(range(len(graph)))
    for ending, groups in groups_by_ending.items():
        components = nx.weakly_connected_components(as_networkx(graph).subgraph(members(ending)))
        assert {members(g) for g in groups} == {frozenset(c) for c in components}


@examples(60)
@given(dags(max_nodes=9), st.sampled_from([None, 1, 2, 3]), st.sampled_from([None, 1, 2, 8]), st.randoms())
def test_stages_that_cannot_matter_are_not_asked_for(
    graph: OperatorGraph, r: int | None, s: int | None, chance: random.Random
) -> None:
    """Costs that grow with what a stage holds, but for some: the same schedule comes of fewer of them."""
    weight = [chance.randint(1, 20) for _ in range(len(graph))]
    contention, seed = chance.choice([0.1, 0.4, 1.0]), chance.random()
    measured_endings: list[int] = []

    def merges(groups: tuple[int, ...]) -> bool:
        alone = len(groups) > 1 and all(g.bit_count() == 1 for g in groups)
        return alone and random.Random(f"{seed} {groups}").random() < 0.3

    def cost(ending: int, groups: tuple[int, ...]) -> float:
        measured_endings.append(ending)
        times = [sum(weight[v] for v in members(g)) for g in groups]
        concurrent = max(max(times), contention * sum(times)) + 1
        return concurrent * random.Random(f"{seed} {ending}").random() if merges(groups) else concurrent

    whole = find_schedule(graph.predecessors, cost, r, s)
    all_of_them = len(measured_endings)
    measured_endings.clear()
    schedule = find_schedule(graph.predecessors, cost, r, s, merges)
    assert schedule.cost == pytest.approx(whole.cost) and schedule.counts == whole.counts
    assert len(measured_endings) == len(set(measured_endings)) <= all_of_them


def test_pruning_changes_nothing_where_units_disturb_each_other() -> None:
    """Units of different groups slow each other down, some so much that they take less in turn: as one group, with a third
    unit between them. A stage takes at least as long as any part of it with its groups apart."""
    for seed in range(400):
        chance = random.Random(seed)
        n = chance.randint(4, 7)
        predecessors = [[u for u in range(v) if chance.random() < 0.25] for v in range(n)]
        weight = [chance.uniform(0.5, 1.5) for _ in range(n)]
        slower = {pair: chance.choice([0, 0, 0, 2, 8]) * weight[pair[0]] for pair in itertools.permutations(range(n), 2)}

        def cost(_: int, groups: tuple[int, ...], weight: list[float] = weight, slower: dict = slower) -> float:
            units = [members(g) for g in groups]
            pairs = (p for one, other in itertools.permutations(units, 2) for p in itertools.product(one, other))
            return 0.2 + max(sum(weight[v] for v in group) for group in units) + sum(slower[pair] for pair in pairs)

        whole, pruned = (find_schedule(predecessors, cost, 3, 8, eagerly) for eagerly in (None, lambda _: False))
        assert pruned.cost == pytest.approx(whole.cost), seed


@examples(30)
@given(dags(max_nodes=8), LIMITS, st.integers(1, 40))
def test_few_endings_made_larger_at_a_time_are_the_same(
    graph: OperatorGraph, limits: tuple[int | None, int | None], chunk: int
) -> None:
    """Their order too, which decides between schedules of equal cost."""
    predecessors = tuple(map(tuple, graph.predecessors))
    whole = enumerate_endings(predecessors, *limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endings_module, "CHUNK", chunk)
        cut = enumerate_endings.__wrapped__(predecessors, *limits)
    for name in ("states", "endings", "first", "ending", "rest"):
        assert getattr(cut, name).tolist() == getattr(whole, name).tolist()
    assert (cut.levels, cut.groups, cut.schedules) == (whole.levels, whole.groups, whole.schedules)


def test_a_device_that_is_never_full_leaves_little_to_measure() -> None:
    """Six chains of three that may all run at once: one stage of all of them is best, and few others are asked for."""
    predecessors = [[v - 1] if v % 3 else [] for v in range(18)]
    measured_endings: list[int] = []

    def cost(ending: int, groups: tuple[int, ...]) -> float:
        measured_endings.append(ending)
        return 1.0 + max(g.bit_count() for g in groups)

    schedule = find_schedule(predecessors, cost, 3, 8, lambda _: False)
    assert len(schedule.stages) == 1 and len(schedule.stages[0]) == 6
    assert len(measured_endings) < 60 < schedule.counts.states


def test_stages_that_are_alike_are_asked_for_once() -> None:
    """Six chains of two, all the same: groups of a stage are first units, second ones, or both."""
    predecessors = [[v - 1] if v % 2 else [] for v in range(12)]
    kinds: list[tuple[int, ...]] = []

    def kind(groups: tuple[int, ...]) -> tuple[int, ...]:
        first = sum(1 << v for v in range(0, 12, 2))
        return tuple(sorted(2 * g.bit_count() + bool(g & first) for g in groups))

    def cost(ending: int, groups: tuple[int, ...]) -> float:
        kinds.append(kind(groups))
        return 1.0 + max(g.bit_count() for g in groups) + 0.6 * ending.bit_count()

    schedule = find_schedule(predecessors, cost, 2, 8, lambda _: False, kind)
    assert len(kinds) == len(set(kinds)) < 60
    assert schedule.cost == pytest.approx(find_schedule(predecessors, cost, 2, 8).cost)


def test_a_block_that_is_too_wide_is_refused() -> None:
    with pytest.raises(TooManyTransitions, match="a block of 40 units"):
        find_schedule([[]] * 40, lambda *_: 1.0, 1, 8)


def test_what_must_not_be_is_not_chosen() -> None:
    schedule = find_schedule([[], [], []], lambda ending, _: inf if ending.bit_count() > 1 else 1.0)
    assert schedule.cost == 3 and all(len(groups) == 1 for groups in schedule.stages)
    with pytest.raises(ValueError, match="finite"):
        find_schedule([[]], lambda *_: inf)


def test_the_largest_blocks_of_the_papers_table_1() -> None:
    """Inception-v3's last block, 11 operators of width 6, and a fire module of SqueezeNet with a complex bypass, 6 operators
    of width 3. The paper's 4.9e3 and 51 are of endings whose groups each start from one operator, without pruning.
    """
    inception = [[], [], [1], [1], [], [4], [5], [5], [], [8]]
    fire = [[], [0], [0], [], [1, 2], [3, 4]]

    def transitions(block: list[list[int]], r: int | None = None, one_head: bool = False) -> int:
        return find_schedule(block, lambda *_: 1.0, r, one_head=one_head).counts.transitions

    whole = [*inception, [0, 2, 3, 6, 7, 9]]
    assert transitions(inception) == 4860
    assert (transitions(fire), transitions(whole)) == (60, 4860 + 180)
    assert (transitions(fire, one_head=True), transitions(whole, one_head=True)) == (51, 4871)
    assert (transitions(fire, 3, one_head=True), transitions(whole, 3, one_head=True)) == (47, 4616)


@examples(40)
@given(dags(max_nodes=8), LIMITS)
def test_groups_of_one_head_are_disjoint_cones(graph: OperatorGraph, limits: tuple[int | None, int | None]) -> None:
    """Of each state, the endings that are unions of an operator with all of the state that depends on it, and no others."""
    r, s = limits
    counted = find_schedule(graph.predecessors, lambda *_: 1.0, r, s, one_head=True).counts.transitions
    assert counted == of_one_head([list(p) for p in graph.predecessors], r, s)


@pytest.mark.parametrize(("chains", "length"), [(1, 1), (1, 9), (2, 1), (2, 4), (3, 3), (4, 2)])
def test_independent_chains_reach_the_bound_of_the_papers_figure_13(chains: int, length: int) -> None:
    """Of each chain a state is a prefix and an ending its tail: (length + 2 over 2) pairs, less those of an empty ending."""
    block = [[v - 1] if v % length else [] for v in range(chains * length)]
    counts = find_schedule(block, lambda *_: 1.0).counts
    assert counts.transitions == comb(length + 2, 2) ** chains - (length + 1) ** chains


def of_one_head(block: list[list[int]], r: int | None, s: int | None) -> int:
    """The pairs of a state and an ending of it that is made of at most s disjoint cones of at most r operators: an operator
    with all that follow it.
    """
    after = [{v for v, before in enumerate(block) if u in before} for u in range(len(block))]

    def cone(u: int, state: frozenset[int]) -> frozenset[int]:
        return frozenset({u}).union(*(cone(v, state) for v in after[u] & state))

    def endings(state: frozenset[int], disjoint: bool) -> set[frozenset[int]]:
        unions = {(frozenset[int](), 0)}
        for one in [cone(u, state) for u in state]:
            if disjoint and r is not None and len(one) > r:
                continue
            unions |= {(union | one, count + 1) for union, count in unions if not (disjoint and union & one)}
        return {union for union, count in unions if union and not (disjoint and s is not None and count > s)}

    states, rest = {frozenset(range(len(block)))}, [frozenset(range(len(block)))]
    while rest:
        state = rest.pop()
        further = {state - ending for ending in endings(state, disjoint=False)} - states - {frozenset()}
        states |= further
        rest += further
    return sum(len(endings(state, disjoint=True)) for state in states)


def test_a_long_chain_and_a_wide_block_beyond_a_machine_word() -> None:
    chain = [[v - 1] if v else [] for v in range(300)]
    schedule = find_schedule(chain, lambda ending, _: 1.0 + ending.bit_count() / 100, 3, 8)
    assert len(schedule.stages) == 100 and schedule.counts.states == 300


@examples(200)
@given(dags(max_nodes=7, max_edges=14), LIMITS, st.integers(0, 99), st.floats(0, 1), st.sampled_from([0.25, 1.0, 3.0]))
def test_estimates_lose_no_more_than_they_exceed_the_costs_by(
    graph: OperatorGraph, limits: tuple[int | None, int | None], seed: int, least_share: float, bias: float
) -> None:
    """Each estimate is a share of the cost, times a factor that all have."""
    r, s = limits
    measured: set[int] = set()

    def cost_of(ending: int) -> int:
        return random.Random(f"{seed} {ending}").randint(1, 50)

    def cost(ending: int, groups: tuple[int, ...] = ()) -> float:
        measured.add(ending)
        return cost_of(ending)

    def estimate(groups: tuple[int, ...]) -> float:
        share = least_share + (1 - least_share) * random.Random(f"share {seed} {sum(groups)}").random()
        return bias * share * cost_of(sum(groups))

    exact = find_schedule(graph.predecessors, cost, r, s)
    every = set(measured)
    measured.clear()
    estimates = Estimates(estimate)
    schedule = find_schedule(graph.predecessors, cost, r, s, estimates=estimates)
    by_ending = {sum(groups): groups for groups in enumerate_endings(graph.predecessors, r, s).groups}
    excess = max(estimates.factor * estimate(groups) / cost_of(ending) for ending, groups in by_ending.items())
    assert exact.cost <= schedule.cost <= exact.cost * max(excess, 1.0) * (1 + 1e-9)
    assert measured <= every and len(estimates.ratios) >= len(measured)
    if least_share == 1 and len(estimates.ratios) < LEAST_RATIOS and bias == 1:
        assert len(measured) == len(schedule.stages)


def test_bounds_follow_estimates_that_are_all_wrong_alike() -> None:
    """Simulated stages that take half or twice as long: once some are measured, the search measures few others."""
    wide: list[list[int]] = [[] for _ in range(9)]

    def cost(ending: int, groups: tuple[int, ...] = ()) -> float:
        return 1.0 + random.Random(ending).random() + ending.bit_count() ** 1.5

    exact = find_schedule(wide, cost).cost
    for bias in (0.5, 1.0, 2.0):
        measured: list[int] = []

        def noted(ending: int, groups: tuple[int, ...], measured: list[int] = measured) -> float:
            measured.append(ending)
            return cost(ending)

        estimates = Estimates(lambda groups, bias=bias: bias * cost(sum(groups)), 0.01)
        assert find_schedule(wide, noted, estimates=estimates).cost == pytest.approx(exact)
        assert estimates.factor == pytest.approx(0.99 / bias) or len(measured) < LEAST_RATIOS
        assert len(measured) < 60, (bias, len(measured))  # of 511
