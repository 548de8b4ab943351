"""What forward passes change is undone, in a scripted module too."""

import pytest
import torch
from torch import Tensor, nn

import systems
from systems.base import Unsupported
from systems.training.restore import state_kept


class Counting(nn.Module):
    """It assigns a buffer anew in each call."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return self.linear(x) + self.count


@pytest.mark.parametrize("form", ["eager", "scripted", "in part"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_buffer_that_forward_assigns_is_the_one_of_before(form: str) -> None:
    counting = Counting()
    own = counting if form == "eager" else torch.jit.script(counting)
    module = nn.Sequential(own, nn.ReLU()) if form == "in part" else own
    before = own.count
    with state_kept(module):
        module(torch.ones(2, 3))
        assert torch.equal(own.count, torch.ones(3))
    assert own.count is before and torch.equal(before, torch.zeros(3))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_takes_a_module_with_a_scripted_part() -> None:
    module = nn.Sequential(torch.jit.script(nn.Linear(3, 3)), nn.ReLU()).eval()
    x = torch.randn(2, 3)
    prepared = systems.load("torchscript").prepare(module, (x,))
    torch.testing.assert_close(prepared(x), module(x).detach())


class Store:
    """What a module may hold that is no module, with others in it."""

    def __init__(self) -> None:
        self.last: Tensor | None = None
        self.rows = [{"sum": torch.zeros(3)}]
        self.above = self


class Holding(nn.Module):
    """It adds up in a store, or keeps there what it made once."""

    def __init__(self, is_adding: bool):
        super().__init__()
        self.is_adding, self.stores = is_adding, {"own": (Store(),)}

    def forward(self, x: Tensor) -> Tensor:
        store = self.stores["own"][0]
        if self.is_adding:
            store.rows[0]["sum"] = store.rows[0]["sum"] + x
            return store.rows[0]["sum"] * 2
        if store.last is None:
            store.last = torch.arange(3.0)
        return x + store.last


@pytest.mark.parametrize("choice", ["nimble", "opara_fused", "onnxruntime"])
def test_what_an_object_of_a_module_adds_up_is_refused(choice: str) -> None:
    module, x = nn.Sequential(Holding(is_adding=True)).eval(), torch.ones(3)
    says = r"^it changes its own state in a forward pass \(0\.stores\.own\.0\.rows\.0\.sum\), which is no buffer$"
    with pytest.raises(Unsupported, match=says):
        systems.load(choice).prepare(module, (x,))
    assert type(module(x)) is Tensor and torch.equal(module(x), 4 * x)


def test_what_an_object_of_a_module_keeps_is_none_of_a_trace() -> None:
    module, x = Holding(is_adding=False).eval(), torch.ones(3)
    prepared = systems.load("nimble").prepare(module, (x,))
    assert module.stores["own"][0].last is None
    torch.testing.assert_close(prepared(x), module(x))
    assert type(module.stores["own"][0].last) is Tensor
    prepared.close()


def test_an_object_without_another_tensor_stays_as_it_is() -> None:
    module = Holding(is_adding=False)
    store = module.stores["own"][0]
    with state_kept(module):
        store.calls = 1
    assert store.calls == 1
