"""Whatever a user's own factory does: its cell has a record or a reason in one line, and other records stay whole."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Run
from made_factories import factory
from made_records import cell, record

from results.cell import choose
from results.document import to_json
from results.record import STATUSES, Record
from results.store import read_record
from results.words import MOST_LETTERS
from runners.cell import messages, worker
from runners.cell.messages import Checked, Done, Failed, Refused
from runners.sweep.sweep import BAD

SYSTEMS = ("eager", "nimble", "torchscript", "ios", "opara")
PROCESSES = 4  # factories that real processes call too
pytestmark = pytest.mark.usefixtures("cache_folder")


def reasons(seed: int, folder: Path, write: Callable[[object], None]) -> list[str]:
    """What the process of a cell says of the factory of a seed: why there is no record, or no good one."""
    (folder / f"odd_{seed}.py").write_text(factory(seed))
    model = choose("model", "custom", factory=f"odd_{seed}:make")
    runner = choose("runner", "latency", samples=3)
    odd_cell = replace(cell(), model=model, system=choose("system", SYSTEMS[seed % len(SYSTEMS)]), runner=runner)
    own = worker.Worker(None)  # type: ignore[arg-type]
    own.write = write  # type: ignore[method-assign]
    said = []
    measure = messages.Measure(replace(record(), cell=odd_cell), None, False)
    for command in (messages.Check("model", model, 1), messages.Learn(odd_cell), measure):
        try:
            reply = worker.guarded(own.carry_out, command)
        except BaseException as error:  # ends the process of a cell, as os._exit does
            if isinstance(error, Exception):
                raise
            return said
        if isinstance(reply, Failed | Refused):
            said.append(reply.reason)
        elif isinstance(reply, Done):
            said += check_record(reply.record)
        else:
            assert isinstance(reply, Checked | messages.Learned), reply
    return said


def check_record(made: Record) -> list[str]:
    """Its reason, if it has one."""
    assert made.status in STATUSES and (made.status == "ok") == (made.reason is None)
    json.dumps(to_json(made))
    return [made.reason] if made.reason else []


@pytest.mark.parametrize("number", [8, pytest.param(120, marks=pytest.mark.slow)])
def test_a_factory_has_a_record_or_a_reason_in_a_line(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    num_said = 0
    for seed in range(number):
        said = reasons(seed, tmp_path, lambda phase: None)
        num_said += bool(said)
        for reason in said:
            assert reason and reason.isprintable() and len(reason) <= MOST_LETTERS + 100, (seed, reason)
    assert number / 2 < num_said < number


@pytest.mark.slow
def test_a_sweep_over_odd_factories_ends_and_loses_nothing(run: Run, folder: Path) -> None:
    arguments = ("model=custom", "system=eager,nimble", "runner=latency", "runner.samples=3", "rounds=0", "results=r", "-m")
    assert run(*arguments, "model.factory=tiny:make").returncode == 0
    whole = {file: file.read_bytes() for file in (folder / "r").iterdir()}
    assert len(whole) == 2
    for seed in range(PROCESSES):
        (folder / f"odd_{seed}.py").write_text(factory(seed))
        done = run(*arguments, f"model.factory=odd_{seed}:make")
        assert done.returncode in (0, 1, 2) and "opweave: interrupted" not in done.stderr, (seed, done.stderr)
        assert "Traceback" not in done.stdout + done.stderr, (seed, done.stdout, done.stderr)
        is_wrong = done.returncode == 2
        files = set((folder / "r").iterdir())
        assert all(file.read_bytes() == text for file, text in whole.items())
        new = [read_record(file) for file in files - set(whole)]
        assert len(new) == (0 if is_wrong else 2), (seed, done.stderr)
        assert (done.returncode == 1) == any(made.status in BAD for made in new), (seed, done.stdout)
        whole |= {file: file.read_bytes() for file in files}
