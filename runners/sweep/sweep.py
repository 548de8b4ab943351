"""A sweep: cells grouped for comparison, each in a process of its own, each recorded as soon as it is measured."""

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from results.cell import Cell, Group
from results.environment import Environment
from results.record import Record, identity
from results.store import Store
from runners.checks import BadRequest, not_writable
from runners.machine import environment
from runners.machine.device import visible
from runners.request.request import Request
from runners.roots import roots

from .checking import sources_of, tried
from .cores import shares
from .group_run import GroupRun
from .lane import Lane, Processes
from .progress import Progress
from .quiet import Quiet
from .rounds import in_shared_rounds
from .summary import print_summary

BAD = ("failed", "timeout", "out_of_memory", "incorrect", "unchecked")


class Sweep:
    """Runs the cells of a request whose devices are decided, and keeps their records.

    A cell that has a record of the same identity is not measured again unless `force`. The cells of one group are measured
    one after another, then in interleaved rounds, all on one GPU.
    """

    def __init__(self, request: Request):
        """Raises BadRequest where the folder cannot be written or a model or system refuses its options."""
        self.request, self.options = request, request.options
        self.store = Store(self.options.results)
        is_on_gpu = request.cells[0].device == "cuda"
        names = [visible(gpu) for gpu in self.options.gpus or (0,)] if is_on_gpu else ["0"]
        each = request.num_gpus if is_on_gpu else 1
        self.gpus = [",".join(names[i : i + each]) for i in range(0, len(names) - each + 1, each)]
        self.tried = tried(request)
        self.refused: dict[Cell, str] = {}  # why, of those whose options measuring them has shown to be wrong
        self.environments: dict[Cell, Environment] = {
            cell: environment.identity(cell, roots(cell), self.gpus[0], sources_of(cell, self.tried.sources))
            for cell in request.cells
        }
        self.ids = {cell: identity(cell, where) for cell, where in self.environments.items()}
        try:
            self.store.make()
        except OSError as error:
            raise not_writable("results", self.store.folder, error) from error

    def run(self) -> int:
        """Run all groups; print the table; returns the exit status.

        Raises BadRequest, last of all where a cell was refused: the others are measured.
        """
        groups: dict[Group, list[Cell]] = {}
        for cell in self.request.cells:
            groups.setdefault(cell.group, []).append(cell)
        for line in self.store.read().skipped:
            print(f"opweave: {line}", file=sys.stderr)
        self.waiting = deque(groups.values())
        self._run_groups()
        records = [self.store.find(self.ids[cell]) for cells in groups.values() for cell in cells]
        present: list[Record] = []
        for cells in groups.values():
            found = {cell: record for cell in cells if (record := self.store.find(self.ids[cell])) is not None}
            present += (found | in_shared_rounds(self.store, found)).values()
        if present or not self.refused:
            print_summary(present, self.store.folder)
        if self.refused:
            raise BadRequest(_words(self.refused, len(self.request.cells)))
        return _exit_status(records)

    def _run_groups(self) -> None:
        """Every group on some lane; what ends one lane ends all of them."""
        processes, quiet = Processes(), Quiet()
        with Progress(len(self.request.cells)) as progress, ThreadPoolExecutor(len(self.gpus)) as pool:
            device, count = self.request.cells[0].device, len(self.gpus)
            if self.tried.process:
                processes.add(self.tried.process)
            lanes = [
                Lane(device, gpu, cores, count, self.options, processes, progress, quiet, self.tried.process)
                for gpu, cores in zip(self.gpus, shares(count), strict=True)
            ]
            jobs = [pool.submit(self._run_lane, lane) for lane in lanes]
            try:
                for job in as_completed(jobs):
                    job.result()
            except BaseException:
                self.waiting.clear()
                processes.end()
                raise

    def _run_lane(self, lane: Lane) -> None:
        """Groups, until none waits."""
        while cells := self._next():
            group = GroupRun(lane, cells, self.store, self._place_of, self._following)
            group.run()
            self.refused |= group.refused
        lane.close()

    def _next(self) -> Sequence[Cell] | None:
        try:
            return self.waiting.popleft()
        except IndexError:
            return None

    def _following(self) -> Sequence[Cell]:
        """The cells of the next group."""
        return next(iter(list(self.waiting)), ())

    def _place_of(self, cell: Cell) -> tuple[str, Environment]:
        return self.ids[cell], self.environments[cell]


def _words(refused: Mapping[Cell, str], num_cells: int) -> str:
    """Why cells were refused, in one line."""
    cell, reason = next(iter(refused.items()))
    if num_cells == 1:
        return reason
    if len(refused) == 1:
        return f"{cell.label}: {reason}"
    return f"{len(refused)} of {num_cells} cells were refused, the first, {cell.label}: {reason}"


def _exit_status(records: Sequence[Record | None]) -> int:
    """1 where a cell has no record or went wrong."""
    return int(any(record is None or record.status in BAD for record in records))
