"""A session whose calls are whole steps of training, a few of which are compared with eager's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from results.cell import Cell
from results.record import Correctness
from runners.measurements.base import options_of
from runners.measurements.correctness import ROUNDINGS, TOLERANCE, relative_error
from runners.measurements.training import TrainingOptions
from systems.base import Prepared, System, Unsupported
from systems.pytorch.eager import Eager
from systems.training.step import undone

from .calls import sample
from .session import Session

COMPARED_STEPS = 3
AUXILIARY = 0.3  # the weight of further outputs in the loss, as GoogLeNet and Inception-v3 were trained
# What a number is off by at most when it is rounded: how far such an error grows in a few steps says what rounding may cost.
UNIT_ROUNDOFF = {"fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
RATES = ("p", "drop_prob", "dropout")  # attributes by which modules know how much to drop
NEGLIGIBLE = 0.1
LONG_STEP_MS = 300.0  # steps this long are warm after a few


def loss(output: object, target: Tensor) -> Tensor:
    """Mean cross-entropy of class scores, which every output is taken for: [B, C] for images, [B, S, C] for tokens.

    Further outputs (auxiliary heads) count AUXILIARY times. BERT's are its last hidden state, with as many classes as it has
    features, and the pooled first token [B, C], which is compared with that token's target.
    """
    first, *others = _scores(output)
    value = _cross_entropy(first, target)
    for scores in others:
        value = value + AUXILIARY * _cross_entropy(scores, target)
    return value


def _scores(output: object) -> list[Tensor]:
    return [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]


def _cross_entropy(scores: Tensor, target: Tensor) -> Tensor:
    if scores.dim() <= target.dim():
        target = target[:, 0]
    return functional.cross_entropy(scores.flatten(0, -2), target.flatten())


class TrainingSession(Session):
    """A cell whose calls are steps of training, all on one batch of random data with random targets."""

    is_training = True
    wake_calls = 1
    round_calls = 3

    def __init__(self, cell: Cell, visible_device: str, phase: Callable[[str], None]):
        """Load as Session does. Raises Unsupported also where the model's output cannot be taken for class scores."""
        super().__init__(cell, visible_device, phase)
        options = options_of(TrainingOptions, cell.runner)
        assert isinstance(options, TrainingOptions)
        self.options = options
        self.target = self._targets()
        self.start = [t.detach().to("cpu", copy=True) for t in self._state()]
        self.optimizer = self._optimizer()
        self._comparison: Correctness | None = None

    def before_preparing(self) -> None:
        """Compare a system that draws random numbers of its own, on the same model with nothing to draw."""
        if self.system.own_randomness and self._draws():
            self.phase("correctness")
            self._comparison = replace(self._compare_without_dropout(), dropout=False)

    def _made_ready(self) -> Prepared:
        return self._step(self.system, self.optimizer)

    def call(self) -> object:
        """One step."""
        return self.prepared(*self.inputs, self.target)

    def compare(self) -> Correctness:
        """A few steps beside eager's from the same state."""
        if self._comparison is None:
            self._comparison = replace(self._compare(self.prepared, self.optimizer), dropout=True)
        return self._comparison

    def _warm_up(self) -> int:
        expected_ms = min(sample(self.call, self.device, 2))
        return 0 if expected_ms > LONG_STEP_MS else super()._warm_up()

    def _run_eagerly(self) -> None:
        with undone(self.module):
            output = self.module(*self.inputs)
            sum(scores.float().sum() for scores in _scores(output)).backward()  # type: ignore[union-attr]

    def _state(self) -> list[Tensor]:
        return [*self.module.parameters(), *self.module.buffers()]

    def _targets(self) -> Tensor:
        """Random classes for what the model's first output scores: [B] or [B, S], int64."""
        with undone(self.module), torch.no_grad():
            scores = _scores(self.module(*self.inputs))
        if not scores or scores[0].dim() < 2:
            raise Unsupported("its output is no class scores, [batch, ..., classes], that a loss could be made of")
        generator = torch.Generator().manual_seed(self.cell.conditions.seed)
        return torch.randint(scores[0].shape[-1], scores[0].shape[:-1], generator=generator).to(self.device)

    def _optimizer(self) -> torch.optim.Optimizer:
        rate, decay = float(self.options.learning_rate), float(self.options.weight_decay)
        trained = [p for p in self.module.parameters() if p.requires_grad]
        if not trained:
            raise Unsupported("it has no parameters to train")
        if self.options.optimizer == "adamw":
            return torch.optim.AdamW(trained, lr=rate, weight_decay=decay)
        return torch.optim.SGD(trained, lr=rate, momentum=float(self.options.momentum), weight_decay=decay)

    def _step(self, system: System, optimizer: torch.optim.Optimizer) -> Prepared:
        return system.prepare_training(self.module, optimizer, loss, self.inputs, self.target)

    def _draws(self) -> bool:
        """Does a step depend on the random state?"""
        first, second = (self._run(*self._eager_step(), seed, steps=1).losses for seed in (0, 1))
        return first != second

    def _compare_without_dropout(self) -> Correctness:
        """For a system that draws random numbers of its own: the same model, in which there is nothing to draw."""
        with _without_dropout(self.module):
            if self._draws():
                raise Unsupported("it draws random numbers for more than dropout, and this system draws others than eager")
            optimizer = self._optimizer()
            prepared = self._step(self.system, optimizer)
            compared = self._compare(prepared, optimizer)
            prepared.close()
        return compared

    def _compare(self, prepared: Prepared, optimizer: torch.optim.Optimizer) -> Correctness:
        """Compare a few steps from the model's first state, and from one random state, with eager's.

        relative_error is the largest: of a loss, of what the parameters have changed by, of what the statistics have.
        rounding, where it was needed to judge: eager's own, after rounding every parameter once.
        """
        precision = self.cell.conditions.precision
        eager, trained = self._run(*self._eager_step()), self._run(prepared, optimizer)
        error, rounding, tolerance = trained.difference(eager), None, TOLERANCE[precision]
        if error > tolerance:
            rounding = self._run(*self._eager_step(), rounded=UNIT_ROUNDOFF[precision]).difference(eager)
            tolerance = max(tolerance, ROUNDINGS * rounding)
        self._restore()
        reason = None
        if not eager.is_finite():
            reason = "eager's own losses or weights are not finite after a few steps: a lower runner.learning_rate may help"
        elif not error <= tolerance:
            reason = f"relative error {error:.1e} after {COMPARED_STEPS} steps exceeds the tolerance {tolerance:.1e}"
        return Correctness(
            is_correct=reason is None,
            reason=reason,
            relative_error=error,
            rounding=rounding,
            tolerance=tolerance,
            steps=COMPARED_STEPS,
            losses=tuple(trained.losses),
            eager_losses=tuple(eager.losses),
        )

    def _eager_step(self) -> tuple[Prepared, torch.optim.Optimizer]:
        optimizer = self._optimizer()
        return self._step(Eager(), optimizer), optimizer

    def _run(
        self,
        step: Prepared,
        optimizer: torch.optim.Optimizer,
        seed: int = 0,
        *,
        steps: int = COMPARED_STEPS,
        rounded: float = 0.0,
    ) -> StepHistory:
        """Steps from the model's first state.

        rounded: by which fraction, up or down at random, its parameters are set off first.
        """
        self._restore()
        optimizer.state.clear()
        with torch.no_grad():
            for i, p in enumerate(self.module.parameters() if rounded else ()):
                signs = torch.randint(2, p.shape, generator=torch.Generator().manual_seed(i)).to(p.device) * 2 - 1
                p.mul_(1 + rounded * signs)
        torch.manual_seed(seed)
        losses = [step(*self.inputs, self.target).item() for _ in range(steps)]
        changes = [t.detach().cpu().double() - s.double() for t, s in zip(self._state(), self.start, strict=True)]
        parameters = len(list(self.module.parameters()))
        return StepHistory(losses, changes[:parameters], changes[parameters:])

    def _restore(self) -> None:
        with torch.no_grad():
            for t, value in zip(self._state(), self.start, strict=True):
                t.copy_(value)
        for p in self.module.parameters():
            p.grad = None


@dataclass
class StepHistory:
    """What some steps did: the loss of each, and by how much each parameter and each buffer has changed, in float64."""

    losses: list[float]
    parameters: list[Tensor]
    buffers: list[Tensor]

    def difference(self, other: StepHistory) -> float:
        """The largest relative error of all these; infinite where something is not finite.

        A parameter's is relative to at least a tenth of the average change: some gradients are zero but for rounding (that
        of the keys' bias in attention), and they differ by all they are.
        """
        errors = [abs(a - b) / abs(b) for a, b in zip(self.losses, other.losses, strict=True)]
        errors += [relative_error(a, b) for a, b in zip(self.buffers, other.buffers, strict=True)]
        average = math.sqrt(
            sum(float(p.square().sum()) for p in other.parameters) / sum(p.numel() for p in other.parameters)
        )
        for a, b in zip(self.parameters, other.parameters, strict=True):
            scale = max(b.norm().item(), NEGLIGIBLE * average * math.sqrt(b.numel()))
            errors.append((a - b).norm().item() / (scale or 1.0))
        return max(errors) if all(map(math.isfinite, errors)) else math.inf

    def is_finite(self) -> bool:
        return all(map(math.isfinite, self.losses)) and all(t.isfinite().all() for t in (*self.parameters, *self.buffers))


@contextmanager
def _without_dropout(module: nn.Module) -> Iterator[None]:
    rates = [(m, name, r) for m in module.modules() for name in RATES if isinstance(r := getattr(m, name, None), float)]
    for m, name, _ in rates:
        setattr(m, name, 0.0)
    try:
        yield
    finally:
        for m, name, r in rates:
            setattr(m, name, r)
