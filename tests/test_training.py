"""Scheduled training against eager's: losses, weights, statistics, the optimizer's state, random numbers."""

import copy
import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from training import (
    DEVICES,
    GPU,
    SMALL_BERT,
    Optimizers,
    adam,
    adamw,
    batch,
    eager_step,
    equal,
    groups,
    net,
    prepare_training,
    sgd,
)

import models
import systems
from runners.cell.training import loss
from systems.nimble import Nimble
from systems.scheduling.execution.cpu_executor import CpuExecutor
from systems.scheduling.execution.training_step import TrainingStep
from systems.scheduling.graph.joint_graph import capture_step
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.graph.stateful_program import StatefulProgram
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.stream_assignment import assign_streams, single_stream

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("model", "options", "steps", "make"),
    [
        ("mobilenet_v2_cifar10", {}, 2, sgd),
        ("bert", SMALL_BERT, 8, adamw),
        pytest.param("efficientnet_b0_cifar10", {}, 4, adamw, marks=pytest.mark.slow),
        pytest.param("bert", SMALL_BERT, 100, sgd, marks=pytest.mark.slow),
        *(pytest.param(m, {}, 100, sgd, marks=pytest.mark.slow) for m in ("resnet50_cifar10", "mobilenet_v2_cifar10")),
        pytest.param("efficientnet_b0_cifar10", {}, 100, adamw, marks=pytest.mark.slow),
        pytest.param("bert", {"sequence": 64}, 100, adamw, marks=pytest.mark.slow),
    ],
)
def test_losses_and_weights_are_eagers_to_the_bit(model: str, options: dict, steps: int, make: Optimizers) -> None:
    loaded = models.load(model, 2, training=True, **options)
    module, reference = loaded.module, copy.deepcopy(loaded.module)
    optimizer, eager = make(module), make(reference)
    classes, shape = (64, (2, options.get("sequence", 1))) if model == "bert" else (10, (2,))
    data = [(*loaded.fresh_inputs(i), torch.randint(classes, shape)) for i in range(steps)]
    step = prepare_training(module, optimizer, loss, loaded.inputs, data[0][-1])
    torch.manual_seed(1)
    expected = [eager_step(reference, eager, *d).item() for d in data]
    torch.manual_seed(1)
    got = [step(*d).item() for d in data]
    step.close()
    assert got == expected and len(set(got)) == steps
    assert equal(module.state_dict(), reference.state_dict())
    assert equal(optimizer.state_dict(), eager.state_dict())


@pytest.mark.parametrize("scheduler", [assign_streams, pytest.param(single_stream, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "make", [sgd, adamw, adam, groups, lambda m: sgd(m, momentum=0.0), lambda m: adamw(m, amsgrad=True)]
)
def test_scheduled_and_eager_steps_take_turns(make: Optimizers, scheduler: Callable[[OperatorGraph], Schedule]) -> None:
    """Learning rates change, eager steps and loaded checkpoints come in between, and all is as if eager alone trained."""
    module, reference = net(), net()
    optimizer, eager = make(module), make(reference)
    step = prepare_training(module, optimizer, loss, *batch(0), assign=scheduler)
    state = torch.get_rng_state()
    for i in range(60):
        if i in (20, 40):
            for group in (*optimizer.param_groups, *eager.param_groups):
                group["lr"] *= 0.3
        if i == 30:  # load_state_dict puts new tensors into the optimizer
            checkpoint, of_optimizer = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
            step(*batch(99))
            module.load_state_dict(checkpoint)
            optimizer.load_state_dict(of_optimizer)
        torch.set_rng_state(state)
        got = eager_step(module, optimizer, *batch(i)) if i in (7, 8, 31) else step(*batch(i))
        torch.set_rng_state(state)
        assert torch.equal(got, eager_step(reference, eager, *batch(i)))
        state = torch.get_rng_state()
    step.close()
    assert equal(module.state_dict(), reference.state_dict()) and module.calls == 60
    assert equal(optimizer.state_dict(), eager.state_dict())


PARTS = [(False, True), (True, False), (False, False)]  # backward on several streams, and the update in the graph


@pytest.mark.parametrize(("multi_stream_backward", "captured_update"), PARTS)
@pytest.mark.parametrize("make", [sgd, adamw, groups])
def test_backward_on_one_stream_and_an_optimizer_outside(
    make: Optimizers, multi_stream_backward: bool, captured_update: bool
) -> None:
    """All is as if eager alone trained, whose steps come in between."""
    module, reference = net(), net()
    optimizer, eager = make(module), make(reference)
    options = {"multi_stream_backward": multi_stream_backward, "captured_update": captured_update}
    step = systems.load("nimble", **options).prepare_training(module, optimizer, loss, batch(0)[:1], batch(0)[1])
    rates = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (optimizer, eager)]
    for i in range(20):
        state = torch.get_rng_state()
        got = eager_step(module, optimizer, *batch(i)) if i in (7, 8) else step(*batch(i))
        torch.set_rng_state(state)
        assert torch.equal(got, eager_step(reference, eager, *batch(i)))
        for rate in rates:
            rate.step()
        if not captured_update:
            for p, q in zip(module.parameters(), reference.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None) and (p.grad is None or torch.equal(p.grad, q.grad))
    step.close()
    assert equal(module.state_dict(), reference.state_dict())
    assert equal(optimizer.state_dict(), eager.state_dict())


@pytest.mark.parametrize("choice", ["nimble", "nimble_released"])
def test_the_streams_of_a_step(choice: str) -> None:
    """As released: forward on several streams, and what follows the loss on one of them, after all of it."""
    module = net()
    step = systems.load(choice).prepare_training(module, sgd(module), loss, batch(0)[:1], batch(0)[1])
    assert isinstance(step, TrainingStep) and isinstance(step.program, StatefulProgram)
    schedule, forward = step.schedule, step.program.num_forward
    names = [operator.name for operator in schedule.graph.operators]
    assert "loss" in names[forward - 1] and not any("backward" in name for name in names[:forward])
    is_released = choice == "nimble_released"
    assert len(set(schedule.streams[:forward])) > 1 and (len(set(schedule.streams[forward:])) == 1) == is_released
    before = schedule.happens_before()
    assert (before[forward] == (1 << forward) - 1) == is_released
    assert ("SGD" in names) != is_released and step.update.changes_parameters != is_released
    step.close()


def test_any_optimizer_steps_outside() -> None:
    module, reference = net(), net()
    optimizer, eager = (torch.optim.RMSprop(m.parameters(), lr=1e-3) for m in (module, reference))
    for m in (module, reference):
        m.unused.grad = torch.ones(3)  # of an earlier backward, which zero_grad takes away
    step = systems.load("nimble_released").prepare_training(module, optimizer, loss, batch(0)[:1], batch(0)[1])
    for i in range(3):
        torch.manual_seed(i)
        step(*batch(i))
        torch.manual_seed(i)
        eager_step(reference, eager, *batch(i))
    step.close()
    assert equal(module.state_dict(), reference.state_dict()) and equal(optimizer.state_dict(), eager.state_dict())


@pytest.mark.parametrize("choice", ["nimble", "nimble_released"])
@pytest.mark.parametrize("device", DEVICES)
def test_preparing_changes_nothing(device: str, choice: str) -> None:
    module = net(device)
    optimizer = sgd(module)
    eager_step(module, optimizer, *batch(0, device))
    before = copy.deepcopy((module.state_dict(), optimizer.state_dict(), [p.grad for p in module.parameters()]))
    addresses = [t.data_ptr() for t in module.state_dict().values()]
    generator = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    x, target = batch(0, device)
    step = systems.load(choice).prepare_training(module, optimizer, loss, (x,), target)
    assert equal((module.state_dict(), optimizer.state_dict(), [p.grad for p in module.parameters()]), before)
    assert torch.equal(generator, torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state())
    momentum = optimizer.state[module.stem.weight]["momentum_buffer"]
    step(*batch(1, device))
    assert [t.data_ptr() for t in module.state_dict().values()] == addresses
    assert optimizer.state[module.stem.weight]["momentum_buffer"] is momentum
    step.close()


def test_a_run_that_fails_changes_nothing_either() -> None:
    module = net()
    program, static = capture_step(module, sgd(module), loss, batch(0)[:1], batch(0)[1])
    static.refresh()
    before, drawn = copy.deepcopy(module.state_dict()), torch.get_rng_state()

    def fail(operator: int, _: Any) -> None:
        if operator == len(program.graph) - 1:
            raise RuntimeError("at the end")

    with pytest.raises(RuntimeError, match="at the end"), program.undone():
        program.run(batch(0), fail)
    assert equal(module.state_dict(), before) and torch.equal(torch.get_rng_state(), drawn)
    with pytest.raises(RuntimeError, match="at the end"):
        program.run(batch(0), fail)
    assert not equal(module.state_dict(), before)  # it does change something


def test_random_delays_give_the_same_weights() -> None:
    chance = random.Random(0)
    pauses = [0.0, 0.0, 0.0, 1e-4, 1e-3]
    ends = []
    for delay in (None, *[lambda _: time.sleep(chance.choice(pauses))] * 4):
        module = net()
        program, static = capture_step(module, sgd(module), loss, batch(0)[:1], batch(0)[1])
        executor = CpuExecutor(program, assign_streams(program.graph), delay=delay)
        torch.manual_seed(3)
        for i in range(10):
            static.refresh()
            executor(*batch(i))
        executor.close()
        ends.append(copy.deepcopy(module.state_dict()))
    assert all(equal(end, ends[0]) for end in ends)


def test_dampening_goes_on_from_an_eager_step() -> None:
    module, reference = net(), net()
    optimizer, eager = sgd(module, dampening=0.5), sgd(reference, dampening=0.5)
    for m, o in ((module, optimizer), (reference, eager)):
        torch.manual_seed(0)
        eager_step(m, o, *batch(0))
    step = prepare_training(module, optimizer, loss, *batch(0))
    torch.manual_seed(1)
    step(*batch(1))
    torch.manual_seed(1)
    eager_step(reference, eager, *batch(1))
    assert equal(module.state_dict(), reference.state_dict())
    optimizer.state.clear()
    with pytest.raises(ValueError, match="first step differs"):
        step(*batch(1))
    step.close()


def test_frozen_layers_eval_form_and_a_learning_rate_schedule() -> None:
    def train(scheduled: bool) -> tuple[dict, list[float]]:
        module = net()
        module.norm.eval()
        module.stem.weight.requires_grad_(False)
        optimizer = adamw(module)
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        step = prepare_training(module, optimizer, loss, *batch(0)) if scheduled else None
        losses = []
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the schedule warns of a step that it has not seen
            for i in range(20):
                value = step(*batch(i)) if step else eager_step(module, optimizer, *batch(i))
                rates.step()
                losses.append(value.item())
        if step:
            step.close()
        return module.state_dict(), losses

    assert equal(train(True), train(False))


def test_as_a_library() -> None:
    module, reference = net(), net()
    optimizer, eager = sgd(module), sgd(reference)
    x, target = batch(0)
    step = Nimble(module).prepare(x, training=True, optimizer=optimizer, loss=loss, example_target=target)
    torch.manual_seed(0)
    got = step(x, target)
    torch.manual_seed(0)
    assert torch.equal(got, eager_step(reference, eager, x, target)) and not got.requires_grad
    assert equal(module.state_dict(), reference.state_dict())
    step.close()


@pytest.mark.parametrize(
    ("system", "options", "device"),
    [
        *(
            (s, o, "cpu")
            for s, o in (
                *(("eager", {}), ("torchscript", {}), ("nimble", {}), ("nimble_released", {})),
                ("nimble", {"multi_stream": False}),
            )
        ),
        pytest.param("torch_compile", {"mode": "default"}, "cpu", marks=pytest.mark.slow),
        *(
            pytest.param(s, {}, "cuda", marks=GPU)
            for s in ("torchscript", "torch_compile", "cuda_graph", "nimble", "nimble_released")
        ),
    ],
)
@pytest.mark.parametrize("make", [sgd, adamw, adam])
def test_every_system_trains_as_eager_does(system: str, options: dict, device: str, make: Optimizers) -> None:
    module, reference = (net(device, counts=False) for _ in range(2))  # a traced forward assigns no buffer
    for m in (module, reference):
        m.drop.p = 0.0
    optimizer, eager = make(module), make(reference)
    before = copy.deepcopy(module.state_dict())
    step = systems.load(system, **options).prepare_training(
        module, optimizer, loss, batch(0, device)[:1], batch(0, device)[1]
    )
    assert equal(before, module.state_dict()) and not optimizer.state
    for i in range(5):
        got = step(*batch(i, device)).item()
        assert got == pytest.approx(eager_step(reference, eager, *batch(i, device)).item(), rel=1e-3)
    for a, b in zip(module.state_dict().values(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
    step.close()


class TestOnGpu:
    pytestmark = GPU

    def test_dropout_draws_eagers_numbers_and_other_ones_each_step(self) -> None:
        module = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.2)).cuda()
        reference = copy.deepcopy(module)
        optimizer, eager = sgd(module, lr=0.0), sgd(reference, lr=0.0)
        x, target = torch.randn(32, 64, device="cuda"), torch.randint(64, (32,), device="cuda")
        step = prepare_training(module, optimizer, loss, x, target)
        torch.cuda.manual_seed(5)
        expected = [eager_step(reference, eager, x, target).item() for _ in range(5)]
        state = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(5)
        got = [step(x, target).item() for _ in range(5)]
        assert len(set(got)) == 5 and got == pytest.approx(expected, rel=1e-6)
        assert torch.equal(torch.cuda.get_rng_state(), state)
        step.close()

    @pytest.mark.parametrize("model", ["resnet50_cifar10", "mobilenet_v2_cifar10", "efficientnet_b0_cifar10", "bert"])
    def test_the_loss_curve_is_eagers(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """With algorithms that sum in one order: a loss curve magnifies what another order rounds differently."""
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
        loaded = models.load(model, 32, training=True, device="cuda")
        module, reference = loaded.module, copy.deepcopy(loaded.module)
        optimizer, eager = sgd(module, lr=0.01), sgd(reference, lr=0.01)
        target = torch.randint(10, (32, 128) if model == "bert" else (32,), device="cuda")
        step = prepare_training(module, optimizer, loss, loaded.inputs, target)
        torch.cuda.manual_seed(1)
        expected = [eager_step(reference, eager, *loaded.fresh_inputs(i), target).item() for i in range(100)]
        torch.cuda.manual_seed(1)
        got = [step(*loaded.fresh_inputs(i), target).item() for i in range(100)]
        step.close()
        assert got[:10] == pytest.approx(expected[:10], rel=1e-3)
        assert sum(got[-20:]) == pytest.approx(sum(expected[-20:]), rel=0.05)
