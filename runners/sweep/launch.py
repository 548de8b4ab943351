"""A sweep on other machines, through one of Hydra's launchers: each group of cells is a job of the launcher's."""

import json
import os
import shutil
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from filelock import FileLock
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from results.record import group_key
from results.store import Store, write_json
from runners.machine.environment import ROOT, SETTINGS
from runners.request.bad_request import BadRequest
from runners.request.requests import DEVICES, NO_RECORD, SWEEP_KEYS, resolve

# conf/hydra/launcher/ has presets under the names that the launchers' own plugins gave their schemas. To be held to those is
# what Hydra warns of, and what is wanted.
warnings.filterwarnings("ignore", r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")

ATTEMPTS = 3  # a group, before its sweep ends without it
SILENCE = 60.0  # seconds without any job, after which it is said
Plain = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """Cells that are compared, and so measured on one machine. overrides: of the first, which name the job."""

    overrides: list[str]
    requests: list[Plain]

    @property
    def name(self) -> str:
        request = self.requests[0]
        return f"{request['model']['name']} b{request['batch']}"


@dataclass(frozen=True)
class Outcome:
    """How a job ended. status: the exit status of its sweep. records: the ids of its cells."""

    host: str
    status: int
    records: list[str]
    bad_request: str | None = None


class Jobs:
    """What a launcher runs on a node: `numbers[i]` is the group of its job number i.

    It goes there pickled, by the launcher. What it did comes back as a file in `folder`, which the machines share, since a
    node may be lost with all that it would have answered.
    """

    def __init__(self, groups: Sequence[Group], numbers: Sequence[int], folder: Path):
        self.groups, self.numbers, self.folder = list(groups), list(numbers), folder
        self.cwd = os.getcwd()  # where custom models are imported from
        self.settings = {name: os.environ[name] for name in SETTINGS if name in os.environ}

    def __call__(self, config: DictConfig) -> None:
        """Run one group's sweep, unless that was done meanwhile by a job that was given up too early."""
        number = self.numbers[HydraConfig.get().job.num]
        # A launcher's own idea of how many threads a job has (Ray sets OMP_NUM_THREADS) would make another cell of it.
        for name in SETTINGS:
            os.environ.pop(name, None)
        os.environ.update(self.settings)
        with FileLock(lock_file(self.folder, number)), (self.folder / f"{number}.log").open("a", encoding="utf-8") as log:
            if read_outcome(self.folder, number) is not None:
                return
            with redirect_stdout(log), redirect_stderr(log):
                try:
                    outcome = self.run(self.groups[number].requests)
                except BadRequest as error:
                    outcome = Outcome(socket.gethostname(), 2, [], str(error))
                except Exception:
                    traceback.print_exc()
                    raise
            write_json(self.folder / f"{number}.outcome", vars(outcome))

    def run(self, requests: Sequence[Plain]) -> Outcome:
        """Raises BadRequest, for what only this node could tell."""
        from .sweep import Sweep

        try:
            os.chdir(self.cwd)
        except OSError as error:
            raise BadRequest(
                f"{self.cwd}, where the sweep was asked for, is not there: {error.strerror or error}"
            ) from error
        resolved = [resolve(OmegaConf.create(request)) for request in requests]
        cells = [{key: value for key, value in request.items() if key not in SWEEP_KEYS} for request in resolved]
        options = {key: resolved[0][key] for key in SWEEP_KEYS if key != "output"}
        sweep = Sweep(cells, **options)
        return Outcome(socket.gethostname(), sweep.run(), list(sweep.ids.values()))


class Launch:
    """Hands the groups of a sweep to a launcher and sees them through.

    launcher: one of Hydra's, set up. context: Hydra's, config: the sweep's own. name: of the launcher, for people. folder:
    where the machines meet, from meeting_place.
    """

    def __init__(self, launcher: Any, context: Any, config: DictConfig, name: str, groups: Sequence[Group], folder: Path):
        self.launcher, self.context, self.config, self.name = launcher, context, config, name
        self.groups, self.folder = list(groups), folder
        self.results = Path(self.groups[0].requests[0]["results"])

    def run(self) -> int:
        """Returns the exit status, as that of a sweep on this machine. Raises BadRequest."""
        try:
            self.folder.mkdir(parents=True)
            Store(self.results).make()
        except OSError as error:
            raise BadRequest(f"{error.filename} cannot be written: {error.strerror or error}") from error
        # A launcher's process finds this project, and its plugins of Hydra, wherever it is started.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        print(
            f"opweave: {len(self.groups)} groups for hydra/launcher={self.name}; their logs: {self.folder}", file=sys.stderr
        )
        ended = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(ended,), daemon=True)
        watcher.start()
        try:
            for attempt in range(ATTEMPTS):
                left = [number for number in range(len(self.groups)) if read_outcome(self.folder, number) is None]
                if not left:
                    break
                self._attempt(left, attempt)
        finally:
            ended.set()
            watcher.join()
        return self._finish()

    def _attempt(self, left: Sequence[int], attempt: int) -> None:
        if attempt:
            names = ", ".join(self.groups[number].name for number in left)
            print(f"opweave: launched again, for its job ended too early: {names}", file=sys.stderr)
        jobs = Jobs(self.groups, left, self.folder)
        self.launcher.setup(hydra_context=self.context, task_function=jobs, config=self.config)
        try:
            # A job composes its config anew, so the folder is told to each.
            folder = "'" + str(self.folder).replace("\\", "\\\\").replace("'", "\\'") + "'"
            where = [f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=."]
            self.launcher.launch([[*self.groups[number].overrides, *where] for number in left], initial_job_idx=0)
        except Exception as error:  # each launcher has its own for a job that was killed, and then waits for no other
            if not any(self.folder.glob("*.log")):  # no job has begun: it is the launcher that cannot be as it was asked for
                raise BadRequest(f"hydra/launcher={self.name}: {error}") from error
            print(f"opweave: hydra/launcher={self.name}: {' '.join(str(error).split())[:300]}", file=sys.stderr)
        for number in left:  # one that is still at work is waited for
            with FileLock(lock_file(self.folder, number)):
                pass

    def _watch(self, ended: threading.Event) -> None:
        """Tell of each group that is done."""
        told: set[int] = set()
        waited = 0.0
        while True:
            last = ended.wait(1.0)
            waited += 1.0
            for number, group in enumerate(self.groups):
                if number not in told and (outcome := read_outcome(self.folder, number)) is not None:
                    told.add(number)
                    how = "done" if outcome.status == 0 else f"ended with status {outcome.status}"
                    print(f"[{len(told)}/{len(self.groups)}] {group.name}: {how} on {outcome.host}", file=sys.stderr)
            if waited == SILENCE and not any(self.folder.glob("*.log")):
                asked = f"is there what hydra.launcher asks for? (hydra/launcher={self.name})"
                print(f"opweave: no job has begun after {SILENCE:.0f} s: {asked}", file=sys.stderr)
            if last:
                return

    def _finish(self) -> int:
        """Print the table of all groups; returns the exit status. Raises BadRequest where a node found one."""
        from .summary import print_summary

        store, records, status = Store(self.results), [], 0
        for number, group in enumerate(self.groups):
            outcome = read_outcome(self.folder, number)
            if outcome is None:
                log = self.folder / f"{number}.log"
                print(f"opweave: {group.name}: no job for it came to its end; see {log}", file=sys.stderr)
                status = 1
                continue
            if outcome.bad_request is not None:
                raise BadRequest(f"{outcome.host}: {outcome.bad_request}")
            found = [record for record in map(store.find, outcome.records) if record is not None]
            if len(found) < len(outcome.records):
                print(
                    f"opweave: {group.name}: measured on {outcome.host}, but not all of its records are in {self.results} "
                    "here: the machines of a launcher need a folder that they share",
                    file=sys.stderr,
                )
                status = 1
            records += found
            status = max(status, outcome.status)
        print_summary(records, self.results)
        if status == 0:
            shutil.rmtree(self.folder, ignore_errors=True)  # a node may still hold a log of its own
        return status


def grouped(cells: Sequence[tuple[Sequence[str], DictConfig]]) -> list[Group]:
    """The groups of cells that are compared, from their overrides and configs. What only a node can tell is not checked.

    Raises BadRequest.
    """
    groups: dict[str, Group] = {}
    for overrides, config in cells:
        request = check(config)
        if request["runner"]["name"] in NO_RECORD:
            raise BadRequest(f"runner={request['runner']['name']} keeps no record and runs here: leave hydra/launcher out")
        groups.setdefault(group_key(request), Group(list(overrides), [])).requests.append(request)
    found = list(groups.values())
    for key in SWEEP_KEYS:
        if len({repr(request[key]) for group in found for request in group.requests}) > 1:
            raise BadRequest(f"{key} holds for a whole sweep: give it one value")
    return found


def meeting_place(groups: Sequence[Group], config: DictConfig) -> Path:
    """A folder for one launch, told to Hydra as the sweep's.

    It is in that of the results, which is the one that the machines share; no file in it is named like a record.
    """
    folder = Path(groups[0].requests[0]["results"]) / ".launches" / uuid4().hex[:8]
    with read_write(config), open_dict(config):
        config.hydra.sweep.dir, config.hydra.sweep.subdir = str(folder), "."
    return folder


def check(config: DictConfig) -> Plain:
    """The request as plain data, checked but for the device: this machine need not have the GPUs of those that measure.

    Raises BadRequest.
    """
    ours = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    elsewhere = {key: ours.get(key) for key in ("device", "gpus")}
    if elsewhere["device"] in DEVICES:
        ours.device = "cpu"
    request = resolve(ours)
    return request | {key: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for key, v in elsewhere.items()}


def lock_file(folder: Path, number: int) -> Path:
    """Held by the job that runs a group."""
    return folder / f"{number}.lock"


def read_outcome(folder: Path, number: int) -> Outcome | None:
    """How a group ended, None while it has not."""
    try:
        return Outcome(**json.loads((folder / f"{number}.outcome").read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
