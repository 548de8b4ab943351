"""runner=accuracy: systems that learn from a table, from the command line to the record."""

import json
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, command, environment, records

pytest.importorskip("sklearn", reason="pip install '.[windtunnel]'")
pytest.importorskip("lightgbm", reason="pip install '.[windtunnel]'")

import systems
from models import BadModel
from models.table_options import TableOptions
from models.tabular.catalogue import read
from models.tabular.dataset import split
from models.tabular.pipelines import Size
from results.accuracy import SeedAccuracy
from results.cell import Cell, Conditions, choose
from results.document import from_json, to_json
from results.ranking import auc
from runners.cell.accuracy import AccuracySession
from runners.checks import BadRequest
from runners.measurements.accuracy import AccuracyOptions, summarized
from systems.base import BadOption, Unsupported
from systems.tabular.learner import Learner, Task

ASKED = ["runner=accuracy", "model=pipeline", "model.dataset=synthetic", "device=cpu", "results=r"]


def run(folder: Path, *arguments: str) -> Any:
    import subprocess

    return subprocess.run(
        command(*arguments), cwd=folder, env=environment(OPWEAVE_CACHE=str(folder / "cache")), capture_output=True, text=True
    )


@pytest.mark.slow
def test_from_the_command_line_to_the_record(tmp_path: Path) -> None:
    sweep = ["-m", *ASKED, "model.pipeline=pipe1", "system=pipeline,windtunnel,eager", "runner.seeds=2"]
    done = run(tmp_path, *sweep)
    assert done.returncode == 0, done.stderr
    records_by_system = {record["cell"]["system"]["choice"]: record for record in records(tmp_path / "r").values()}
    assert {name: record["status"] for name, record in records_by_system.items()} == {
        "pipeline": "ok",
        "windtunnel": "ok",
        "eager": "unsupported",
    }
    assert "eager executes networks, and learns nothing from a table" in records_by_system["eager"]["reason"]
    whole, tuned = (from_json(records_by_system[name]) for name in ("pipeline", "windtunnel"))
    assert to_json(tuned) == records_by_system["windtunnel"]
    assert whole.accuracy is not None and tuned.accuracy is not None
    assert whole.accuracy.form == tuned.accuracy.form == "small" and "(small)" in done.stdout
    assert [seed.seed for seed in tuned.accuracy.seeds] == [0, 1] and tuned.accuracy.test_rows == 1800
    for one, other in zip(whole.accuracy.seeds, tuned.accuracy.seeds, strict=True):
        assert other.gain is not None and other.auc - other.gain == pytest.approx(
            one.auc
        )  # the same pipeline, the same rows
        assert other.translation_error is not None and other.translation_error < 1e-4 and one.gain is None
    assert whole.accuracy.low < whole.accuracy.auc < whole.accuracy.high and whole.learning_s is not None
    artefacts = sorted((tmp_path / "cache").rglob("scores.safetensors"))
    assert len(artefacts) == 4  # a system and a seed
    # A third seed is learned alone: the others were kept.
    before = {file: file.stat().st_mtime_ns for file in artefacts}
    third = run(tmp_path, *ASKED, "model.pipeline=pipe1", "system=pipeline", "runner.seeds=3")
    assert third.returncode == 0, third.stderr
    after = sorted((tmp_path / "cache").rglob("scores.safetensors"))
    assert len(after) == 5 and all(file.stat().st_mtime_ns == time for file, time in before.items())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(
            ["model.dataset=criteo", "system=pipeline"],
            "model.dataset=criteo needs model.path=FILE with Criteo's train.txt",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["model.dataset=criteoo", "system=pipeline"], "model.dataset=criteoo is not one of", marks=pytest.mark.slow
        ),
        pytest.param(
            ["system=windtunnel", "system.level=5"], "system.level=5 is not one of 1, 2, 3, 4", marks=pytest.mark.slow
        ),
        pytest.param(
            ["system=windtunnel", "system.temperature=0.0"], "system.temperature=0.0 is not above 0", marks=pytest.mark.slow
        ),
        (["system=pipeline", "runner.seeds=0"], "runner.seeds=0 is not a positive integer"),
        pytest.param(
            ["system=pipeline", "model.split=order"], "the rows of synthetic have no order", marks=pytest.mark.slow
        ),
    ],
)
def test_bad_requests_are_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = run(tmp_path, *ASKED, *arguments)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()[-1:]) == 1


def session(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    system: str,
    model: str = "pipeline",
    precision: str = "fp32",
    **options: Any,
) -> AccuracySession:
    monkeypatch.setenv("OPWEAVE_CACHE", str(tmp_path))
    model_options = {"dataset": "synthetic", "pipeline": "pipe1"} | options if model == "pipeline" else options
    conditions = Conditions(batch=1, device="cpu", precision=precision, layout="contiguous", seed=3, algorithms="heuristic")
    cell = Cell(
        choose("model", model, **model_options), choose("system", system), choose("runner", "accuracy", seeds=2), conditions
    )
    return AccuracySession(cell, "0", lambda phase: None)


def test_a_network_is_refused_as_a_table_and_a_table_as_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadModel, match="takes a pipeline over a table, such as model=pipeline, not resnet18"):
        session(tmp_path, monkeypatch, "pipeline", "resnet18")
    with pytest.raises(Unsupported, match="nimble executes networks"):
        session(tmp_path, monkeypatch, "nimble")
    for name in ("pipeline", "windtunnel", "gbdt2nn"):
        with pytest.raises(Unsupported, match=r"executes no network: runner=accuracy"):
            systems.load(name).prepare(None, ())  # type: ignore[arg-type]
    with pytest.raises(BadOption, match=r"system\.scope=leaves is not one of all, trees"):
        systems.load("windtunnel", scope="leaves")


def test_precision_is_set_and_part_of_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = session(tmp_path, monkeypatch, "pipeline", precision="tf32_products")
    assert torch.backends.cuda.matmul.allow_tf32
    exact = session(tmp_path, monkeypatch, "pipeline", precision="tf32")
    assert not torch.backends.cuda.matmul.allow_tf32 and exact._of(0) != rounded._of(0)
    with pytest.raises(Unsupported, match="train in fp32 or TF32, not in fp16"):
        session(tmp_path, monkeypatch, "pipeline", precision="fp16")


def test_a_wrong_translation_is_incorrect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = session(tmp_path, monkeypatch, "pipeline")
    made.prepare()
    assert made.compare().is_correct
    table, data = made.accuracy().table, made.dataset
    training = data.rows.iloc[made._split(made.seeds[-1]).training]
    assert table is not None and (table.numeric, table.categorical) == (2, 6)
    assert table.categories == sum(len(set(training[name])) for name in data.categorical) > 300
    assert table.positive_share == data.label.sum() / len(data)
    made._seeds[0] = replace(made._seeds[0], translation_error=1e-3)
    assert (made.compare().is_correct, made.compare().reason) == (
        False,
        "the exact translation differs from the pipeline by 1.0e-03 in a raw score",
    )
    made._seeds[0] = replace(made._seeds[0], translation_error=None, auc=float("nan"))
    assert not made.compare().is_correct


def test_threads_sleep_at_barriers_unless_the_user_says_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    session(tmp_path, monkeypatch, "pipeline")
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    session(tmp_path, monkeypatch, "pipeline")
    assert os.environ["OMP_WAIT_POLICY"] == "active"


def test_what_is_kept_are_scores_of_test_rows_and_never_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.numpy import load_file

    made = session(tmp_path, monkeypatch, "pipeline")
    made.learn()
    (first, _) = sorted(tmp_path.rglob("scores.safetensors"))
    scores = load_file(first)
    assert set(scores) == {"positive"} and len(scores["positive"]) == 1800 and len(np.unique(scores["positive"])) > 100
    assert "label" not in json.dumps(json.loads((first.parent / "facts.json").read_text()))


def task(seed: int = 0) -> tuple[Task, np.ndarray]:
    data = read("synthetic", num_rows=3000)
    parts = split(data, "rows", seed)
    rows, label = data.at(parts.test)
    both = data.at(parts.training), data.at(parts.validation)
    return Task(data, *both, rows, "pre2", "pipe2", Size(5, 8, num_threads=1), True, seed, "cpu", lambda line: None), label


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("pipeline", {}),
        ("windtunnel", {"max_epochs": 2}),
        ("windtunnel_cold", {"max_epochs": 8}),
        ("gbdt2nn", {"max_epochs": 2}),
        ("lightgbm", {"trials": 2, "max_trees": 30}),
        ("deepgbm", {"max_epochs": 4, "groups": 2}),
        pytest.param("deepgbm", {"max_epochs": 2, "groups": 2, "executor": "nimble"}, marks=pytest.mark.slow),
        ("hummingbird", {}),
        ("translation", {}),
        ("translation", {"executor": "nimble"}),
        pytest.param("tabm", {"max_epochs": 4}, marks=pytest.mark.slow),
        pytest.param("ft_transformer", {"max_epochs": 2, "learning_rate": 1e-3}, marks=pytest.mark.slow),
    ],
)
def test_every_learner_learns(name: str, options: dict[str, Any]) -> None:
    own = {"ft_transformer": "rtdl_revisiting_models", "tabm": "tabm", "hummingbird": "hummingbird"}.get(name, "sklearn")
    if find_spec(own) is None:
        pytest.skip(f"{own} is not installed")
    learner = systems.load(name, **options)
    assert isinstance(learner, Learner) and learner.learns and learner.unsupported("cpu") is None
    made, label = task()
    learned = learner.learn_from(made)
    assert auc(learned.positive, label).value > 0.6
    assert (learned.positive >= 0).all() and (learned.positive <= 1).all() and learned.fit_s > 0
    assert learned.predict_us is not None and learned.predict_us > 0
    assert (learned.epoch_s is not None) == (name in ("windtunnel", "windtunnel_cold", "gbdt2nn"))
    assert learned.epoch_s is None or 0 < learned.epoch_s < learned.tune_s
    translated = ("windtunnel", "windtunnel_cold", "gbdt2nn", "hummingbird", "translation")
    assert (learned.pipeline_positive is not None) == (name in translated)
    times = [(time.batch, time.form) for time in learned.predictions]
    timed = [(batch, form) for batch in (1, 64) for form in ("values", "categories")]  # there are no 4096 test rows
    assert times == (timed if name in ("pipeline", "hummingbird", "translation") else [])
    assert all(time.encode_us > 0 and time.us > 0 for time in learned.predictions)
    if name == "translation":
        assert learned.pipeline_positive is not None and learned.translation_error is not None
        assert learned.translation_error < 1e-9 and np.allclose(learned.positive, learned.pipeline_positive, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["deepgbm", "tabm", "ft_transformer"])
def test_a_peers_steps_are_captured_and_learn_as_eager_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout draws other numbers in a graph: without it both learn the same."""
    own = {"ft_transformer": "rtdl_revisiting_models", "tabm": "tabm"}.get(name, "sklearn")
    if find_spec(own) is None or find_spec("lightgbm") is None:
        pytest.skip(f"{own} or lightgbm is not installed")
    from torch import nn

    from systems.pytorch.cuda_graph import CapturedStep
    from systems.tabular import networks

    captured: list[type] = []

    class Steps(networks.Steps):
        def close(self) -> None:
            captured.append(type(self.prepared))
            super().close()

    monkeypatch.setattr(networks, "Steps", Steps)
    monkeypatch.setattr(nn.Dropout, "forward", lambda self, x: x)
    made, label = task()
    scores = {}
    for system in ("eager", "cuda_graph"):
        learner = systems.load(name, max_epochs=3, executor=system)
        assert isinstance(learner, Learner)
        learned = learner.learn_from(replace(made, device="cuda"))
        assert auc(learned.positive, label).value > 0.6
        scores[system] = learned.positive
    assert captured == [type(None), CapturedStep]
    assert abs(scores["eager"] - scores["cuda_graph"]).max() < 0.02


def test_hummingbird_is_exact_and_converts_no_factorization_machine() -> None:
    if find_spec("hummingbird") is None:
        pytest.skip("pip install --no-deps hummingbird-ml onnxconverter-common dill")
    import sys

    hummingbird = systems.load("hummingbird")
    assert isinstance(hummingbird, Learner)
    made, _ = task()
    for pipeline in ("pipe1", "pipe2"):
        learned = hummingbird.learn_from(replace(made, pipeline=pipeline))
        assert learned.translation_error is not None and learned.translation_error < 1e-4
    assert sys.modules.get("tvm", True) is not None  # what hides TVM is gone
    with pytest.raises(Unsupported, match="converts no factorization machine, which pipe3 ends in"):
        hummingbird.learn_from(replace(made, pipeline="pipe3"))


def test_hummingbird_says_how_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "hummingbird" else True)
    reason = "hummingbird needs hummingbird: pip install --no-deps hummingbird-ml onnxconverter-common dill"
    assert systems.load("hummingbird").unsupported("cpu") == reason


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("windtunnel", {"learning_rate": 0.0}, r"system\.learning_rate=0\.0 is not above 0"),
        ("windtunnel", {"dropout": 1.0}, r"system\.dropout=1\.0 is not at least 0 and below 1"),
        ("windtunnel", {"patience": 0}, r"system\.patience=0 is not at least 1"),
        ("tabm", {"executor": "eagre"}, r"system\.executor=eagre names no system: did you mean eager\?"),
        ("translation", {"executor": "nimbel"}, r"system\.executor=nimbel names no system: did you mean nimble\?"),
        ("gbdt2nn", {"temperature": float("inf")}, r"system\.temperature=inf is not above 0"),
        ("tabm", {"weight_decay": -1.0}, r"system\.weight_decay=-1\.0 is not at least 0"),
        ("ft_transformer", {"batch_size": 0}, r"system\.batch_size=0 is not at least 1"),
        ("deepgbm", {"groups": 0}, r"system\.groups=0 is not at least 1"),
        ("lightgbm", {"trials": 0}, r"system\.trials=0 is not at least 1"),
    ],
)
def test_an_option_that_cannot_be_is_refused_before_anything_is_fitted(
    name: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadOption, match=words):
        systems.load(name, **options)


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert systems.load("tabm").unsupported("cpu") == "tabm needs sklearn: pip install '.[windtunnel]'"


def test_no_learner_is_loaded_with_its_libraries() -> None:
    """Who has not installed them is told so, and lists all systems without them."""
    import subprocess
    import sys

    program = (
        "import sys, systems; names = ('pipeline', 'windtunnel', 'lightgbm', 'tabm', 'ft_transformer', 'deepgbm');"
        "[systems.load(name) for name in names]; print({'sklearn', 'lightgbm', 'tabm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "set()"


def test_a_part_is_of_all_its_seeds() -> None:
    seeds = [SeedAccuracy(i, 0.7 + i / 100, 1e-6, 0.5, 1.0, 2.0, 3, 0.01, 1e-7, 1e-6) for i in range(3)]
    part = summarized(seeds, (70, 15, 15), "rows", "whole", 9)
    assert part.auc == pytest.approx(0.71) and part.gain == pytest.approx(0.01) and part.low < 0.71 < part.high
    assert part.gain_low == pytest.approx(0.01 - 1.96 * 1e-7**0.5, rel=1e-3) and part.log_loss == 0.5
    assert summarized([replace(seeds[0], gain=None)], (70, 15, 15), "rows", "small", None).gain is None


def test_wrong_options() -> None:
    with pytest.raises(BadRequest, match=r"runner\.seeds=0 is not a positive integer"):
        AccuracyOptions(0)
    for options, words in (
        ({"form": "tiny"}, r"model\.form=tiny is not one of auto, whole, small"),
        ({"training_share": 0.0}, r"model\.training_share=0\.0 is not above 0"),
        ({"pipeline": "pipe4"}, r"model\.pipeline=pipe4 is not one of"),
    ):
        with pytest.raises(BadModel, match=words):
            TableOptions(**options)  # type: ignore[arg-type]
