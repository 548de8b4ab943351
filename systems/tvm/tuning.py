"""MetaSchedule's tuning of a module's functions, with a log that is kept, and a budget of trials and of time.

The search within a function is MetaSchedule's; which function is next is decided here. TVM's own scheduler measures a batch
of every function before it writes down or tells of any of them, which for a network is most of what there is time for.
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
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from systems.base import Unsupported

from .build import SEED, default_schedule, quiet, register_intrinsics
from .measuring import Measuring

WORKLOADS, RECORDS, SPENT = "database_workload.json", "database_tuning_record.json", "spent.json"
DEFAULTS = "defaults.json"
BATCH = 16  # trials of one function that are built and run together, at most; about what a machine builds at once
POPULATION = 8  # candidates bred for each that is measured, TVM's own ratio in a full batch
SAMPLES = 5 * 512  # of a schedule space, few of which a GPU can run, to begin a generation with; TVM's own number
EMPTY = 3  # batches in succession without a new candidate, after which a function counts as searched
ALPHA, WINDOW = 0.2, 3  # of the gradient, TVM's own
INVALID = 1e10  # seconds, which MetaSchedule's log has for a candidate that does not run


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
        _replace(self.folder / SPENT, [*self._batches(), (self.trials, self.seconds + seconds)])

    @property
    def defaults(self) -> dict[str, float]:
        """Seconds of each function in its default schedule, by the function's digest; infinite where that does not run."""
        file = self.folder / DEFAULTS
        return json.loads(file.read_text()) if file.exists() else {}

    def know_defaults(self, seconds: dict[str, float]) -> None:
        _replace(self.folder / DEFAULTS, seconds)

    def within(self, trials: int, budget_s: float) -> "Usable":
        """The beginning of the log that tuning with this budget of trials and seconds would have written.

        So a log that a larger budget has filled says of a smaller one what that is worth, and no more.
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
        """A database of the fastest of these records for each function, where it is faster than the function's default."""
        from tvm.s_tir.meta_schedule.database import MemoryDatabase, TuningRecord

        with tempfile.TemporaryDirectory(dir=self.folder, prefix="built-") as folder:
            records = Path(folder) / RECORDS
            records.write_bytes(b"".join(line + b"\n" for line in usable.records))
            measured = _database(self.folder / WORKLOADS, records)
        fastest: dict[str, Any] = {}
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
    """records: lines of a log. seconds: what they took. defaults: as TuningLog's."""

    records: list[bytes]
    seconds: float
    defaults: dict[str, float]

    @property
    def digest(self) -> str:
        return hashlib.sha256(b"\n".join([*self.records, json.dumps(self.defaults).encode()])).hexdigest()


@dataclass
class Function:
    """A function that is tuned. context: its TuneContext. weight: how often the module calls it. best: the fewest seconds
    known before the first and after each batch of candidates, the default schedule among them. tried: their traces.
    """

    context: Any
    weight: int
    workload: Any
    best: list[float]
    tried: set[str]
    begun: bool = field(default=False)
    empty: int = field(default=0)

    def promise(self) -> float:
        """What another batch promises, in seconds of the whole module: the gradient by which MetaSchedule's own scheduler
        chooses (of Ansor, Section 6), from the default's time on rather than from the first batch's. Nothing once no new
        candidate is found, or where none has run in WINDOW batches.
        """
        batches, now = len(self.best), self.best[-1]
        if self.empty >= EMPTY or (math.isinf(now) and batches > WINDOW):
            return 0.0
        if math.isinf(now):
            return now
        before = self.best[-1 - WINDOW] if batches > WINDOW else math.inf
        gained = now if math.isinf(before) else (before - now) / WINDOW
        return self.weight * (ALPHA * gained + (1 - ALPHA) * now / batches)

    def candidates(self, most: int, batch: int, database: Any, cost_model: Any) -> list[Any]:
        """The next batch of MetaSchedule's search, without what was measured before."""
        if not self.begun:
            self.context.pre_tuning(1 << 20, batch, None, database, cost_model)
            self.begun = True
        found = self.context.generate_measure_candidates()
        if found is None:
            self.empty = EMPTY
            return []
        new = [c for c in found if _trace(c.sch.trace) not in self.tried]
        return list(islice(new, most))


def tune(
    lowered: Callable[[], Any],
    target: Any,
    log: TuningLog,
    trials: int,
    budget_s: float,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Measure candidates for the functions of a module until the log holds `trials`, or those have taken `budget_s` seconds.

    lowered: makes the module, if need be. What the log holds already counts: a run that was killed is taken up again, and
    loses the batch that it was at. First of all the functions' default schedules are measured, which are no trials but take
    their time: they say where trials pay, and what a candidate has to beat. Raises Unsupported where xgboost, TVM's cost
    model, is missing.
    """
    if log.trials >= trials or log.seconds >= budget_s:
        return
    try:
        import xgboost  # noqa: F401
    except ImportError as error:
        raise Unsupported("TVM's tuning needs xgboost: pip install xgboost-cpu") from error
    from tvm.s_tir import meta_schedule

    def told(of: str = "") -> None:
        progress(f"tuning: {log.trials} of {trials} trials, {log.seconds:.0f} of {budget_s:.0f} s{of}")

    told()
    _clear(log.folder)
    built = Path(tempfile.mkdtemp(dir=log.folder, prefix="built-"))
    with ExitStack() as stack:
        stack.enter_context(quiet())
        stack.callback(_clear, log.folder)
        register_intrinsics()
        module = lowered()
        last = time.monotonic()

        def spend() -> bool:
            """Put down what was done since the last time; is there time left?"""
            nonlocal last
            now = time.monotonic()
            log.spend(now - last)
            last = now
            return log.seconds < budget_s

        database = log.database()
        tasks = meta_schedule.relax_integration.extract_tasks(module, target)
        measure = Measuring(target, built, BATCH)
        stack.callback(measure.close)
        known = log.defaults
        missing = [f for f in (task.dispatched[0] for task in tasks) if _digest(f) not in known]
        for begin in range(0, len(missing), BATCH):
            some = missing[begin : begin + BATCH]
            results = measure([default_schedule(f, target) for f in some])
            if not known and all(r.run_secs is None for r in results):
                raise RuntimeError(f"TVM's tuner cannot measure anything here: {_last_line(results[0].error_msg)}")
            known |= {_digest(f): _seconds(r.run_secs) for f, r in zip(some, results, strict=True)}
            log.know_defaults(known)
            time_left = spend()
            told(f", {min(begin + BATCH, len(missing))} of {len(missing)} default schedules")
            if not time_left:
                return
        batch = max(1, min(BATCH, trials // max(1, len(tasks))))
        functions = _functions(tasks, target, database, log, batch)
        cost_model = meta_schedule.cost_model.CostModel.create("xgb", num_tuning_cores=_cores(), tree_method="auto")
        while log.trials < trials:
            function = max(functions, key=Function.promise, default=None)
            if function is None or not function.promise():
                break  # nothing is left to try
            candidates = function.candidates(min(batch, trials - log.trials), batch, database, cost_model)
            _try(function, candidates, measure, database, cost_model)
            time_left = spend()
            told()
            if not time_left:
                break


def _functions(tasks: Sequence[Any], target: Any, database: Any, log: TuningLog, batch: int) -> list[Function]:
    """What is known of each function, from the log.

    The evolutionary search has TVM's own population (512) in proportion to the batch: breeding 512 candidates takes half a
    minute, of which a batch of two would measure two.
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
    """Measure candidates, and have the log, the search and the cost model learn of it."""
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
    function.empty = 0 if candidates else function.empty + 1
    function.best.append(min([function.best[-1], *(_seconds(r.run_secs) for r in results)]))


def _digest(module: Any) -> str:
    """The same for the same function in another process."""
    from tvm_ffi import structural_hash

    return f"{structural_hash(module) & (1 << 64) - 1:016x}"


def _trace(trace: Any) -> str:
    return str(trace.as_json(True))  # what postprocessing adds follows from the rest


def _seconds(runs: Sequence[Any] | None) -> float:
    """The mean of what was measured, infinite for a candidate that did not run."""
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
    """Remove what was built, by a run that was killed too."""
    for left in folder.glob("built-*"):
        shutil.rmtree(left, ignore_errors=True)


def _database(workloads: Path, records: Path) -> Any:
    from tvm.s_tir import meta_schedule

    return meta_schedule.database.JSONDatabase(str(workloads), str(records))


def _replace(file: Path, document: Any) -> None:
    """Write it whole or not at all."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(document))
    os.replace(partial, file)


def _lines(file: Path) -> list[bytes]:
    return file.read_bytes().splitlines() if file.exists() else []


def _mend(file: Path) -> None:
    """Cut off the line that a process was killed in the midst of, which TVM would not read past."""
    if file.exists() and (content := file.read_bytes()) and not content.endswith(b"\n"):
        file.write_bytes(content[: content.rfind(b"\n") + 1])
