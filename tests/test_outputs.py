"""Outputs are the caller's own: what a write in one of them, in an input or in a weight changes is as in eager execution."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from drawing import examples
from hypothesis import example, given
from hypothesis import strategies as st
from modules import Lambda
from torch import Tensor, nn

import systems


class Returning(nn.Module):
    """Returns sigmoid(x), [4, 4], and what each of its steps leaves: a view, a copy, or something computed."""

    table: Tensor

    def __init__(self, steps: list[str]):
        super().__init__()
        self.steps = steps
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("table", torch.randn(4, 4))

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs = [x.sigmoid()]
        for step in self.steps:
            outputs.append(self.step(step, x, outputs[-1]))
        return outputs

    def step(self, name: str, x: Tensor, latest: Tensor) -> Tensor:
        match name:
            case "input":
                return x
            case "weight":
                return self.weight
            case "table":
                return self.table
            case "ones":
                return torch.ones(4, 4)
            case "made":  # of nothing that a call brings, and then as another shape
                return (self.weight * 2).t().reshape(-1)
            case "turn":
                return latest.transpose(0, -1)
            case "part":
                return latest[..., -2:]
            case "flat":
                return latest.reshape(-1)
            case "copy":
                return latest.clone()
            case "cast":
                return latest.to(torch.float32, copy=True)
            case "contiguous":
                return latest.contiguous()
            case "dropout":
                return nn.functional.dropout(latest, training=False)
            case "once":
                return latest * 1
            case "sigmoid":
                return latest.sigmoid()
        raise ValueError(name)


SOURCES = ("input", "weight", "table", "ones", "made")
STEPS = (*SOURCES, "turn", "part", "flat", "copy", "cast", "contiguous", "dropout", "once", "sigmoid")


@pytest.mark.usefixtures("cache_folder")
@examples(25)
@given(st.lists(st.sampled_from(STEPS), min_size=1, max_size=6), st.booleans())
@example(["sigmoid", "copy"], False)
@example(["input", "part", "copy"], True)
@example(["table", "turn", "copy", "flat"], False)
@example(["made", "made"], True)
def test_a_write_changes_what_it_changes_in_eager_execution(steps: list[str], is_fused: bool) -> None:
    module = Returning(steps).eval()
    own = deepcopy(module)
    prepared = systems.load("nimble", merge_equal=is_fused, fold_constants=is_fused, fuse_elementwise=is_fused).prepare(
        own, (torch.randn(4, 4),)
    )
    for written in range(4 + len(steps)):
        x = torch.randn(4, 4)
        own_x = x.clone()
        tensors = [x, module.weight, module.table, *module(x)]
        own_tensors = [own_x, own.weight, own.table, *prepared(own_x)]
        with torch.no_grad():
            tensors[written].mul_(2)
            own_tensors[written].mul_(2)
        for i, (out, expected) in enumerate(zip(own_tensors, tensors, strict=True)):
            assert torch.equal(out, expected), i
    prepared.close()


@pytest.mark.usefixtures("cache_folder")
@examples(15)
@given(st.integers(0, 2), st.integers(0, 2), st.booleans(), st.booleans())
@example(1, 0, True, False)
@example(1, 1, True, True)
def test_a_copy_has_its_own_memory_for_what_reads_memory(first: int, offset: int, is_copied: bool, is_fused: bool) -> None:
    """as_strided counts from where the memory of a tensor begins: a copy's begins with it, a view's before it."""

    def act(x: Tensor) -> Tensor:
        part = x.sigmoid()[first:]
        whole = part.clone() if is_copied else part
        return whole[..., 1:].as_strided((2, 2), (1, 2), offset) * 2

    module = Lambda(act).eval()
    prepared = systems.load("nimble", merge_equal=is_fused, fold_constants=is_fused, fuse_elementwise=is_fused).prepare(
        module, (torch.randn(4, 4),)
    )
    x = torch.randn(4, 4)
    assert torch.equal(prepared(x), module(x))
    prepared.close()
