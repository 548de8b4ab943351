"""The exported program that compilers share: its digests, inputs and outputs."""

import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from conftest import ROOT
from modules import Lambda
from torch import Tensor, nn
from torch.nn import functional as F

import models
from systems.base import Unsupported
from systems.compilers.exported import Exported


class Stateful(nn.Module):
    def __init__(self, act: Any):
        super().__init__()
        self.act, self.norm = act, nn.BatchNorm2d(3).train()
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("scratch", torch.zeros(2, 3, 8, 8))

    def forward(self, x: Tensor) -> Any:
        return self.act(self, x)


class Small(nn.Module):
    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)).relu()).mean((2, 3))


def small(seed: int = 0) -> nn.Module:
    return Small(seed).eval()


def image(batch: int = 2) -> tuple[Tensor]:
    return (torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(1)),)


class TestDigests:
    def test_content_tells_weights_apart_and_structure_does_not(self) -> None:
        one, same, other = (Exported(small(seed), image()) for seed in (0, 0, 1))
        assert one.structure == same.structure == other.structure
        assert one.content == same.content != other.content

    @pytest.mark.parametrize(
        "changed",
        [
            lambda: Exported(small(), image(3)),
            lambda: Exported(small().double(), (image()[0].double(),)),
            lambda: Exported(small(), (image()[0].to(memory_format=torch.channels_last),)),
            lambda: Exported(nn.Sequential(small(), nn.ReLU()).eval(), image()),
            lambda: Exported(Lambda(lambda x: x + 1), image()),
        ],
    )
    def test_structure_tells_shapes_dtypes_layouts_and_operators_apart(self, changed: Any) -> None:
        assert changed().structure != Exported(small(), image()).structure

    def test_constants_count(self) -> None:
        constants = torch.full((8,), 1.0), torch.full((8,), 2.0)
        one, two = (Exported(Lambda(partial(torch.mul, c)), image()) for c in constants)
        assert one.structure == two.structure and one.content != two.content

    @pytest.mark.slow
    def test_they_are_the_same_in_every_process(self) -> None:
        code = (
            "import models; from systems.compilers.exported import Exported; m = models.load('squeezenet', 1);"
            "e = Exported(m.module, m.inputs); print(e.structure, e.content)"
        )
        run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        here = models.load("squeezenet", 1)
        exported = Exported(here.module, here.inputs)
        assert run.stdout.split() == [exported.structure, exported.content]


class TestExported:
    def test_one_switch_for_tf32_follows_the_kind_of_model(self) -> None:
        cudnn, cublas = torch.backends.cudnn, torch.backends.cuda.matmul
        before = cudnn.allow_tf32, cublas.allow_tf32
        try:
            for convolutions, products in ((True, False), (False, True), (True, True)):
                cudnn.allow_tf32, cublas.allow_tf32 = convolutions, products
                assert Exported(small(), image()).allow_tf32 == convolutions
                assert Exported(nn.Linear(3, 4).eval(), (torch.randn(2, 3),)).allow_tf32 == products
        finally:
            cudnn.allow_tf32, cublas.allow_tf32 = before

    def test_layout(self) -> None:
        assert not Exported(small(), image()).channels_last
        assert Exported(small(), (image()[0].to(memory_format=torch.channels_last),)).channels_last
        assert not Exported(nn.Linear(3, 4).eval(), (torch.randn(2, 3),)).channels_last

    @pytest.mark.parametrize(
        ("act", "changed"),
        [
            (lambda self, x: self.norm(x), "norm.running_mean"),
            (
                lambda self, x: F.instance_norm(x, self.norm.running_mean, self.norm.running_var),
                "running_mean",
            ),
            (lambda self, x: x.flatten(1).mul_(2), "input"),
        ],
    )
    def test_what_changes_its_state_or_inputs_is_refused(self, act: Any, changed: str) -> None:
        with pytest.raises(Unsupported, match=f"changes its .*{changed}"):
            Exported(Stateful(act), image())

    @pytest.mark.parametrize(
        ("act", "written"),
        [
            (lambda self, x: x + self.count.add_(1), "count"),
            (lambda self, x: self.count.view(1).relu_() + x, "count"),
            (lambda self, x: torch.add(x, 1, out=self.scratch), "scratch"),
        ],
    )
    def test_what_changes_a_buffer_takes_and_returns_it(self, act: Any, written: str) -> None:
        module = Stateful(act)
        exported = Exported(module, image())
        assert [id(x) for x in exported.written] == [id(getattr(module, written))]
        assert len(exported.outputs()) == 2

    @pytest.mark.parametrize(
        "act",
        [
            lambda self, x: (x + 1).relu_().flatten(1).mul_(2),
            lambda self, x: torch.zeros_like(x).copy_(x) + self.count,
        ],
    )
    def test_what_changes_what_it_has_computed_is_not(self, act: Any) -> None:
        Exported(Stateful(act), image())

    def test_what_cannot_be_captured_is_refused(self) -> None:
        with pytest.raises(Unsupported, match=r"torch\.export cannot capture it"):
            Exported(Lambda(lambda x: x if x.sum() > 0 else -x), image())

    def test_shapes_that_depend_on_values_are_refused(self) -> None:
        with pytest.raises(Unsupported, match="depends on the values"):
            Exported(Lambda(lambda x: torch.bincount(x.flatten().long().clamp(0))), image())

    def test_outputs_take_the_modules_form(self) -> None:
        exported = Exported(Lambda(lambda x: {"a": x + 1, "b": [x * 2, None, 3]}), (torch.ones(2),))
        assert [tuple(o.shape) for o in exported.outputs()] == [(2,), (2,)]
        out = exported.settled([torch.zeros(2), torch.ones(2)])
        assert out["b"][1:] == [None, 3] and out["a"].sum() == 0 and out["b"][0].sum() == 2
        with pytest.raises(ValueError, match="1 output in the place of 2"):
            exported.settled([torch.zeros(2)])
