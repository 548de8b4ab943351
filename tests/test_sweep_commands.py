"""What a sweep tells its processes: what is made ahead, learned and measured, and what an answer comes to."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import soon
from faulty_models import working_directory

from results.cell import Cell, Conditions, choose
from results.quantity import Measured, Quantity
from results.warning import Warning
from runners.cell.messages import Answer, Command, Done, Failed, Learn, Learned, Measure, Round
from runners.request.request import Request, SweepOptions
from runners.sweep.cell_process import CellProcess
from runners.sweep.lane import Lane
from runners.sweep.sweep import Sweep


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return working_directory(tmp_path)


@pytest.fixture
def overheard(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, str, int]]:
    """What processes are told, where cores enough are idle, as beside a GPU: process, command, system, batch."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("tempfile.tempdir", str(folder / "tmp"))
    monkeypatch.setattr(Lane, "has_idle_cores", lambda _: True)
    commands: list[tuple[int, str, str, int]] = []
    tell = CellProcess.tell

    def listen(self: CellProcess, command: Command) -> bool:
        cell = command.record.cell if isinstance(command, Measure) else getattr(command, "cell", None)
        if cell is not None:
            commands.append((self.process.pid, type(command).__name__, cell.system.choice, cell.batch))
        return tell(self, command)

    monkeypatch.setattr(CellProcess, "tell", listen)
    return commands


def asked_for(batches: Sequence[int], systems: Sequence[str]) -> Request:
    model, runner = choose("model", "custom", factory="zoo:make"), choose("runner", "latency", samples=5)
    cells = tuple(
        Cell(model, choose("system", system), runner, Conditions(batch, "cpu", "fp32"))
        for batch in batches
        for system in systems
    )
    return Request(cells, SweepOptions(Path("r"), False, 60, None, rounds=1, max_load=1.0, gpus=(0,), output=None))


@pytest.mark.slow
def test_what_the_next_cell_needs_is_made_ahead_of_it(overheard: list[tuple[int, str, str, int]]) -> None:
    """Also from one group to the next, and nothing is left running."""
    assert (
        Sweep(asked_for((1, 5), ("eager", "torchscript"))).run() == 1
    )  # the second model has a branch that tracing freezes
    order = [("eager", 1), ("torchscript", 1), ("eager", 5), ("torchscript", 5)]
    cells_by_command = {
        do: [(system, batch) for _, what, system, batch in overheard if what == do] for do in ("Ahead", "Measure")
    }
    assert cells_by_command == {"Ahead": order[1:], "Measure": order}
    of = {(do, system, batch): pid for pid, do, system, batch in overheard}
    assert all(of["Ahead", *c] == of["Measure", *c] for c in order[1:])
    assert soon(lambda: not any(psutil.pid_exists(pid) for pid in of.values()))


def played(monkeypatch: pytest.MonkeyPatch, answer: Callable[[Command], Answer | None]) -> None:
    """Have answers that are not None stand for those of the processes."""
    ask = CellProcess.ask

    def stand_in(self: CellProcess, command: Command, *rest: Any) -> Answer:
        return answer(command) or ask(self, command, *rest)

    monkeypatch.setattr(CellProcess, "ask", stand_in)


@pytest.mark.slow
def test_a_system_that_learns_is_measured_in_a_process_that_has_learned_nothing(
    overheard: list[tuple[int, str, str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    learns = lambda command: isinstance(command, Learn) and command.cell.system.name == "eager"  # noqa: E731
    doubt = Warning("notice", {"text": "nothing is kept"})
    played(monkeypatch, lambda command: Learned(1000.0, (doubt,)) if learns(command) else None)
    learned: list[int] = []
    close = CellProcess.close

    def closed(self: CellProcess) -> None:
        learned.append(self.process.pid)
        close(self)

    monkeypatch.setattr(CellProcess, "close", closed)
    sweep = Sweep(asked_for((1,), ("eager", "torchscript")))
    assert sweep.run() == 0
    commands = [(do, system) for _, do, system, _ in overheard]
    assert commands.count(("Ahead", "torchscript")) == 2  # one of them was taken for the second process of eager
    (measured,) = [pid for pid, do, system, _ in overheard if (do, system) == ("Measure", "eager")]
    first_ahead = next(pid for pid, do, _, _ in overheard if do == "Ahead")
    assert measured == first_ahead
    records = {r.cell.system.name: r for r in sweep.store.read().records.values()}
    assert records["eager"].learning_s == 1000 and doubt in records["eager"].warnings
    assert records["torchscript"].learning_s is None and (records["eager"].preparation_s or 0) < 1000


def test_what_ends_learning_is_the_cells_record(
    overheard: list[tuple[int, str, str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    played(monkeypatch, lambda command: Failed("timeout", "no result after 60 s") if isinstance(command, Learn) else None)
    sweep = Sweep(asked_for((1,), ("eager",)))
    assert sweep.run() == 1
    (record,) = sweep.store.read().records.values()
    assert (record.status, record.reason, record.learning_s) == ("timeout", "no result after 60 s", None)
    assert not any(do == "Measure" for _, do, _, _ in overheard)


def test_a_number_that_no_reader_takes_is_a_failure_with_its_reason(
    overheard: list[tuple[int, str, str, int]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A record that cannot be read back would leave its cell without one, and without a word."""

    def infinite(command: Command) -> Answer | None:
        if not isinstance(command, Measure):
            return None
        quantity = Quantity("ratio", "a ratio", "x", float("inf"), is_more_better=True)
        measured = {"ratio": Measured((quantity,), {}, "2026-01-01")}
        return Done(replace(command.record, status="ok", reason=None, measured=measured))

    played(monkeypatch, infinite)
    sweep = Sweep(asked_for((1,), ("eager",)))
    assert sweep.run() == 1
    (record,) = sweep.store.read().records.values()
    assert (record.status, record.reason) == ("failed", "what was measured makes no record: it holds inf")
    output = capsys.readouterr()
    assert f"failed: {record.reason}" in output.out and "failed" in output.err.splitlines()[-1]


@pytest.mark.slow
def test_a_cell_that_cannot_take_part_in_rounds_is_known_by_data(
    overheard: list[tuple[int, str, str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    played(monkeypatch, lambda command: Failed("failed", "it ended") if isinstance(command, Round) else None)
    sweep = Sweep(asked_for((1,), ("eager", "torchscript")))
    assert sweep.tried.process is not None
    assert sweep.run() == 0
    first = next(pid for pid, do, system, _ in overheard if (do, system) == ("Learn", "eager"))
    assert first == sweep.tried.process.process.pid  # the model was tried in forks of it
    records = list(sweep.store.read().records.values())
    assert all(r.warnings[-1] == Warning("no_ratio", {"status": "failed", "reason": "it ended"}) for r in records)
    num_commands = len(overheard)
    assert Sweep(asked_for((1,), ("eager", "torchscript"))).run() == 0 and len(overheard) == num_commands  # not tried again
