"""A sweep on other machines, through one of Hydra's launchers: each group of cells is a job of the launcher's."""

import os
import shutil
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

from filelock import FileLock
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict, read_write

from conf.text import counted
from results.cell import Group
from results.record import Record
from results.store import Store
from results.words import one_line
from runners.checks import BadRequest
from runners.machine.installation import IMPORT_PATH
from runners.request.request import Request
from runners.showings.registry import is_showing

from .jobs import JobGroup, Jobs, lock_file, read_outcome
from .summary import print_summary

ATTEMPTS = 3  # a group, before its sweep ends without it
SILENCE = 60.0  # seconds without any job, after which it is said


class Launch:
    """Hands the groups of a sweep to a launcher and sees them through."""

    def __init__(
        self,
        launcher: Launcher,
        context: HydraContext,
        config: DictConfig,
        name: str,
        groups: Sequence[JobGroup],
        folder: Path,
    ):
        """Nothing is launched yet.

        Args:
            launcher: one of Hydra's.
            context: Hydra's.
            config: the sweep's own.
            name: of the launcher, for people.
            groups: what is compared.
            folder: where the machines meet, from meeting_place.
        """
        self.launcher, self.context, self.config, self.name = launcher, context, config, name
        self.groups, self.folder = list(groups), folder
        self.results = self.groups[0].request.options.results

    def run(self) -> int:
        """Returns the exit status, as that of a sweep on this machine. Raises BadRequest."""
        try:
            self.folder.mkdir(parents=True)
            Store(self.results).make()
        except OSError as error:
            raise BadRequest(f"{error.filename} cannot be written: {error.strerror or error}") from error
        # A launcher's process finds this project, and its plugins of Hydra, wherever it is started.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*IMPORT_PATH, os.environ.get("PYTHONPATH")]))
        print(
            f"opweave: {counted(len(self.groups), 'group')} for hydra/launcher={self.name}; their logs: {self.folder}",
            file=sys.stderr,
        )
        ended = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(ended,), daemon=True)
        watcher.start()
        try:
            for attempt in range(ATTEMPTS):
                undone = [number for number in range(len(self.groups)) if read_outcome(self.folder, number) is None]
                if not undone:
                    break
                self._attempt(undone, attempt)
        finally:
            ended.set()
            watcher.join()
        return self._finish()

    def _attempt(self, undone: Sequence[int], attempt: int) -> None:
        if attempt:
            names = ", ".join(self.groups[number].name for number in undone)
            print(f"opweave: launched again, for its job ended too early: {names}", file=sys.stderr)
        jobs = Jobs(self.groups, undone, self.folder)
        self.launcher.setup(hydra_context=self.context, task_function=jobs, config=self.config)
        try:
            # A job composes its config anew, so the folder is told to each.
            folder = "'" + str(self.folder).replace("\\", "\\\\").replace("'", "\\'") + "'"
            where = [f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=."]
            self.launcher.launch([[*self.groups[number].overrides, *where] for number in undone], initial_job_idx=0)
        except Exception as error:  # each launcher has its own for a job that was killed, and then waits for no other
            if not any(self.folder.glob("*.log")):  # no job has begun: it is the launcher that cannot be as it was asked for
                shutil.rmtree(self.folder, ignore_errors=True)
                raise BadRequest(f"hydra/launcher={self.name}: {error}") from error
            print(f"opweave: hydra/launcher={self.name}: {one_line(str(error), 300)}", file=sys.stderr)
        for number in undone:  # one that is still at work is waited for
            with FileLock(lock_file(self.folder, number)):
                pass

    def _watch(self, ended: threading.Event) -> None:
        """Tell of each group that is done."""
        done: set[int] = set()
        waited_s = 0.0
        while True:
            is_last = ended.wait(1.0)
            waited_s += 1.0
            for number, group in enumerate(self.groups):
                if number not in done and (outcome := read_outcome(self.folder, number)) is not None:
                    done.add(number)
                    how = "done" if outcome.status == 0 else f"ended with status {outcome.status}"
                    print(f"[{len(done)}/{len(self.groups)}] {group.name}: {how} on {outcome.host}", file=sys.stderr)
            if waited_s == SILENCE and not any(self.folder.glob("*.log")):
                hint = f"is there what hydra.launcher asks for? (hydra/launcher={self.name})"
                print(f"opweave: no job has begun after {SILENCE:.0f} s: {hint}", file=sys.stderr)
            if is_last:
                return

    def _finish(self) -> int:
        """Print the table of all groups; returns the exit status. Raises BadRequest where a node found one."""
        records: list[Record] = []
        status = 0
        for number, group in enumerate(self.groups):
            group_status, group_records = self._outcome(number, group)
            status = max(status, group_status)
            records += group_records
        print_summary(records, self.results)
        if status == 0:
            shutil.rmtree(self.folder, ignore_errors=True)  # a node may still hold a log of its own
        return status

    def _outcome(self, number: int, group: JobGroup) -> tuple[int, list[Record]]:
        """The exit status of a group, and those of its records that are here."""
        outcome = read_outcome(self.folder, number)
        if outcome is None:
            log = self.folder / f"{number}.log"
            print(f"opweave: {group.name}: no job for it came to its end; see {log}", file=sys.stderr)
            return 1, []
        if outcome.bad_request is not None:
            raise BadRequest(f"{outcome.host}: {outcome.bad_request}")
        records = [record for record in map(Store(self.results).find, outcome.records) if record is not None]
        if len(records) == len(outcome.records):
            return outcome.status, records
        print(
            f"opweave: {group.name}: measured on {outcome.host}, but not all of its records are in {self.results} "
            "here: the machines of a launcher need a folder that they share",
            file=sys.stderr,
        )
        return max(1, outcome.status), records


def grouped(requests: Sequence[tuple[Sequence[str], Request]]) -> list[JobGroup]:
    """The groups of cells that are compared. What only a node can tell is not checked.

    Args:
        requests: of one cell each, with the overrides that ask for it.

    Raises:
        BadRequest: a runner keeps no record, or something that holds for a whole sweep differs.
    """
    Request.joined(request for _, request in requests)
    overrides_of: dict[Group, tuple[str, ...]] = {}
    requests_of: dict[Group, list[Request]] = {}
    for overrides, request in requests:
        (cell,) = request.cells
        if is_showing(cell.runner):
            raise BadRequest(f"runner={cell.runner.choice} keeps no record and runs here: leave hydra/launcher out")
        overrides_of.setdefault(cell.group, tuple(overrides))
        requests_of.setdefault(cell.group, []).append(request)
    return [JobGroup(overrides_of[group], Request.joined(together)) for group, together in requests_of.items()]


def meeting_place(groups: Sequence[JobGroup], config: DictConfig) -> Path:
    """A folder for one launch, told to Hydra as the sweep's.

    It is in that of the results, which is the one that the machines share; no file in it is named like a record.
    """
    folder = groups[0].request.options.results / ".launches" / uuid4().hex[:8]
    with read_write(config), open_dict(config):
        config.hydra.sweep.dir, config.hydra.sweep.subdir = str(folder), "."
    return folder
