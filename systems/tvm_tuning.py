"""MetaSchedule's tuning of a module's functions, with a log that is kept, and a budget of trials and of time."""

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from systems.base import Unsupported

from .tvm_build import SEED, quiet, register_intrinsics

WORKLOADS, RECORDS, SPENT = "database_workload.json", "database_tuning_record.json", "spent.json"
BATCH = 64  # trials of one function that are built and run together, at most
POPULATION = 8  # candidates bred for each that is measured, TVM's own ratio in a full batch
UNMEASURED = 50  # new candidates that a generation begins with at least, TVM's own number
BUILD_SECONDS = RUN_SECONDS = 60.0  # a candidate that takes longer counts as invalid
PROCESS_USES = 256  # TVM leaks memory in a process that builds; after so many candidates there is a new one


class TuningLog:
    """The log in `folder`: MetaSchedule's JSON database, a line a trial, and the seconds that the trials took."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in (WORKLOADS, RECORDS):
            _mend(folder / name)

    @property
    def trials(self) -> int:
        """How many candidates were measured, those that turned out invalid among them."""
        return len(_lines(self.folder / RECORDS))

    @property
    def seconds(self) -> float:
        """What all of them took, the search included."""
        batches = self._batches()
        return batches[-1][1] if batches else 0.0

    def spend(self, seconds: float) -> None:
        """Put the seconds of a batch down, whose trials are in the log."""
        partial = self.folder / f"{SPENT}.partial"
        partial.write_text(json.dumps([*self._batches(), (self.trials, self.seconds + seconds)]))
        os.replace(partial, self.folder / SPENT)

    def within(self, trials: int, budget_s: float) -> "Usable":
        """The beginning of the log that tuning with this budget of trials and seconds would have written.

        So a log that a larger budget has filled says of a smaller one what that is worth, and no more.
        """
        in_time = next((n for n, seconds in [(0, 0.0), *self._batches()] if seconds >= budget_s), self.trials)
        count = min(trials, in_time, self.trials)
        seconds = next((seconds for n, seconds in self._batches() if n >= count), self.seconds) if count else 0.0
        return Usable(_lines(self.folder / RECORDS)[:count], seconds)

    def database(self) -> Any:
        """All of the log, as MetaSchedule reads and extends it."""
        return _database(self.folder / WORKLOADS, self.folder / RECORDS)

    def best(self, usable: "Usable") -> Any:
        """A database of these records alone."""
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="built-") as folder:
            records = Path(folder) / RECORDS
            records.write_bytes(b"".join(line + b"\n" for line in usable.records))
            return _database(self.folder / WORKLOADS, records)

    def _batches(self) -> list[tuple[int, float]]:
        """Trials and seconds up to the end of each batch."""
        file = self.folder / SPENT
        return [(trials, seconds) for trials, seconds in json.loads(file.read_text())] if file.exists() else []


@dataclass(frozen=True)
class Usable:
    """records: lines of a log. seconds: what they took."""

    records: list[bytes]
    seconds: float

    @property
    def digest(self) -> str:
        return hashlib.sha256(b"\n".join(self.records)).hexdigest()


class BudgetSpent(Exception):
    """The time for tuning is over; what is raised within TVM comes out of it as a RuntimeError."""


def tune(
    lowered: Callable[[], Any],
    target: Any,
    log: TuningLog,
    trials: int,
    budget_s: float,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Measure candidates for the functions of a module until the log holds `trials`, or those have taken `budget_s` seconds.

    lowered: makes the module, if need be. What the log holds already counts: a run that was killed is taken up again.
    Functions with the fewest trials come first, and of those the ones with the most arithmetic; then MetaSchedule's gradient
    scheduler divides the trials. Raises Unsupported where xgboost, its cost model, is missing.
    """
    remaining = trials - log.trials
    if remaining <= 0 or log.seconds >= budget_s:
        return
    try:
        import xgboost  # noqa: F401
    except ImportError as error:
        raise Unsupported("TVM's tuning needs xgboost: pip install xgboost-cpu") from error
    from tvm.s_tir import meta_schedule
    from tvm.support.popen_pool import PopenPoolExecutor

    stopped: list[BudgetSpent] = []
    spent = _report_of(log, trials, budget_s, progress, stopped)
    built = Path(tempfile.mkdtemp(dir=log.folder, prefix="built-"))
    with ExitStack() as stack:
        stack.enter_context(quiet())
        stack.callback(_clear, log.folder)
        register_intrinsics()
        database = log.database()
        tasks = _tasks(lowered(), target, database, remaining)
        pool = PopenPoolExecutor(os.cpu_count(), BUILD_SECONDS, maximum_process_uses=PROCESS_USES)
        stack.callback(pool.shutdown)
        runner = meta_schedule.runner.LocalRunner(timeout_sec=RUN_SECONDS)
        stack.callback(runner.pool.shutdown)  # on a GPU it holds a context
        try:
            meta_schedule.tune.tune_tasks(
                tasks=[context for context, _ in tasks],
                task_weights=[weight for _, weight in tasks],
                work_dir=str(log.folder),
                max_trials_global=remaining,
                num_trials_per_iter=_per_batch(remaining, len(tasks)),
                builder=_builder(pool, str(built)),
                runner=runner,
                database=database,
                measure_callbacks=[*meta_schedule.measure_callback.MeasureCallback.create("default"), spent],
            )
        except (BudgetSpent, RuntimeError):
            if not stopped:
                raise


def _report_of(
    log: TuningLog, trials: int, budget_s: float, progress: Callable[[str], None], stopped: list[BudgetSpent]
) -> Any:
    """A callback for after each batch, to come after the one that writes the log: it puts the time down, tells of it, and
    raises BudgetSpent, which it also puts into `stopped`.
    """
    from tvm.ir.utils import derived_object
    from tvm.s_tir.meta_schedule.measure_callback import PyMeasureCallback

    last = time.monotonic()

    @derived_object
    class Report(PyMeasureCallback):  # type: ignore[misc]
        def apply(self, scheduler: Any, task: int, candidates: Any, builds: Any, runs: Any) -> None:
            nonlocal last
            now = time.monotonic()
            log.spend(now - last)
            last = now
            tell()
            if log.seconds >= budget_s:
                stopped.append(BudgetSpent())
                raise stopped[0]

    def tell() -> None:
        progress(f"tuning: {log.trials} of {trials} trials, {log.seconds:.0f} of {budget_s:.0f} s")

    tell()
    return Report()


def _per_batch(trials: int, functions: int) -> int:
    """Trials of one function that are built and run together."""
    return max(1, min(BATCH, trials // functions))


def _tasks(module: Any, target: Any, database: Any, trials: int) -> list[tuple[Any, float]]:
    """A tuning context and a weight (how often it is called) for each function, in the order in which they are begun.

    The evolutionary search has TVM's own population (512) where a batch is full, and a smaller one in proportion where it is
    not: breeding 512 candidates takes half a minute, of which a batch of two would measure two.
    """
    from tvm.s_tir import meta_schedule
    from tvm.s_tir.analysis import estimate_tir_flops

    tried = Counter(record.workload for record in database.get_all_tuning_records())
    tasks = [(task, task.dispatched[0]) for task in meta_schedule.relax_integration.extract_tasks(module, target)]
    tasks.sort(key=lambda t: (tried[database.commit_workload(t[1])], -t[0].weight * estimate_tir_flops(t[1])))
    population = POPULATION * _per_batch(trials, len(tasks))
    search = meta_schedule.search_strategy.EvolutionarySearch
    options = {
        "target": target,
        "num_threads": os.cpu_count() or 1,
        "rand_state": SEED,
        "space_generator": "post-order-apply",
    }
    contexts = []
    for task, function in tasks:
        strategy = search(population_size=population, init_min_unmeasured=min(UNMEASURED, population))
        context = meta_schedule.TuneContext(function, task_name=task.task_name, search_strategy=strategy, **options)
        contexts.append((context, task.weight))
    return contexts


def _builder(pool: Any, folder: str) -> Any:
    """Builds candidates in the processes of `pool`, into `folder`.

    TVM's own LocalBuilder starts new processes for each batch, which takes longer than building it, has each of them import
    the tensor intrinsics, though a candidate holds the bodies of those that it uses, and leaves what it built in the folder
    for temporary files where it is killed.
    """
    from tvm.ir.utils import derived_object
    from tvm.s_tir.meta_schedule.builder import BuilderResult, PyBuilder
    from tvm.support.popen_pool import StatusKind

    def build(module: Any, target: Any) -> str:  # travels by value
        import os
        import tempfile

        from tvm.driver import build
        from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock
        from tvm.support.tar import tar

        library = build(RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(module), target=target)
        file = os.path.join(tempfile.mkdtemp(dir=folder), f"candidate.{tar.output_format}")
        library.export_library(file, fcompile=tar)
        return file

    @derived_object
    class Builder(PyBuilder):  # type: ignore[misc]
        def build(self, build_inputs: Any) -> list[Any]:
            candidates = [(candidate.mod, candidate.target) for candidate in build_inputs]
            results = pool.map_with_error_catching(lambda candidate: build(*candidate), candidates)
            done = StatusKind.COMPLETE
            return [
                BuilderResult(r.value, None) if r.status == done else BuilderResult(None, repr(r.value)) for r in results
            ]

    return Builder()


def _clear(folder: Path) -> None:
    """Remove what was built, by a run that was killed too."""
    for left in folder.glob("built-*"):
        shutil.rmtree(left, ignore_errors=True)


def _database(workloads: Path, records: Path) -> Any:
    from tvm.s_tir import meta_schedule

    return meta_schedule.database.JSONDatabase(str(workloads), str(records))


def _lines(file: Path) -> list[bytes]:
    return file.read_bytes().splitlines() if file.exists() else []


def _mend(file: Path) -> None:
    """Cut off the line that a process was killed in the midst of, which TVM would not read past."""
    if file.exists() and (content := file.read_bytes()) and not content.endswith(b"\n"):
        file.write_bytes(content[: content.rfind(b"\n") + 1])
