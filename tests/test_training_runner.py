"""runner=training: steps of training compared with eager's, and measured."""

from typing import Any

import pytest
import torch
from conftest import Run, records
from made_records import record
from torch import Tensor, nn
from torch.nn import functional
from training import SMALL_BERT, eager_step

from results.cell import Cell, Conditions, choose
from results.document import from_json, to_json
from runners.cell.measuring import measured
from runners.cell.training import TrainingSession, loss


def cell(system: str = "nimble") -> Cell:
    model, runner = choose("model", "bert", **SMALL_BERT), choose("runner", "training", samples=3)
    return Cell(model, choose("system", system), runner, Conditions(2, "cpu", "fp32"))


@pytest.mark.parametrize("system", ["eager", "torchscript", "nimble"])
def test_a_cell_is_compared_and_measured(system: str) -> None:
    session = TrainingSession(cell(system), "0", lambda _: None)
    result = measured(session, record(of=cell(system)))
    assert result.is_ok and result.throughput is not None and result.latency is not None
    assert result.throughput.statistics.median > 0 and len(result.latency.host_ms) >= 3
    correctness = result.correctness
    assert correctness is not None and correctness.losses is not None
    assert correctness.relative_error < 1e-3 and len(correctness.losses) == correctness.steps
    assert correctness.dropout == (system != "torchscript")
    assert (result.schedule is None) == (system != "nimble")
    assert session.round() and result.kernels is not None and result.kernels.reason == "a CPU runs no kernels"
    assert from_json(to_json(result)) == result


def test_a_step_that_forgets_one_parameter_is_incorrect(monkeypatch: pytest.MonkeyPatch) -> None:
    session = TrainingSession(cell(), "0", lambda _: None)
    forgotten = session.module.bert.pooler.dense.bias

    def prepare(module: nn.Module, optimizer: torch.optim.Optimizer, *rest: Any) -> Any:
        class Forgetful:
            schedule, program, compilation, memory = None, None, None, {}

            def __call__(self, *data: Tensor) -> Tensor:
                before = forgotten.detach().clone()
                value = eager_step(module, optimizer, *data)
                with torch.no_grad():
                    forgotten.copy_(before)
                return value

        return Forgetful()

    monkeypatch.setattr(session.system, "prepare_training", prepare)
    result = measured(session, record(of=cell()))
    assert result.status == "incorrect" and "after 3 steps exceeds the tolerance" in (result.reason or "")


def test_the_loss_of_several_outputs() -> None:
    tokens, pooled, target = torch.randn(2, 5, 7), torch.randn(2, 7), torch.randint(7, (2, 5))
    expected = functional.cross_entropy(tokens.transpose(1, 2), target) + 0.3 * functional.cross_entropy(
        pooled, target[:, 0]
    )
    torch.testing.assert_close(loss((tokens, pooled), target), expected)


@pytest.mark.slow
def test_from_the_command_line(run: Run, folder: Any) -> None:
    asked = ("model=custom", "model.factory=tiny:make", "batch=4", "device=cpu", "results=out", "rounds=2")
    done = run("-m", "runner=training", "runner.samples=3", "system=eager,nimble", *asked)
    assert done.returncode == 0, done.stderr
    assert "samples/s" in done.stdout
    found = records(folder / "out")
    both = [found[f"tiny:make {s}"] for s in ("eager", "nimble")]
    assert all(r["status"] == "ok" and len(r["comparison"]["rounds"]) == 2 for r in both)
    assert all(r["kernels"]["when"] > r["comparison"]["when"] for r in both)
    done = run("runner=training", "runner.optimizer=adam", *asked[:-2])
    assert done.returncode == 2 and "did you mean adamw?" in done.stderr
