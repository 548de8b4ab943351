"""Writes into parts of a tensor: a kernel each, and the answers of eager execution."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from drawing import examples
from hypothesis import example, given
from hypothesis import strategies as st
from modules import Lambda
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_structure

import models
import systems
from systems.scheduling.graph.capture import capture, from_graph
from systems.scheduling.graph.partial_writes import WRITE_PARTS, writes_of
from systems.scheduling.graph.program import Input, Program
from systems.scheduling.graph.stored_program import from_document, to_document
from systems.scheduling.simulate.estimate import demand_of
from systems.scheduling.simulate.gpu import load

BASES = ("zeros", "input", "computed", "turned", "expanded", "weight")
IN_ORDER = [base for base in BASES if base != "turned"]  # of another export copies into the order of its dimensions
PLACES: dict[str, tuple[int | slice, ...]] = {
    "rows": (slice(1, 3),),
    "row": (-1,),
    "columns": (slice(None), slice(-3, None)),
    "block": (slice(0, -2), slice(1, 4)),
    "steps": (slice(0, None, 2), slice(None, None, 3)),
    "one": (2, 1),
    "column": (slice(None), 0),
    "none": (slice(3, 3),),
    "all": (slice(None),),
}
PARTS = [name for name in PLACES if name != "all"]  # no view leads to all of a tensor
VALUES = ("number", "true", "scalar", "broadcast", "computed", "other part", "sum", "wide")
READS = ("nothing", "whole", "part")

Step = tuple[str, str, str]


class Writing(nn.Module):
    """Writes into parts of a tensor of [4, 6]; returns it, and what was read of it between writes."""

    def __init__(self, base: str, steps: list[Step]):
        super().__init__()
        self.base, self.steps = base, steps
        self.weight = nn.Parameter(torch.linspace(0, 1, 24).reshape(4, 6))

    def forward(self, x: Tensor, row: Tensor) -> list[Tensor]:
        y = self.first(x, row)
        outputs = []
        for place, value, read in self.steps:
            at = PLACES[place]
            match value:
                case "number":
                    y[at] = 2.5
                case "true":
                    y[at] = True
                case "scalar":
                    y[at] = row[0]
                case "broadcast":
                    y[at] = row[:1]
                case "computed":
                    y[at] = x[at].sigmoid()
                case "other part":
                    y[at] = y[:1, :1]
                case "sum":
                    y[at] += x[at]
                case "wide":
                    y[at] = torch.ones(1, dtype=torch.float64)
            if read == "whole":
                outputs.append(y.exp())
            elif read == "part":
                outputs.append(y[1:, 2] * 2)
        return [y, *outputs]

    def first(self, x: Tensor, row: Tensor) -> Tensor:
        match self.base:
            case "zeros":
                return x.new_zeros(4, 6)
            case "input":
                return x.clone()
            case "computed":
                return x.sigmoid()
            case "turned":
                return x.reshape(6, 4).sigmoid().t()
            case "expanded":
                return row.sigmoid().expand(4, 6).clone()
            case "weight":
                return self.weight.detach().clone()
        raise ValueError(self.base)


def counted(program: Program) -> Counter[str]:
    return Counter(operator.name for operator in program.graph.operators)


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6), torch.randn(6)


@pytest.mark.usefixtures("cache_folder")
@examples(60)
@given(
    st.sampled_from(BASES),
    st.lists(st.tuples(st.sampled_from([*PLACES]), st.sampled_from(VALUES), st.sampled_from(READS)), min_size=1, max_size=5),
    st.booleans(),
)
@example("zeros", [("block", "number", "nothing"), ("block", "other part", "nothing"), ("one", "sum", "part")], True)
@example("weight", [("rows", "scalar", "nothing"), ("row", "true", "whole"), ("row", "wide", "nothing")], False)
def test_answers_are_those_of_eager_execution(base: str, steps: list[Step], is_fused: bool) -> None:
    module = Writing(base, steps).eval()
    prepared = systems.load("nimble", merge_equal=is_fused, fold_constants=is_fused, fuse_elementwise=is_fused).prepare(
        module, inputs()
    )
    for x, row in (inputs(), inputs()):
        given = x.clone(), row.clone()
        with torch.no_grad():
            expected = module(x.clone(), row)
        outputs = prepared(x, row)
        assert torch.equal(x, given[0]) and torch.equal(row, given[1])
        for out, reference in zip(outputs, expected, strict=True):
            assert torch.equal(out, reference) and out.stride() == reference.stride()
    prepared.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("cache_folder")
@pytest.mark.parametrize("base", BASES)
def test_a_cuda_graph_holds_them(base: str) -> None:
    steps = [("block", "number", "whole"), ("one", "true", "nothing"), ("row", "scalar", "nothing")]
    steps += [("columns", "broadcast", "part"), ("steps", "computed", "nothing"), ("rows", "sum", "nothing")]
    module = Writing(base, steps).cuda().eval()
    prepared = systems.load("nimble").prepare(module, tuple(x.cuda() for x in inputs()))
    for _ in range(2):
        x, row = (x.cuda() for x in inputs())
        with torch.no_grad():
            expected = module(x.clone(), row)
        for out, reference in zip(prepared(x, row), expected, strict=True):
            torch.testing.assert_close(out, reference)
    prepared.close()


def test_a_number_of_the_host_fills_what_it_is_copied_to() -> None:
    """Of torch 2.11's export of `y[at] = 2.5` on a GPU. No CUDA Graph holds a copy from the host."""
    graph = fx.Graph()
    y, number, row = (graph.placeholder(name) for name in ("y", "number", "row"))
    copies = [graph.call_function(torch.ops.aten.copy.default, (y, source)) for source in (number, row)]
    graph.output(tuple(copies))
    with FakeTensorMode():
        values = torch.empty(4, 6, device="cuda"), torch.empty(()), torch.empty(6, device="cuda")
    for node, value in zip((y, number, row, *copies), (*values, values[0], values[0]), strict=True):
        node.meta["val"] = value
    references = [Input(0), torch.tensor(2.5), Input(1)]
    program = from_graph(graph, references, tree_structure([0, 0]), (torch.ones(4, 6), torch.ones(6)))
    assert [call.function for call in program.calls] == [torch.ops.aten.fill.Tensor, torch.ops.aten.copy.default]
    x, filled = torch.randn(4, 6), torch.full((4, 6), 2.5)
    for out, expected in zip(program.run((x, torch.ones(6))), (filled, torch.ones(4, 6)), strict=True):
        assert torch.equal(out, expected)
    assert {call.produces.shape for call in program.calls} == {(4, 6)}


def test_what_reads_a_buffer_reads_no_number_of_the_host_in_its_place() -> None:
    """A buffer without dimensions takes a number from the host, and is read afterwards."""
    graph = fx.Graph()
    buffer, number = graph.placeholder("buffer"), graph.placeholder("number")
    written = graph.call_function(torch.ops.aten.copy.default, (buffer, number))
    read = graph.call_function(torch.ops.aten.exp.default, (written,))
    graph.output((written, read))
    with FakeTensorMode():
        on_gpu, on_host = torch.empty((), device="cuda"), torch.empty(())
    for node, value in ((buffer, on_gpu), (number, on_host), (written, on_gpu), (read, on_gpu)):
        node.meta["val"] = value
    program = from_graph(graph, [Input(0), torch.tensor(2.5)], tree_structure([0, 0]), (torch.ones(()),))
    assert [call.function for call in program.calls] == [torch.ops.aten.fill.Tensor, torch.ops.aten.exp.default]
    filled, read_of_it = program.run((torch.ones(()),))
    assert filled == 2.5 and torch.equal(read_of_it, filled.exp())


@examples(40)
@given(
    st.sampled_from(IN_ORDER), st.lists(st.tuples(st.sampled_from(PARTS), st.sampled_from(VALUES)), min_size=1, max_size=5)
)
def test_writes_in_a_row_are_one_operator(base: str, writes: list[tuple[str, str]]) -> None:
    """But for those that read what was written: `y[at] += v` writes twice, a sum and then what it has written."""
    program = capture(Writing(base, [(place, value, "nothing") for place, value in writes]).eval(), inputs())
    names = counted(program)
    rows = 1 + sum({"other part": 1, "sum": 2}.get(value, 0) for _, value in writes)
    assert names["write_parts"] + names["slice_scatter"] + names["select_scatter"] <= rows
    assert not names["fill"] and not names["copy"]


def test_a_number_is_written_as_exactly_as_it_is() -> None:
    def act(x: Tensor) -> Tensor:
        y = x * 1
        y[1:, 0] = (1 << 60) + 1
        y[0] = True
        return y

    x = torch.ones(3, 2, dtype=torch.int64)
    program = capture(Lambda(act).eval(), (x,))
    assert counted(program)["write_parts"] == 1 and torch.equal(program.run((x,))[0], act(x))


def test_a_write_of_what_lies_in_overlapping_memory_stays_as_it_is() -> None:
    def act(x: Tensor) -> Tensor:
        return torch.slice_scatter(x[:1].expand(4, 6), x[1:3, :] * 2, 0, 1, 3)

    x = torch.randn(4, 6)
    program = capture(Lambda(act).eval(), (x,))
    assert counted(program)["slice_scatter"] == 1 and torch.equal(program.run((x,))[0], act(x))


def test_what_is_put_in_another_place_than_it_was_taken_from_is_no_write_there() -> None:
    def act(x: Tensor) -> Tensor:
        y = x * 2
        return torch.slice_scatter(y, torch.select_scatter(y[2:], x[:2, 0], 1, 3), 0, 0, 2)

    x = torch.randn(4, 6)
    assert torch.equal(capture(Lambda(act).eval(), (x,)).run((x,))[0], act(x))


def test_it_is_stored_and_read_again() -> None:
    module = Writing("zeros", [("block", "number", "nothing"), ("rows", "computed", "nothing")]).eval()
    program = capture(module, inputs())
    again = from_document(to_document(program, module), module, program.examples)
    x, row = inputs()
    assert counted(again)["write_parts"] == 1 and torch.equal(again.run((x, row))[0], program.run((x, row))[0])


def test_swins_masks_take_an_operator_each() -> None:
    """Each is written in nine parts; eager execution fills these in place."""
    model = models.load("swin_t", 1, size="small")
    program = capture(model.module, model.inputs)
    names = counted(program)
    assert names["write_parts"] == names["new_zeros"] > 0 and not names["fill"] and not names["slice_scatter"]
    for v, call in enumerate(program.calls):
        if call.function is WRITE_PARTS:
            assert len(list(writes_of(call.args[1]))) == len([*call.args[2], *call.args[3]]) == 9
            assert demand_of(program, v, load("h200")).kernels == 10
