"""A training step as one graph: the state that operators read and write, and the order it asks for."""

import dataclasses
import time
import weakref

import networkx as nx
import pytest
import torch
from dags import as_networkx, dags
from hypothesis import given
from hypothesis import strategies as st
from test_verify import ordering
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves
from training import Optimizers, adamw, batch, groups, net, sgd

import models
from runners.cell.training import loss
from systems.scheduling.execution.cpu_executor import CpuExecutor, MissingDependency
from systems.scheduling.graph.joint_graph import capture_step
from systems.scheduling.graph.operator_graph import Operator, OperatorGraph, State
from systems.scheduling.graph.program import Call, Input, Output
from systems.scheduling.graph.stateful_program import StatefulProgram
from systems.scheduling.plans.schedule import sequential
from systems.scheduling.plans.stream_assignment import assign_streams
from systems.scheduling.plans.verify import InvalidSchedule, verify

pytestmark = pytest.mark.usefixtures("one_thread")


def joint(make: Optimizers = sgd) -> StatefulProgram:
    module = net()
    return capture_step(module, make(module), loss, batch(0)[:1], batch(0)[1])[0]


@pytest.mark.parametrize("make", [sgd, adamw, groups])
def test_operators_touch_what_the_graph_declares_and_nothing_else(make: Optimizers) -> None:
    """Every operator alone, and the memory of all others and the random state compared before and after it."""
    module = net()
    optimizer = make(module)
    program, static = capture_step(module, optimizer, loss, batch(0)[:1], batch(0)[1])
    static.refresh()
    graph, values = program.graph, [None] * len(program.graph)
    names = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
    lasting = {name: t for t in program.changed if (name := names.get(id(t)))}
    for p, moments in static.moments.items():
        lasting |= {f"{moment} of {names[id(p)]}": t for moment, t in moments.items()}
    unchanging = {names[id(t)]: t for t in (*module.parameters(), *module.buffers()) if names[id(t)] not in lasting}
    assert set(unchanging) == {"unused"}
    for v in range(len(graph)):
        copies = {name: t.detach().clone() for name, t in (lasting | unchanging).items()}
        outputs = {u: [t.clone() for t in tree_leaves(values[u]) if isinstance(t, Tensor)] for u in range(v)}
        state = torch.get_rng_state()
        with torch.no_grad():
            values[v] = program.execute(v, values, batch(0))  # type: ignore[call-overload]
        written = {piece.name for piece in graph.state if piece.writers >> v & 1}
        for name, t in (lasting | unchanging).items():
            assert torch.equal(t, copies[name]) or name in written, f"{graph.label(v)} writes {name}"
        for u, before in outputs.items():
            after = [t for t in tree_leaves(values[u]) if isinstance(t, Tensor)]
            if not all(torch.equal(a, b) or a.isnan().any() for a, b in zip(after, before, strict=True)):
                pieces = [piece for piece in graph.state if piece.writers >> v & 1]
                assert any((piece.readers | piece.writers) >> u & 1 for piece in pieces) or written & set(lasting)
        assert torch.equal(state, torch.get_rng_state()) or "the random generator" in written


def test_every_reader_of_a_parameter_is_declared() -> None:
    program = joint()
    state = {piece.name: piece for piece in program.graph.state}
    weight = next(t for t in program.changed if t.shape == (8, 8, 3, 3))
    for v, call in enumerate(program.calls):
        if any(isinstance(a, Tensor) and a.data_ptr() == weight.data_ptr() for a in call.leaves()):
            assert (state["left.weight"].readers | state["left.weight"].writers) >> v & 1
    assert state["left.weight"].readers.bit_count() == 3  # forward, and the gradients of input and weight
    assert state["left.weight"].writers.bit_count() == 1
    assert state["shared.running_mean"].writers.bit_count() == 2  # it is used twice
    assert state["the random generator"].writers.bit_count() == 2


def test_each_missing_wait_is_refused_by_name_and_unverified_caught() -> None:
    program = joint()
    schedule = assign_streams(program.graph)
    assert len(schedule.waits) > 20
    for u, v in schedule.waits:
        without = dataclasses.replace(schedule, waits=tuple(w for w in schedule.waits if w != (u, v)))
        with pytest.raises(InvalidSchedule, match=r"operator \d+ \(.*\).* \d+ \(.*\)"):
            verify(program.graph, without)
    writers = sum(piece.writers for piece in program.graph.state)
    ordered = [w for w in schedule.waits if w[0] not in program.graph.producers[w[1]]]
    assert ordered and writers
    for u, v in ordered:  # waits that carry no data: nothing but the state asks for them
        without = dataclasses.replace(schedule, waits=tuple(w for w in schedule.waits if w != (u, v)))
        executor = CpuExecutor(
            program,
            without,
            unverified=True,
            delay=lambda w, u=u: time.sleep(0.3) if w == u else None,  # type: ignore[misc]
        )
        with pytest.raises(MissingDependency, match=rf"operator {v} .* before {u} .*, which touches the same state"):
            executor(*batch(0))
        executor.close()


def test_each_missing_edge_of_the_state_is_refused_by_name() -> None:
    """The graph itself lacks the dependency, so that every scheduler goes wrong; the declared state shows it."""
    graph = joint().graph
    edges = [(u, v) for v, before in enumerate(graph.predecessors) for u in before if u not in graph.producers[v]]
    assert edges
    for u, v in edges:
        before = [[w for w in p if (w, x) != (u, v)] for x, p in enumerate(graph.predecessors)]
        without = OperatorGraph(graph.operators, before, graph.producers, graph.state)
        with pytest.raises(
            InvalidSchedule, match=rf"operator {v} \(.*\) writes .* after {u} \(.*\), which (reads|writes) it"
        ):
            verify(without, assign_streams(without))
        verify(without, sequential(without))  # one stream has the order of capture by itself


def test_an_output_is_not_kept_for_those_that_only_come_after_it() -> None:
    state, alive = torch.ones(4), []

    def read(x: Tensor) -> Tensor:
        alive.append(weakref.ref(out := x + state))
        return out

    def write(x: Tensor) -> None:
        alive.append(alive[0]() is not None)
        state.copy_(x)

    functions = (read, torch.neg, torch.sin, write)
    arguments = (Input(0),), (Output(0),), (Input(0),), (Output(2),)
    calls = [Call(f, a, {}) for f, a in zip(functions, arguments, strict=True)]
    operators = [Operator(i, f.__name__, f.__name__) for i, f in enumerate(functions)]
    producers = [[o.operator for o in call.references()] for call in calls]
    graph = OperatorGraph.with_state(operators, producers, [State("state", 0b0001, 0b1000)])
    assert graph.edges == ((0, 1), (2, 3), (0, 3)) and graph.consumers[0] == (1,)
    x = torch.randn(4)
    program = StatefulProgram(graph, calls, [Output(1)], tree_flatten(0)[1], (x,), [state], False)
    executor = CpuExecutor(program, sequential(graph))
    assert torch.equal(executor(x), -(x + 1)) and torch.equal(state, x.sin())
    assert alive[1] is False


@st.composite
def stateful(draw: st.DrawFn) -> tuple[OperatorGraph, list[State]]:
    graph = draw(dags(max_nodes=15))
    masks = st.integers(0, (1 << len(graph)) - 1)
    pieces = draw(st.lists(st.tuples(masks, masks), max_size=3))
    return graph, [State(f"piece {i}", r & ~w, w) for i, (r, w) in enumerate(pieces)]


def conflicts(state: list[State]) -> set[tuple[int, int]]:
    """Pairs of which the second has to come after the first, straight from the definition."""
    out = set()
    for piece in state:
        for v in range(15):
            for u in range(v):
                touch = all((piece.readers | piece.writers) >> w & 1 for w in (u, v))
                if touch and any(piece.writers >> w & 1 for w in (u, v)):
                    out.add((u, v))
    return out


@given(stateful())
def test_state_orders_all_conflicts_with_no_edge_too_many(case: tuple[OperatorGraph, list[State]]) -> None:
    graph, state = case
    ordered = OperatorGraph.with_state(graph.operators, graph.predecessors, state)
    closure = nx.transitive_closure_dag(as_networkx(ordered))
    needed = nx.transitive_closure_dag(nx.DiGraph([*graph.edges, *conflicts(state)]))
    assert set(closure.edges) == set(needed.edges)
    assert ordered.producers == graph.predecessors and set(graph.edges) <= set(ordered.edges)
    for edge in set(ordered.edges) - set(graph.edges):
        rest = nx.DiGraph([e for e in ordered.edges if e != edge])
        assert not (edge[0] in rest and edge[1] in rest and nx.has_path(rest, *edge))
    for scheduler in (assign_streams, sequential):
        verify(ordered, scheduler(ordered))


@given(stateful())
def test_verification_accepts_exactly_what_orders_all_conflicts(case: tuple[OperatorGraph, list[State]]) -> None:
    graph, state = case
    declared = OperatorGraph(graph.operators, graph.predecessors, state=state)  # without the edges that state asks for
    schedule = assign_streams(declared)
    order = ordering(schedule)
    if all(order.has_edge(u, v) for u, v in conflicts(state)):
        verify(declared, schedule)
    else:
        with pytest.raises(InvalidSchedule, match=r"(reads|writes) piece \d after \d+ "):
            verify(declared, schedule)


def test_the_update_of_early_layers_alone_waits_for_the_end_of_backward() -> None:
    """Updates are operators of their own, beside the rest of backward, and so is each convolution's gradient of weights."""
    module = models.load("mobilenet_v2_cifar10", 2, training=True).module
    x, target = torch.randn(2, 3, 32, 32), torch.tensor([0, 1])
    graph = capture_step(module, sgd(module), loss, (x,), target)[0].graph
    updates = [v for v, o in enumerate(graph.operators) if o.name == "SGD"]
    backward = [v for v, o in enumerate(graph.operators) if o.name == "convolution_backward"]
    assert 5 <= len(updates) <= 9 and len(backward) == 2 * 52 - 1  # the image has no gradient
    behind = [sum(not graph.ancestors[v] >> b & 1 for b in backward) for v in updates]
    assert behind[0] > len(backward) / 2 and behind[-1] < len(backward) / 4
