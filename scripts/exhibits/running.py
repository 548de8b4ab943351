"""Runs what an exhibit lacks through run.py, each sweep in a process of its own; nothing runs twice."""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import product
from pathlib import Path

import conf
from results.cell import Cell, Choice
from results.record import Record
from results.schedule_file import ScheduleFile, read_cells
from results.store import Store
from scripts.agreement import COSTS, COSTS_SUFFIX, are_there
from scripts.charts.style import FILE

from .evidence import Evidence, choices, parts, read_timelines, select
from .preset import OUTPUT, Parameters, Preset

ROOT = conf.FOLDER.parent
PREFIX = (__package__ or "").removesuffix("scripts.exhibits")  # "opweave." in a wheel, nothing in a checkout
RUN = ("-m", f"{PREFIX}run") if PREFIX else (str(ROOT / "run.py"),)
SCHEDULE_FILE = f"system.{FILE}"  # the option of run.py that is a path, or several
COSTS_KEY = "runner.costs"
COSTS_OF = {"system": "orca", "runner": "iteration_costs"}  # what measures them
MEASURED_WITH = ("model", "precision", "system.pipeline_parallel", "system.tensor_parallel")  # what they are costs of
SMALL = {"device": "cpu", "rounds": "2"}
# Of runners that have the option: few samples, and no attempt at what a CPU cannot.
SMALL_OPTIONS = {
    "bench": {"runner.samples": "5", "runner.sm_efficiency": "off"},
    "latency": {"runner.samples": "5"},
    "training": {"runner.samples": "3"},
    "sm_efficiency": {"runner.sm_efficiency": "off"},
}
HOW = ("results", "force", "timeout", "memory_gib", "max_load", "gpus")  # of a sweep, what changes nothing that it measures
NOT_CELLS = (*HOW, "rounds")
NAMED = ("model", "system", "batch")  # what a schedule file's name tells, with the options of the system
FAILED_CELL, BAD_REQUEST, INTERRUPTED = 1, 2, 130  # statuses of run.py beside 0


class CannotRun(Exception):
    """run.py refused the request, or broke; the message is one line."""


class Refused(CannotRun):
    """run.py refused the request, and has said why."""


class Run:
    """One exhibit with the user's changes."""

    def __init__(
        self,
        preset: Preset,
        overrides: Mapping[str, str],
        results: Path,
        output: Path,
        small: bool,
        files: Path | None = None,
    ):
        """A run that nothing of has begun.

        Args:
            preset: the exhibit.
            overrides: what the user changes of its sweeps, as run.py takes it.
            results: the folder of records.
            output: the folder of exhibits' folders, which records may name.
            small: whether the preset's small settings apply.
            files: where schedules and timelines lie by now; `output` if None.
        """
        self.results, self.small, self.force = results, small, overrides.get("force", "").lower() == "true"
        self.changes = {key: value for key, value in overrides.items() if key not in HOW}
        self.folder = output / (preset.name.replace("/", "-") + ("-small" if small else ""))
        self.files = self.folder if files is None else files / self.folder.name
        self.preset = self._changed(preset, overrides)

    def _changed(self, preset: Preset, overrides: Mapping[str, str]) -> Preset:
        sweep = dict(preset.sweep)
        # A further sweep that changes a key which the user names would no longer show what it is for.
        further = [sweep | change for change in preset.also if not change.keys() & overrides.keys()]
        schedules, timeline = dict(preset.schedules), dict(preset.timeline)
        if self.small:
            runner = overrides.get("runner", _runner(sweep))
            sweep |= preset.small | SMALL | SMALL_OPTIONS.get(runner, {})
            further = []
            for step in filter(None, (schedules, timeline)):
                step |= {key: value for key, value in preset.small.items() if key in step} | {"device": "cpu"}
        self._usual = schedules or sweep
        steps = [
            {key: self._relocated(preset, key, value) for key, value in {**step, **overrides}.items()}
            for step in (sweep, *further, *filter(None, (schedules, timeline)))
        ]
        count = 1 + len(further)
        return replace(
            preset,
            sweep=steps[0],
            also=steps[1:count],
            schedules=steps[count] if schedules else {},
            timeline=steps[-1] if timeline else {},
            systems={theirs: self._with_file_here(preset, ours) for theirs, ours in preset.systems.items()},
            baseline=self._with_file_here(preset, preset.baseline),
        )

    def _relocated(self, preset: Preset, key: str, value: str) -> str:
        """The value of a sweep's key; paths are those of this run."""
        return ",".join(self._here(preset, path) for path in parts(value)) if key == SCHEDULE_FILE else value

    def _with_file_here(self, preset: Preset, system: Choice) -> Choice:
        """A system whose schedule file is this run's."""
        options = system.options
        if FILE not in system.changed:
            return system
        return replace(system, values=tuple(sorted((options | {FILE: self._here(preset, str(options[FILE]))}).items())))

    def _here(self, preset: Preset, path: str) -> str:
        """A file in the exhibit's folder under OUTPUT, as presets name it, in the folder of this run."""
        in_preset = Path(OUTPUT) / preset.name.replace("/", "-")
        if Path(path).parent != in_preset:
            return path
        first = {key: next(iter(parts(value)), "") for key, value in self.changes.items()}
        return str(self.folder / self._subfolder(first) / Path(path).name)

    @property
    def sweeps(self) -> list[Parameters]:
        """Those that leave records."""
        return [sweep for sweep in (self.preset.sweep, *self.preset.also) if _runner(sweep) not in ("schedule", "timeline")]

    @property
    def schedules(self) -> Parameters:
        return self.preset.sweep if _runner(self.preset.sweep) == "schedule" else self.preset.schedules

    @property
    def _schedule_cells(self) -> list[Parameters]:
        return list(cells(self.schedules)) if self.schedules else []

    @property
    def timeline(self) -> Parameters:
        return self.preset.sweep if _runner(self.preset.sweep) == "timeline" else self.preset.timeline

    def run(self) -> None:
        """Raises CannotRun."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for cell in self._schedule_cells:
            self._schedule(cell)
        for sweep in self.sweeps:
            if _any_here(sweep):
                _run_py(["-m", *_words(sweep), f"results={quoted(self.results)}"])
        if _any_here(self.timeline) and (self.force or not self._trace.exists()):
            _run_py(["-m", *_words(_without_a_record(self.timeline, "timeline")), f"output={quoted(self._trace)}"])

    def _schedule(self, cell: Parameters) -> None:
        name = f"{cell['model']}@{system_of(cell)}@b{cell.get('batch', '1')}.schedule.json"
        file = self.folder / self._subfolder(cell) / name
        if file.exists() and not self.force:
            return
        words = _words(_without_a_record(cell, "schedule"))
        with tempfile.TemporaryDirectory() as nothing:
            known = {"OPWEAVE_CACHE": nothing} if self.preset.cold else {}
            _run_py([*words, f"output={quoted(file)}"], known)

    def _subfolder(self, cell: Parameters) -> str:
        """Where in the folder the schedule of a cell belongs: beside the others where all is as in the preset, or where its
        file's name tells the difference; else in a folder of its own.
        """
        changed = [
            f"{key}={cell[key]}"
            for key in sorted(self.changes.keys() & cell.keys() - {*NAMED, *NOT_CELLS, "runner"})
            if not key.startswith(("system.", "runner.")) and cell[key] not in parts(self._usual.get(key, ""))
        ]
        return _digest(changed) if changed else ""

    @property
    def _trace(self) -> Path:
        """A file for each request, so that another's timelines are not taken for this one's."""
        return self.folder / f"{_digest(sorted(_words(_without_a_record(self.timeline, 'timeline'))))}.trace.json"

    def evidence(self, records: Sequence[Record] | None = None) -> Evidence:
        """What there is by now. records: those of the folder, where they have been read."""
        if records is None:
            records = Store(self.results).read().all if self.results.exists() else []
        sweeps = [_expected(sweep) for sweep in self.sweeps]
        measured = select(records, sweeps, self.preset.beside.values()) if sweeps else None
        schedules: dict[Cell, ScheduleFile] = {}
        for folder in dict.fromkeys(self.files / self._subfolder(cell) for cell in self._schedule_cells):
            schedules |= read_cells(folder)
        return Evidence(measured, schedules, read_timelines(self.files / self._trace.name) if self.timeline else [])

    def missing_costs(self) -> list[str]:
        """The commands that measure what iterations cost, for costs that the sweeps name and that are not there."""
        commands = []
        for sweep in self.sweeps:
            for costs in parts(sweep.get(COSTS_KEY, "")):
                if not are_there(costs):
                    cell = {key: value for key, value in sweep.items() if key in MEASURED_WITH}
                    output = (COSTS / f"{costs}{COSTS_SUFFIX}").relative_to(ROOT)
                    commands.append(shlex.join(["python", "run.py", *_words({**cell, **COSTS_OF}), f"output={output}"]))
        return list(dict.fromkeys(commands))

    def missing_systems(self) -> list[str]:
        """What the preset names and conf/system/ does not have."""
        named = {s for step in (*self.sweeps, self.schedules, self.timeline) for s in parts(step.get("system", ""))}
        return sorted(named - set(conf.choices("system")))


def cells(parameters: Parameters) -> Iterator[Parameters]:
    """Every combination of the values, as a sweep has them, of systems that are here."""
    keys = list(parameters)
    for values in product(*(parts(parameters[key]) or [""] for key in keys)):
        cell = dict(zip(keys, values, strict=True))
        if cell["system"] in conf.choices("system"):
            yield cell


def system_of(cell: Parameters) -> Choice:
    """The key of a cell's system."""
    (system,) = choices("system", cell)
    return system


def _any_here(parameters: Parameters) -> bool:
    return any(system in conf.choices("system") for system in parts(parameters.get("system", "")))


def _without_a_record(parameters: Parameters, runner: str) -> Parameters:
    """For a runner that keeps none: without what is about records, or an option of another runner."""
    about_records = "rounds", "force", "gpus"
    known = {f"runner.{option}" for option in conf.options("runner", runner)}
    rest = {k: v for k, v in parameters.items() if k not in about_records and (k in known or not k.startswith("runner."))}
    return rest | {"runner": runner}


def _runner(parameters: Parameters) -> str:
    return parameters.get("runner", "bench")


def _expected(sweep: Parameters) -> Parameters:
    return {key: value for key, value in sweep.items() if key not in NOT_CELLS}


def _digest(words: Sequence[str]) -> str:
    """A short name for a request."""
    return sha256(" ".join(words).encode()).hexdigest()[:8]


def _words(parameters: Parameters) -> list[str]:
    """As run.py takes them, without the systems that are not here."""
    here = {**parameters, "system": ",".join(s for s in parts(parameters["system"]) if s in conf.choices("system"))}
    if SCHEDULE_FILE in here:
        here[SCHEDULE_FILE] = ",".join(map(quoted, parts(here[SCHEDULE_FILE])))
    return [f"{key}={value}" for key, value in here.items()]


def quoted(path: Path | str) -> str:
    """A path as Hydra's grammar takes one with spaces and parentheses."""
    return "'" + str(path).replace("'", "\\'") + "'"


def _run_py(arguments: list[str], environment: Mapping[str, str] | None = None) -> None:
    """Its progress goes on to standard error. A failed cell has a record that says so, and is no error here.

    Raises:
        Refused: the request was refused.
        CannotRun: it ended with a status that is none of a sweep.
        KeyboardInterrupt: it was interrupted.
    """
    command = [sys.executable, *RUN, *arguments]
    with tempfile.TemporaryFile("w+") as output:  # what a person at run.py would want to see once it has ended
        done = subprocess.run(command, stdout=output, env={**os.environ, **(environment or {})}, check=False)
        output.seek(0)
        if done.returncode not in (0, FAILED_CELL):
            shutil.copyfileobj(output, sys.stderr)
    if done.returncode == BAD_REQUEST:
        raise Refused("run.py refused what it was asked, as it says above")
    if done.returncode == INTERRUPTED:
        raise KeyboardInterrupt
    if done.returncode not in (0, FAILED_CELL):
        raise CannotRun(f"run.py ended with status {done.returncode}")
