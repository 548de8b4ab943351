"""A session whose cell is a system that learns from a table: fitting belongs to learning, and what came of it is kept.

Invariant: each seed is fitted once for a system, a model and the code of both, in the process that learns. What is kept are
scores of test rows, never their labels; the process that measures draws the split anew and compares.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

import systems
from models import BadModel
from models.registry import PIPELINE
from models.table_options import TableOptions
from results.accuracy import Accuracy, PredictionTime, SeedAccuracy, TableCounts
from results.calls import Correctness
from results.cell import Cell
from results.limits import Limits
from results.warning import Warning
from runners.machine.code import code_digest
from runners.measurements.accuracy import AccuracyOptions, summarized
from runners.measurements.base import options_of
from systems.base import Prepared, Unsupported
from systems.cache import JSON, Artefact, Cache
from systems.tabular.learner import Learned, Learner, Task

from .arithmetic import set_arithmetic
from .session import Session

if TYPE_CHECKING:
    from models.tabular.dataset import Dataset, Split

SMALL_ROWS, SMALL_TREES, SMALL_LEAVES, SMALL_EPOCHS = 12_000, 20, 16, 8
MOST_TRANSLATION_ERROR = 1e-4  # of raw scores
SCORES, FACTS = "scores.safetensors", "facts.json"


class AccuracySession(Session):
    """A cell of runner=accuracy."""

    def __init__(self, cell: Cell, visible_device: str, phase: Callable[[str], None]):
        """Load the system. Raises BadModel and Unsupported before any table is read."""
        # LightGBM's library reads it when it is loaded. Threads that spin at barriers make a fit many times as long where
        # another process has a core.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        self.cell, self.visible_device, self.phase = cell, visible_device, phase
        self.device = cell.device
        self.notices: tuple[Warning, ...] = ()
        self.known_limits: Limits | None = None
        if cell.model.name != PIPELINE:
            raise BadModel(f"runner=accuracy takes a pipeline over a table, such as model=pipeline, not {cell.model.choice}")
        system = systems.load(cell.system.name, **cell.system.options)
        if not isinstance(system, Learner):
            raise Unsupported(f"{cell.system.choice} executes networks, and learns nothing from a table")
        if reason := system.unsupported(self.device):
            raise Unsupported(reason)
        self.system: Learner = system  # type: ignore[assignment]
        if cell.conditions.precision in ("fp16", "bf16"):
            raise Unsupported(f"systems that learn from a table train in fp32 or TF32, not in {cell.conditions.precision}")
        set_arithmetic(cell.conditions.precision, cell.conditions.algorithms)
        options: dict[str, Any] = cell.model.options
        self.table = TableOptions(**options)
        runner = options_of(AccuracyOptions, cell.runner)
        self.seeds = range(cell.conditions.seed, cell.conditions.seed + runner.seeds)
        is_small = self.table.form == "small" or (self.table.form == "auto" and self.device == "cpu")
        self.form = "small" if is_small else "whole"
        if is_small:
            torch.set_num_threads(1)  # steps so small take longer where threads wait for each other
        self._dataset: Dataset | None = None
        self._seeds: list[SeedAccuracy] = []
        self._parameters: int | None = None
        self._rows = (0, 0, 0)

    def learn(self) -> float | None:
        """Fit each seed that the cache lacks; returns the seconds."""
        begin = perf_counter()
        for seed in self.seeds:
            with self._kept(seed):
                pass
        return perf_counter() - begin

    def prepare(self) -> float:
        """Score what was learned against the labels of the test rows."""
        from results.ranking import auc, auc_difference, log_loss

        self.phase("preparing")
        begin = perf_counter()
        for seed in self.seeds:
            split = self._split(seed)
            label = self.dataset.label[split.test]
            self._rows = (len(split.training), len(split.validation), len(split.test))
            with self._kept(seed) as artefact:
                scores = {name: tensor.numpy() for name, tensor in load_file(artefact.folder / SCORES).items()}
                facts = json.loads((artefact.folder / FACTS).read_text(encoding="utf-8"))
            area = auc(scores["positive"], label)
            gain = auc_difference(scores["positive"], scores["pipeline"], label) if "pipeline" in scores else None
            self._parameters = facts.pop("parameters")
            predictions = tuple(PredictionTime(**prediction) for prediction in facts.pop("predictions"))
            self._seeds.append(
                SeedAccuracy(
                    seed,
                    area.value,
                    area.variance,
                    log_loss(scores["positive"], label),
                    gain=None if gain is None else gain.value,
                    gain_variance=None if gain is None else gain.variance,
                    predictions=predictions,
                    **facts,
                )
            )
        self._prepared = NotCallable()
        return perf_counter() - begin

    def compare(self) -> Correctness:
        """Is every translation within its tolerance of its pipeline, and is every score a number that tells rows apart?"""
        errors = [seed.translation_error for seed in self._seeds if seed.translation_error is not None]
        worst = max(errors, default=None)
        reason = None
        if worst is not None and not worst <= MOST_TRANSLATION_ERROR:
            reason = f"the exact translation differs from the pipeline by {worst:.1e} in a raw score"
        elif not all(np.isfinite([seed.auc, seed.log_loss]).all() and seed.auc_variance > 0 for seed in self._seeds):
            reason = "its scores are not numbers, or the same for all rows"
        return Correctness(reason is None, reason, None, None, None, element_error=worst, reference="the pipeline itself")

    def settle(self) -> tuple[Warning, ...]:
        """Nothing is timed."""
        return ()

    def accuracy(self) -> Accuracy:
        """What `prepare` found, and what the table has."""
        dataset, training = self.dataset, self._split(self.seeds[-1]).training
        num_categories = dataset.num_categories(training)
        counts = TableCounts(len(dataset.numeric), len(dataset.categorical), num_categories, dataset.positive_share)
        accuracy = summarized(self._seeds, self._rows, self.table.split, self.form, self._parameters)
        return replace(accuracy, table=counts)

    @property
    def operator_threads(self) -> int | None:
        return torch.get_num_threads() if self.device == "cpu" else None

    @property
    def dataset(self) -> Dataset:
        """The table, read once. Raises BadModel."""
        from models.tabular.catalogue import read
        from models.tabular.dataset import BadData

        if self._dataset is None:
            self.phase(f"reading {self.table.dataset}")
            try:
                self._dataset = read(self.table.dataset, self.table.path, SMALL_ROWS if self.form == "small" else None)
            except BadData as error:
                raise BadModel(str(error)) from error
        return self._dataset

    def _split(self, seed: int) -> Split:
        from models.tabular.dataset import BadData, split

        try:
            return split(self.dataset, self.table.split, seed, self.table.training_share)
        except BadData as error:
            raise BadModel(str(error)) from error

    def _kept(self, seed: int) -> AbstractContextManager[Artefact]:
        """What was learned of a seed; it is learned now if the cache lacks it."""
        return Cache().artefact(
            "accuracy",
            f"{self.cell.system.label} on {self.cell.model.label}, seed {seed}",
            self._of(seed),
            self._learner(seed),
        )

    def _of(self, seed: int) -> dict[str, JSON]:
        """All that decides what is learned."""
        roots = (
            "models.tabular.catalogue",
            "models.tabular.pipelines",
            f"systems{systems.registry.place(self.cell.system.name)}",
        )
        file = Path(self.table.path).expanduser() if self.table.path else None
        changed = [file.stat().st_mtime_ns, file.stat().st_size] if file is not None and file.exists() else []
        return {
            "model": {**self.cell.model.options},
            "system": {"name": self.cell.system.name, **self.cell.system.options},
            "form": self.form,
            "device": self.device,
            "precision": self.cell.conditions.precision,
            "seed": seed,
            "file": changed,  # type: ignore[dict-item]
            "code": code_digest(roots),
        }

    def _learner(self, seed: int) -> Callable[[Path], Mapping[str, JSON] | None]:
        def make(folder: Path) -> None:
            learned = self._learned(seed)
            scores = {"positive": learned.positive}
            if learned.pipeline_positive is not None:
                scores["pipeline"] = learned.pipeline_positive
            save_file({k: torch.from_numpy(np.ascontiguousarray(v, np.float64)) for k, v in scores.items()}, folder / SCORES)
            names = ("fit_s", "tune_s", "epochs", "translation_error", "predict_us", "epoch_s", "parameters")
            facts = {name: getattr(learned, name) for name in names}
            facts["predictions"] = [asdict(prediction) for prediction in learned.predictions]
            (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")

        return make

    def _learned(self, seed: int) -> Learned:
        from models.tabular.pipelines import Size

        split = self._split(seed)
        where = f"seed {seed - self.seeds.start + 1} of {len(self.seeds)}"
        self.phase(f"learning: {where}")
        threads = torch.get_num_threads()
        size = Size(num_threads=threads, device=self.device)
        if self.form == "small":
            size = Size(SMALL_TREES, SMALL_LEAVES, fm_epochs=SMALL_EPOCHS, num_threads=threads)
        task = Task(
            self.dataset,
            self.dataset.at(split.training),
            self.dataset.at(split.validation),
            self.dataset.at(split.test)[0],
            self.table.preprocessing,
            self.table.pipeline,
            size,
            self.form == "small",
            seed,
            self.device,
            lambda line: self.phase(f"learning: {where}, {line}"),
        )
        return self.system.learn_from(task)


class NotCallable(Prepared):
    """What was learned is scored, and never called."""

    def __call__(self, *inputs: torch.Tensor) -> Any:
        raise TypeError("a system that learns from tables executes no network")
