"""MetaSchedule's tuning of a module's functions, with a log that stays, and a budget of trials and of time.

MetaSchedule searches within a function; this module decides which function is next. TVM's own scheduler measures a batch of
every function before it logs or reports any of them, which for a network takes most of the budget.
"""

import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from systems.base import Unsupported

from .build import SEED, default_schedule, quiet, register_intrinsics
from .measuring import Measuring

WORKLOADS, RECORDS, SPENT = "database_workload.json", "database_tuning_record.json", "spent.json"
DEFAULTS = "defaults.json"
EXHAUSTED = "exhausted.json"
BATCH = 16  # trials of one function that are built and run together, at most; about as many as a machine builds at once
POPULATION = 8  # candidates bred for each that is measured, TVM's own ratio in a full batch
SAMPLES = 5 * 512  # of a schedule space, to begin a generation with, since a GPU can run few of them; TVM's own number
EMPTY = 3  # batches in succession without a new candidate, after which a function counts as searched
ALPHA, WINDOW = 0.2, 3  # of the gradient, TVM's own
INVALID = 1e10  # seconds that MetaSchedule's log has for a candidate that does not run


class TuningLog:
    """The log in a folder: MetaSchedule's JSON database, a line a trial, and the seconds that the trials took."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in (WORKLOADS, RECORDS):
            _mend(folder / name)

    @property
    def trials(self) -> int:
        """Candidates that were measured, invalid ones included."""
        return len(_lines(self.folder / RECORDS))

    @property
    def seconds(self) -> float:
        """Of all trials, the search included."""
        batches = self._batches()
        return batches[-1][1] if batches else 0.0

    def is_finished(self, trials: int, budget_s: float) -> bool:
        """Has tuning with this budget nothing left to do: trials or seconds are spent, or no candidate is left?"""
        return self.trials >= trials or self.seconds >= budget_s or self._is_exhausted(trials)

    def note_exhausted(self, trials: int) -> None:
        """Note that a search for so many trials found no further candidate."""
        _replace(self.folder / EXHAUSTED, [trials, self.trials])

    def _is_exhausted(self, trials: int) -> bool:
        file = self.folder / EXHAUSTED
        if not file.exists():
            return False
        wanted, measured = json.loads(file.read_text())
        return bool(wanted >= trials and measured == self.trials)

    def spend(self, seconds: float) -> None:
        """Note the seconds of a batch whose trials are in the log."""
        _replace(self.folder / SPENT, [*self._batches(), (self.trials, self.seconds + seconds)])

    @property
    def defaults(self) -> dict[str, float]:
        """Seconds of each function in its default schedule, by the function's digest; infinite if that does not run."""
        file = self.folder / DEFAULTS
        return json.loads(file.read_text()) if file.exists() else {}

    def note_defaults(self, seconds: dict[str, float]) -> None:
        _replace(self.folder / DEFAULTS, seconds)

    def within(self, trials: int, budget_s: float) -> "Usable":
        """The beginning of the log that tuning with this budget of trials and seconds would have written.

        So a log that a larger budget has filled shows what a smaller one is worth, and no more.
        """
        in_time = next((n for n, seconds in [(0, 0.0), *self._batches()] if seconds >= budget_s), self.trials)
        count = min(trials, in_time, self.trials)
        before = max((seconds for n, seconds in self._batches() if not n), default=0.0)
        seconds = next((seconds for n, seconds in self._batches() if n >= count), self.seconds) if count else before
        return Usable(_lines(self.folder / RECORDS)[:count], seconds, self.defaults)

    def database(self) -> Any:
        """All of the log, as MetaSchedule reads and extends it."""
        return _database(self.folder / WORKLOADS, self.folder / RECORDS)

    def best(self, usable: "Usable") -> Any:
        """A database of each function's fastest record, for functions that have one faster than their default."""
        from tvm.s_tir.meta_schedule.database import MemoryDatabase, TuningRecord

        with tempfile.TemporaryDirectory(dir=self.folder, prefix="built-") as folder:
            records = Path(folder) / RECORDS
            records.write_bytes(b"".join(line + b"\n" for line in usable.records))
            measured = _database(self.folder / WORKLOADS, records)
        fastest: dict[str, TuningRecord] = {}
        for record in measured.get_all_tuning_records():
            digest = _digest(record.workload.mod)
            if _seconds(record.run_secs) < min(usable.defaults.get(digest, math.inf), _best(fastest.get(digest))):
                fastest[digest] = record
        chosen = MemoryDatabase()
        for record in fastest.values():
            workload = chosen.commit_workload(record.workload.mod)
            chosen.commit_tuning_record(
                TuningRecord(record.trace, workload, record.run_secs, record.target, record.args_info)
            )
        return chosen

    def _batches(self) -> list[tuple[int, float]]:
        """Trials and seconds up to the end of each batch."""
        file = self.folder / SPENT
        return [(trials, seconds) for trials, seconds in json.loads(file.read_text())] if file.exists() else []


@dataclass(frozen=True)
class Usable:
    """The part of a log that a budget covers.

    Args:
        records: Lines of the log.
        seconds: That they took.
        defaults: Those of `TuningLog`.
    """

    records: list[bytes]
    seconds: float
    defaults: dict[str, float]

    @property
    def digest(self) -> str:
        return hashlib.sha256(b"\n".join([*self.records, json.dumps(self.defaults).encode()])).hexdigest()


@dataclass
class Function:
    """A function that is tuned.

    Args:
        context: Its TuneContext.
        weight: How often the module calls it.
        workload: It, in MetaSchedule's database.
        best: The fewest seconds known before the first and after each batch of candidates, the default schedule included.
        tried: Traces of the candidates that were measured.
        has_begun: Its search has begun.
        num_empty: Batches in succession without a new candidate.
    """

    context: Any
    weight: int
    workload: Any
    best: list[float]
    tried: set[str]
    has_begun: bool = False
    num_empty: int = 0

    def promise(self) -> float:
        """Seconds of the whole module that another batch promises to save.

        It is the gradient by which MetaSchedule's own scheduler chooses (Ansor, Section 6), from the default's time on
        rather than from the first batch's. It is 0 once the search finds no new candidate, or if no candidate has run in
        WINDOW batches.
        """
        batches, now = len(self.best), self.best[-1]
        if self.num_empty >= EMPTY or (math.isinf(now) and batches > WINDOW):
            return 0.0
        if math.isinf(now):
            return now
        before = self.best[-1 - WINDOW] if batches > WINDOW else math.inf
        gained = now if math.isinf(before) else (before - now) / WINDOW
        return self.weight * (ALPHA * gained + (1 - ALPHA) * now / batches)

    def candidates(self, limit: int, batch: int, database: Any, cost_model: Any) -> list[Any]:
        """The next batch of MetaSchedule's search, at most `limit`, without those that were measured before."""
        if not self.has_begun:
            self.context.pre_tuning(1 << 20, batch, None, database, cost_model)
            self.has_begun = True
        candidates = self.context.generate_measure_candidates()
        if candidates is None:
            self.num_empty = EMPTY
            return []
        new = [c for c in candidates if _trace(c.sch.trace) not in self.tried]
        return new[:limit]


def tune(
    lowered: Callable[[], Any],
    target: Any,
    log: TuningLog,
    trials: int,
    budget_s: float,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Measure candidates for the functions of a module until the log holds `trials`, or they have taken `budget_s` seconds.

    The trials in the log count, so that a run goes on where a killed one stopped, less the batch in flight. The functions'
    default schedules are measured first. They are no trials, but their time counts: they show where trials pay, and what a
    candidate has to beat.

    Invariant: after each batch the log holds its trials and its seconds, and nothing in it is measured again.

    Args:
        lowered: Makes the module; not called if the log is finished.
        target: A tvm.target.Target.
        progress: Called with a line on where tuning stands.

    Raises:
        Unsupported: xgboost, TVM's cost model, is missing.
    """
    if log.is_finished(trials, budget_s):
        return
    try:
        import xgboost  # noqa: F401
    except ImportError as error:
        raise Unsupported("TVM's tuning needs xgboost: pip install xgboost-cpu") from error
    from tvm.s_tir import meta_schedule

    def report(more: str = "") -> None:
        progress(f"tuning: {log.trials} of {trials} trials, {log.seconds:.0f} of {budget_s:.0f} s{more}")

    report()
    _clear(log.folder)
    built = Path(tempfile.mkdtemp(dir=log.folder, prefix="built-"))
    with ExitStack() as stack:
        stack.enter_context(quiet())
        stack.callback(_clear, log.folder)
        register_intrinsics()
        module = lowered()
        last_s = time.monotonic()

        def spend() -> bool:
            """Log the seconds since the last call; is there time left?"""
            nonlocal last_s
            now_s = time.monotonic()
            log.spend(now_s - last_s)
            last_s = now_s
            return log.seconds < budget_s

        database = log.database()
        tasks = meta_schedule.relax_integration.extract_tasks(module, target)
        measure = Measuring(target, built, BATCH)
        stack.callback(measure.close)
        known = log.defaults
        missing = [f for f in (task.dispatched[0] for task in tasks) if _digest(f) not in known]
        for begin in range(0, len(missing), BATCH):
            group = missing[begin : begin + BATCH]
            results = measure([default_schedule(f, target) for f in group])
            if not known and all(r.run_secs is None for r in results):
                raise RuntimeError(f"TVM's tuner cannot measure anything here: {_last_line(results[0].error_msg)}")
            known |= {_digest(f): _seconds(r.run_secs) for f, r in zip(group, results, strict=True)}
            log.note_defaults(known)
            time_left = spend()
            report(f", {min(begin + BATCH, len(missing))} of {len(missing)} default schedules")
            if not time_left:
                return
        batch = max(1, min(BATCH, trials // max(1, len(tasks))))
        functions = _functions(tasks, target, database, log, batch)
        cost_model = meta_schedule.cost_model.CostModel.create("xgb", num_tuning_cores=_cores(), tree_method="auto")
        while log.trials < trials:
            function = max(functions, key=Function.promise, default=None)
            if function is None or not function.promise():
                log.note_exhausted(trials)
                break
            candidates = function.candidates(min(batch, trials - log.trials), batch, database, cost_model)
            _try(function, candidates, measure, database, cost_model)
            time_left = spend()
            report()
            if not time_left:
                break


def _functions(tasks: Sequence[Any], target: Any, database: Any, log: TuningLog, batch: int) -> list[Function]:
    """Each function with its history from the log.

    The evolutionary search has TVM's own population (512) in proportion to the batch: breeding 512 candidates takes half a
    minute, and a batch of two would measure two of them.
    """
    from tvm.s_tir import meta_schedule

    records: dict[str, list[Any]] = {}
    for record in database.get_all_tuning_records():
        records.setdefault(_digest(record.workload.mod), []).append(record)
    defaults, population = log.defaults, POPULATION * batch
    functions = []
    for task in tasks:
        workload = database.commit_workload(task.dispatched[0])
        digest = _digest(workload.mod)
        search = meta_schedule.search_strategy.EvolutionarySearch(
            population_size=population, init_min_unmeasured=batch, max_fail_count=math.ceil(SAMPLES / population)
        )
        context = meta_schedule.TuneContext(
            workload.mod,
            target=target,
            space_generator="post-order-apply",
            search_strategy=search,
            task_name=task.task_name,
            rand_state=SEED,
            num_threads=_cores(),
        )
        known = records.get(digest, [])
        default = defaults[digest]
        best = min((_seconds(r.run_secs) for r in known), default=default)
        history = [default, *[min(default, best)] * math.ceil(len(known) / batch)]
        functions.append(Function(context, task.weight, workload, history, {_trace(r.trace) for r in known}))
    return functions


def _try(function: Function, candidates: Sequence[Any], measure: Measuring, database: Any, cost_model: Any) -> None:
    """Measure candidates, and enter the results into the log, the search and the cost model."""
    from tvm.s_tir.meta_schedule.database import TuningRecord

    results = measure([candidate.sch.mod for candidate in candidates])
    for candidate, result in zip(candidates, results, strict=True):
        seconds = [INVALID] if result.run_secs is None else result.run_secs
        target = function.context.target
        database.commit_tuning_record(
            TuningRecord(candidate.sch.trace, function.workload, seconds, target, candidate.args_info)
        )
        function.tried.add(_trace(candidate.sch.trace))
    if candidates:
        function.context.notify_runner_results(candidates, results)
        cost_model.update(function.context, candidates, results)
    function.num_empty = 0 if candidates else function.num_empty + 1
    function.best.append(min([function.best[-1], *(_seconds(r.run_secs) for r in results)]))


def _digest(module: Any) -> str:
    """A function's hash, the same in every process."""
    from tvm_ffi import structural_hash

    return f"{structural_hash(module) & (1 << 64) - 1:016x}"


def _trace(trace: Any) -> str:
    return str(trace.as_json(True))  # without what postprocessing adds, which follows from the rest


def _seconds(runs: Sequence[Any] | None) -> float:
    """The mean of a candidate's times, infinite if it did not run."""
    values = [float(seconds) for seconds in runs or ()]
    mean = sum(values) / len(values) if values else INVALID
    return mean if mean < INVALID else math.inf


def _best(record: Any) -> float:
    return math.inf if record is None else _seconds(record.run_secs)


def _last_line(traceback: str) -> str:
    return str(traceback).replace("\\n", "\n").strip().splitlines()[-1]


def _cores() -> int:
    return os.cpu_count() or 1


def _clear(folder: Path) -> None:
    """Remove the folders of built candidates, those of killed runs too."""
    for built in folder.glob("built-*"):
        shutil.rmtree(built, ignore_errors=True)


def _database(workloads: Path, records: Path) -> Any:
    from tvm.s_tir import meta_schedule

    return meta_schedule.database.JSONDatabase(str(workloads), str(records))


def _replace(file: Path, document: object) -> None:
    """Write it whole or not at all."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(document))
    os.replace(partial, file)


def _lines(file: Path) -> list[bytes]:
    return file.read_bytes().splitlines() if file.exists() else []


def _mend(file: Path) -> None:
    """Cut off a line that a killed process left unfinished: TVM would not read past it."""
    if file.exists() and (content := file.read_bytes()) and not content.endswith(b"\n"):
        file.write_bytes(content[: content.rfind(b"\n") + 1])
