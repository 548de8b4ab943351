"""Processes of cells: what they import and build ahead, how their ends are told, and that none outlives its parent."""

import io
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import ROOT, gone, soon, worker_of

import models
from models import loading
from results.cell import Cell, Conditions, choose
from runners.cell.messages import Check, Checked, Failed, NoMessage, Prepare, Ready, Round, Turn, answer_to, encoded
from runners.cell.worker import Worker, build_ahead
from runners.request.request import Request, SweepOptions
from runners.sweep.cell_process import CellProcess
from runners.sweep.checking import Tried, tried
from runners.sweep.host_memory import host_memory, out_of_memory_kills
from runners.sweep.lane import Lane, Processes
from runners.sweep.progress import Progress
from runners.sweep.quiet import Quiet

MIB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
def test_no_worker_outlives_a_killed_parent() -> None:
    parent = (
        "import sys, time; from runners.sweep.cell_process import CellProcess\n"
        "from results.cell import Cell, Conditions, choose; from runners.cell.messages import Ahead\n"
        "chosen = choose('model', 'custom'), choose('system', 'nimble'), choose('runner', 'latency')\n"
        "p = CellProcess('cpu', '0'); p.tell(Ahead(Cell(*chosen, Conditions(1, 'cpu'))))\n"
        "import psutil\n"
        "while not (worker := psutil.Process(p.process.pid).children()): time.sleep(0.01)\n"
        "worker[0].suspend()  # so that it does not see the end of its commands\n"
        "print(p.process.pid, worker[0].pid, flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    keeper_and_worker = [int(number) for number in process.stdout.readline().split()]
    process.kill()
    process.wait()
    assert len(keeper_and_worker) == 2 and gone(keeper_and_worker, within=5)


@pytest.mark.slow
def test_what_is_imported_ahead_is_what_every_cell_of_the_model_needs() -> None:
    code = (
        "import sys; from results.cell import choose; from runners.cell.worker import import_ahead\n"
        "for name in sys.argv[1:]: import_ahead(choose('model', name)); print(*sys.modules)"
    )
    command = [sys.executable, "-c", code, "custom", "squeezenet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    custom, squeezenet = (set(line.split()) for line in done.stdout.splitlines())
    assert {"torch", "runners.cell.session"} <= custom and "models.vision" not in custom
    assert {"torch", "runners.cell.session", "models.vision"} <= squeezenet and "systems.nimble.system" not in squeezenet


def test_what_is_built_ahead_is_for_the_runner_of_the_cell() -> None:
    before, threads = torch.get_num_threads(), 2
    torch.set_num_threads(threads)

    def ahead(runner: str, model: str, **options: Any) -> None:
        chosen = choose("model", model, **options), choose("system", "eager"), choose("runner", runner)
        build_ahead(Cell(*chosen, Conditions(1, "cpu")))

    for runner in ("latency", "training"):
        ahead(runner, "squeezenet", bypass="none")
        built = next(iter(loading._ahead.values()))
        assert models.load("squeezenet", 1, training=runner == "training").module is built
    ahead("latency", "squeezenet", bypass="long")  # told when it is loaded
    ahead("latency", "custom", factory="a:b")
    for runner in ("serving", "capacity", "engine", "simulation", "simulated"):  # made on the device
        ahead(runner, "gpt")
    assert not loading._ahead and torch.get_num_threads() == threads
    torch.set_num_threads(before)


def test_an_answer_to_another_command_is_none() -> None:
    check = Check("system", choose("system", "eager"), 1)
    assert answer_to(check, encoded(Checked(None)).encode()) == Checked(None)
    with pytest.raises(NoMessage, match="Turn"):
        answer_to(check, encoded(Turn((1.0,))).encode())


def test_a_worker_that_is_killed_is_told_apart_from_one_that_timed_out() -> None:
    killed = CellProcess("cpu", "0")
    worker_of(killed.process.pid).kill()
    answer = killed.ask(Round(), timeout=10)
    assert isinstance(answer, Failed) and answer.status == "failed" and "SIGKILL" in answer.reason
    slow = CellProcess("cpu", "0")
    answer = slow.ask(Check("system", choose("system", "eager"), 1), timeout=0.05)
    assert isinstance(answer, Failed) and answer.status == "timeout" and slow.process.poll() is not None


def test_an_answer_without_an_end_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runners.sweep.cell_process.MOST_BYTES", 10)
    process = CellProcess("cpu", "0")
    answer = process.ask(Check("system", choose("system", "eager"), 1), timeout=60)
    assert isinstance(answer, Failed) and "what is no answer" in answer.reason and process.process.poll() is not None


def test_what_the_kernel_kills_for_want_of_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = 3
    monkeypatch.setattr("runners.sweep.cell_process.out_of_memory_kills", lambda: kills)
    itself, of_its_own = CellProcess("cpu", "0"), CellProcess("cpu", "0")
    kills += 1
    worker_of(itself.process.pid).kill()
    answer = itself.ask(Round(), timeout=10)
    assert isinstance(answer, Failed) and answer.status == "out_of_memory"
    assert "the kernel killed its process for want of memory" in answer.reason
    answer = of_its_own.ask(Round(), timeout=60)  # fails, as where a compiler has been killed
    assert isinstance(answer, Failed) and answer.status == "failed"
    assert answer.reason.startswith("AssertionError: a cell is prepared first; meanwhile")
    assert answer.reason.endswith("the kernel killed a process of this machine for want of memory")
    of_its_own.close()


def test_the_options_of_a_gpus_cell_are_tried_in_a_process_that_ends(tmp_path: Path) -> None:
    """It sees no GPU, so that no cell can be measured in it."""
    chosen = choose("model", "squeezenet"), choose("system", "nimble", multi_stream=False), choose("runner", "latency")
    options = SweepOptions(tmp_path, False, 120, None, rounds=0, max_load=1.0, gpus=None, output=None)
    assert tried(Request((Cell(*chosen, Conditions(1, "cuda")),), options)) == Tried({}, None)
    assert not [p for p in psutil.Process().children() if "runners.machine.keeper" in p.cmdline()]


@pytest.mark.slow
def test_what_is_tried_leaves_the_process_as_it_was_or_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the first cell can be measured in it: each model is made in a fork, which nothing outlives."""
    (tmp_path / "tried.py").write_text(
        "import os, signal\n"
        "import torch\n"
        "def make(batch):\n"
        "    open('made', 'a').write(f'{os.getpid()} ')\n"
        "    return torch.nn.ReLU(), (torch.ones(batch),)\n"
        "def exits(batch):\n"
        "    print('a word', flush=True)\n"
        "    os._exit(7)\n"
        "def killed(batch): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.chdir(tmp_path)
    check = {
        name: Check("model", choose("model", "custom", factory=f"tried:{name}"), 1) for name in ("make", "exits", "killed")
    }
    process = CellProcess("cpu", "0")
    first, second = (process.ask(check["make"], timeout=120) for _ in range(2))
    assert isinstance(first, Checked) and first == second and first.sources
    worker = worker_of(process.process.pid)
    made = [int(number) for number in (tmp_path / "made").read_text().split()]
    assert len({worker.pid, *made}) == 3 and soon(lambda: not worker.children())
    options = SweepOptions(tmp_path, False, 60, None, rounds=0, max_load=1.0, gpus=None, output=None)
    lane = Lane("cpu", "0", (), 1, options, Processes(), Progress(1), Quiet(), process)
    assert lane.start_or_take(()) is process
    answer = process.ask(check["exits"], timeout=120)
    assert isinstance(answer, Failed) and answer.status == "failed"
    assert answer.reason == "its process ended with status 7; its last words: a word"
    process = CellProcess("cpu", "0")
    answer = process.ask(check["killed"], timeout=120)
    assert isinstance(answer, Failed) and "was killed by SIGKILL" in answer.reason


def test_kills_for_want_of_memory_are_the_kernels_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = tmp_path / "vmstat"
    monkeypatch.setattr("runners.sweep.host_memory.Path", lambda _: counters)
    assert out_of_memory_kills() == 0
    counters.write_text("nr_free_pages 5\noom_kill 3\npgfault 9\n")
    assert out_of_memory_kills() == 3


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
def test_a_process_whose_parent_has_ended_before_it_asked_ends() -> None:
    code = (
        "import os; from runners.machine.tether import die_with_parent; die_with_parent(os.getppid() + {}); print('alive')"
    )
    for other, said in ((0, "alive"), (1, "")):
        run = subprocess.run([sys.executable, "-c", code.format(other)], cwd=ROOT, capture_output=True, text=True)
        assert (run.stdout.strip(), run.returncode) == (said, other), run.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of shares of a page")
def test_memory_that_processes_share_counts_once() -> None:
    script = "import os, time; held = b'x' * (64 << 20); [os.fork() for _ in range(2)]; print(flush=True); time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert parent.stdout is not None
        for _ in range(4):  # two forks make four processes of one
            parent.stdout.readline()
        process = psutil.Process(parent.pid)
        processes = [process, *process.children(recursive=True)]
        assert len(processes) == 4
        assert host_memory(processes, math.inf) > 4 * 64 * MIB > 2 * host_memory(processes, 0) > 2 * 64 * MIB
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
    assert host_memory([process], 0) == 0  # has ended since it was listed


def test_a_process_that_prepares_for_the_rounds_gives_the_gpus_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mock of torch's allocator, which alone knows what a GPU lends it."""
    steps_taken: list[str] = []
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: steps_taken.append("given back"))
    chosen = choose("model", "squeezenet"), choose("system", "eager"), choose("runner", "latency")
    worker = Worker(io.StringIO())
    monkeypatch.setattr("runners.cell.session.Session.prepare", lambda session: steps_taken.append("prepared"))
    assert worker.carry_out(Prepare(Cell(*chosen, Conditions(1, "cpu")))) == Ready()
    assert steps_taken == ["given back", "prepared", "given back"]  # once the model is loaded, and once it is prepared
