"""Runs what an exhibit lacks through run.py, each sweep a process of its own; what is there already is not run again."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import product
from pathlib import Path

from results.record import CONF
from results.store import Store
from scripts.charts.measured import Record

from .evidence import Evidence, labels, parts, read_schedules, read_timelines, select
from .preset import OUTPUT, Parameters, Preset, systems_here

ROOT = CONF.parent
SMALL = {"device": "cpu", "rounds": "2"}
# Of runners that have the option: few samples, and no attempt at what a CPU cannot.
SMALL_OPTIONS = {
    "bench": {"runner.samples": "5", "runner.sm_efficiency": "off"},
    "latency": {"runner.samples": "5"},
    "training": {"runner.samples": "3"},
    "sm_efficiency": {"runner.sm_efficiency": "off"},
}
NOT_CELLS = ("results", "force", "timeout", "memory_gib", "rounds", "gpus")
BAD_REQUEST = 2


class CannotRun(Exception):
    """run.py refused the request, or broke; the message is one line."""


class Refused(CannotRun):
    """run.py refused the request, and has said why."""


class Run:
    """One exhibit: preset with the user's changes made, and the folders of its records and of its other files. kept: where
    the latter lie by now, if not in `output`, which records may name.
    """

    def __init__(
        self,
        preset: Preset,
        overrides: Mapping[str, str],
        results: Path,
        output: Path,
        small: bool,
        kept: Path | None = None,
    ):
        self.results, self.small, self.force = results, small, overrides.get("force") == "true"
        self.folder = output / (preset.name.replace("/", "-") + ("-small" if small else ""))
        self.kept = self.folder if kept is None else kept / self.folder.name
        self.preset = self._changed(preset, overrides)

    def _changed(self, preset: Preset, overrides: Mapping[str, str]) -> Preset:
        sweep = dict(preset.sweep)
        # One that changes what the user names too would be of that, and not of what it is there for.
        further = [sweep | change for change in preset.also if not change.keys() & overrides.keys()]
        schedules, timeline = dict(preset.schedules), dict(preset.timeline)
        if self.small:
            runner = overrides.get("runner", _runner(sweep))
            sweep |= preset.small | SMALL | SMALL_OPTIONS.get(runner, {})
            further = []
            for step in filter(None, (schedules, timeline)):
                step |= {key: value for key, value in preset.small.items() if key in step} | {"device": "cpu"}
        steps = [
            {key: self._in_folder(preset, value) for key, value in {**step, **overrides}.items()}
            for step in (sweep, *further, *filter(None, (schedules, timeline)))
        ]
        count = 1 + len(further)
        return replace(
            preset,
            sweep=steps[0],
            also=steps[1:count],
            schedules=steps[count] if schedules else {},
            timeline=steps[-1] if timeline else {},
            systems={theirs: self._in_folder(preset, ours) for theirs, ours in preset.systems.items()},
            baseline=self._in_folder(preset, preset.baseline),
        )

    def _in_folder(self, preset: Preset, text: str) -> str:
        """A path under the folder that presets call results/exhibits, as it is here."""
        return text.replace(f"{OUTPUT}/{preset.name.replace('/', '-')}", str(self.folder))

    @property
    def sweeps(self) -> list[Parameters]:
        """Those that leave records."""
        return [sweep for sweep in (self.preset.sweep, *self.preset.also) if _runner(sweep) not in ("schedule", "timeline")]

    @property
    def schedules(self) -> Parameters:
        return self.preset.sweep if _runner(self.preset.sweep) == "schedule" else self.preset.schedules

    @property
    def timeline(self) -> Parameters:
        return self.preset.sweep if _runner(self.preset.sweep) == "timeline" else self.preset.timeline

    def run(self) -> None:
        """Raises CannotRun."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.schedules:
            for cell in cells(self.schedules):
                self._schedule(cell)
        for sweep in self.sweeps:
            if _any_here(sweep):
                _run_py(["-m", *_words(sweep), f"results={quoted(self.results)}"])
        if _any_here(self.timeline) and (self.force or not self._trace.exists()):
            _run_py(["-m", *_words(_without_a_record(self.timeline, "timeline")), f"output={quoted(self._trace)}"])

    def _schedule(self, cell: Parameters) -> None:
        file = self.folder / f"{cell['model']}@{system_of(cell)}@b{cell.get('batch', '1')}.schedule.json"
        if file.exists() and not self.force:
            return
        words = _words(_without_a_record(cell, "schedule"))
        with tempfile.TemporaryDirectory() as nothing:
            known = {"OPWEAVE_CACHE": nothing} if self.preset.cold else {}
            _run_py([*words, f"output={quoted(file)}"], known)

    @property
    def _trace(self) -> Path:
        """A file for each request, so that another's timelines are not taken for this one's."""
        asked = " ".join(sorted(_words(_without_a_record(self.timeline, "timeline"))))
        return self.folder / f"{sha256(asked.encode()).hexdigest()[:8]}.trace.json"

    def evidence(self, records: Sequence[Record] | None = None) -> Evidence:
        """What there is by now. records: those of the folder, where they have been read."""
        if records is None:
            records = list(Store(self.results).read().records.values()) if self.results.is_dir() else []
        measured = select(records, [_expected(sweep) for sweep in self.sweeps]) if self.sweeps else None
        schedules = read_schedules(self.kept) if self.schedules else {}
        return Evidence(measured, schedules, read_timelines(self.kept / self._trace.name) if self.timeline else [])

    def missing_systems(self) -> list[str]:
        """What the preset names and conf/system/ does not have."""
        named = {s for step in (*self.sweeps, self.schedules, self.timeline) for s in parts(step.get("system", ""))}
        return sorted(named - set(systems_here()))


def cells(parameters: Parameters) -> Iterator[Parameters]:
    """Every combination of the values, as a sweep has them, of systems that are here."""
    keys = list(parameters)
    for values in product(*(parts(parameters[key]) or [""] for key in keys)):
        cell = dict(zip(keys, values, strict=True))
        if cell["system"] in systems_here():
            yield cell


def system_of(cell: Parameters) -> str:
    """The label of a cell's system."""
    (found,) = labels("system", cell)
    return found


def _any_here(parameters: Parameters) -> bool:
    return any(system in systems_here() for system in parts(parameters.get("system", "")))


def _without_a_record(parameters: Parameters, runner: str) -> Parameters:
    """For a runner that keeps none: without what is about records, or an option of another runner."""
    kept = {k: v for k, v in parameters.items() if k not in ("rounds", "force", "gpus") and not k.startswith("runner.")}
    return kept | {"runner": runner}


def _runner(parameters: Parameters) -> str:
    return parameters.get("runner", "bench")


def _expected(sweep: Parameters) -> Parameters:
    return {key: value for key, value in sweep.items() if key not in NOT_CELLS}


def _words(parameters: Parameters) -> list[str]:
    """As run.py takes them, without the systems that are not here."""
    here = {**parameters, "system": ",".join(s for s in parts(parameters["system"]) if s in systems_here())}
    if "system.schedule" in here:
        here["system.schedule"] = ",".join(map(quoted, parts(here["system.schedule"])))
    return [f"{key}={value}" for key, value in here.items()]


def quoted(path: Path | str) -> str:
    """A path as Hydra's grammar takes one with spaces and parentheses."""
    return "'" + str(path).replace("'", "\\'") + "'"


def _run_py(arguments: list[str], environment: Mapping[str, str] | None = None) -> None:
    """Its progress goes on to standard error. A cell that fails is told by its record, so that only a request that was
    refused is an error here: raises CannotRun. An interrupt goes on too.
    """
    command = [sys.executable, str(ROOT / "run.py"), *arguments]
    with tempfile.TemporaryFile("w+") as told:  # what a person at run.py would want to see once it has ended
        done = subprocess.run(command, stdout=told, env={**os.environ, **(environment or {})}, check=False)
        told.seek(0)
        if done.returncode not in (0, 1):
            shutil.copyfileobj(told, sys.stderr)
    if done.returncode == BAD_REQUEST:
        raise Refused("run.py refused what it was asked, as it says above")
    if done.returncode not in (0, 1):
        raise KeyboardInterrupt
