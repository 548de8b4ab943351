"""What other processes take of the cores is told apart from what a sweep takes itself, and costs a CPU's ratios."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from conftest import Run, records
from made_records import cell, latency, record

from results.cell import Cell
from results.comparison import comparable, margin, speedup
from results.document import from_json
from results.record import Record
from results.warning import Warning
from runners.cell.messages import Failed, Turn
from runners.machine.cpu_load import CpuLoad
from runners.sweep import rounds as rounds_room
from runners.sweep.cell_process import CellProcess
from runners.sweep.rounds import Rounds, compared, sharing_rounds, twin_of, with_margin

NUM_CORES = len(os.sched_getaffinity(0))


@contextmanager
def burning(count: int) -> Iterator[list[int]]:
    """Processes that keep a core busy each; their ids."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def seconds(processes: list[int]) -> float:
    """What they took of the cores."""
    return sum(times.user + times.system for times in (psutil.Process(process).cpu_times() for process in processes))


def test_what_a_sweeps_own_processes_take_is_no_load() -> None:
    with burning(2) as burners, subprocess.Popen(["sleep", "60"]) as stranger:
        try:
            begin, before_s = time.monotonic(), seconds(burners)
            own, strangers = CpuLoad(os.getpid()), CpuLoad(stranger.pid)
            time.sleep(2)
            difference = strangers.share_of_others() - own.share_of_others()
            share = (seconds(burners) - before_s) / ((time.monotonic() - begin) * NUM_CORES)
        finally:
            stranger.kill()
    assert share > 0.05 and difference == pytest.approx(share, rel=0.5)  # whatever else runs here


def test_a_process_that_has_ended_counts_as_its_parents() -> None:
    own, begin = CpuLoad(os.getpid()), time.monotonic()
    with burning(2) as burners:
        time.sleep(1)
        own_s = seconds(burners)
    elapsed_s = time.monotonic() - begin
    assert own_s > 0.1 and own.share_of_others() <= 1 - 0.5 * own_s / (elapsed_s * NUM_CORES)


def test_every_kind_of_time_of_its_own_cores_counts_and_no_share_is_beyond_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores of four, whose counters a mock of psutil moves; 10 s pass."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2})
    times = [dict.fromkeys(("user", "nice", "system", "irq", "softirq", "steal", "idle"), 0.0) for _ in range(4)]
    now = [100.0]
    monkeypatch.setattr("runners.machine.cpu_load.monotonic", lambda: now[0])
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [SimpleNamespace(**core) for core in times])
    monkeypatch.setattr("runners.machine.cpu_load._tree_seconds", lambda _: 0.0)
    load = CpuLoad(1)
    now[0] += 10.0
    for kind, share in zip(("user", "nice", "system", "irq", "softirq", "steal"), (1, 2, 3, 4, 5, 6), strict=True):
        times[1][kind] += 1.0
        times[2][kind] += 1.0
        times[0][kind] = times[1]["idle"] = 100.0  # another core, and no work
        assert load.share_of_others() == pytest.approx(0.1 * share)
    times[1]["user"] += 100.0
    assert load.share_of_others() == 1.0
    times[1]["user"] -= 300.0
    assert load.share_of_others() == 0.0


def test_rounds_shorter_than_a_tick_are_watched_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mocks of the clock and of the counters: half of the cores' time is another's, counted 0.01 s late."""
    now = [100.0]
    monkeypatch.setattr("runners.machine.cpu_load.monotonic", lambda: now[0])
    monkeypatch.setattr("runners.machine.cpu_load.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr("runners.machine.cpu_load._busy_seconds", lambda: 0.5 * NUM_CORES * max(now[0] - 100.01, 0.0))
    monkeypatch.setattr("runners.machine.cpu_load._tree_seconds", lambda _: 0.0)
    load = CpuLoad(1)
    now[0] += 0.005  # as long as the rounds take
    assert load.share_of_others() == pytest.approx(0.49)


def measured(device: str) -> dict[Cell, Record]:
    """Two cells that took 4 and 1 ms alone."""
    cells = {system: cell(system, device=device) for system in ("eager", "nimble")}
    alone_ms = {"eager": 4.0, "nimble": 1.0}
    return {of: record(of=of, latency=latency(alone_ms[system])) for system, of in cells.items()}


@pytest.mark.parametrize(
    ("device", "eager_ms", "load", "max_load", "kinds"),
    [
        ("cpu", 4.0, 0.0, 0.1, []),
        ("cpu", 4.0, 0.2, 0.1, ["busy_rounds"]),
        ("cpu", 100.0, 0.0, 0.1, ["apart_in_rounds"]),
        ("cpu", 1.0, 0.0, 0.1, ["apart_in_rounds"]),
        ("cpu", 100.0, 1.0, 0.1, ["apart_in_rounds", "busy_rounds"]),
        ("cpu", 100.0, 1.0, 1.0, ["differs_in_rounds"]),
        ("cuda", 100.0, 1.0, 0.1, ["differs_in_rounds"]),
    ],
)
def test_rounds_of_a_busy_cpu_give_no_ratio(
    device: str, eager_ms: float, load: float, max_load: float, kinds: list[str]
) -> None:
    alone = measured(device)
    eager, nimble = alone
    turns = {eager: [(eager_ms,)] * 3, nimble: [(1.0,)] * 3}
    after = compared(alone, turns, load, max_load)
    assert [warning.kind for warning in after[eager].warnings] == kinds
    is_sound = not {"busy_rounds", "apart_in_rounds"} & set(kinds)
    assert (
        comparable(after[nimble], after[eager])
        is is_sound
        is bool(sharing_rounds({cell: [one] for cell, one in after.items()}))
    )
    assert (speedup(after[nimble], after[eager]) is not None) is is_sound
    again = compared(after, {eager: [(4.0,)] * 3, nimble: [(1.0,)] * 3}, 0.0, 0.1)  # on an idle machine
    ratio = speedup(again[nimble], again[eager])
    assert ratio is not None and ratio.ratio == 4.0 and not again[eager].warnings


def test_a_second_process_of_one_system_tells_what_two_processes_differ_by() -> None:
    alone = measured("cuda")
    eager, nimble = alone
    assert twin_of(alone) == nimble  # though eager takes no time to prepare
    slower = {cell: replace(one, preparation_s=9.0) for cell, one in alone.items()}
    assert twin_of({eager: slower[eager]}) == eager and twin_of({}) is None
    records = compared(alone, {eager: [(4.0,)] * 3, nimble: [(1.0,)] * 3}, 0.0, 1.0)
    assert margin(list(records.values())) is None
    rounds = Rounds(None, None, again=[(1.25,), (1.25,), (1.25,)])  # type: ignore[arg-type]
    with_second = {**records, nimble: with_margin(records[nimble], rounds)}
    one = margin(list(with_second.values()))
    assert one is not None and (one.ratio, one.low, one.high) == (0.8, 0.8, 0.8)
    rounds.no_margin = Failed("out_of_memory", "no room")
    without = with_margin(records[nimble], rounds)
    assert margin([without]) is None and [w.kind for w in without.warnings] == ["no_margin"]
    again = compared({**alone, nimble: without}, {eager: [(4.0,)] * 3, nimble: [(1.0,)] * 3}, 0.0, 1.0)
    assert not again[nimble].warnings  # of the next rounds the warning is no more
    busy = replace(with_second[nimble], warnings=(Warning("busy_rounds", {"load": 0.5, "cores": 2}),))
    assert margin([busy]) is None


def test_rounds_go_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process of nimble takes turns too, until it fails; a cell that fails is left out."""
    taken: list[str] = []

    class Turns:
        """Stands for processes that are ready. name: of which."""

        def __init__(self, name: str = "second "):
            self.name = name

        def ready(self, of: Cell, phase: str) -> CellProcess:
            return object.__new__(CellProcess)

        def turn(self, of: Cell) -> Turn | Failed:
            taken.append(self.name + of.system.name)
            fails = {"opara": 2, "second nimble": 3}
            return Failed("failed", "no more") if taken.count(taken[-1]) == fails.get(taken[-1]) else Turn((1.0,))

        def close(self, of: Cell) -> None: ...

        def close_all(self) -> None: ...

    monkeypatch.setattr(rounds_room, "Parked", lambda lane: Turns())
    eager, nimble, opara = (cell(system) for system in ("eager", "nimble", "opara"))
    lane = SimpleNamespace(gpu="0", progress=SimpleNamespace(phase=lambda *what: None), rounds=nullcontext)
    made = Rounds(lane, Turns(""))  # type: ignore[arg-type]
    made.run([eager, nimble, opara], 4, nimble)
    there = ["eager", "nimble", "opara", "second nimble"]
    assert taken == [*there, *there[::-1], "eager", "nimble", "second nimble", "nimble", "eager"]
    assert set(made.turns) == {eager, nimble} and [len(turns) for turns in made.turns.values()] == [4, 4]
    assert list(made.left_out) == [opara] and made.no_margin is not None


@pytest.mark.parametrize("fails_as", ["while it is prepared", "in a turn", "beside a cell that lacks memory"])
def test_a_second_process_that_ends_gives_its_memory_back(fails_as: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no cell loses its ratio by it: one that lacks memory beside it has its turn again."""
    closed: list[str] = []
    lacks = Failed("out_of_memory", "no room")

    class Turns:
        """Stands for processes that are ready. name: of which."""

        def __init__(self, name: str = "second "):
            self.name = name

        def ready(self, of: Cell, phase: str) -> CellProcess | Failed:
            fails = self.name and fails_as == "while it is prepared"
            return lacks if fails else object.__new__(CellProcess)

        def turn(self, of: Cell) -> Turn | Failed:
            if self.name:
                return lacks if fails_as == "in a turn" else Turn((1.0,))
            is_crowded = fails_as.startswith("beside") and of.system.name == "eager" and not closed
            return lacks if is_crowded else Turn((1.0,))

        def close(self, of: Cell) -> None:
            closed.append(self.name + of.system.name)

        def close_all(self) -> None: ...

    monkeypatch.setattr(rounds_room, "Parked", lambda lane: Turns())
    eager, nimble = (cell(system) for system in ("eager", "nimble"))
    lane = SimpleNamespace(gpu="0", progress=SimpleNamespace(phase=lambda *what: None), rounds=nullcontext)
    made = Rounds(lane, Turns(""))  # type: ignore[arg-type]
    made.run([eager, nimble], 3, nimble)
    assert closed == ["second nimble"] and made.no_margin is not None and not made.left_out
    assert [len(turns) for turns in made.turns.values()] == [3, 3]


def test_only_rounds_that_all_have_shared_are_shared() -> None:
    alone = measured("cuda")
    turns = {of: [(1.0,)] * 3 for of in alone}
    first, second = (compared(alone, turns, 0.0, 1.0) for _ in range(2))
    eager, nimble = alone
    assert sharing_rounds({cell: [one] for cell, one in first.items()}) == first
    assert not sharing_rounds({eager: [first[eager]], nimble: [second[nimble]]})
    assert not sharing_rounds({cell: [one] for cell, one in alone.items()})
    assert sharing_rounds({eager: [second[eager], first[eager]], nimble: [first[nimble]]}) == first
    both = {cell: [second[cell], first[cell]] for cell in alone}
    assert sharing_rounds(both) == second  # the one that counts


@pytest.mark.slow
def test_busy_loops_beside_a_sweep_cost_its_ratio(run: Run, folder: Path) -> None:
    arguments = (
        "-m",
        "model=custom",
        "model.factory=tiny:make",
        "device=cpu",
        "runner=latency",
        "runner.samples=5",
        "results=r",
    )
    with burning(2 * NUM_CORES):
        done = run("-m", *arguments, "system=eager,nimble")
    assert done.returncode == 0, done.stderr
    assert "other processes took" in done.stdout and "x [" not in done.stdout
    read = {name: from_json(document) for name, document in records(folder / "r").items()}
    assert len(read) == 2 and all({"busy_cpu", "busy_rounds"} <= {w.kind for w in r.warnings} for r in read.values())
    assert {r.operator_threads for r in read.values()} == {1}
