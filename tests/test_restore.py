"""What forward passes change is undone, in a scripted module too."""

from collections import deque
from collections.abc import Callable
from types import CellType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import systems
from systems.base import Unsupported
from systems.training.restore import attributes_kept, state_kept


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


class Slots:
    """A store without a dictionary."""

    __slots__ = ("__own", "unset")

    def __init__(self) -> None:
        self.__own = torch.zeros(3)

    def add(self, x: Tensor) -> Tensor:
        self.__own = self.unset = self.__own + x
        return self.__own


class Deriving(Slots):
    """And one with both."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = torch.zeros(3)

    def add(self, x: Tensor) -> Tensor:
        self.sum = super().add(x)
        return self.sum


def adds_in_cell() -> Callable[[Tensor], Tensor]:
    total = torch.zeros(3)

    def add(x: Tensor) -> Tensor:
        nonlocal total, later
        total = later = total + x
        return total

    if total.numel() == 0:
        later = total  # it is empty, as long as nothing is added
    return add


def adds_in_list() -> Callable[[Tensor], Tensor]:
    totals = [torch.zeros(3)]

    def add(x: Tensor) -> Tensor:
        totals.append(totals[-1] + x)
        return totals[-1]

    return add


class InObject(nn.Module):
    """It adds up in an object."""

    def __init__(self, store: Any):
        super().__init__()
        self.store = store

    def forward(self, x: Tensor) -> Tensor:
        return self.store.add(x) * 2  # type: ignore[no-any-return]


class InDeque(nn.Module):
    """It adds up at the end of a deque of two."""

    def __init__(self) -> None:
        super().__init__()
        self.last = deque([torch.zeros(3)], maxlen=2)

    def forward(self, x: Tensor) -> Tensor:
        self.last.append(self.last[-1] + x)
        return self.last[-1] * 2


class InFunction(nn.Module):
    """It adds up by a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) * 2


def in_own_closure() -> nn.Module:
    total = torch.zeros(3)

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal total
            total = total + x
            return total * 2

    return Module()


ADDING: dict[str, Callable[[], nn.Module]] = {  # by where they add up
    "store._Slots__own": lambda: InObject(Slots()),
    "store.sum": lambda: InObject(Deriving()),
    "last.1": InDeque,
    "function.total": lambda: InFunction(adds_in_cell()),
    "function.totals.1": lambda: InFunction(adds_in_list()),
    "forward.total": in_own_closure,
}


@pytest.mark.parametrize("place", ADDING)
def test_what_others_hold_for_a_module_is_given_back_and_told(place: str) -> None:
    module, x = ADDING[place]().eval(), torch.ones(3)
    with attributes_kept(module) as changes:
        module(x)
        module(x)
    assert place in changes.assigned
    assert torch.equal(module(x), 2 * x) and torch.equal(module(x), 4 * x)
    other = ADDING[place]().eval()
    with pytest.raises(Unsupported, match="it changes its own state in a forward pass"):
        systems.load("nimble").prepare(other, (x,))
    assert torch.equal(other(x), 2 * x)


def test_slots_and_attributes_stay_apart() -> None:
    module = InObject(Deriving())
    with attributes_kept(module):
        module(torch.ones(3))
    assert [*vars(module.store)] == ["sum"]


@pytest.mark.parametrize("make", [Slots, adds_in_cell])
def test_what_was_not_set_is_not_set_again(make: Callable[[], Any]) -> None:
    made = make()
    module = InObject(made) if isinstance(made, Slots) else InFunction(made)
    with attributes_kept(module):
        module(torch.ones(3))
    if isinstance(made, Slots):
        assert not hasattr(made, "unset")
    else:
        assert dict(zip(made.__code__.co_freevars, made.__closure__, strict=True))["later"] == CellType()


def test_the_closure_of_a_loss_is_given_back() -> None:
    loss = adds_in_cell()
    with attributes_kept(nn.Linear(3, 3), loss) as changes:
        loss(torch.ones(3))
    assert "loss.total" in changes.assigned and torch.equal(loss(torch.ones(3)), torch.ones(3))


def test_an_object_without_another_tensor_stays_as_it_is() -> None:
    module = Holding(is_adding=False)
    store = module.stores["own"][0]
    with state_kept(module):
        store.calls = 1
    assert store.calls == 1
