"""Scheduled training of drawn layers, optimizers and events between steps: as eager to the bit."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawing import examples
from hypothesis import given, reject
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from training import CLASSES, VALUES, WEIGHTS, equal, prepare_training

from systems.scheduling.execution.training_step import TrainingStep
from systems.scheduling.plans.stream_assignment import single_stream

pytestmark = pytest.mark.usefixtures("one_thread")


class Scaled(nn.Module):
    """Counts in two buffers, of which it reads one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        self.calls += 1
        return x * self.scale + self.calls.cos()


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) * x.new_empty(len(x), 1).bernoulli_(0.5)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "again": nn.Identity,  # the first linear layer once more
    "norm": lambda: nn.BatchNorm1d(8),
    "fixed norm": lambda: nn.BatchNorm1d(8).eval(),
    "untracked norm": lambda: nn.BatchNorm1d(8, track_running_stats=False),
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "dropout": lambda: nn.Dropout(0.4),
    "relu": lambda: nn.LeakyReLU(0.1, inplace=True),
    "scaled": Scaled,
    "noisy": Noisy,
    "checkpointed": Checkpointed,
    "recurrent": lambda: nn.RNNCell(8, 8),
}
ADAM = st.fixed_dictionaries(
    {},
    optional={
        "betas": st.sampled_from([(0.5, 0.9), (0.0, 0.5)]),
        "weight_decay": st.just(0.1),
        "amsgrad": st.booleans(),
        "maximize": st.booleans(),
        "fused": st.booleans(),
    },
)
SGD = st.fixed_dictionaries(
    {"momentum": st.sampled_from([0.0, 0.9])},
    optional={"weight_decay": st.just(0.1), "maximize": st.booleans(), "fused": st.booleans()},
)
OPTIMIZERS = st.one_of(
    st.tuples(st.just(torch.optim.SGD), SGD),
    st.tuples(st.just(torch.optim.SGD), st.just({"momentum": 0.8, "nesterov": True})),
    st.tuples(st.just(torch.optim.Adam), ADAM),
    st.tuples(st.just(torch.optim.AdamW), ADAM),
)
EVENTS = st.sampled_from(["step", "eager", "rate", "reload", "clear", "gradients"])


@examples(12)
@given(
    blocks=st.lists(st.sampled_from([*BLOCKS]), max_size=5),
    frozen=st.sets(st.integers(0, 12)),
    optimizer=OPTIMIZERS,
    num_groups=st.integers(1, 3),
    weighted=st.booleans(),
    events=st.lists(EVENTS, min_size=2, max_size=8),
    on_one_stream=st.booleans(),
)
def test_any_training_is_eagers(
    blocks: list[str],
    frozen: set[int],
    optimizer: tuple[Any, dict[str, Any]],
    num_groups: int,
    weighted: bool,
    events: list[str],
    on_one_stream: bool,
) -> None:
    loss = nn.CrossEntropyLoss(weight=WEIGHTS if weighted else None, label_smoothing=0.1)

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8), *(BLOCKS[name]() for name in blocks), nn.Linear(8, 8)]
        layers = [layers[0] if isinstance(layer, nn.Identity) else layer for layer in layers]
        module = nn.Sequential(*layers)
        for i, p in enumerate(list(module.parameters())[:-1]):
            p.requires_grad_(i not in frozen)
        kind, options = optimizer
        groups = [{"params": list(module.parameters())[i::num_groups], "lr": 0.01 * (i + 1)} for i in range(num_groups)]
        return module, kind([g for g in groups if g["params"]], **options)

    def stepped(module: nn.Module, own: torch.optim.Optimizer, step: TrainingStep | None) -> list[Tensor]:
        losses = []
        torch.manual_seed(1)
        for i, event in enumerate(events):
            if event == "rate":
                for group in own.param_groups:
                    group["lr"] *= 0.5
            elif event == "reload":
                module.load_state_dict(copy.deepcopy(module.state_dict()))
                own.load_state_dict(copy.deepcopy(own.state_dict()))
            elif event == "clear":
                own.state.clear()
            elif event == "gradients":
                functional.mse_loss(module(VALUES), VALUES).backward()
            x, target = VALUES.roll(i), CLASSES.roll(i)
            if step is not None and event != "eager":
                losses.append(step(x, target))
                continue
            own.zero_grad()
            value = loss(module(x), target)
            value.backward()
            own.step()
            losses.append(value.detach())
        return losses

    reference, eager = made()
    try:
        expected = stepped(reference, eager, None)
    except RuntimeError as error:  # an activation in place may write what the backward of the one before it reads
        assert "modified by an inplace operation" in str(error)
        reject()
    module, own = made()
    more = {"assign": single_stream} if on_one_stream else {}
    step = prepare_training(module, own, loss, VALUES, CLASSES, **more)
    try:
        assert equal(stepped(module, own, step), expected)
    finally:
        step.close()
    assert equal(module.state_dict(), reference.state_dict()) and equal(own.state_dict(), eager.state_dict())
