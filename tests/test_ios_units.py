"""IOS's schedule units, blocks and stages."""

import itertools
import json
import random
from dataclasses import replace

import networkx as nx
import torch
from dags import as_networkx, dags, members
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from systems.ios.blocks import find_blocks, unit_graph
from systems.ios.search import find_schedule
from systems.ios.units import KINDS, find_units
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.plans.schedule import Schedule, Search
from systems.scheduling.plans.stages import Stage, greedy, to_schedule
from systems.scheduling.plans.verify import verify


@given(dags(max_nodes=30), st.integers(2, 30))
def test_blocks_follow_each_other(graph: OperatorGraph, most: int) -> None:
    blocks = find_blocks(graph, most)
    assert sorted(v for part in blocks.parts for v in part) == list(range(len(graph)))
    assert all(len(part) <= most for part in blocks.parts)
    place = {v: i for i, part in enumerate(blocks.parts) for v in part}
    assert all(place[u] <= place[v] for u, v in graph.edges)
    closure = nx.transitive_closure_dag(as_networkx(graph))
    comparable = {v: closure.in_degree(v) + closure.out_degree(v) for v in closure}
    assert set(blocks.cuts) == {v for v, count in comparable.items() if count == len(graph) - 1}
    whole = find_blocks(graph, len(graph) + 1)
    assert whole.splits == 0 and all(part[-1] in whole.cuts for part in whole.parts[:-1])
    assert [tuple(sorted(sum(block, ()))) for block in blocks.blocks] == list(whole.parts)
    assert blocks.splits == sum(len(block) - 1 for block in blocks.blocks)


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
    stages = greedy(graph)
    place = {v: i for i, stage in enumerate(stages) for v in stage}
    assert sorted(place) == list(range(len(graph)))
    for v, producers in enumerate(graph.predecessors):
        assert place[v] == max((place[u] + 1 for u in producers), default=0)


@given(dags(max_nodes=15), st.randoms())
def test_stages_become_a_valid_schedule(graph: OperatorGraph, chance: random.Random) -> None:
    """Whatever the stages: each is over before the next begins, and the file reads back."""
    block_schedule = find_schedule(graph.predecessors, lambda ending, _: chance.random(), 3, 3)
    stages = [Stage(tuple(tuple(sorted(members(g))) for g in groups)) for groups in block_schedule.stages]
    schedule = to_schedule(graph, "ios", stages, Search(seconds=0.0, states=1, transitions=2))
    verify(graph, schedule)
    before = schedule.happens_before()
    for earlier, later in itertools.pairwise(stages):
        for u in (v for group in earlier.groups for v in group):
            assert all(before[v] >> u & 1 for group in later.groups for v in group)
    assert Schedule.from_json(json.loads(json.dumps(schedule.to_json(model="m", batch=1, device="cpu")))) == schedule


@given(dags(max_nodes=15), st.randoms())
def test_without_barriers_only_dependencies_and_groups_order_what_runs(graph: OperatorGraph, chance: random.Random) -> None:
    block_schedule = find_schedule(graph.predecessors, lambda ending, _: chance.random(), 3, 3)
    stages = [Stage(tuple(tuple(sorted(members(g))) for g in groups)) for groups in block_schedule.stages]
    schedule = to_schedule(graph, "ios", stages, Search(), barriers=False)
    verify(graph, schedule)
    assert schedule.order == to_schedule(graph, "ios", stages, Search()).order
    needed = as_networkx(graph)
    for stage in stages:
        for group in stage.groups:
            assert len({schedule.streams[v] for v in group}) == 1
            needed.add_edges_from(itertools.pairwise(group))
    closure = nx.transitive_closure_dag(needed)
    assert [members(mask) for mask in schedule.happens_before()] == [set(closure.predecessors(v)) for v in range(len(graph))]
    assert set(schedule.waits) <= set(graph.edges)
    for wait in schedule.waits:  # none is there twice, and without any of them two operators would lose their order
        fewer = replace(schedule, waits=tuple(other for other in schedule.waits if other != wait))
        assert len(fewer.waits) == len(schedule.waits) - 1 and fewer.happens_before() != schedule.happens_before()
