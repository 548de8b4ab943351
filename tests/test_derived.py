"""Weights that passes derive follow what is written into the module's own, and inputs lie in memory as they are."""

from contextlib import closing

import pytest
import torch
from torch import Tensor, nn

import systems
from systems.base import Unsupported
from systems.nimble import Nimble
from systems.scheduling.graph.derived import Derivations, Derived

ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def folded() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_folded_weights_follow_an_optimizer(name: str, is_fused: bool) -> None:
    """A fused step raises no version counter."""
    module, x = folded(), torch.randn(2, 3, 8, 8)
    optimizer = OPTIMIZERS[name](module.parameters(), lr=0.1, fused=is_fused)  # type: ignore[operator]
    with closing(systems.load("nimble", fold_batch_norm=True).prepare(module, (x,))) as fast:
        for _ in range(2):
            with torch.no_grad():
                torch.testing.assert_close(fast(x), module(x), rtol=1e-4, atol=1e-4)
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(fast(x), module(x), rtol=1e-4, atol=1e-4)


def test_only_a_fused_step_has_all_derived_again() -> None:
    weight, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    derivations = Derivations([Derived.of(lambda w: 2 * w, weight)])
    other.grad = torch.ones(3)
    torch.optim.SGD([other], lr=0.1).step()
    assert not derivations.refresh()
    torch.optim.SGD([other], lr=0.1, fused=True).step()
    assert derivations.refresh() and not derivations.refresh()


def negated(device: str) -> Tensor:
    """Its memory holds the opposite of its values."""
    x = torch.fft.rfft(torch.randn(4, 6, device=device)).conj().imag
    assert x.is_neg()
    return x


@pytest.mark.parametrize(
    ("system", "device"),
    [
        *(("nimble", "cpu"), ("nimble_fused", "cpu")),
        *(pytest.param(system, "cuda", marks=ON_A_GPU) for system in ("nimble", "nimble_fused", "cuda_graph")),
    ],
)
def test_an_input_that_a_flag_negates_is_refused(system: str, device: str) -> None:
    module, x = nn.Sequential(nn.ReLU(), nn.Tanh()).eval().to(device), negated(device)
    with pytest.raises(Unsupported, match=r"input 0 is negated by a flag alone: pass x\.resolve_neg"):
        systems.load(system).prepare(module, (x,))
    with closing(systems.load(system).prepare(module, (x.resolve_neg(),))) as fast:
        torch.testing.assert_close(fast(x.resolve_neg()), module(x))
        with pytest.raises(ValueError, match="resolve_neg"):
            fast(x)


def test_a_conjugated_input_is_refused() -> None:
    class Real(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return torch.view_as_real(z.resolve_conj()).relu()

    z = torch.randn(3, dtype=torch.complex64).conj()
    with pytest.raises(Unsupported, match="resolve_conj"):
        systems.load("nimble").prepare(Real().eval(), (z,))


class Writes(nn.Module):
    """A buffer that each call doubles."""

    h: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("h", torch.ones(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.h.mul_(2.0)
        return (x + self.h).relu() * 1.5


def test_an_input_in_a_buffer_that_is_written_is_refused() -> None:
    module, x = Writes().eval(), torch.ones(6, 4)
    fast = Nimble(module).eval()
    fast.prepare(x)
    for inside in (module.h, module.h[:], module.h.view(4, 6).view(6, 4)):
        with pytest.raises(ValueError, match="input 0 lies in a buffer that the module writes: pass a copy of it"):
            fast(inside)
    before = module.h.clone()
    with torch.no_grad():
        torch.testing.assert_close(fast(module.h.clone()), (before + 2 * before).relu() * 1.5)
    assert torch.equal(module.h, 2 * before)
