"""runner=training: steps of training compared with eager's, and measured."""

import json
from typing import Any

import pytest
import torch
from conftest import Run, records
from torch import Tensor, nn
from torch.nn import functional
from training import SMALL_BERT, eager_step

from runners.measurements.training import TrainingSession, loss


def cell(**more: Any) -> dict[str, Any]:
    runner = {
        "name": "training",
        "samples": 3,
        "optimizer": "sgd",
        "learning_rate": 0.01,
        "momentum": 0.9,
        "weight_decay": 1e-4,
    }
    return {
        "model": {"name": "bert", **SMALL_BERT},
        "system": {"name": "nimble", "multi_stream": True},
        "runner": runner,
        "batch": 2,
        "device": "cpu",
        "precision": "fp32",
        "layout": "contiguous",
        "seed": 0,
    } | more


@pytest.mark.parametrize("system", ["eager", "torchscript", "nimble"])
def test_a_cell_is_compared_and_measured(system: str) -> None:
    session = TrainingSession(cell(system={"name": system}), "0", lambda _: None)
    record = session.measure()
    assert record["status"] == "ok" and record["throughput"]["unit"] == "samples/s"
    assert record["throughput"]["statistics"]["median"] > 0 and len(record["latency"]["host_ms"]) >= 3
    found = record["correctness"]
    assert found["relative_error"] < 1e-3 and len(found["losses"]) == found["steps"]
    assert found["dropout"] == (system != "torchscript")
    assert (record["schedule"] is None) == (system != "nimble")
    assert session.round() and record["kernels"]["reason"] == "a CPU runs no kernels"
    json.dumps(record)


def test_a_step_that_forgets_one_parameter_is_incorrect(monkeypatch: pytest.MonkeyPatch) -> None:
    session = TrainingSession(cell(), "0", lambda _: None)
    forgotten = session.module.bert.pooler.dense.bias

    def prepare(module: nn.Module, optimizer: torch.optim.Optimizer, *rest: Any) -> Any:
        class Forgetful:
            schedule, memory = None, {}

            def __call__(self, *data: Tensor) -> Tensor:
                before = forgotten.detach().clone()
                value = eager_step(module, optimizer, *data)
                with torch.no_grad():
                    forgotten.copy_(before)
                return value

        return Forgetful()

    monkeypatch.setattr(session.system, "prepare_training", prepare)
    record = session.measure()
    assert record["status"] == "incorrect" and "after 3 steps exceeds the tolerance" in record["reason"]


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
