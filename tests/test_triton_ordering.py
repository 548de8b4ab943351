"""Kernels that order few numbers: against PyTorch, and in the programs in which the pass puts them."""

from importlib import import_module

import pytest
import torch
from drawing import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from rewriting import Function
from torch import Tensor, nn
from triton_cases import device_with_kernels, favour

import models
from systems.scheduling.graph.capture import capture
from systems.scheduling.passes.context import Context
from systems.scheduling.passes.fold_constants import fold_constants
from systems.scheduling.passes.own_kernels import SEPARATE
from systems.scheduling.passes.select_sorts import OWN, select_sorts

device = device_with_kernels
CONTEXT = Context(favour("opweave"), favour("opweave"))
DRAWN = examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
SPECIAL = [0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), float("-inf"), 65504.0, -65504.0, 6e-8]


@DRAWN
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
@pytest.mark.slow
def test_the_largest_are_those_of_pytorch(device: str, data: st.DataObject, dtype: torch.dtype) -> None:
    """Of equal ones any column will do: it holds the number, and no other place of the row has it."""
    draw = data.draw
    rows, columns = draw(st.integers(1, 9)), draw(st.sampled_from([1, 2, 7, 32, 33, 128, 200, 1024]))
    count = draw(st.integers(1, min(columns, 32)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    x = torch.randn(rows, columns, generator=random)
    if draw(st.booleans()):
        x = torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL), (rows, columns), generator=random)]
    x = x.to(device, dtype)
    values, places = import_module("systems.kernels.ordering").Top(count)(x)
    torch.testing.assert_close(values, x.topk(count).values, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(x.gather(1, places), values, rtol=0, atol=0, equal_nan=True)
    assert all(len(set(row)) == count for row in places.tolist())


@DRAWN
@given(data=st.data(), dtype=st.sampled_from([torch.int32, torch.int64]), is_inverted=st.booleans())
@pytest.mark.slow
def test_a_sort_is_that_of_pytorch(device: str, data: st.DataObject, dtype: torch.dtype, is_inverted: bool) -> None:
    """Equal ones stay as they stood. Groups end as counts of them say; numbers that are of no group count nowhere."""
    ordering = import_module("systems.kernels.ordering")
    size, bins = data.draw(st.sampled_from([1, 2, 5, 63, 64, 1024, 1025, 2100])), data.draw(st.integers(2, 40))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    far = torch.iinfo(dtype)
    x = torch.randint(-2, bins + 3, (size,), generator=random, dtype=dtype)
    x[torch.randint(0, size, (2,), generator=random)] = torch.tensor([far.min, far.max], dtype=dtype)
    x = x.to(device)
    values, places, *ranks = ordering.Sort(is_inverted)(x)
    expected, stood = x.sort(stable=True)
    assert values.equal(expected) and places.equal(stood) and len(ranks) == is_inverted
    for inverse in ranks:
        assert inverse.equal(places.argsort())
    ends = ordering.GroupEnds(bins)(x)
    assert ends.tolist() == [int(((x >= 0) & (x <= i)).sum()) for i in range(bins)] and ends.dtype is torch.int32


def routed(p: object, scores: Tensor) -> tuple[Tensor, ...]:
    """As a mixture of experts routes rows: 3 of 8 experts each."""
    weights, experts = scores.softmax(-1).topk(3)
    chosen, places = experts.reshape(-1).sort()
    counts = torch.histc(chosen.float() if chosen.device.type == "cpu" else chosen.int(), bins=8, min=0, max=7)
    inverse = torch.empty_like(places)
    inverse[places] = torch.arange(len(places), device=places.device)
    return weights, places // 3, counts.cumsum(0, dtype=torch.int32), inverse


def test_a_router_takes_a_kernel_each_where_that_is_faster(device: str) -> None:
    scores = torch.randn(20, 8, generator=torch.Generator().manual_seed(0)).to(device)
    captured = capture(Function(routed).eval(), (scores,))
    program, decisions = select_sorts(captured, CONTEXT)
    assert [d.pattern.partition(" of ")[0] for d in decisions] == [
        "topk",
        "sort + empty_like + arange + index_put",
        "_to_copy + histc + cumsum",
    ]
    assert {d.chosen for d in decisions} == {OWN}
    own = [operator.target.partition("[")[0] for operator in program.graph.operators if "opweave" in operator.target]
    assert sorted(own) == ["opweave.groupends", "opweave.sort", "opweave.top"]
    names = {operator.name for operator in program.graph.operators}
    assert names.isdisjoint({"arange", "index_put", "histc", "_to_copy", "empty_like"})
    got, expected = program.run((scores,)), captured.run((scores,))
    assert got[0].equal(expected[0]) and got[2].equal(expected[2])
    # A sort that is not stable may have equal ones in another order: what each place has is told by both together.
    experts = scores.topk(3).indices.reshape(-1)
    ordered = torch.empty_like(experts)
    ordered[got[3]] = experts
    assert ordered.equal(experts.sort().values) and got[1].equal(torch.argsort(got[3]) // 3)
    kept, decisions = select_sorts(captured, Context(favour("aten"), favour("aten")))
    assert kept.calls == captured.calls and {d.chosen for d in decisions} == {SEPARATE}


class Scattering(nn.Module):
    """Numbers scattered to where a sort says: of a buffer, or made anew from `first` on."""

    def __init__(self, device: str, first: int, is_own: bool) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.arange(6, device=device) if is_own else None)
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        places = x.sort()[1]
        made = torch.arange(self.first, self.first + 6, device=x.device) if self.numbers is None else self.numbers
        return torch.empty_like(places).index_put((places,), made)


@pytest.mark.parametrize(("first", "is_own", "is_inverse"), [(0, False, True), (1, False, False), (0, True, False)])
def test_folded_numbers_are_counted_too(device: str, first: int, is_own: bool, is_inverse: bool) -> None:
    """What `fold_constants` has made of arange is a tensor. A buffer is one too, which its owner may write."""
    x = torch.tensor([3, 1, 2, 9, 8, 7], device=device)
    folded, _ = fold_constants(capture(Scattering(device, first, is_own).eval(), (x,)), CONTEXT)
    program, (decision,) = select_sorts(folded, CONTEXT)
    assert ("index_put" in decision.pattern) is is_inverse
    assert program.run((x,))[0].tolist() == [first + i for i in (2, 0, 1, 5, 4, 3)]


@pytest.mark.parametrize(
    "forward",
    [
        lambda p, x, i: x.topk(2, largest=False),
        lambda p, x, i: x.topk(2, dim=0),
        lambda p, x, i: x.topk(40),
        lambda p, x, i: x.t().topk(2),
        lambda p, x, i: i.sort(descending=True),
        lambda p, x, i: x.sort(),
        lambda p, x, i: i[::2].sort(),
        lambda p, x, i: torch.histc(i.float(), 8, 0, 8).cumsum(0, dtype=torch.int32),  # bins of other widths
        lambda p, x, i: torch.histc(i.float(), 8, 0, 7).cumsum(0),
        lambda p, x, i: torch.histc(i.float() / 2, 8, 0, 7).cumsum(0, dtype=torch.int32),
        lambda p, x, i: ((c := torch.histc(i.float(), 8, 0, 7)) + 1, c.cumsum(0, dtype=torch.int32)),
    ],
)
def test_what_no_kernel_takes_stays(device: str, forward: object) -> None:
    x, i = torch.randn(60, 60, device=device), torch.randint(0, 8, (20,), device=device)
    captured = capture(Function(forward).eval(), (x, i))  # type: ignore[arg-type]
    program, decisions = select_sorts(captured, CONTEXT)
    assert program.calls == captured.calls and not decisions


def upto(like: Tensor, first: int = 0) -> Tensor:
    return torch.arange(first, first + len(like), device=like.device)


@pytest.mark.parametrize(
    "forward",
    [
        lambda p, i: (s := i.sort()[1], torch.empty_like(s).index_put((s,), upto(s, 1))),  # from 1 on
        lambda p, i: (s := i.sort()[1], torch.zeros_like(s).index_put((s,), upto(s))),  # into zeros
        lambda p, i: (s := i.sort()[1], torch.empty_like(s).index_put((s,), upto(s), True)),  # added
        lambda p, i: (s := i.sort()[0], torch.empty_like(s).index_put((s,), upto(s))),  # to where values say
    ],
)
def test_what_is_no_inverse_is_scattered_apart(device: str, forward: object) -> None:
    captured = capture(Function(forward).eval(), (torch.randperm(20, device=device),))  # type: ignore[arg-type]
    program, (decision,) = select_sorts(captured, CONTEXT)
    assert decision.pattern == "sort of 20" and "index_put" in {operator.name for operator in program.graph.operators}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_mixture_of_experts_is_routed_the_same() -> None:
    model = models.load("qwen3_moe", 1, device="cuda", size="small")
    module = model.module.eval().to(torch.bfloat16)
    captured = capture(module, model.inputs)
    program, decisions = select_sorts(captured, CONTEXT)
    assert len(decisions) == 6 and {d.chosen for d in decisions} == {OWN}
    (got,), (expected,) = program.run(model.inputs), captured.run(model.inputs)
    torch.testing.assert_close(got, expected, rtol=5e-2, atol=5e-2)
