"""Bags of embeddings that hold one row each: which become lookups, and what must stay."""

from collections.abc import Callable

import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from rewriting import COUNTING, DEVICES, Function, names
from torch import Tensor, nn
from torch.nn import functional

from systems.scheduling.graph.capture import capture
from systems.scheduling.passes.replace_bags import replace_bags

MODES = ("sum", "mean", "max")


def bags(forward: Callable[..., object], padding: int | None = None, mode: str = "sum") -> Function:
    torch.manual_seed(0)
    return Function(forward, a=nn.EmbeddingBag(9, 4, mode=mode, padding_idx=padding), b=nn.EmbeddingBag(5, 4)).eval()


def single(p: nn.ModuleDict, x: Tensor) -> Tensor:
    beginnings = torch.arange(x.shape[0], device=x.device)
    return p["a"](x, beginnings) + p["b"](x % 5, beginnings)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
@examples(4)
@given(rows=st.lists(st.integers(0, 8), min_size=1, max_size=6), others=st.data())
def test_a_bag_of_one_row_is_a_lookup(mode: str, device: str, rows: list[int], others: st.DataObject) -> None:
    module, x = bags(single, mode=mode).to(device), torch.tensor(rows, device=device)
    program, decisions = replace_bags(capture(module, (x,)), COUNTING)
    assert [(d.chosen, d.kind, d.pattern) for d in decisions] == [
        ("lookup", "replace_bags", f"embedding_bag of {n}x4") for n in (9, 5)
    ]
    assert names(program).count("embedding") == 2 and not {"embedding_bag", "arange"} & set(names(program))
    length = st.lists(st.integers(0, 8), min_size=len(rows), max_size=len(rows))
    for y in (x, torch.tensor(others.draw(length), device=device)):
        with torch.no_grad():
            assert torch.equal(program.run((y,))[0], module(y))


def test_what_else_reads_the_beginnings_still_does() -> None:
    module, x = bags(lambda p, x: p["a"](x, y := torch.arange(x.shape[0])) * y[:, None]), torch.tensor([3, 1, 4])
    program, decisions = replace_bags(capture(module, (x,)), COUNTING)
    assert len(decisions) == 1 and names(program).count("arange") == 1
    with torch.no_grad():
        assert torch.equal(program.run((x,))[0], module(x))


@pytest.mark.parametrize("named", range(5))
def test_arguments_that_are_left_out_are_the_operators_own(named: int) -> None:
    further = (False, 1, False, None)[:named]
    module = bags(lambda p, x: torch.embedding_bag(p["a"].weight, x, torch.arange(x.shape[0]), *further)[0])
    x = torch.tensor([3, 1, 4])
    program, decisions = replace_bags(capture(module, (x,)), COUNTING)
    assert len(decisions) == 1 and "embedding_bag" not in names(program)
    with torch.no_grad():
        assert torch.equal(program.run((x,))[0], module(x))


STAYS: dict[str, Function] = {
    "bags of two rows": bags(lambda p, x: p["a"](x, torch.arange(0, x.shape[0], 2))),
    "a first bag without rows": bags(lambda p, x: p["a"](x, torch.arange(x.shape[0]) - 1 + 1)),
    "an end is named": bags(
        lambda p, x: functional.embedding_bag(x, p["a"].weight, torch.arange(x.shape[0]), include_last_offset=True)
    ),
    "a row that does not count": bags(lambda p, x: p["a"](x, torch.arange(x.shape[0])), padding=3),
    "rows have weights": bags(
        lambda p, x: functional.embedding_bag(
            x, p["a"].weight, torch.arange(x.shape[0]), mode="sum", per_sample_weights=x.float()
        )
    ),
    "another output is read": bags(
        lambda p, x: torch.ops.aten.embedding_bag.default(p["a"].weight, x, torch.arange(x.shape[0]))[:2]
    ),
    "fewer bags than rows": bags(lambda p, x: p["a"](x, torch.arange(x.shape[0] - 1))),
    "two dimensions": bags(lambda p, x: p["a"](x.view(2, 2))),
}


@pytest.mark.parametrize("case", STAYS)
def test_other_bags_stay(case: str) -> None:
    module, x = STAYS[case], torch.tensor([3, 1, 4, 1])
    captured = capture(module, (x,))
    program, decisions = replace_bags(captured, COUNTING)
    assert program is captured and decisions == [] and "embedding_bag" in names(captured)
    with torch.no_grad():
        expected = module(x)
    for got, reference in zip(program.run((x,)), expected if isinstance(expected, tuple) else [expected], strict=True):
        assert torch.equal(got, reference)
