"""Replacing groups of operators by one each, and parts of a program alone."""

import pytest
import torch
from dags import dags
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from rewriting import Function, image, names
from torch import Tensor
from torch.utils._pytree import tree_structure

from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.graph.part import part
from systems.scheduling.graph.program import Call, Input, Output, Program
from systems.scheduling.graph.rewrite import Replacement, replace


@examples(50)
@given(dags(max_nodes=12, max_edges=24), st.data())
def test_chains_replaced_by_one_operator_compute_the_same(graph: OperatorGraph, data: st.DataObject) -> None:
    """Operators that add up what they read; some chains of an operator and its only reader become one."""
    calls = [
        Call(lambda x, *rest, v=v: x + v + sum(rest), (Input(0), *map(Output, producers)), {})
        for v, producers in enumerate(graph.predecessors)
    ]
    ends = [v for v, readers in enumerate(graph.successors) if not readers]
    program = Program(graph, calls, [Output(v) for v in ends], tree_structure([0] * len(ends)), (torch.zeros(2),))
    replacements, taken = [], set()
    for u, readers in enumerate(graph.successors):
        if len(readers) == 1 and not taken & {u, readers[0]} and data.draw(st.booleans()):
            taken |= {u, v := readers[0]}
            before = [Output(w) for w in graph.predecessors[u]]
            others = [Output(w) for w in graph.predecessors[v] if w != u]

            def both(x: Tensor, n: int, *rest: Tensor, u: int = u, v: int = v) -> Tensor:
                return x + v + (x + u + sum(rest[:n])) + sum(rest[n:])

            call = Call(both, (Input(0), len(before), *before, *others), {})
            replacements.append(Replacement((u, v), "both", "both", call, {v: None}))
    rewritten, place = replace(program, replacements)
    assert len(rewritten.graph) == len(graph) - len(replacements)
    x = torch.tensor([1.0, 2.0])
    for got, expected in zip(rewritten.run((x,)), program.run((x,)), strict=True):
        assert torch.equal(got, expected)
    for r in replacements:
        assert (
            place[r.operators[0]] == place[r.operators[1]]
            and rewritten.graph.operators[place[r.operators[0]]].name == "both"
        )


def three() -> Program:
    module = Function(lambda p, x: x.relu().sigmoid() + x.relu().tanh())
    return capture(module.eval(), (image(),))


def test_what_cannot_be_replaced_is_told() -> None:
    program = three()  # relu, sigmoid, relu, tanh, add
    call = program.calls[1]
    with pytest.raises(ValueError, match="takes"):
        replace(program, [Replacement((0, 1), "a", "a", call, {1: None}), Replacement((1,), "b", "b", call, {1: None})])
    with pytest.raises(ValueError, match=r"computes the output of operator 1 \(sigmoid\) no more"):
        replace(program, [Replacement((0, 1), "a", "a", Call(torch.relu, (Input(0),), {}), {})])
    with pytest.raises(ValueError, match="cycle"):
        around = Call(torch.add, (Output(1), Output(3)), {})
        replace(program, [Replacement((0, 4), "a", "a", around, {0: None, 4: None})])


def test_a_part_computes_what_the_whole_does() -> None:
    program = three()
    alone = part(program, [1, 3, 4])
    a, b = image(), image()
    assert [len(alone.examples), len(alone.graph.edges), names(alone)] == [2, 2, ["sigmoid", "tanh", "add"]]
    assert torch.equal(alone.run((a, b))[0], a.sigmoid() + b.tanh())
    assert [program.signature(0), program.signature(1)] == [
        program.signature(2),
        "aten.sigmoid.default(float32[2, 4, 10, 10])",
    ]
