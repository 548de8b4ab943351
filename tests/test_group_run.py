"""What a group of cells does where a GPU cannot hold all of them at once."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_records import cell, latency, record

from results.cell import Cell
from results.record import Record
from results.store import Store
from runners.cell.messages import Answer, Done, Failed, Learn, Learned, Measure, Prepare, Profile, Ready, Round, Turn
from runners.sweep.cell_process import CellProcess
from runners.sweep.group_run import GroupRun

ALONE_MS = {"eager": 40.0, "cuda_graph": 7.0, "xla": 9.0, "nimble": 6.0, "weave": 4.0}
LACKS = Failed("out_of_memory", "no room")


class Gpu:
    """A mock of a lane whose GPU holds `room` prepared processes.

    Attributes:
        pending: what each cell leaves to the profiler.
        profiling: how many processes as large as a prepared one the profiler needs room for.
        needs: the room that a cell's process takes before it is prepared, where it is not that of one.
        held: the cell of each process that holds memory.
        measured, prepared: cells in the order in which they were asked for.
        rested: the GPU, once its group has ended.
    """

    gpu, options = "0", SimpleNamespace(force=True, rounds=2, margin=False, max_load=1.0)
    rounds = staticmethod(nullcontext)

    def __init__(self, room: int, pending: tuple[str, ...] = (), profiling: int = 0):
        self.room, self.pending, self.profiling = room, pending, profiling
        self.needs: dict[str, int] = {}
        self.held: dict[CellProcess, str] = {}
        self.measured: list[str] = []
        self.prepared: list[str] = []
        self.rested: list[str] = []
        self.progress = SimpleNamespace(
            start=lambda *_: None, done=lambda *_: None, phase=lambda *_: None, rest=self.rested.append
        )

    def exclusive(self, _: Cell) -> Any:
        return nullcontext()

    def others(self) -> list[object]:
        return []

    def start(self) -> CellProcess:
        return object.__new__(CellProcess)

    def start_or_take(self, _: object) -> CellProcess:
        return self.start()

    def close(self, process: CellProcess) -> None:
        self.held.pop(process, None)

    def ask(self, process: CellProcess, command: object, of: Cell) -> Answer:
        name = of.system.name
        match command:
            case Learn():
                return Learned(None)
            case Measure() | Prepare():
                (self.measured if isinstance(command, Measure) else self.prepared).append(name)
                if len(self.held) + self.needs.get(name, 1) > self.room:
                    return LACKS
                self.held[process] = name
                return Done(self._alone(command.record)) if isinstance(command, Measure) else Ready()
            case Round():
                return Turn((ALONE_MS[name],))
            case Profile():
                if len(self.held) + self.profiling > self.room:
                    return LACKS
                return Done(replace(command.record, pending=()))
        raise AssertionError(command)

    def _alone(self, owed: Record) -> Record:
        """The record as its process would fill it."""
        ms = latency(ALONE_MS[owed.cell.system.name])
        return replace(owed, status="ok", reason=None, latency=ms, pending=self.pending)


def run_on(gpu: Gpu, folder: Path) -> GroupRun:
    """A group of one cell a system, as it has run."""
    cells = [cell(system, device="cuda") for system in ALONE_MS]
    places = {of: (record(of=of).id, record(of=of).environment) for of in cells}
    group = GroupRun(gpu, cells, Store(folder), places.__getitem__, lambda: ())  # type: ignore[arg-type]
    group.run()
    return group


@pytest.mark.parametrize(
    ("room", "again", "prepared", "left_out"),
    [
        (5, [], [], []),
        (4, ["weave"], ["eager"], ["eager"]),
        (2, ["xla", "nimble", "weave"], ["cuda_graph", "xla", "eager"], ["cuda_graph", "xla", "eager"]),
    ],
)
def test_the_slowest_gives_way(
    tmp_path: Path, room: int, again: list[str], prepared: list[str], left_out: list[str]
) -> None:
    """again: measured a second time. prepared: again for the rounds, in this order. left_out: of them."""
    gpu = Gpu(room)
    group = run_on(gpu, tmp_path)
    assert gpu.rested == ["0"]
    assert gpu.measured == [name for system in ALONE_MS for name in [system] * (1 + (system in again))]
    assert gpu.prepared == prepared and not gpu.held
    assert all(of.status == "ok" for of in group.records.values())
    without = {of.system.name for of, kept in group.records.items() if [w.kind for w in kept.warnings] == ["no_ratio"]}
    assert without == set(left_out) == {of.system.name for of, kept in group.records.items() if kept.comparison is None}


@pytest.mark.parametrize(("needs", "times"), [(1, [1, 1, 1]), (5, [1, 1, 2]), (6, [1, 1, 3]), (7, [1, 1, 3])])
def test_a_cell_that_lacks_memory_is_measured_again_only_with_more_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs: int, times: list[int]
) -> None:
    """On a GPU of 6, where two are parked, and the third needs so much."""
    monkeypatch.setattr(sys.modules[__name__], "ALONE_MS", {"eager": 40.0, "cuda_graph": 7.0, "xla": 9.0})
    gpu = Gpu(6)
    gpu.needs = {"xla": needs}
    group = run_on(gpu, tmp_path)
    assert [gpu.measured.count(name) for name in ALONE_MS] == times
    assert [of.status for of in group.records.values()] == ["ok", "ok", "ok" if needs <= 6 else "out_of_memory"]


@pytest.mark.parametrize("room", [0, 1])
def test_a_cell_that_had_all_the_memory_is_measured_once(tmp_path: Path, room: int) -> None:
    gpu = Gpu(room)
    gpu.needs = dict.fromkeys(ALONE_MS, 2)
    group = run_on(gpu, tmp_path)
    assert gpu.measured == list(ALONE_MS)
    assert {of.status for of in group.records.values()} == {"out_of_memory"}


@pytest.mark.parametrize(("room", "profiling"), [(5, 0), (4, 0), (2, 0), (5, 1), (4, 2), (2, 1)])
def test_the_profiler_finds_room_for_each(tmp_path: Path, room: int, profiling: int) -> None:
    gpu = Gpu(room, ("limits",), profiling)
    group = run_on(gpu, tmp_path)
    assert not gpu.held
    assert all(of.is_ok and not of.pending and of.limits is None for of in group.records.values())
