"""What a training step cannot do, told: what was changed since it was prepared, what cannot be scheduled."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from training import Optimizers, adamw, batch, net, prepare_training, sgd

import systems
from runners.cell.training import loss
from systems.base import Unsupported
from systems.training.held_module import HeldModule

pytestmark = pytest.mark.usefixtures("one_thread")
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def wrong(change: Callable[[Any], None], make: Optimizers = sgd) -> Callable[[], Any]:
    """A step after which something was changed behind its back."""

    def call() -> Any:
        module = net()
        optimizer = make(module)
        step = prepare_training(module, optimizer, loss, *batch(0))
        try:
            change((module, optimizer, step))
            return step(*batch(0))
        finally:
            step.close()

    return call


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (wrong(lambda c: c[2](batch(0)[0][:2], batch(0)[1])), ValueError, r"input 0 is float32\[2, 3, 8, 8\]"),
        (wrong(lambda c: c[2](batch(0)[0].double(), batch(0)[1])), ValueError, "input 0 is float64"),
        (wrong(lambda c: c[2](batch(0)[0], batch(0)[1].float())), ValueError, r"input 1 is float32\[4\]"),
        (wrong(lambda c: c[2](batch(0)[0])), ValueError, "prepared for 2 inputs, called with 1"),
        (wrong(lambda c: c[0].norm.eval()), RuntimeError, "BatchNorm2d was in training form"),
        (wrong(lambda c: c[0].double()), RuntimeError, "has been replaced"),
        (
            wrong(lambda c: setattr(c[0].stem.weight, "data", torch.zeros(8, 3, 3, 3))),
            RuntimeError,
            "a parameter or buffer of the module has moved",
        ),
        (wrong(lambda c: setattr(c[0], "a", nn.Linear(8, 8))), RuntimeError, "has been replaced"),
        (wrong(lambda c: setattr(c[0], "calls", torch.zeros(2))), RuntimeError, "calls of the module has been replaced"),
        (
            wrong(lambda c: c[1].param_groups[0].update(momentum=0.5)),
            ValueError,
            "momentum of parameter group 0 has changed",
        ),
        (wrong(lambda c: c[1].param_groups[0].update(betas=(0.5, 0.9)), adamw), ValueError, "betas of parameter group 0"),
        (
            wrong(lambda c: c[1].add_param_group({"params": [torch.ones(1)]})),
            ValueError,
            "1 parameter group, now there are 2",
        ),
    ],
)
def test_what_was_changed_since_is_told(call: Callable[[], Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(change, message, marks=GPU)
        for change, message in (
            (lambda m: m.norm.eval(), "BatchNorm2d was in training form"),
            (lambda m: setattr(m, "a", nn.Linear(8, 8, device="cuda")), "has been replaced"),
            (lambda m: setattr(m.stem.weight, "data", torch.zeros(8, 3, 3, 3, device="cuda")), "has moved"),
            (lambda m: m.stem.weight.requires_grad_(False), "was frozen, or no more"),
        )
    ],
)
def test_a_step_in_one_cuda_graph_tells_what_was_changed_since(change: Callable[[Any], None], message: str) -> None:
    module = net("cuda", counts=False)
    inputs = batch(0, "cuda")
    step = systems.load("cuda_graph").prepare_training(module, sgd(module), loss, inputs[:1], inputs[1])
    step(*inputs)
    change(module)
    with pytest.raises(RuntimeError, match=message):
        step(*inputs)
    step.close()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
def test_a_forward_that_assigns_a_buffer_is_not_captured_in_one_cuda_graph(device: str) -> None:
    module = net(device)
    calls, inputs = module.calls, batch(0, device)
    with pytest.raises(Unsupported, match="its forward assigns calls"):
        systems.load("cuda_graph").prepare_training(module, sgd(module), loss, inputs[:1], inputs[1])
    assert module.calls is calls


def test_a_held_module_names_what_a_forward_assigns_and_puts_it_back() -> None:
    module = net()
    held, calls = HeldModule(module), module.calls
    assert not held.replaced()
    module(*batch(0)[:1])
    assert held.replaced() == ["calls"]
    held.put_back()
    assert module.calls is calls and not held.replaced()


@pytest.mark.parametrize(
    ("module", "make", "criterion", "reason"),
    [
        (
            net,
            lambda m: torch.optim.RMSprop(m.parameters()),
            loss,
            "RMSprop steps cannot be scheduled: SGD's, Adam's and AdamW's can",
        ),
        (net, lambda m: torch.optim.Adam(m.parameters(), decoupled_weight_decay=True), loss, "is AdamW"),
        (net, lambda m: sgd(m, dampening=0.5), loss, "first step differs"),
        (net, lambda m: sgd(m, differentiable=True), loss, "differentiable"),
        (net, lambda m: torch.optim.SGD([torch.ones(2, requires_grad=True)]), loss, "not the module's"),
        (net, lambda m: torch.optim.SGD([m.unused]), loss, "depends on no parameter"),
        (net, sgd, functional.mse_loss, "cannot be traced"),
        (
            net,
            sgd,
            lambda y, t: functional.cross_entropy(y, t, reduction="none"),
            r"shape \[4\], and must be a single number",
        ),
    ],
)
def test_what_cannot_be_scheduled_says_why_in_one_line(module: Any, make: Any, criterion: Any, reason: str) -> None:
    made = module()
    with pytest.raises(Unsupported, match=reason) as caught:
        prepare_training(made, make(made), criterion, *batch(0))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda self, x: self.linear(x if x.sum() > 0 else -x), "cannot be traced"),
        (lambda self, x: self.linear(x.mul_(2)), "changes input 0 in place"),
        (
            lambda self, x: checkpoint(lambda y: self.linear(functional.dropout(y)), x, use_reentrant=False),
            "its backward, as of a checkpoint, would draw other random numbers",
        ),
    ],
)
def test_a_forward_that_cannot_be_scheduled_says_why(forward: Any, reason: str) -> None:
    module = type("Model", (nn.Module,), {"forward": forward})()
    module.linear = nn.Linear(4, 4)
    with pytest.raises(Unsupported, match=reason):
        prepare_training(module, sgd(module), loss, torch.randn(2, 4), torch.tensor([0, 1]))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_an_lstm_on_a_cpu_is_trained_without_onednn() -> None:
    module, x = Recurrent(), torch.randn(2, 4)
    with pytest.raises(Unsupported, match=r"prepare the step under torch\.backends\.mkldnn\.flags\(enabled=False\)$"):
        prepare_training(module, sgd(module), functional.mse_loss, x, x)
    own = deepcopy(module)
    with torch.backends.mkldnn.flags(enabled=False):
        step = prepare_training(own, sgd(own), functional.mse_loss, x, x)
    eager = systems.load("eager").prepare_training(module, sgd(module), functional.mse_loss, (x,), x)
    for _ in range(2):
        torch.testing.assert_close(step(x, x), eager(x, x))
    step.close()


def test_autocast_is_that_of_the_prepared_step() -> None:
    module, x = nn.Linear(4, 4), torch.randn(2, 4)
    own = deepcopy(module)
    half = torch.autocast("cpu", dtype=torch.bfloat16)
    eager = systems.load("eager").prepare_training(module, sgd(module), functional.mse_loss, (x,), x)
    with half:
        step = prepare_training(own, sgd(own), functional.mse_loss, x, x)
    for _ in range(2):
        with half:  # anew for each step: it keeps the weights that it has cast
            torch.testing.assert_close(step(x, x), eager(x, x))
    with pytest.raises(
        RuntimeError, match="under autocast to bfloat16 on cpu and is called without autocast: prepare again"
    ):
        step(x, x)
    step.close()


def test_a_hook_on_a_gradient_or_a_step_is_not_passed_over() -> None:
    module = net()
    with pytest.raises(Unsupported, match="hook on its gradient"):
        module.stem.weight.register_hook(lambda g: g * 2)
        prepare_training(module, sgd(module), loss, *batch(0))
    module = net()
    optimizer = sgd(module)
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(Unsupported, match="step hooks"):
        prepare_training(module, optimizer, loss, *batch(0))


def test_systems_that_do_not_train_say_so() -> None:
    module = net()
    with pytest.raises(Unsupported, match="opara runs inference only"):
        systems.load("opara").prepare_training(module, sgd(module), loss, batch(0)[:1], batch(0)[1])
    with pytest.raises(Unsupported, match="rewriting passes are for inference"):
        fused = systems.load("nimble", fold_batch_norm=True)
        fused.prepare_training(module, sgd(module), loss, batch(0)[:1], batch(0)[1])
