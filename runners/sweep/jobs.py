"""What a launcher runs on a node: the sweep of one group of cells. How it ended comes back as a file."""

import json
import os
import socket
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from results.store import write_json
from runners.checks import BadRequest
from runners.machine.environment import settings_of
from runners.request.request import Request

from .sweep import Sweep


@dataclass(frozen=True)
class JobGroup:
    """Cells that are compared, and so measured on one machine. overrides: of the first, which name the job."""

    overrides: tuple[str, ...]
    request: Request

    @property
    def name(self) -> str:
        cell = self.request.cells[0]
        return f"{cell.model.choice} b{cell.batch}"


@dataclass(frozen=True)
class Outcome:
    """How a job ended. status: the exit status of its sweep. records: the ids of its cells."""

    host: str
    status: int
    records: list[str]
    bad_request: str | None = None


class Jobs:
    """`numbers[i]` is the group of the launcher's job number i.

    It goes to the node pickled, by the launcher. What it did comes back as a file in `folder`, which the machines share,
    since a node may be lost with all that it would have answered.
    """

    def __init__(self, groups: Sequence[JobGroup], numbers: Sequence[int], folder: Path):
        self.groups, self.numbers, self.folder = list(groups), list(numbers), folder
        self.cwd = os.getcwd()  # where custom models are imported from
        self.settings = settings_of(os.environ)

    def __call__(self, config: DictConfig) -> None:
        """Run one group's sweep, unless that was done meanwhile by a job that was given up too early."""
        number = self.numbers[HydraConfig.get().job.num]
        # A launcher's own idea of how many threads a job has (Ray sets OMP_NUM_THREADS) would make another cell of it.
        for name in settings_of(os.environ):
            del os.environ[name]
        os.environ.update(self.settings)
        with FileLock(lock_file(self.folder, number)), (self.folder / f"{number}.log").open("a", encoding="utf-8") as log:
            if read_outcome(self.folder, number) is not None:
                return
            with redirect_stdout(log), redirect_stderr(log):
                try:
                    outcome = self.run(self.groups[number].request)
                except BadRequest as error:
                    outcome = Outcome(socket.gethostname(), 2, [], str(error))
                except Exception:
                    traceback.print_exc()
                    raise
            write_json(self.folder / f"{number}.outcome", asdict(outcome))

    def run(self, request: Request) -> Outcome:
        """Raises BadRequest, for what only this node could tell."""
        try:
            os.chdir(self.cwd)
        except OSError as error:
            raise BadRequest(
                f"{self.cwd}, where the sweep was asked for, is not there: {error.strerror or error}"
            ) from error
        sweep = Sweep(request.decided())
        return Outcome(socket.gethostname(), sweep.run(), list(sweep.ids.values()))


def lock_file(folder: Path, number: int) -> Path:
    """Held by the job that runs a group."""
    return folder / f"{number}.lock"


def read_outcome(folder: Path, number: int) -> Outcome | None:
    """How a group ended, None while it has not."""
    try:
        return Outcome(**json.loads((folder / f"{number}.outcome").read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
