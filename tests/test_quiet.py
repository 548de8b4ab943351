"""Rounds of one lane beside others: nothing else is measured meanwhile, and what learns stands still."""

import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import cast

import pytest
from conftest import soon, worker_of

from results.cell import Cell, Conditions, choose
from results.store import Store
from runners.cell.messages import Answer, Check, Command, Failed, Learn, Measure, Prepare, Round
from runners.request.request import Request, SweepOptions
from runners.sweep.cell_process import CellProcess
from runners.sweep.lane import Ended, Lane
from runners.sweep.quiet import Quiet
from runners.sweep.sweep import Sweep

CELL = Cell(
    choose("model", "googlenet"), choose("system", "weave"), choose("runner", "latency"), Conditions(1, "cpu", "fp32")
)


class Standing:
    """Stands for a process: says whether it may go on."""

    is_paused = False

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False


class Watched:
    """Lanes that work at random, and what went on beside whose rounds."""

    def __init__(self) -> None:
        self.quiet, self.lock = Quiet(), threading.Lock()
        self.working, self.in_rounds, self.wrong = 0, 0, list[str]()
        self.learning: set[Standing] = set()

    @contextmanager
    def counted(self, name: str) -> Iterator[None]:
        with self.lock:
            setattr(self, name, getattr(self, name) + 1)
            self.look()
        yield
        with self.lock:
            self.look()
            setattr(self, name, getattr(self, name) - 1)

    def look(self) -> None:
        if (self.in_rounds and self.working) or self.in_rounds > 1:
            self.wrong.append(f"{self.in_rounds} rounds beside {self.working} that work")

    def lane(self, seed: int) -> None:
        generator, process = random.Random(seed), Standing()
        for _ in range(25):
            what = generator.choice(("learn", "measure", "rounds"))
            seconds = generator.uniform(0, 0.004)
            if what == "rounds":
                with self.quiet.rounds(lambda: None), self.counted("in_rounds"):
                    time.sleep(seconds)
                    with self.lock:
                        still = [other.is_paused for other in self.learning]
                    self.wrong += ["one learns beside rounds"] * still.count(False)
                continue
            command: Command = Learn(CELL) if what == "learn" else Prepare(CELL)
            with self.quiet.work(cast(CellProcess, process), command, lambda: None):
                if what == "measure":
                    with self.counted("working"):
                        time.sleep(seconds)
                    continue
                with self.lock:
                    self.learning.add(process)
                time.sleep(seconds)
                with self.lock:
                    self.learning.discard(process)


def test_rounds_are_alone_whatever_the_lanes_do() -> None:
    watched = Watched()
    lanes = [threading.Thread(target=watched.lane, args=(seed,)) for seed in range(6)]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join(60)
    assert not any(lane.is_alive() for lane in lanes)
    assert watched.wrong == []


def test_what_learns_stands_still_until_the_rounds_are_over() -> None:
    quiet, process, begun, over = Quiet(), Standing(), threading.Event(), threading.Event()

    def learns() -> None:
        with quiet.work(cast(CellProcess, process), Learn(CELL), lambda: None):
            begun.set()
            over.wait(60)

    thread = threading.Thread(target=learns)
    thread.start()
    begun.wait(60)
    with quiet.rounds(lambda: None):
        assert process.is_paused
    assert not process.is_paused
    over.set()
    thread.join(60)
    with quiet.rounds(lambda: None):  # it has learned, and is none of those that do
        assert not process.is_paused


def test_a_lane_that_waits_can_end() -> None:
    quiet, begun, over = Quiet(), threading.Event(), threading.Event()

    def other() -> None:
        with quiet.rounds(lambda: None):
            begun.set()
            over.wait(60)

    def ends() -> None:
        raise Ended

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait(60)
    process = cast(CellProcess, Standing())
    with pytest.raises(Ended), quiet.work(process, Prepare(CELL), ends):
        pass
    with pytest.raises(Ended), quiet.rounds(ends):
        pass
    over.set()
    thread.join(60)
    with quiet.work(process, Prepare(CELL), ends):  # nothing of those that ended is left to wait for
        pass


def test_a_process_stands_still_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ticking.py").write_text(
        "import subprocess, sys, time\n"
        "TICK = 'import time, sys\\n'\\\n"
        '       \'for _ in range(6000): open(sys.argv[1], "a").write("x"); time.sleep(0.01)\'\n'
        "def make(batch):\n"
        "    subprocess.Popen([sys.executable, '-c', TICK, 'child'])\n"
        "    subprocess.call([sys.executable, '-c', TICK, 'other child'])\n"
    )
    monkeypatch.chdir(tmp_path)
    process = CellProcess("cpu", "0")
    process.tell(Check("model", choose("model", "custom", factory="ticking:make"), 1))
    files = [tmp_path / name for name in ("child", "other child")]
    assert soon(lambda: all(file.exists() and file.stat().st_size > 3 for file in files))

    def sizes() -> list[int]:
        return [file.stat().st_size for file in files]

    process.pause()
    before, clock = sizes(), process.seconds()
    time.sleep(0.5)
    assert sizes() == before and process.seconds() == pytest.approx(clock, abs=0.01)
    process.resume()
    assert soon(lambda: all(now > then for now, then in zip(sizes(), before, strict=True)))
    assert process.paused_s >= 0.5
    process.close()


def test_the_deadline_of_one_that_stands_still_does_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.chdir(tmp_path)
    process, answers = CellProcess("cpu", "0"), list[Answer]()
    command = Check("model", choose("model", "custom", factory="sleeps:make"), 1)
    thread = threading.Thread(target=lambda: answers.append(process.ask(command, timeout=1.5)))
    begin = time.monotonic()
    thread.start()
    process.pause()
    time.sleep(2.0)
    process.resume()
    thread.join(60)
    took = time.monotonic() - begin
    (answer,) = answers
    assert isinstance(answer, Failed) and answer.status == "timeout" and took >= 3.5


@pytest.mark.slow
def test_the_budget_of_a_search_that_stands_still_does_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPWEAVE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "squares.py").write_text(
        "import torch\n"
        "class Squares(torch.nn.Module):\n"
        "    def forward(self, x): return sum(torch.relu(x @ x + n).tanh() for n in range(8))\n"
        "def make(batch): return Squares(), (torch.rand(64, 64),)\n"
    )
    monkeypatch.chdir(tmp_path)
    process, spent = CellProcess("cpu", "0"), list[int]()

    def phase(text: str) -> None:
        if found := re.search(r"(\d+) of 60 s, ", text):
            spent.append(int(found[1]))
            if len(spent) == 2:
                raise Ended
            process.pause()
            time.sleep(6)
            process.resume()

    model = choose("model", "custom", factory="squares:make")
    cell = Cell(model, choose("system", "weave", budget_s=60), choose("runner", "latency"), Conditions(1, "cpu", "fp32"))
    with pytest.raises(Ended):
        process.ask(Learn(cell), timeout=120, phase=phase)
    process.close()
    assert process.paused_s >= 6 and spent[1] - spent[0] < 6


def test_one_that_stands_still_is_killed_like_any_other() -> None:
    process = CellProcess("cpu", "0")
    worker = worker_of(process.process.pid)
    process.pause()
    assert worker.status() == "stopped"
    process.close()
    assert soon(lambda: not worker.is_running())
    process.resume()  # what it was is no more


@pytest.mark.slow
def test_two_lanes_of_a_sweep_do_not_measure_beside_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, in the place of two GPUs: the lock of the device, which two lanes share here, is away."""
    intervals: list[tuple[str, int, float, float]] = []
    ask = CellProcess.ask

    def listen(self: CellProcess, command: Command, *arguments: object, **named: object) -> Answer:
        begin = time.monotonic()
        answer = ask(self, command, *arguments, **named)  # type: ignore[arg-type]
        intervals.append((type(command).__name__, self.process.pid, begin, time.monotonic()))
        return answer

    monkeypatch.setattr(CellProcess, "ask", listen)
    monkeypatch.setattr(Lane, "exclusive", lambda self, cell: nullcontext())
    cells = tuple(
        Cell(
            choose("model", "squeezenet"),
            choose("system", s),
            choose("runner", "latency", samples=5),
            Conditions(b, "cpu", "fp32"),
        )
        for b in (1, 2)
        for s in ("eager", "nimble")
    )
    options = SweepOptions(tmp_path, False, 120, None, rounds=3, max_load=1.0, gpus=(0,), output=None)
    sweep = Sweep(Request(cells, options))
    sweep.gpus = ["0", "1"]
    assert sweep.run() == 0
    records = Store(tmp_path).read().records.values()
    assert len(records) == 4 and all(record.comparison is not None for record in records)
    rounds = [(begin, end) for what, _, begin, end in intervals if what == Round.__name__]
    measured = [(begin, end) for what, _, begin, end in intervals if what in (Measure.__name__, Prepare.__name__)]
    assert len(rounds) == 12 and len(measured) == 4
    assert not [1 for a, b in rounds for c, d in measured if a < d and c < b]
