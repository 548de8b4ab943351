"""A sweep: cells grouped for comparison, each in a process of its own, each recorded as soon as it is measured."""

import os
import re
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

from filelock import FileLock, Timeout

from results.record import SCHEMA, group_key, identity, is_final
from results.store import Store
from runners.cell.pending import AGAIN, NOT_YET, PROFILED
from runners.machine import card, environment
from runners.machine.device import visible
from runners.request.bad_request import BadRequest
from runners.request.requests import defaults_only

from .cell_process import CellProcess
from .progress import Progress
from .summary import print_summary

CORES = Path("/sys/devices/system/cpu")
IDLE_CORES = 8  # a GPU: with so many, one that imports does not disturb the one that launches
COMPARED = ("bench", "latency", "training")  # runners whose cells take part in the interleaved rounds
NO_RATIO = "no ratio"  # how the warning of a cell begins that could not take part in them
APART = 1.25  # a cell whose time in the rounds differs by more from that alone is doubtful
BAD = ("failed", "timeout", "out_of_memory", "incorrect")


class Sweep:
    """Runs `cells` (resolved configs) and keeps their records in the folder `results`.

    A cell that has a record of the same config and environment is not measured again unless `force`. The cells of one group
    (those that differ in their system alone) are measured one after another, then in `rounds` interleaved rounds, all on
    one GPU of `gpus`. Raises BadRequest where the folder cannot be written or a custom model cannot be made.
    """

    def __init__(
        self,
        cells: list[dict[str, Any]],
        *,
        results: str,
        force: bool,
        timeout: float,
        memory_gib: float | None,
        rounds: int,
        gpus: list[int],
    ):
        self.store = Store(results)
        self.force, self.timeout, self.memory_gib, self.rounds = force, timeout, memory_gib, rounds
        self.cells = list({repr(sorted(cell.items())): cell for cell in cells}.values())
        self.gpus = [visible(gpu) for gpu in gpus] if cells[0]["device"] == "cuda" else ["0"]
        self.cores = dict(zip(self.gpus, shares(len(self.gpus)), strict=True))
        sources = self._check_options()
        self.identities = {
            id(c): environment.identity(c, self.gpus[0], sources.get(_options(c, "model"))) for c in self.cells
        }
        self.ids = {id(c): identity(c, self.identities[id(c)]) for c in self.cells}
        try:
            self.store.make()
        except OSError as error:
            raise self._not_writable(error) from error

    def run(self) -> int:
        """Run all groups; print the table; returns the exit status."""
        groups: dict[str, list[dict[str, Any]]] = {}
        for cell in self.cells:
            groups.setdefault(group_key(cell), []).append(cell)
        for file, reason in self.store.read().skipped.items():
            print(f"opweave: skipped {file}: {reason}", file=sys.stderr)
        self.waiting = deque(groups.values())
        with Progress(len(self.cells)) as progress, ThreadPoolExecutor(len(self.gpus)) as pool:

            def work(gpu: str) -> None:
                ahead = None
                while group := self._next():
                    run = GroupRun(self, group, gpu, progress, ahead)
                    run.run()
                    ahead = run.ahead
                if ahead:
                    CellProcesses.close(ahead)

            jobs = [pool.submit(work, gpu) for gpu in self.gpus]
            try:
                for job in as_completed(jobs):
                    job.result()
            except BaseException:
                self.waiting.clear()
                CellProcesses.end()
                raise
        records = [self.store.find(self.ids[id(cell)]) for group in groups.values() for cell in group]
        present = [record for record in records if record is not None]
        print_summary(present, self.store.folder)
        return 1 if len(present) < len(records) or any(r["status"] in BAD for r in present) else 0

    def _next(self) -> list[dict[str, Any]] | None:
        try:
            return self.waiting.popleft()
        except IndexError:
            return None

    def _not_writable(self, error: OSError) -> BadRequest:
        return BadRequest(f"results={self.store.folder} cannot be written: {error.strerror or error}")

    def _check_options(self) -> dict[str, str]:
        """Have models and systems try the options they were given, so that a wrong one is told before anything is measured.

        Only options that are not conf/'s own are tried, since that needs PyTorch. Gives digests of the sources of custom
        models, by options. Raises BadRequest.
        """
        doubtful = {
            _options(cell, group): {group: cell[group], "batch": cell["batch"]}
            for cell in self.cells
            for group in ("model", "system")
            if not defaults_only(cell, group)
        }
        if not doubtful:
            return {}
        sources = {}
        process = CellProcess("cpu", "0")
        try:
            for options, part in doubtful.items():
                answer = process.ask({"do": "check", "cell": part}, self.timeout, self.memory_gib)
                if not answer.get("checked"):
                    raise BadRequest(answer.get("bad_request") or f"{options}: {answer['status']}: {answer['reason']}")
                sources[options] = answer["sources"]
        finally:
            process.close()
        return sources


def shares(count: int) -> list[list[int]]:
    """The cores for each of `count` GPUs measured at once: what is compiled for one must not hold up launches on another.

    Empty ones, which stand for every core, for one GPU and where there is less than a core for each. Threads of one physical
    core, which many machines number far apart, slow each other, so they go to one GPU.
    """
    cores = sorted(os.sched_getaffinity(0), key=_physical) if hasattr(os, "sched_getaffinity") else []
    if count == 1 or len(cores) < count:
        return [[] for _ in range(count)]
    bounds = [i * len(cores) // count for i in range(count + 1)]
    return [sorted(cores[begin:end]) for begin, end in pairwise(bounds)]


def _physical(core: int) -> tuple[int, int]:
    """The first thread of the physical core that a core (as Linux counts them) is a thread of, and itself."""
    siblings = CORES / f"cpu{core}" / "topology" / "thread_siblings_list"  # "3", "3,35" or "6-7"
    first = re.match(r"\d+", siblings.read_text()) if siblings.exists() else None
    return int(first[0]) if first else core, core


def _options(cell: dict[str, Any], group: str) -> str:
    """What of a cell its model or its system checks."""
    return ", ".join(f"{group}.{key}={value}" for key, value in cell[group].items())


class Ended(Exception):
    """The sweep ends, and the answer that a group waited for with it."""


class CellProcesses:
    """Every process that any group has open, so that a sweep that ends early can end them all."""

    alive: set[CellProcess] = set()
    ending = False

    @classmethod
    def start(cls, device: str, gpu: str, cores: list[int]) -> CellProcess:
        process = CellProcess(device, gpu, cores)
        cls.alive.add(process)
        if cls.ending:  # set before the others were killed, so this one is either among those or seen here
            process.kill()
        return process

    @classmethod
    def close(cls, process: CellProcess) -> None:
        process.close()
        cls.alive.discard(process)

    @classmethod
    def end(cls) -> None:
        """Kill all; the groups that wait for them see it and end too."""
        cls.ending = True
        for process in list(cls.alive):
            process.kill()


class GroupRun:
    """One group of cells on one GPU (or the CPU), which no other sweep of this user measures on meanwhile."""

    def __init__(
        self, sweep: Sweep, cells: list[dict[str, Any]], gpu: str, progress: Progress, ahead: CellProcess | None = None
    ):
        """ahead: a process that imports and builds for this group. What `run` leaves there is for the next on this GPU."""
        self.sweep, self.cells, self.gpu, self.progress, self.ahead = sweep, cells, gpu, progress, ahead
        self.device: str = cells[0]["device"]
        self.records: dict[str, dict[str, Any]] = {}
        self.parked: dict[str, CellProcess] = {}  # measured and waiting for the rounds, by id
        self.to_measure: list[dict[str, Any]] = []

    def run(self) -> None:
        with self._device():
            self.foreign = card.processes(self.gpu) if self.device == "cuda" else []
            try:
                self.to_measure = [cell for cell in self.cells if self._found(cell) is None]
                for cell in self.cells:
                    self._cell(cell)
                self._compare()
                self._profile()
            finally:
                for process in self.parked.values():
                    CellProcesses.close(process)

    @contextmanager
    def _device(self) -> Iterator[None]:
        """The device for this group alone: sweeps that run at once take turns."""
        name = card.uuid(self.gpu) if self.device == "cuda" else "cpu"
        lock = FileLock(Path(tempfile.gettempdir()) / f"opweave-{os.getuid()}-{name}.lock")
        while not lock.is_locked:
            try:
                lock.acquire(timeout=1.0)
            except Timeout:
                self.progress.wait(self.gpu, self.cells[0])
                if CellProcesses.ending:
                    raise Ended from None
        try:
            yield
        finally:
            lock.release()

    def _ask(self, process: CellProcess, command: dict[str, Any], cell: dict[str, Any]) -> dict[str, Any]:
        def tell(phase: str) -> None:
            self.progress.phase(self.gpu, cell, phase)

        answer = process.ask(command, self.sweep.timeout, self.sweep.memory_gib, tell)
        if CellProcesses.ending:
            raise Ended
        return answer

    def _found(self, cell: dict[str, Any]) -> dict[str, Any] | None:
        """The record that spares measuring the cell. Read with the lock held: another sweep may have just written it."""
        found = None if self.sweep.force else self.sweep.store.find(self.sweep.ids[id(cell)])
        return found if found is not None and is_final(found) else None

    def _process(self, cell: dict[str, Any]) -> CellProcess:
        """A process for the cell, begun ahead of time where cores enough are idle beside the one that measures: it has
        imported what the cell needs, and built its network on the CPU.
        """
        process, self.ahead = self.ahead or CellProcesses.start(self.device, self.gpu, self.sweep.cores[self.gpu]), None
        self.to_measure = [other for other in self.to_measure if other is not cell]
        following = [*self.to_measure, *(other for group in list(self.sweep.waiting)[:1] for other in group)]
        if following and self._cores_are_idle():
            self.ahead = CellProcesses.start(self.device, self.gpu, self.sweep.cores[self.gpu])
            self.ahead.tell({"do": "ahead", "cell": following[0]})
        return process

    def _cores_are_idle(self) -> bool:
        return self.device == "cuda" and (os.cpu_count() or 1) >= IDLE_CORES * len(self.sweep.gpus)

    def _cell(self, cell: dict[str, Any]) -> None:
        identifier = self.sweep.ids[id(cell)]
        if (found := self._found(cell)) is not None:
            self.records[identifier] = found
            self.progress.skip(cell)
            return
        record = self._measure(cell, identifier)
        # What the parked ones hold, of the GPU's memory and of the host's, the cell may have lacked; its own limit it has
        # exceeded without them.
        if record["status"] == "out_of_memory" and "memory_gib" not in record and self.parked:
            for process in self.parked.values():
                CellProcesses.close(process)
            self.parked.clear()
            record = self._measure(cell, identifier)
        self._write(record)
        self.progress.done(cell, record)

    def _measure(self, cell: dict[str, Any], identifier: str) -> dict[str, Any]:
        process = self._process(cell)
        self.progress.start(cell, self.gpu)
        started = datetime.now(UTC).isoformat()
        # What takes a profiler waits until after the rounds.
        rounds = cell["runner"]["name"] in COMPARED and len(self.cells) > 1 and self.sweep.rounds > 0
        command = {"do": "measure", "cell": cell, "limits": self._known_limits(), "profile": not rounds, "again": False}
        answer = self._ask(process, command, cell)
        before_s = 0.0
        if (answer.get("record") or answer).get("status") == AGAIN:
            before_s = answer["record"]["preparation_s"]
            CellProcesses.close(process)
            process = self._process(cell)
            answer = self._ask(process, command | {"again": True}, cell)
        if "bad_request" in answer:
            raise BadRequest(answer["bad_request"])
        outcome = answer.get("record") or answer
        record = {
            "schema": SCHEMA,
            "id": identifier,
            "status": outcome["status"],
            "reason": outcome.get("reason"),
            "when": started,
            "config": cell,
            "environment": self.sweep.identities[id(cell)] | answer.get("environment", {}),
            "comparison": None,
            **{k: v for k, v in outcome.items() if k not in ("status", "reason", "when", "warnings")},
            "warnings": [*(f"not alone on the GPU: {p}" for p in self.foreign), *outcome.get("warnings", [])],
        }
        if before_s and "preparation_s" in record:
            record["preparation_s"] += before_s
        if record["status"] == "ok" and rounds:
            self.parked[identifier] = process
        else:
            CellProcesses.close(process)
        return record

    def _known_limits(self) -> dict[str, Any] | None:
        """The limits that a cell of this group has measured: they are the model's, the same for every system."""
        measured = [r["limits"] for r in self.records.values() if (r.get("limits") or {}).get("critical_path_ms")]
        return {k: v for k, v in measured[0].items() if k != "rewritten"} if measured else None

    def _compare(self) -> None:
        """Interleaved rounds over the cells that ran, unless they share some already."""
        cells = {self.sweep.ids[id(c)]: c for c in self.cells if c["runner"]["name"] in COMPARED}
        ok = [i for i in cells if self.records[i]["status"] == "ok"]
        taking_part = [i for i in ok if not any(w.startswith(NO_RATIO) for w in self.records[i]["warnings"])]
        groups = {(self.records[i].get("comparison") or {}).get("group") for i in taking_part}
        if len(taking_part) < 2 or not self.sweep.rounds or (len(groups) == 1 and None not in groups):
            return
        for i in list(taking_part):
            if i in self.parked:
                continue
            process = self.parked[i] = CellProcesses.start(self.device, self.gpu, self.sweep.cores[self.gpu])
            self.progress.phase(self.gpu, cells[i], "preparing again for the rounds")
            answer = self._ask(process, {"do": "prepare", "cell": cells[i]}, cells[i])
            if not answer.get("prepared"):
                self._leave_out(i, taking_part, answer)
        rounds: dict[str, list[list[float]]] = {i: [] for i in taking_part}
        for number in range(self.sweep.rounds):
            for i in list(taking_part):
                self.progress.phase(self.gpu, cells[i], f"round {number + 1} of {self.sweep.rounds}")
                answer = self._ask(self.parked[i], {"do": "round"}, cells[i])
                if "host_ms" in answer:
                    rounds[i].append(answer["host_ms"])
                else:
                    self._leave_out(i, taking_part, answer)
        if len(taking_part) < 2:
            return
        group = uuid4().hex[:16]
        for i in taking_part:
            shared = {"group": group, "cells": taking_part, "when": datetime.now(UTC).isoformat(), "rounds": rounds[i]}
            record = self.records[i]
            alone, beside = median(record["latency"]["host_ms"]), median(x for turn in rounds[i] for x in turn)
            if not 1 / APART < beside / alone < APART:
                doubt = f"in the rounds it took {beside / alone:.2f} times as long as when it was measured alone"
                record = record | {"warnings": [*record["warnings"], doubt]}
            self._write(record | {"comparison": shared})

    def _profile(self) -> None:
        """What takes a profiler, of the cells that have waited with it, or that an earlier sweep left without it."""
        for cell in self.cells:
            identifier = self.sweep.ids[id(cell)]
            record = self.records[identifier]
            waiting = [name for name in PROFILED if (record.get(name) or {}).get("reason") == NOT_YET]
            if record["status"] != "ok" or not waiting:
                continue
            answer: dict[str, Any] = {"prepared": True}
            if identifier not in self.parked:
                self.parked[identifier] = CellProcesses.start(self.device, self.gpu, self.sweep.cores[self.gpu])
                self.progress.phase(self.gpu, cell, "preparing again for the profiler")
                answer = self._ask(self.parked[identifier], {"do": "prepare", "cell": cell}, cell)
            if answer.get("prepared"):
                answer = self._ask(self.parked[identifier], {"do": "profile", "limits": self._known_limits()}, cell)
            failed = {"reason": f"measuring it ended as {answer.get('status')} ({answer.get('reason')})"}
            found = answer.get("profiled") or {name: record[name] | failed for name in waiting}
            self._write(record | found)

    def _leave_out(self, identifier: str, taking_part: list[str], answer: dict[str, Any]) -> None:
        """A cell that cannot run beside its siblings keeps its record, with a warning that says why it has no ratio."""
        taking_part.remove(identifier)
        CellProcesses.close(self.parked.pop(identifier))
        record = self.records[identifier]
        warning = f"{NO_RATIO}: in the interleaved rounds it ended as {answer.get('status')} ({answer.get('reason')})"
        self._write(record | {"warnings": [*record["warnings"], warning]})

    def _write(self, record: dict[str, Any]) -> None:
        try:
            self.sweep.store.write(record)
        except OSError as error:
            raise self.sweep._not_writable(error) from error
        self.records[record["id"]] = record
