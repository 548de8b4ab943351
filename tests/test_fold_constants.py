"""What no input changes is computed once, in modules that write buffers, take views and fill shapes as well."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import models
import systems
from systems.profiling.timing import Timer
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.scheduling.passes.rewriting import Rewriting


def folded(program: Program) -> Program:
    return Rewriting(fold_constants=True).apply(program, Timer(torch.device("cpu")))[0]


class Mixed(nn.Module):
    """Steps over values of [3, 3], each of x, of a weight, of a buffer, of constants or of two earlier ones."""

    state: Tensor

    def __init__(self, steps: list[tuple[str, int, int]]):
        super().__init__()
        self.steps = steps
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("state", torch.randn(3, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [x, self.weight, torch.arange(9.0).view(3, 3)]
        for kind, i, j in self.steps:
            a, b = values[i % len(values)], values[j % len(values)]
            match kind:
                case "add":
                    values.append(a + b)
                case "product":
                    values.append(torch.tanh(a @ b))
                case "view":
                    values.append(a.t())
                case "parts":
                    values.append(torch.cat(a.split([1, 2])[::-1]))
                case "zeros":
                    values.append(torch.zeros_like(a) + 1)
                case "filled":
                    values.append(a.new_full((3, 3), 2.5))
                case "state":
                    values.append(self.state * 2)
                case "write":
                    self.state.copy_(torch.sigmoid(a))
        return values[-1], values[len(values) // 2].sin() + x


KINDS = ("add", "product", "view", "parts", "zeros", "filled", "state", "write")
STEP = st.tuples(st.sampled_from(KINDS), st.integers(0, 20), st.integers(0, 20))


@examples(25)
@given(st.lists(STEP, min_size=1, max_size=9), st.integers(0, 99))
def test_folding_leaves_every_output_as_it_was(steps: list[tuple[str, int, int]], seed: int) -> None:
    """In three calls, before the last of which a weight and a buffer are written."""
    torch.manual_seed(seed)
    module = Mixed(steps).eval()
    program = capture(module, (torch.zeros(3, 3),))
    other = folded(program)
    assert len(other.graph) <= len(program.graph)
    for call in range(3):
        if call == 2:
            with torch.no_grad():
                module.weight.mul_(-0.5)
                module.state.add_(1)
        x, before = torch.randn(3, 3), module.state.clone()
        expected, after = [t.clone() for t in program.run((x,))], module.state.clone()
        module.state.data.copy_(before)  # unseen by derivations: it is as it was
        other.derived.refresh()
        for out, reference in zip(other.run((x,)), expected, strict=True):
            torch.testing.assert_close(out, reference)
        torch.testing.assert_close(module.state, after)


class Table(nn.Module):
    """A bias looked up in a table of weights, of which nothing depends on x; noise; and the table itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        bias = self.table[torch.arange(4).flip(0)].view(2, 2)
        return x + bias, bias.exp(), x + torch.rand(2, 2)


def test_what_is_returned_and_what_is_random_is_computed_in_each_call() -> None:
    program = capture(Table().eval(), (torch.zeros(2, 2),))
    names = [operator.name for operator in folded(program).graph.operators]
    assert sorted(names) == ["add", "add", "exp", "rand"]
    first, second = (folded(program).run((torch.zeros(2, 2),)) for _ in range(2))
    assert torch.equal(first[0], second[0]) and not torch.equal(first[2], second[2])
    assert first[1].data_ptr() != second[1].data_ptr()


def test_what_a_run_writes_is_no_constant() -> None:
    """It would be derived anew in each call."""
    for steps, num_derived in (([("state", 0, 0)], 2), ([("state", 0, 0), ("write", 0, 0)], 1)):  # one is of arange
        program = capture(Mixed([*steps, ("add", 3, 0)]).eval(), (torch.zeros(3, 3),))
        assert len(folded(program).derived.derived) == num_derived


class Doubled(nn.Module):
    """What a view makes of a weight times two, plus x."""

    def __init__(self, view: Callable[[Tensor], Tensor]):
        super().__init__()
        self.view, self.weight = view, nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.view(self.weight * 2)


@pytest.mark.parametrize(
    ("view", "num_views"),
    [
        (lambda doubled: doubled.t(), 0),
        (lambda doubled: doubled[:, :2], 1),  # leaves elements out
        (lambda doubled: doubled.view(4, 4, 1).expand(4, 4, 3), 1),  # repeats them
        (lambda doubled: doubled.view(4, 4, 1).expand(4, 4, 3).transpose(0, 1), 2),  # and so does what that view reads
    ],
)
def test_views_that_leave_elements_out_or_repeat_them_stay(view: Callable[[Tensor], Tensor], num_views: int) -> None:
    module = Doubled(view).eval()
    x = torch.randn_like(view(module.weight.detach()).contiguous())
    other = folded(capture(module, (x,)))
    assert len(other.graph) == num_views + 1, [operator.name for operator in other.graph.operators]
    for one in other.derived.derived:
        assert torch._prims_common.is_non_overlapping_and_dense_or_false(one.tensor)
    torch.testing.assert_close(other.run((x,))[0], module(x))


def test_a_constant_holds_no_more_memory_than_its_own() -> None:
    """Rows of a product, in a tensor of a quarter of its size."""
    other = folded(capture(Doubled(lambda doubled: doubled[:1]).eval(), (torch.zeros(1, 4),)))
    (one,) = other.derived.derived
    assert one.tensor.shape == (1, 4) and one.tensor.untyped_storage().nbytes() == 4 * 4


class Rewound(nn.Module):
    """Writes what is known into a buffer that x is added to: the write belongs to each call."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.state.index_copy_(0, torch.arange(2), torch.ones(2).exp()) + x


def test_a_write_of_a_constant_belongs_to_each_call() -> None:
    module, x = Rewound().eval(), torch.zeros(3)
    ready = systems.load("nimble", fold_constants=True).prepare(module, (x,))
    for _ in range(2):
        assert torch.equal(ready(x)[:2], torch.ones(2).exp())
        assert torch.equal(module.state, torch.tensor([1.0, 1.0, 0.0]).exp() * torch.tensor([1, 1, 0]))
        module.state.data.zero_()
    ready.close()


@pytest.mark.parametrize(
    ("name", "names"),
    [("dlrm", {"arange"}), pytest.param("swin_t", {"fill", "slice_scatter", "write_parts"}, marks=pytest.mark.slow)],
)
def test_masks_and_places_of_the_zoo_are_computed_once(name: str, names: set[str]) -> None:
    """DLRM's offsets of 26 bags; Swin's masks of shifted windows, filled in from a tensor made like the image."""
    model = models.load(name, 1, size="small")
    ready = systems.load("nimble", fold_constants=True).prepare(model.module, model.inputs)
    operators = {operator.name for operator in ready.program.graph.operators}
    assert not operators & names
    inputs = model.fresh_inputs(1)
    with torch.no_grad():
        torch.testing.assert_close(ready(*inputs), model.module(*inputs))
    ready.close()
