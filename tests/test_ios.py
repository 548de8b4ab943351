"""IOS: the search against brute force, blocks against their definition, merges against eager, whole models."""

import itertools
import json
import random
from collections.abc import Callable
from math import inf
from pathlib import Path

import networkx as nx
import pytest
import torch
from dags import as_networkx, dags
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import models
import systems
from runners.correctness import relative_error
from systems.base import BadOption
from systems.ios.blocks import find_blocks, unit_graph
from systems.ios.endings import TooManyTransitions
from systems.ios.merge import merge, mergeable
from systems.ios.search import find_schedule
from systems.ios.stages import Stage, greedy, lower, to_schedule
from systems.ios.system import STRATEGIES
from systems.ios.units import KINDS, find_units
from systems.scheduling.capture import capture
from systems.scheduling.operator_graph import OperatorGraph
from systems.scheduling.program import Program
from systems.scheduling.rewrite import replace
from systems.scheduling.schedule import Schedule
from systems.scheduling.verify import verify


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPWEAVE_CACHE", str(tmp_path_factory.mktemp("cache")))


# The dynamic programme


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


def members(mask: int) -> frozenset[int]:
    return frozenset(v for v in range(mask.bit_length()) if mask >> v & 1)


LIMITS = st.sampled_from([(None, None), (1, None), (None, 2), (2, 1), (3, 2), (3, 8)])


@settings(max_examples=30)
@given(dags(max_nodes=8, max_edges=14), LIMITS, st.integers(0, 99))
def test_the_search_is_exact(graph: OperatorGraph, limits: tuple[int | None, int | None], seed: int) -> None:
    assume(len(graph) < 7 or len(graph.edges) > 4)  # brute force takes minutes on eight operators without edges
    r, s = limits

    def cost(ending: frozenset[int]) -> float:
        return random.Random(f"{seed} {sorted(ending)}").randint(1, 50)

    asked: dict[int, tuple[int, ...]] = {}

    def stage_cost(ending: int, groups: tuple[int, ...]) -> float:
        asked[ending] = groups
        return cost(members(ending))

    found = find_schedule(graph.predecessors, stage_cost, r, s)
    least, states, transitions, schedules = brute_force(graph, cost, r, s)
    assert (found.cost, found.counts.states, found.counts.transitions) == (least, states, transitions)
    assert found.counts.schedules == schedules
    assert sum(cost(members(sum(groups))) for groups in found.stages) == least
    assert sorted(v for groups in found.stages for g in groups for v in members(g)) == list(range(len(graph)))
    for ending, groups in asked.items():
        components = nx.weakly_connected_components(as_networkx(graph).subgraph(members(ending)))
        assert {members(g) for g in groups} == {frozenset(c) for c in components}


@settings(max_examples=60)
@given(dags(max_nodes=9), st.sampled_from([None, 1, 2, 3]), st.sampled_from([None, 1, 2, 8]), st.randoms())
def test_stages_that_cannot_matter_are_not_asked_for(
    graph: OperatorGraph, r: int | None, s: int | None, chance: random.Random
) -> None:
    """Costs that grow with what a stage holds, but for some: the same schedule comes of fewer of them."""
    weight = [chance.randint(1, 20) for _ in range(len(graph))]
    contention, seed = chance.choice([0.1, 0.4, 1.0]), chance.random()
    asked: list[int] = []

    def merges(groups: tuple[int, ...]) -> bool:
        alone = len(groups) > 1 and all(g.bit_count() == 1 for g in groups)
        return alone and random.Random(f"{seed} {groups}").random() < 0.3

    def cost(ending: int, groups: tuple[int, ...]) -> float:
        asked.append(ending)
        times = [sum(weight[v] for v in members(g)) for g in groups]
        concurrent = max(max(times), contention * sum(times)) + 1
        return concurrent * random.Random(f"{seed} {ending}").random() if merges(groups) else concurrent

    whole = find_schedule(graph.predecessors, cost, r, s)
    all_of_them = len(asked)
    asked.clear()
    found = find_schedule(graph.predecessors, cost, r, s, merges)
    assert found.cost == pytest.approx(whole.cost) and found.counts == whole.counts
    assert len(asked) == len(set(asked)) <= all_of_them


def test_a_device_that_is_never_full_leaves_little_to_measure() -> None:
    """Six chains of three that may all run at once: one stage of all of them is best, and few others are asked for."""
    predecessors = [[v - 1] if v % 3 else [] for v in range(18)]
    asked: list[int] = []

    def cost(ending: int, groups: tuple[int, ...]) -> float:
        asked.append(ending)
        return 1.0 + max(g.bit_count() for g in groups)

    found = find_schedule(predecessors, cost, 3, 8, lambda _: False)
    assert len(found.stages) == 1 and len(found.stages[0]) == 6
    assert len(asked) < 60 < found.counts.states


def test_stages_that_are_alike_are_asked_for_once() -> None:
    """Six chains of two, all the same: groups of a stage are first units, second ones, or both."""
    predecessors = [[v - 1] if v % 2 else [] for v in range(12)]
    asked: list[tuple[int, ...]] = []

    def kind(groups: tuple[int, ...]) -> tuple[int, ...]:
        first = sum(1 << v for v in range(0, 12, 2))
        return tuple(sorted(2 * g.bit_count() + bool(g & first) for g in groups))

    def cost(ending: int, groups: tuple[int, ...]) -> float:
        asked.append(kind(groups))
        return 1.0 + max(g.bit_count() for g in groups) + 0.6 * ending.bit_count()

    found = find_schedule(predecessors, cost, 2, 8, lambda _: False, kind)
    assert len(asked) == len(set(asked)) < 60
    assert found.cost == pytest.approx(find_schedule(predecessors, cost, 2, 8).cost)


def test_a_block_that_is_too_wide_is_refused() -> None:
    with pytest.raises(TooManyTransitions, match="a block of 40 units"):
        find_schedule([[]] * 40, lambda *_: 1.0, 1, 8)


def test_what_must_not_be_is_not_chosen() -> None:
    found = find_schedule([[], [], []], lambda ending, _: inf if ending.bit_count() > 1 else 1.0)
    assert found.cost == 3 and all(len(groups) == 1 for groups in found.stages)
    with pytest.raises(ValueError, match="finite"):
        find_schedule([[]], lambda *_: inf)


def test_the_largest_blocks_of_the_papers_table_1() -> None:
    """Inception-v3's last block, 11 operators of width 6: 4,860 transitions and the concatenation's, where the paper says
    4.9e3. A fire module of SqueezeNet with a complex bypass, 6 operators of width 3: the paper's 51 are those of r = 3, and
    without pruning there are 60.
    """
    inception = [[], [], [1], [1], [], [4], [5], [5], [], [8]]
    fire = [[], [0], [0], [], [1, 2], [3, 4]]

    def transitions(block: list[list[int]], r: int | None) -> int:
        return find_schedule(block, lambda *_: 1.0, r).counts.transitions

    assert transitions(inception, None) == 4860
    assert transitions([*inception, [0, 2, 3, 6, 7, 9]], None) == 4860 + 180
    assert (transitions(fire, None), transitions(fire, 3)) == (60, 51)


def test_a_long_chain_and_a_wide_block_beyond_a_machine_word() -> None:
    chain = [[v - 1] if v else [] for v in range(300)]
    found = find_schedule(chain, lambda ending, _: 1.0 + ending.bit_count() / 100, 3, 8)
    assert len(found.stages) == 100 and found.counts.states == 300


# Blocks and units


@given(dags(max_nodes=30), st.integers(2, 30))
def test_blocks_follow_each_other(graph: OperatorGraph, most: int) -> None:
    blocks = find_blocks(graph.predecessors, most)
    assert sorted(v for part in blocks.parts for v in part) == list(range(len(graph)))
    assert all(len(part) <= most for part in blocks.parts)
    place = {v: i for i, part in enumerate(blocks.parts) for v in part}
    assert all(place[u] <= place[v] for u, v in graph.edges)
    closure = nx.transitive_closure_dag(as_networkx(graph))
    comparable = {v: closure.in_degree(v) + closure.out_degree(v) for v in closure}
    assert set(blocks.cuts) == {v for v, count in comparable.items() if count == len(graph) - 1}
    whole = find_blocks(graph.predecessors, len(graph) + 1)
    assert whole.splits == 0 and all(part[-1] in whole.cuts for part in whole.parts[:-1])


@pytest.mark.parametrize(
    ("model", "units", "blocks"),
    [("squeezenet", 39, 8), ("inception_v3", 121, 11), ("randwire", 111, 3), ("nasnet", None, None), ("googlenet", 82, 9)],
)
def test_units_and_blocks_of_the_zoo(model: str, units: int | None, blocks: int | None) -> None:
    """blocks: those of several units. The paper's Table 2 counts 11 blocks and 119 operators for Inception-v3, which are
    these without the last view and linear layer; 3 blocks and 120 operators for RandWire. Its SqueezeNet has bypasses,
    which torchvision's lacks.
    """
    loaded = models.load(model, 1, device="meta")
    program = capture(loaded.module, loaded.inputs)
    found = find_units(program)
    assert sorted(v for unit in found for v in unit) == list(range(len(program.graph)))
    predecessors = unit_graph(program.graph, found)
    assert units is None or len(found) == units
    assert len(found) < 0.75 * len(program.graph)
    parts = find_blocks(predecessors, len(found)).parts
    assert blocks is None or sum(len(part) > 1 for part in parts) == blocks
    for kind in ("operator", "conv_relu", "relu_sepconv"):
        unit_graph(program.graph, find_units(program, kind))


class Cell(nn.Module):
    """Sums, concatenations of concatenations, paddings and weights that are computed, as NASNet and RandWire have them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(2))
        self.depthwise = nn.ModuleList(nn.Conv2d(4, 4, 3, groups=4) for _ in range(2))
        self.pointwise = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(2))
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.max_pool2d(x, 1)
        first, second = torch.sigmoid(self.weights).unbind()
        z = nn.functional.pad((x * first + y * second).relu(), (1, 1, 1, 1))
        left = self.norm(self.pointwise[0](self.depthwise[0](z)))
        right = self.pointwise[1](self.depthwise[1](nn.functional.pad(y, (1, 1, 1, 1))))
        return torch.cat([torch.cat([left, x], 1), left + right], 1)


def test_a_unit_makes_its_own_input() -> None:
    program = capture(Cell().eval(), (torch.randn(2, 4, 6, 6),))
    units = {kind: find_units(program, kind) for kind in KINDS}
    assert all(len(unit) == 1 for unit in units["operator"])
    described = [[program.graph.operators[v].name for v in unit] for unit in units["auto"]]
    pooled, left, right, joined = described
    assert pooled == ["max_pool2d"]
    assert left[:3] == ["sigmoid", "unbind", "mul"] and left[-3:] == ["conv2d", "conv2d", "batch_norm"]
    assert len(left) == 10 and len(right) == 3 and right[1:] == ["conv2d", "conv2d"]
    assert joined == ["cat", "add", "cat"]
    blocks = find_blocks(unit_graph(program.graph, units["auto"]), 24)
    assert [len(part) for part in blocks.parts] == [1, 3]


@given(dags(max_nodes=20))
def test_greedy_puts_each_unit_into_the_first_stage_it_can_be_in(graph: OperatorGraph) -> None:
    stages = greedy(graph.predecessors)
    place = {v: i for i, stage in enumerate(stages) for v in stage}
    assert sorted(place) == list(range(len(graph)))
    for v, producers in enumerate(graph.predecessors):
        assert place[v] == max((place[u] + 1 for u in producers), default=0)


@given(dags(max_nodes=15), st.randoms())
def test_stages_become_a_valid_schedule(graph: OperatorGraph, chance: random.Random) -> None:
    """Whatever the stages: each is over before the next begins, and the file reads back."""
    found = find_schedule(graph.predecessors, lambda ending, _: chance.random(), 3, 3)
    stages = [Stage(tuple(tuple(sorted(members(g))) for g in groups)) for groups in found.stages]
    schedule = to_schedule(graph, stages, {"seconds": 0.0, "states": 1, "transitions": 2})
    verify(graph, schedule)
    before = schedule.happens_before()
    for earlier, later in itertools.pairwise(stages):
        for u in (v for group in earlier.groups for v in group):
            assert all(before[v] >> u & 1 for group in later.groups for v in group)
    assert Schedule.from_json(json.loads(json.dumps(schedule.to_json(model="m", batch=1, device="cpu")))) == schedule


# Merges


class Parallel(nn.Module):
    """Convolutions of one input, each with what stands after it."""

    def __init__(self, branches: list[nn.Module]):
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [branch(x) for branch in self.branches]


def norm(channels: int) -> nn.BatchNorm2d:
    made = nn.BatchNorm2d(channels)
    for tensor in (made.running_mean, made.running_var, made.weight.data, made.bias.data):
        tensor.uniform_(0.5, 2)  # type: ignore[union-attr]
    return made


def merged(module: nn.Module, x: Tensor) -> tuple[Program, Program | None]:
    program = capture(module.eval(), (x,))
    units = [u for u in find_units(program, "conv_relu") if len(u) > 1 or "conv" in name(program, u)]
    replacement = merge(program, units)
    assert mergeable(program, units) == (replacement is not None)
    return program, None if replacement is None else replace(program, [replacement])[0]


def name(program: Program, unit: tuple[int, ...]) -> str:
    return program.graph.operators[unit[0]].name


@st.composite
def convolutions(draw: st.DrawFn) -> list[nn.Module]:
    stride, dilation, groups = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4]))
    bias, normed, activated = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    branches: list[nn.Module] = []
    for _ in range(draw(st.integers(2, 3))):
        kernel = draw(st.tuples(st.sampled_from([1, 3, 5]), st.sampled_from([1, 3, 7])))
        padding = tuple(dilation * (k // 2) for k in kernel)
        channels = groups * draw(st.integers(1, 3))
        layers: list[nn.Module] = [nn.Conv2d(4, channels, kernel, stride, padding, dilation, groups, bias and not normed)]
        layers += [norm(channels)] * normed + [nn.ReLU()] * activated
        branches.append(nn.Sequential(*layers))
    return branches


@settings(max_examples=25)
@given(convolutions())
def test_merged_convolutions_compute_the_same(branches: list[nn.Module]) -> None:
    module, x = Parallel(branches), torch.randn(2, 4, 9, 8)
    program, one = merged(module, x)
    assert one is not None and len(one.graph) == 1 and len(program.graph) >= 2
    for got, expected in zip(one.run((x,)), module(x), strict=True):
        assert got.shape == expected.shape and relative_error(got, expected.detach()) < 1e-5


@pytest.mark.parametrize(
    "branches",
    [
        [nn.Conv2d(4, 2, 3, padding=1), nn.Conv2d(4, 2, 3, stride=2, padding=1)],
        [nn.Conv2d(4, 2, 3, padding=1), nn.Conv2d(4, 2, 3)],
        [nn.Conv2d(4, 2, 3, padding=1), nn.Conv2d(4, 2, 3, padding=2, dilation=2)],
        [nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1, groups=2)],
        [nn.Conv2d(4, 4, 1), nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())],
        [nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), nn.Sequential(nn.Conv2d(4, 4, 1), nn.SiLU())],
        [nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 1)), nn.Conv2d(4, 4, 1)],
    ],
)
def test_what_cannot_be_merged(branches: list[nn.Module]) -> None:
    assert merged(Parallel(branches), torch.randn(1, 4, 8, 8))[1] is None


def test_merged_weights_follow_the_modules() -> None:
    module, x = Parallel([nn.Conv2d(4, 2, 3, padding=1), nn.Conv2d(4, 3, 1)]), torch.randn(1, 4, 8, 8)
    _, one = merged(module, x)
    assert one is not None
    with torch.no_grad():
        module.branches[1].weight.mul_(3)  # type: ignore[operator,union-attr]
    assert one.derived.refresh()
    assert relative_error(one.run((x,))[1], module(x)[1].detach()) < 1e-5


# The system


class Branches(nn.Module):
    """Branches that can be merged, and others beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.c = nn.Conv2d(8, 8, (1, 7), padding=(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.a(x).relu(), self.b(x).relu(), nn.functional.avg_pool2d(x, 3, 1, 1)], dim=1)
        return self.c(y[:, :8]) + y[:, 8:16]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_agrees_with_eager(strategy: str) -> None:
    torch.manual_seed(0)
    module, x = Branches().eval(), torch.randn(2, 8, 12, 12)
    prepared = systems.load("ios", strategy=strategy).prepare(module, (x,))
    for _ in range(2):
        x = torch.randn_like(x)
        with torch.no_grad():
            assert relative_error(prepared(x), module(x)) < 1e-5
    prepared.close()


def test_a_merge_that_was_found_is_written_and_executed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Branches().eval(), torch.randn(2, 8, 12, 12)
    monkeypatch.setattr(
        "systems.ios.costs.StageTimer.concurrent", lambda self, groups, numbers: 10.0 * sum(map(len, groups))
    )
    monkeypatch.setattr("systems.ios.costs.StageTimer.merged", _merge_costs_little)
    schedule = systems.load("ios").schedule(module, (x,))
    assert schedule.merges and schedule.search["transitions"] > 0
    program = capture(module, (x,))
    verify(program.graph, schedule)
    lowered, executed = lower(program, schedule)
    verify(lowered.graph, executed)
    assert [o.name for o in lowered.graph.operators].count("merged_conv2d") == 1
    file = tmp_path / "schedule.json"
    file.write_text(json.dumps(schedule.to_json(model="m", batch=2, device="cpu")))
    larger = torch.randn(5, 8, 12, 12)  # specialised for another batch size, executed at this one
    prepared = systems.load("ios", schedule=str(file)).prepare(module, (larger,))
    with torch.no_grad():
        assert relative_error(prepared(larger), module(larger)) < 1e-5
    assert prepared.schedule is not None and len(prepared.schedule.graph) == len(lowered.graph)
    prepared.close()


def _merge_costs_little(timer: object, units: list[tuple[int, ...]]) -> float | None:
    return None if merge(timer.program, units) is None else 0.1  # type: ignore[attr-defined]


def test_a_schedule_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    x = torch.randn(2, 8, 12, 12)
    schedule = systems.load("ios", strategy="greedy").schedule(Branches().eval(), (x,))
    file = tmp_path / "other.json"
    file.write_text(json.dumps(schedule.to_json(model="m", batch=2, device="cpu")))
    with pytest.raises(BadOption, match=r"other.json does not fit this model: .* this model"):
        systems.load("ios", schedule=str(file)).prepare(nn.Conv2d(8, 8, 1).eval(), (x,))
    file.write_text("{")
    with pytest.raises(BadOption, match=r"other.json: "):
        systems.load("ios", schedule=str(file))
    with pytest.raises(BadOption, match=r"none.json cannot be read"):
        systems.load("ios", schedule=str(tmp_path / "none.json"))


class Normed(nn.Module):
    """Convolutions of one input, each with a batch norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, k, padding=k // 2, bias=False), nn.BatchNorm2d(8), nn.ReLU()) for k in (1, 3, 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def test_what_was_rewritten_is_merged_too_and_its_schedule_fits_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("systems.ios.costs.milliseconds", _model_of_a_device)
    module = Normed().eval()
    for norm in (m for m in module.modules() if isinstance(m, nn.BatchNorm2d)):
        nn.init.uniform_(norm.running_mean)  # type: ignore[arg-type]
        nn.init.uniform_(norm.running_var, 0.5, 2)  # type: ignore[arg-type]
    x = torch.randn(2, 8, 12, 12)
    system = systems.load("ios", strategy="merge", fold_batch_norm=True, fuse_elementwise=True)
    schedule = system.schedule(module, (x,))
    assert schedule.merges and schedule.rewriting["fold_batch_norm"]["folded"] == 3
    prepared = system.prepare(module, (x,))
    for _ in range(2):
        with torch.no_grad():
            for got, expected in zip(tree_leaves(prepared(x)), tree_leaves(module(x)), strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
            for p in module.parameters():
                p.mul_(1.2)
    prepared.close()
    file = tmp_path / "rewritten.json"
    file.write_text(json.dumps(schedule.to_json(model="m", batch=2, device="cpu")))
    with pytest.raises(BadOption, match="does not fit this model"):
        systems.load("ios", schedule=str(file)).prepare(module, (x,))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"strategy": "fast"}, "not one of both"), ({"units": "conv"}, "not one of operator"), ({"r": -1}, "at least 0")],
)
def test_wrong_options_are_told(options: dict, message: str) -> None:
    with pytest.raises(BadOption, match=message):
        systems.load("ios", **options)


def _model_of_a_device(program: Program, groups: list[list[int]] | None = None, *_: float, **__: float) -> float:
    """Milliseconds that depend on the stage alone: what is asked for by a search depends on what the stages before took."""
    longest, work = max(map(len, groups or [[]]), default=0), len(program.graph)
    return max(longest, 0.4 * work) + 0.1


def test_each_distinct_stage_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal blocks are measured as one, and a second search measures nothing."""
    monkeypatch.setattr("systems.ios.costs.milliseconds", _model_of_a_device)
    module = nn.Sequential(Branches(), nn.MaxPool2d(1), Branches(), nn.MaxPool2d(1)).eval()
    single, x = Branches().eval(), torch.randn(2, 8, 12, 12)
    once = systems.load("ios").schedule(single, (x,)).search["measured"]
    assert once > 10
    assert systems.load("ios").schedule(module, (x,)).search["measured"] == 1  # the pool, which is both times the same
    assert systems.load("ios").schedule(module, (x,)).search["measured"] == 0


def test_a_search_tells_of_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups at once take as long as the longest, so that a stage of several is told to gain by it."""
    monkeypatch.setattr("systems.ios.costs.StageTimer.concurrent", lambda self, groups, _: float(max(map(len, groups))))
    module, x = nn.Sequential(Branches(), nn.Conv2d(8, 8, 1)).eval(), torch.randn(2, 8, 12, 12)
    search = systems.load("ios", strategy="parallel").schedule(module, (x,)).search
    parts = search["parts"]
    assert len(parts) == search["blocks"] and sum(part["units"] for part in parts) == search["units"]
    assert sum(part["transitions"] for part in parts) == search["transitions"]
    for part in parts:
        assert part["sequential_milliseconds"] == part["units"] >= part["milliseconds"] > 0
        assert (part["milliseconds"] < part["sequential_milliseconds"]) == (part["width"] > 1)
    plain = systems.load("ios", strategy="sequential").schedule(module, (x,)).search
    assert [part["width"] for part in plain["parts"]] == [part["width"] for part in parts]


def test_a_bounded_search_measures_less_and_finds_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("systems.ios.costs.milliseconds", _model_of_a_device)
    module, x = nn.Sequential(Branches(), nn.MaxPool2d(1), Branches()).eval(), torch.randn(2, 8, 12, 12)
    found = {}
    for exhaustive in (False, True):
        monkeypatch.setenv("OPWEAVE_CACHE", str(tmp_path / str(exhaustive)))
        found[exhaustive] = systems.load("ios", exhaustive=exhaustive).schedule(module, (x,))
    assert found[False].search["measured"] < found[True].search["measured"]
    assert found[False].stages == found[True].stages


def test_an_interrupted_search_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("systems.ios.costs.milliseconds", _model_of_a_device)
    module, x = Branches().eval(), torch.randn(2, 8, 12, 12)
    interrupted = systems.load("ios")

    def report(message: str) -> None:
        if "5 stages measured" in message:
            raise KeyboardInterrupt

    interrupted.report = report  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        interrupted.schedule(module, (x,))
    whole = systems.load("ios").schedule(module, (x,)).search["measured"]
    (tmp_path / "file").touch()
    monkeypatch.setenv("OPWEAVE_CACHE", str(tmp_path / "file" / "folder"))
    with pytest.warns(UserWarning, match="cannot be written"):
        assert systems.load("ios").schedule(module, (x,)).search["measured"] == whole + 5


@pytest.mark.parametrize("model", ["squeezenet", "efficientnet_b0_cifar10"])
def test_real_models(model: str) -> None:
    loaded = models.load(model, 1)
    prepared = systems.load("ios", r=2, s=3).prepare(loaded.module, loaded.inputs)
    inputs = loaded.fresh_inputs(5)
    with torch.no_grad():
        expected = tree_leaves(loaded.module(*inputs))
    for got, reference in zip(tree_leaves(prepared(*inputs)), expected, strict=True):
        assert relative_error(got, reference) < 1e-4
    prepared.close()
