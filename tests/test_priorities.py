"""Which operators a GPU gives its multiprocessors first."""

import json
from collections import Counter
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from dags import dags, from_edges
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import models
import systems
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.plans.lower import lower
from systems.scheduling.plans.priorities import FREE, MOST, PRIORITIES, slacks
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.stream_assignment import assign_streams
from systems.scheduling.plans.verify import InvalidSchedule, verify
from systems.weave.stream_plans import operator_ms

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def chains(graph: OperatorGraph) -> list[list[int]]:
    """Every chain of dependent operators from one without predecessors to one without successors."""
    whole = []
    growing = [[v] for v in range(len(graph)) if not graph.predecessors[v]]
    while growing:
        chain = growing.pop()
        growing += [[*chain, s] for s in graph.successors[chain[-1]]]
        if not graph.successors[chain[-1]]:
            whole.append(chain)
    return whole


@given(st.data())
def test_a_slack_is_what_the_longest_chain_through_an_operator_lacks(data: st.DataObject) -> None:
    graph = data.draw(dags(max_nodes=8))
    times = data.draw(st.lists(st.integers(1, 9).map(float), min_size=len(graph), max_size=len(graph)))
    lengths = [(chain, sum(times[v] for v in chain)) for chain in chains(graph)]
    longest = max(length for _, length in lengths)
    expected = [1 - max(length for chain, length in lengths if v in chain) / longest for v in range(len(graph))]
    assert slacks(graph, times) == pytest.approx(expected)
    by_slack, critical = (PRIORITIES[name](graph, times) for name in ("by slack", "critical path"))
    for v, slack in enumerate(expected):
        assert critical[v] in (0, MOST) and by_slack[v] in range(MOST + 1)
        if slack == 0:
            assert critical[v] == by_slack[v] == MOST
        if slack > FREE:
            assert critical[v] == by_slack[v] == 0


def test_a_schedule_file_keeps_priorities() -> None:
    graph = from_edges(3, [(0, 1), (0, 2)])
    for priorities in ((), (5, 0, 3)):
        schedule = replace(assign_streams(graph), priorities=priorities)
        assert Schedule.from_json(json.loads(json.dumps(schedule.to_json(model="m", batch=1, device="cuda")))) == schedule


@pytest.mark.parametrize(
    "priorities, says", [((1, 2), "3 operators, but priorities for 2"), ((0, 6, 0), "a priority of 6, and the highest is 5")]
)
def test_wrong_priorities_are_refused(priorities: tuple[int, ...], says: str) -> None:
    graph = from_edges(3, [(0, 1), (0, 2)])
    with pytest.raises(InvalidSchedule, match=says):
        verify(graph, replace(assign_streams(graph), priorities=priorities))


def test_a_merge_has_the_highest_priority_of_its_operators() -> None:
    module = Pair().eval()
    program = capture(module, (torch.randn(1, 4, 6, 6),))
    first, second = (v for v, o in enumerate(program.graph.operators) if "conv" in o.name)
    for priorities in ({first: 4}, {second: 3}, {first: 1, second: 2}):
        schedule = replace(
            assign_streams(program.graph),
            merges=((first, second),),
            priorities=tuple(priorities.get(v, 0) for v in range(len(program.graph))),
        )
        lowered, executed = lower(program, schedule)
        by_name = {o.name: executed.priorities[v] for v, o in enumerate(lowered.graph.operators)}
        assert len(executed.priorities) == len(lowered.graph) < len(program.graph)
        assert max(by_name.values()) == max(priorities.values()) and sum(map(bool, executed.priorities)) == 1


class Pair(nn.Module):
    """Two convolutions of one input, which may be one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(4, 3, 1), nn.Conv2d(4, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.other(x)], 1)


@pytest.mark.parametrize("count", [pytest.param(40, marks=GPU)])
def test_each_kernel_of_a_graph_has_the_priority_of_its_operator(count: int) -> None:
    """Of two kinds of kernels on two streams in turn, each kind has another priority."""
    from cuda.bindings import driver
    from cuda.bindings import runtime as cudart

    from systems.scheduling.execution.cuda_streams import Event, Streams, begin_capture, checked
    from systems.scheduling.execution.node_priorities import NodePriorities

    x = torch.randn(64, device="cuda")
    outs = [torch.empty_like(x) for _ in range(count)]
    calls = [(torch.sin, 5) if v % 2 else (torch.exp, 2) for v in range(count)]
    priorities = NodePriorities([priority for _, priority in calls])
    for call, _ in calls:
        call(x, out=outs[0])
    torch.cuda.synchronize()
    with closing(Streams(x.device)) as streams:
        first, second = streams.take([False, False])
        begin_capture(first.handle)
        fork, join = Event(), Event()
        fork.record(first.handle)
        fork.block(second.handle)
        for v, (call, _) in enumerate(calls):
            stream = (first, second)[v // 3 % 2]
            with torch.cuda.stream(stream.torch), priorities.operator(v, stream.handle):
                call(x, out=outs[v])
        join.record(second.handle)
        join.block(first.handle)
        graph = checked(cudart.cudaStreamEndCapture(first.handle))
    assert priorities.give(graph)
    nodes, number = checked(cudart.cudaGraphGetNodes(graph, count))
    attribute = cudart.cudaKernelNodeAttrID.cudaLaunchAttributePriority
    kernels = Counter[tuple[tuple[int, int], int]]()  # by function and priority
    for node in nodes[:number]:
        status, parameters = driver.cuGraphKernelNodeGetParams(driver.CUgraphNode(int(node)))
        assert status == driver.CUresult.CUDA_SUCCESS
        function = int(parameters.func), int(parameters.kern)
        kernels[function, checked(cudart.cudaGraphKernelNodeGetAttribute(node, attribute)).priority] += 1
    assert sorted(priority for _, priority in kernels) == [-5, -2] and len({function for function, _ in kernels}) == 2
    assert set(kernels.values()) == {count // 2}
    checked(cudart.cudaGraphDestroy(graph))


@pytest.mark.parametrize("name", [pytest.param(n, marks=GPU) for n in ("googlenet", "randwire")])
@pytest.mark.parametrize("kind", PRIORITIES)
def test_priorities_leave_what_a_model_computes(name: str, kind: str) -> None:
    from systems.scheduling.execution.execute import execute

    model = models.load(name, 1, device="cuda")
    with torch.no_grad():
        prepared = systems.load("nimble_fused").prepare(model.module, model.inputs)
        schedule = prepared.schedule
        priorities = PRIORITIES[kind](schedule.graph, operator_ms(prepared.program))
        assert len(set(priorities)) > 1
        first = execute(prepared.program, replace(schedule, priorities=priorities))
        for _ in range(20):
            inputs = [torch.randn_like(x) for x in model.inputs]
            assert torch.equal(first(*inputs), prepared(*inputs))
