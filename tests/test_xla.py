"""XLA by torchax: against eager where both import, and its reasons where they do not."""

import os
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import models
import systems
from systems.base import Unsupported
from systems.xla import system as xla

REASON = systems.load("xla").unsupported("cpu")
RUNS = pytest.mark.skipif(REASON is not None, reason=str(REASON))
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


@RUNS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["squeezenet", "mobilenet_v2_cifar10", "bert"])
def test_it_computes_what_eager_does(name: str, device: str) -> None:
    size = {"layers": 2} if name == "bert" else {}
    loaded = models.load(name, 2, device=device, **size)
    prepared = systems.load("xla").prepare(loaded.module, loaded.inputs)
    for inputs in (loaded.inputs, tuple(x.flip(0) for x in loaded.inputs)):
        with torch.no_grad():
            expected = tree_leaves(loaded.module(*inputs))
        for out, reference in zip(tree_leaves(prepared(*inputs)), expected, strict=True):
            torch.testing.assert_close(out, reference, rtol=1e-2, atol=1e-3 * float(reference.abs().max()))
        assert not expected[0][0].equal(expected[0][1])  # what is flipped differs
    prepared.close()
    with pytest.raises(RuntimeError, match="closed"):
        prepared(*loaded.inputs)


class Sizes(nn.Module):
    """It returns integers of 64 bits, beside a mapping."""

    def forward(self, x: Tensor, i: Tensor) -> dict[str, Tensor]:
        return {"largest": x.argmax(1), "rows": x[i] * 2}


@RUNS
def test_types_and_structure_are_eagers() -> None:
    x, i = torch.randn(4, 3), torch.tensor([3, 0])
    out = systems.load("xla").prepare(Sizes().eval(), (x, i))(x, i)
    expected = Sizes()(x, i)
    assert list(out) == list(expected) and out["largest"].dtype == torch.int64
    assert all(out[key].equal(expected[key]) for key in expected)


@RUNS
def test_what_it_cannot_compile_has_a_reason() -> None:
    class Rare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.special.airy_ai(x)

    with pytest.raises(Unsupported, match=r"torchax cannot translate it|XLA cannot compile it"):
        systems.load("xla").prepare(Rare().eval(), (torch.randn(3),))
    with pytest.raises(Unsupported, match="JAX would round float64 to 32 bits"):
        systems.load("xla").prepare(nn.ReLU(), (torch.randn(3, dtype=torch.float64),))


@RUNS
def test_the_process_keeps_its_state() -> None:
    before = torch.backends.mha.get_fastpath_enabled(), dict(os.environ)
    systems.load("xla").prepare(nn.ReLU(), (torch.randn(3),))
    assert (torch.backends.mha.get_fastpath_enabled(), dict(os.environ)) == before


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    xla._missing.cache_clear()
    monkeypatch.setattr(xla, "find_spec", lambda name: None)
    assert systems.load("xla").unsupported("cpu") == f"jax and torchax not installed: pip install {xla.PACKAGES}"
    xla._missing.cache_clear()


def test_a_torchax_that_does_not_import_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """As beside a newer torch. What it has set before it failed is set back."""
    xla._missing.cache_clear()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    monkeypatch.setattr(xla, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "torchax", None)
    reason = systems.load("xla").unsupported("cpu")
    assert reason is not None and reason.startswith(f"torchax does not import beside torch {torch.__version__}: ")
    assert torch.backends.mha.get_fastpath_enabled() == fast_path and xla.PREALLOCATION not in os.environ
    xla._missing.cache_clear()
