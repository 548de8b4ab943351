"""Scheduled training of modules, losses and optimizers of many forms: as eager to the bit, or refused, nothing changed."""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from training import CLASSES, VALUES, WEIGHTS, equal, prepare_training, sgd

import systems
from systems.base import Unsupported

pytestmark = pytest.mark.usefixtures("one_thread")

Loss: TypeAlias = "Callable[[Any, Tensor], Tensor]"


class Form(nn.Module):
    """A forward that does what it is given, over two linear layers and a buffer."""

    def __init__(self, act: Callable[..., Any]):
        super().__init__()
        self.act, self.a, self.b = act, nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        return self.act(self, x)


class Tracking(nn.Module):
    """A loss with a buffer and an attribute of its own."""

    def __init__(self, assigns: bool = False):
        super().__init__()
        self.assigns, self.last = assigns, torch.zeros(())
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        value = functional.mse_loss(y - self.mean, target)
        if self.assigns:
            self.mean = 0.9 * self.mean + y.detach().mean(0)
        else:
            self.mean.mul_(0.9).add_(y.detach().mean(0))
        self.last = value.detach()
        return value


def averaging(m: Form, x: Tensor) -> Tensor:
    y = m.a(x)
    m.mean.data.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    return m.b(y - m.mean)


def checkpointed(m: Form, x: Tensor) -> Tensor:
    return checkpoint(lambda y: m.b(m.norm(m.a(y)).tanh()), x, use_reentrant=False)


def penalized(m: Form) -> Loss:
    return lambda y, t: functional.mse_loss(y, t) + 0.1 * sum(p.square().sum() for p in m.parameters())


def form(act: Callable[..., Any]) -> Form:
    torch.manual_seed(0)
    module = Form(act)
    module.norm, module.again = nn.BatchNorm1d(8), module.a  # a submodule of two names
    return module


@pytest.mark.parametrize("choice", ["nimble", "nimble_released"])
@pytest.mark.parametrize(
    ("act", "make_loss", "target"),
    [
        (lambda m, x: m.b(m.a(x).relu()), penalized, VALUES),
        (checkpointed, lambda m: functional.mse_loss, VALUES),
        (averaging, lambda m: functional.mse_loss, VALUES),
        (lambda m, x: m.a(x * WEIGHTS.view(1, 8)), lambda m: functional.mse_loss, VALUES),
        (lambda m, x: m.a(x), lambda m: nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), CLASSES),
        (lambda m, x: m.a(x), lambda m: Tracking(), VALUES),
        (
            lambda m, x: (m.a(x), m.b(x)),
            lambda m: lambda y, t: functional.mse_loss(y[0], t) + 0.3 * functional.cross_entropy(y[1], CLASSES),
            VALUES,
        ),
    ],
)
def test_a_step_is_eagers(act: Any, make_loss: Callable[[Form], Loss], target: Tensor, choice: str) -> None:
    module, reference = form(act), form(act)
    optimizer, eager = sgd(module), sgd(reference)
    loss, own = make_loss(module), make_loss(reference)
    step = systems.load(choice).prepare_training(module, optimizer, loss, (VALUES,), target)
    for i in range(4):
        x = VALUES.roll(i)
        eager.zero_grad()
        value = own(reference(x), target)
        value.backward()
        eager.step()
        assert torch.equal(step(x, target), value)
    step.close()
    assert equal(module.state_dict(), reference.state_dict()) and equal(optimizer.state_dict(), eager.state_dict())
    if isinstance(loss, Tracking) and isinstance(own, Tracking):
        assert torch.equal(loss.mean, own.mean) and not loss.last


def test_a_constant_of_the_loss_is_read_before_it_is_written() -> None:
    """Whichever operator waits, in a view too."""
    mean, view = torch.zeros(8), slice(2, 6)

    def loss(y: Tensor, target: Tensor) -> Tensor:
        value = functional.mse_loss(y - mean, target) + mean[view].square().sum()
        mean.mul_(0.5)
        mean[view].add_(1.0)
        return value

    module = form(lambda m, x: m.a(x))
    step = prepare_training(module, sgd(module), loss, VALUES, VALUES)
    (state,) = (piece for piece in step.schedule.graph.state if "constant" in piece.name)
    assert state.readers.bit_count() == 2 and state.writers.bit_count() == 2 and not mean.any()
    step.close()


def assigning(m: Form, x: Tensor) -> Tensor:
    m.mean.data = m.mean + 1
    return m.a(x) * m.mean


def registering(m: Form, x: Tensor) -> Tensor:
    if not hasattr(m, "mask"):
        m.register_buffer("mask", torch.ones(8), persistent=False)
    return m.a(x) * m.mask


def drawing(draw: Callable[[], float]) -> Callable[..., Any]:
    return lambda m, x: m.b(m.a(x)) if draw() < 0.5 else m.b(x)


def linear(m: Form, x: Tensor) -> Tensor:
    return m.a(x)


def captured(m: Form) -> Loss:
    weight = m.a.weight
    return lambda y, t: functional.mse_loss(y, t) + weight.square().sum()


@contextmanager
def unchanged(module: nn.Module, loss: object) -> Iterator[None]:
    def state() -> list[Any]:
        parts = [*module.modules(), *(loss.modules() if isinstance(loss, nn.Module) else [])]
        members = [(*vars(part).values(), *part._buffers.values(), *part._modules.values()) for part in parts]
        return [list(map(id, row)) for row in members] + [random.getstate(), str(numpy.random.get_state())]

    before, values, drawn = state(), copy.deepcopy(module.state_dict()), torch.get_rng_state()
    yield
    assert state() == before and equal(module.state_dict(), values) and torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize(
    ("act", "make_loss", "reason"),
    [
        (assigning, lambda m: functional.mse_loss, r"assigns the \.data of mean"),
        (registering, lambda m: functional.mse_loss, r"it sets mask in a forward pass: call the module once before"),
        (drawing(random.random), lambda m: functional.mse_loss, "it draws from Python's random numbers"),
        (drawing(numpy.random.random), lambda m: functional.mse_loss, "it draws from numpy's random numbers"),
        (linear, lambda m: Tracking(assigns=True), r"it sets loss\.mean in a forward pass"),
        (linear, captured, r"it reads a\.weight from before the step"),
        (
            lambda m, x: functional.embedding(CLASSES, m.a.weight, sparse=True),
            lambda m: functional.mse_loss,
            "sparse gradients",
        ),
    ],
)
def test_what_a_capture_would_get_wrong_is_refused(act: Any, make_loss: Callable[[Form], Loss], reason: str) -> None:
    module = form(act)
    loss = make_loss(module)
    with unchanged(module, loss), pytest.raises(Unsupported, match=reason):
        prepare_training(module, sgd(module), loss, VALUES, VALUES)


def test_what_forward_registers_is_trained_with_once_it_is_there() -> None:
    module = form(registering)
    module(VALUES)
    prepare_training(module, sgd(module), functional.mse_loss, VALUES, VALUES).close()


def test_a_loss_gets_what_it_keeps_back() -> None:
    """A function too, and an object that is no module."""
    remembered = SimpleNamespace(last=None, parts=[])

    class Criterion:
        def __init__(self) -> None:
            self.last, self.parts = torch.zeros(()), [1.0]

        def __call__(self, y: Tensor, target: Tensor) -> Tensor:
            self.last = functional.mse_loss(y, target)
            self.parts.append(self.last.detach())  # type: ignore[arg-type]
            return self.last

        def method(self, y: Tensor, target: Tensor) -> Tensor:
            return self(y, target)

    def function(y: Tensor, target: Tensor) -> Tensor:
        function.last = functional.mse_loss(y, target)  # type: ignore[attr-defined]
        return function.last  # type: ignore[attr-defined, no-any-return]

    criterion = Criterion()
    remembered.last = criterion.last
    for loss in (criterion, criterion.method, function):
        module = form(linear)
        prepare_training(module, sgd(module), loss, VALUES, VALUES).close()
    assert criterion.last is remembered.last and criterion.parts == [1.0] and not hasattr(function, "last")


@pytest.mark.parametrize(
    ("module", "inputs", "target", "error", "message"),
    [
        (torch.relu, (VALUES,), VALUES, Unsupported, "no module of PyTorch"),
        (nn.Linear(8, 8), VALUES, VALUES, TypeError, r"has to be a tuple: \(x,\)"),
        (nn.Linear(8, 8), (VALUES,), 5, Unsupported, "input 1 is a int, not a tensor"),
        (nn.Linear(8, 8).requires_grad_(False), (VALUES,), VALUES, Unsupported, "no parameter of the optimizer requires"),
    ],
)
def test_what_is_no_step_is_refused(module: Any, inputs: Any, target: Any, error: type, message: str) -> None:
    optimizer = sgd(module if isinstance(module, nn.Module) else nn.Linear(8, 8))
    with pytest.raises(error, match=message):
        systems.load("nimble").prepare_training(module, optimizer, functional.mse_loss, inputs, target)


@pytest.mark.parametrize("choice", ["nimble", "nimble_released"])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_parameter_that_is_frozen_or_unfrozen_since_is_told(choice: str, frozen: bool) -> None:
    module = form(linear)
    module.a.bias.requires_grad_(not frozen)
    step = systems.load(choice).prepare_training(module, sgd(module), functional.mse_loss, (VALUES,), VALUES)
    step(VALUES, VALUES)
    module.a.bias.requires_grad_(frozen)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(RuntimeError, match="was frozen, or no more"):
        step(VALUES, VALUES)
    assert equal(module.state_dict(), before)
    step.close()


def test_parameters_that_an_outer_optimizer_takes_on_are_told() -> None:
    module = form(lambda m, x: m.b(m.a(x)))
    optimizer = torch.optim.RMSprop(module.a.parameters(), lr=1e-3)
    step = systems.load("nimble_released").prepare_training(module, optimizer, functional.mse_loss, (VALUES,), VALUES)
    optimizer.add_param_group({"params": list(module.b.parameters())})
    with pytest.raises(ValueError, match="held 2 parameters when the step was prepared, and now 4"):
        step(VALUES, VALUES)
    step.close()


def test_steps_of_several_batch_sizes_take_turns() -> None:
    module, reference = form(linear), form(linear)
    optimizer, eager = (torch.optim.AdamW(m.parameters(), amsgrad=True) for m in (module, reference))
    sizes = {n: (VALUES[:n], VALUES[:n]) for n in (4, 2)}
    steps = {n: prepare_training(module, optimizer, functional.mse_loss, *data) for n, data in sizes.items()}
    plain = systems.load("eager").prepare_training(reference, eager, functional.mse_loss, (VALUES,), VALUES)
    for n in (4, 2, 2, 4, 4, 2):
        assert torch.equal(steps[n](*sizes[n]), plain(*sizes[n]))
    assert equal(module.state_dict(), reference.state_dict()) and equal(optimizer.state_dict(), eager.state_dict())
    for step in steps.values():
        step.close()
