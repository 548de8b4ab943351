"""runner=training: steps of training compared with eager's, and measured."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Run, records
from made_records import record
from torch import Tensor, nn
from torch.nn import functional
from training import SMALL_BERT, eager_step

from results.calls import Correctness
from results.cell import Cell, Conditions, choose
from results.document import from_json, to_json
from runners.cell.measuring import measured
from runners.cell.training import TrainingSession, loss
from systems.base import Prepared


def cell(system: str = "nimble") -> Cell:
    model, runner = choose("model", "bert", **SMALL_BERT), choose("runner", "training", samples=3)
    return Cell(model, choose("system", system), runner, Conditions(2, "cpu", "fp32"))


@pytest.mark.parametrize("system", ["eager", "torchscript", "nimble"])
@pytest.mark.slow
def test_a_cell_is_compared_and_measured(system: str) -> None:
    session = TrainingSession(cell(system), "0", lambda _: None)
    result = measured(session, record(of=cell(system)))
    assert result.is_ok and result.throughput is not None and result.latency is not None
    assert result.throughput.statistics.median > 0 and len(result.latency.host_ms) >= 3
    correctness = result.correctness
    assert correctness is not None and correctness.losses is not None
    assert (
        correctness.relative_error is not None
        and correctness.relative_error < 1e-3
        and len(correctness.losses) == correctness.steps
    )
    assert correctness.dropout == (system != "torchscript")
    assert (result.schedule is None) == (system != "nimble")
    assert session.round() and result.kernels is not None and result.kernels.reason == "a CPU runs no kernels"
    assert from_json(to_json(result)) == result


Step = Callable[..., Tensor]  # (module, optimizer, *inputs, target) -> loss


def without_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, *data: Tensor) -> Tensor:
    value = loss(module(*data[:-1]), data[-1])
    value.backward()
    return value.detach()


def without_momentum(module: nn.Module, optimizer: torch.optim.Optimizer, *data: Tensor) -> Tensor:
    optimizer.state.clear()
    return eager_step(module, optimizer, *data)


def twice(module: nn.Module, optimizer: torch.optim.Optimizer, *data: Tensor) -> Tensor:
    eager_step(module, optimizer, *data)
    return eager_step(module, optimizer, *data)


def with_gradients_added_up(module: nn.Module, optimizer: torch.optim.Optimizer, *data: Tensor) -> Tensor:
    value = without_optimizer(module, optimizer, *data)
    optimizer.step()
    return value


def with_a_smaller_rate(module: nn.Module, optimizer: torch.optim.Optimizer, *data: Tensor) -> Tensor:
    before = [p.detach().clone() for p in module.parameters()]
    value = eager_step(module, optimizer, *data)
    with torch.no_grad():
        for p, old in zip(module.parameters(), before, strict=True):
            p.lerp_(old, 0.01)
    return value


def forgetful(module: nn.Module, optimizer: torch.optim.Optimizer, *data: Tensor) -> Tensor:
    *_, forgotten = module.parameters()
    before = forgotten.detach().clone()
    value = eager_step(module, optimizer, *data)
    with torch.no_grad():
        forgotten.copy_(before)
    return value


def with_nothing_finite(module: nn.Module, optimizer: torch.optim.Optimizer, *data: Tensor) -> Tensor:
    return eager_step(module, optimizer, *data) * torch.nan


MUTANTS: tuple[Step, ...] = (
    *(without_optimizer, without_momentum, twice, with_gradients_added_up, with_a_smaller_rate, forgetful),
    with_nothing_finite,
)


def compared(step: Step, monkeypatch: pytest.MonkeyPatch, precision: str, learning_rate: float) -> Correctness:
    """The verdict on a system that takes such steps."""

    class Taken(Prepared):
        def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, *_: Any):
            self.module, self.optimizer = module, optimizer

        def __call__(self, *data: Tensor) -> Tensor:
            return step(self.module, self.optimizer, *data)

    runner = choose("runner", "training", samples=3, learning_rate=learning_rate)
    chosen = choose("model", "bert", **SMALL_BERT), choose("system", "eager"), runner
    session = TrainingSession(Cell(*chosen, Conditions(2, "cpu", precision)), "0", lambda _: None)
    monkeypatch.setattr(session.system, "prepare_training", Taken)
    session.prepare()
    return session.compare()


@pytest.mark.parametrize(
    ("step", "precision"),
    [
        pytest.param(
            step, precision, id=f"{step.__name__}-{precision}", marks=[pytest.mark.slow] * (number % 4 > 0) * is_bf16
        )
        for precision, is_bf16 in (("fp32", False), ("bf16", True))
        for number, step in enumerate([*MUTANTS, eager_step])
    ],
)
def test_a_wrong_step_is_incorrect(step: Step, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rounding makes steps differ, as in bf16; but a hundredth of a step is less than that resolves."""
    is_right = step is eager_step or (step, precision) == (with_a_smaller_rate, "bf16")
    part = compared(step, monkeypatch, precision, 0.1)
    assert part.is_checked and part.is_correct == is_right, part
    assert part.reference == precision and part.tolerance is not None and part.tolerance < 1


def test_changes_are_from_where_the_run_starts() -> None:
    """The disturbance of the first weights is no part of what steps change: without a rate they change nothing."""
    runner = choose("runner", "training", samples=3, learning_rate=0.0)
    chosen = choose("model", "bert", **SMALL_BERT), choose("system", "eager"), runner
    session = TrainingSession(Cell(*chosen, Conditions(2, "cpu", "fp32")), "0", lambda _: None)
    history = session._run(*session._eager_step(), is_disturbed=True)
    assert not any(change.any() for i in range(2) for change in history.changes(i))
    assert not all(map(torch.equal, history.begin, session.start))


def test_a_step_that_may_update_nothing_is_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    part = compared(without_optimizer, monkeypatch, "fp32", 0.0)
    assert not part.is_correct and not part.is_checked and "updates nothing" in (part.reason or "")


def test_the_loss_of_several_outputs() -> None:
    tokens, pooled, target = torch.randn(2, 5, 7), torch.randn(2, 7), torch.randint(7, (2, 5))
    expected = functional.cross_entropy(tokens.transpose(1, 2), target) + 0.3 * functional.cross_entropy(
        pooled, target[:, 0]
    )
    torch.testing.assert_close(loss((tokens, pooled), target), expected)


@pytest.mark.slow
def test_from_the_command_line(run: Run, folder: Any) -> None:
    arguments = ("model=custom", "model.factory=tiny:make", "batch=4", "device=cpu", "results=out", "rounds=2")
    done = run("-m", "runner=training", "runner.samples=3", "system=eager,nimble", *arguments)
    assert done.returncode == 0, done.stderr
    assert "samples/s" in done.stdout
    records_by_name = records(folder / "out")
    both = [records_by_name[f"tiny:make {s}"] for s in ("eager", "nimble")]
    assert all(r["status"] == "ok" and len(r["comparison"]["rounds"]) == 2 for r in both)
    assert all("CPU" in r["kernels"]["reason"] for r in both)
    done = run("runner=training", "runner.optimizer=adam", *arguments[:-2])
    assert done.returncode == 2 and "did you mean adamw?" in done.stderr
