"""A session whose calls are whole steps of training, a few of which are compared with eager's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from models.model import TF32
from results.calls import Correctness
from results.cell import Cell
from runners.measurements.base import options_of
from runners.measurements.correctness import Errors, beyond, largest
from runners.measurements.training import TrainingOptions
from systems.arithmetic import disturb, epsilon
from systems.base import Prepared, System, Unsupported
from systems.pytorch.eager import Eager
from systems.tolerance import FLOOR, MULTIPLE, Distance, distance
from systems.training.step import undone

from .calls import sample
from .session import Session

COMPARED_STEPS = 3
AUXILIARY = 0.3  # the weight of further outputs in the loss, as GoogLeNet and Inception-v3 were trained
RATES = ("p", "drop_prob", "dropout")  # attributes by which modules know how much to drop
NEGLIGIBLE = 0.1  # of the average change: a parameter that changes by less is judged as if it did by that
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
        self.options = options
        self.target = self._targets()
        self.start = self._copied()
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

        Compared are the losses, and what each parameter and each buffer has changed by, after the first step and the last.
        Each may be a multiple as far off as eager is that starts from parameters one unit of rounding away. The reference is
        eager in its own precision: in another, dropout draws other numbers.
        """
        precision = self.cell.conditions.precision
        eager, trained = self._run(*self._eager_step()), self._run(prepared, optimizer)
        disturbed = self._run(*self._eager_step(), is_disturbed=True)
        self._restore()
        arithmetic = "fp32" if precision in TF32 and self.device == "cpu" else precision
        all_errors = eager.errors(trained, disturbed, MULTIPLE[arithmetic])
        norm, element = largest(all_errors, by=0), largest(all_errors, by=1)
        reason, is_checked = beyond(norm, element, f"after {COMPARED_STEPS} steps"), True
        if not (eager.is_finite() and disturbed.is_finite()):
            reason = "eager's own losses or weights are not finite after a few steps: a lower runner.learning_rate may help"
            is_checked = False
        elif not trained.is_finite():
            reason = "its losses or weights are not finite after a few steps"
        elif reason is None and not any(errors.shows_effect for errors in all_errors):
            reason, is_checked = "a step that updates nothing could not be seen: eager's own rounding changes as much", False
        assert norm is not None and element is not None  # there is a loss
        return Correctness(
            is_correct=reason is None,
            reason=reason,
            relative_error=_number(norm.system.norm),
            rounding=_number(norm.eager.norm),
            tolerance=_number(norm.tolerance.norm),
            steps=COMPARED_STEPS,
            losses=tuple(trained.losses),
            eager_losses=tuple(eager.losses),
            is_checked=is_checked,
            reference="fp32" if arithmetic in TF32 else arithmetic,
            element_error=_number(element.system.element),
            element_tolerance=_number(element.tolerance.element),
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
        is_disturbed: bool = False,
    ) -> StepHistory:
        """Steps from the model's first state.

        is_disturbed: its parameters are moved by one unit of rounding first. What they change by is taken from there.
        """
        self._restore()
        optimizer.state.clear()
        if is_disturbed:
            for i, p in enumerate(self.module.parameters()):
                disturb(p, i, epsilon(p, self.cell.conditions.precision))
        begin = self._copied()
        torch.manual_seed(seed)
        losses, states = [], []
        for i in range(steps):
            losses.append(step(*self.inputs, self.target).item())
            if i in (0, steps - 1):
                states.append(self._copied())
        return StepHistory(losses, begin, states, len(list(self.module.parameters())))

    def _copied(self) -> list[Tensor]:
        return [t.detach().to("cpu", copy=True) for t in self._state()]

    def _restore(self) -> None:
        with torch.no_grad():
            for t, value in zip(self._state(), self.start, strict=True):
                t.copy_(value)
        for p in self.module.parameters():
            p.grad = None


@dataclass
class StepHistory:
    """What some steps did.

    Args:
        losses: of each step.
        begin: parameters and buffers before the first, on the CPU.
        states: the same after the first step, and after the last.
        num_parameters: how many of these are parameters.
    """

    losses: list[float]
    begin: list[Tensor]
    states: list[list[Tensor]]
    num_parameters: int

    def errors(self, trained: StepHistory, disturbed: StepHistory, multiple: float) -> list[Errors]:
        """Of the losses, of each parameter's change and of each buffer's; this is the reference.

        A change's are relative to at least a tenth of the average change: some gradients are zero but for rounding (that of
        the keys' bias in attention), and they differ by all they are. Eager's is at least the median of all parameters',
        since that of a single small one may be zero by chance.
        """
        losses = [torch.tensor(history.losses, dtype=torch.float64) for history in (self, trained, disturbed)]
        unit = FLOOR * torch.finfo(self.begin[0].dtype).eps
        all_errors = [_errors(losses, 0.0, unit, multiple)]
        for i in range(len(self.states)):
            own, others, disturbeds = (history.changes(i) for history in (self, trained, disturbed))
            parameters = own[: self.num_parameters]
            squares = sum(float(p.square().sum()) for p in parameters) / sum(p.numel() for p in parameters)
            typical = NEGLIGIBLE * math.sqrt(squares)
            of_parameters = [
                _errors(changes, typical, unit, multiple)
                for changes in zip(parameters, others[: len(parameters)], disturbeds[: len(parameters)], strict=True)
            ]
            usual = Distance(*(median(errors.eager[by] for errors in of_parameters) for by in (0, 1)))
            for errors, change in zip(of_parameters, parameters, strict=True):
                errors.eager = errors.eager.or_more(usual)
                errors.effect = distance(torch.zeros_like(change), change, typical)
            all_errors += of_parameters
            buffers = zip(*(changes[len(parameters) :] for changes in (own, others, disturbeds)), strict=True)
            all_errors += [_errors(changes, 0.0, unit, multiple) for changes in buffers]
        return all_errors

    def changes(self, i: int) -> list[Tensor]:
        """What each parameter and buffer has changed by up to a state, in float64."""
        return [after.double() - before.double() for after, before in zip(self.states[i], self.begin, strict=True)]

    def is_finite(self) -> bool:
        return all(map(math.isfinite, self.losses)) and all(t.isfinite().all() for t in self.states[-1])


def _errors(histories: Sequence[Tensor], typical: float, least: float, multiple: float) -> Errors:
    """histories: of the reference, of the system, of the disturbed eager."""
    reference, trained, disturbed = histories
    return Errors(least, multiple, distance(trained, reference, typical), distance(disturbed, reference, typical))


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


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
