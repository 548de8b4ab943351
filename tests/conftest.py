"""What tests share: settings, and for the command line small models of their own and runs of the real program."""

import gc
import importlib
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from drawing import THOROUGH, few
from exports import keep_onnx_functions, keep_what_exports_make
from hypothesis import settings
from packs import keep_committed_packs, keeping_points

from runners.cell.messages import Answer, Command, Phase, answer_to, encoded
from runners.cell.worker import Worker, guarded
from runners.command import main
from runners.showings import asking
from runners.sweep import checking
from scripts import agreement
from systems.profiling.intensity import ridge_point
from systems.scheduling.execution import cpu_executor
from systems.weave import trials

ROOT = Path(__file__).parent.parent

# A shared machine's timing says nothing about correctness.
settings.register_profile("opweave", deadline=None, max_examples=few(settings.default.max_examples))
settings.register_profile(THOROUGH, deadline=None, max_examples=100)
settings.load_profile("opweave")
pytest.register_assert_rewrite("rewriting", "triton_cases", "drawn_charts", "parallel_engines", "workloads")

TINY = '''
import os, time
import torch
from torch import nn


class Branches(nn.Module):
    """Two branches that a scheduler may run at once."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 1)

    def forward(self, x):
        return {"sum": self.a(x).relu() + self.b(x).sigmoid()}


class Calls(nn.Module):
    """A forward that does what it is given."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, x):
        return self.act(x)


def exhaust(x):
    raise MemoryError("no 1 TiB here")


def image(batch):
    return (torch.randn(batch, 3, 16, 16),)


def make(batch): return Branches(), image(batch)
def random(batch): return Calls(torch.rand_like), image(batch)
def crash(batch): return Calls(lambda x: os._exit(3)), image(batch)
def greedy(batch): return Calls(exhaust), image(batch)
def hang(batch): return Calls(lambda x: time.sleep(600)), image(batch)
def raises(batch): raise RuntimeError("no such thing")
def none(batch): return None
def no_module(batch): return 3, image(batch)
def no_tensor(batch): return Branches(), (3,)
number = 3
'''


# Files that take longest, 67 to 12 s of a core, go first, so that the workers of a run end together.
LONG = (
    *("test_cli", "test_committed_charts", "test_plot_words", "test_models_networks", "test_models_counts"),
    *("test_serving_parallel", "test_serving_ends", "test_training", "test_report_browser", "test_backends"),
    *("test_rewriting", "test_serving_endpoint", "test_torch_compile", "test_xla", "test_fuse_moves", "test_workers"),
    *("test_fuse_reductions", "test_report", "test_onnx", "test_advice", "test_windtunnel_estimator"),
    *("test_triton_attention", "test_triton_products", "test_ios", "test_wheel", "test_serving_simulated"),
    *("test_merge_linears", "test_merge_convolutions", "test_results", "test_aliasing", "test_serving_chat"),
    *("test_fuzz", "test_measuring", "test_sweep", "test_members", "test_triton_passes", "test_odd_models"),
    *("test_write_back", "test_triton_joins", "test_strangers", "test_select_products", "test_reproduce"),
    *("test_accuracy", "test_executors", "test_simulate_runner", "test_fold_constants", "test_weave_peers"),
    *("test_simulator", "test_serving_agreement", "test_pack", "test_systems", "test_exhibits_pictures", "test_plot_values"),
)

# pytest listens to every logger that does not propagate, and for a listener PyTorch composes a trace of each capture.
logging.getLogger("torch.__trace").propagate = True

keep_what_exports_make()
keep_committed_packs()

gc.disable()  # until all tests are imported: of what is imported nothing can be freed, and looking takes a third of the time


def pytest_collection_finish() -> None:
    if "onnxscript" in sys.modules:
        keep_onnx_functions()
    gc.freeze()
    gc.set_threshold(20_000)  # tests make more that stays for a while than that is garbage in cycles
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries tell of what is left at the end


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: names.get(item.path.stem, len(LONG)))


def without_progress(stderr: str) -> list[str]:
    """The lines of a program's messages without those that say, every ten seconds, that it is still at work."""
    return [line for line in stderr.strip().splitlines() if not re.fullmatch(r"\w+: .+, \d+ s", line)]


@pytest.fixture
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test that uses it reads what another, or the user, has measured."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("OPWEAVE_CACHE", str(folder))
    ridge_point.cache_clear()
    return folder


@pytest.fixture
def closed_figures() -> Iterator[None]:
    """Figures of a test are closed at its end."""
    yield
    importlib.import_module("matplotlib.pyplot").close("all")


@pytest.fixture(autouse=True)
def arithmetic_of_the_process() -> Iterator[None]:
    """A test leaves PyTorch's arithmetic as it was: a cell's session sets it for a process of its own."""
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, products.allow_tf32, cudnn.benchmark
    yield
    cudnn.allow_tf32, products.allow_tf32, cudnn.benchmark = before


@pytest.fixture(scope="module")
def arithmetic_of_torch() -> Iterator[None]:
    """That of a process of its own: TF32 in convolutions, and not in products."""
    convolutions, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = convolutions.allow_tf32, products.allow_tf32
    convolutions.allow_tf32, products.allow_tf32 = True, False
    yield
    convolutions.allow_tf32, products.allow_tf32 = before


@pytest.fixture(autouse=True, scope="session")
def measured_costs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whatever is measured and kept is kept in a folder of this test run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPWEAVE_CACHE", str(tmp_path_factory.mktemp("measured")))
        yield


@pytest.fixture(autouse=True, scope="session")
def simulated_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What scripts simulate with the committed costs, for 14 s, one worker of a run simulates for all."""
    folder = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        simulate = keeping_points((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "points")
        patch.setattr(agreement, "_simulated", simulate)
        yield


@pytest.fixture(autouse=True, scope="session")
def unbound() -> Iterator[None]:
    """TVM binds the thread that calls it, and so whatever that starts from then on, to as many cores as it has threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TVM_BIND_THREADS", "0")
        yield


@pytest.fixture(autouse=True, scope="session")
def brief_trials() -> Iterator[None]:
    """A search of weave calls each candidate as often as it must. No test asks which of two small programs is faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "ROUND_SECONDS", 0.0)
        yield


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """More threads sum in another order, and training makes much of a little."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(cpu_executor.os, "cpu_count", lambda: 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with the models of TINY in it, in tiny.py, and nothing else."""
    (tmp_path / "tiny.py").write_text(TINY)
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "run.py"), *arguments]


def environment(**more: str) -> dict[str, str]:
    """The shell's, as a user without settings of his own has it, and without a GPU.

    On one thread unless told otherwise (OMP_NUM_THREADS="" for nothing said): tests run beside each other, and threads that
    wait for their core take many times as long.
    """
    plain = {k: v for k, v in os.environ.items() if k not in ("HYDRA_FULL_ERROR", "PYTEST_CURRENT_TEST")}
    variables = {**plain, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200", **more}
    return {k: v for k, v in variables.items() if v or k != "OMP_NUM_THREADS"}


def gpu_environment() -> dict[str, str]:
    """What shows a command the GPU that this process sees."""
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs the program in `folder` to its end, without waiting for sweeps of other tests to leave the CPU."""
    own = str(tmp_path_factory.mktemp("tmp"))

    def run(*arguments: str, timeout: float = 240, **more: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command(*arguments),
            cwd=folder,
            env=environment(**{"TMPDIR": own, **more}),
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


class WorkerHere:
    """Stands in for the process of a cell: its worker, in this process."""

    def __init__(self, device: str, visible_device: str, cores: Collection[int] = ()):
        self.worker = Worker(io.StringIO(), visible_device)

    def ask(self, command: Command, *_: object) -> Answer | Phase:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            answer = guarded(self.worker.carry_out, command)
        return answer_to(command, encoded(answer).encode())

    def close(self) -> None:
        pass


@pytest.fixture
def run_here(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """As `run`, in this process, for a request that measures nothing; starts of processes are most of such a run."""

    def run_here(*arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
        imported = set(sys.modules)
        capfd.readouterr()
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
            patch.chdir(folder)
            patch.syspath_prepend(folder)
            patch.setattr(sys, "argv", command(*arguments)[1:])
            for variable, value in environment(HYDRA_FULL_ERROR="", **more).items():  # the program sets it for itself
                patch.setenv(variable, value)
            for module in (asking, checking):
                patch.setattr(module, "CellProcess", WorkerHere)
            main()
        for name in set(sys.modules) - imported:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(str(folder)):
                del sys.modules[name]
        output = capfd.readouterr()
        return subprocess.CompletedProcess(sys.argv, int(end.value.code or 0), output.out, output.err)

    return run_here


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a script's main() in this process, where what it imports, for seconds, has been imported."""

    def script(name: str, *arguments: str, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
        folder = "tests/benchmarks" if name.startswith("benchmark_") else "scripts"
        main = importlib.import_module(f"{Path(folder).name}.{name}").main
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", [str(ROOT / folder / f"{name}.py"), *arguments])
        for variable, value in environment().items():
            monkeypatch.setenv(variable, value)
        capsys.readouterr()
        status: Any = 0
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
        output = capsys.readouterr()
        return subprocess.CompletedProcess(sys.argv, status, output.out, output.err)

    return script


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """The records in a folder as their files hold them, by the model's factory and the system; every file must be whole."""
    documents = {}
    for file in sorted(folder.glob("*.json")):
        document = json.loads(file.read_text())
        model, system = document["cell"]["model"], document["cell"]["system"]
        documents[f"{model['options'].get('factory', model['name'])} {system['choice']}"] = document
    return documents


def heed_interrupts() -> None:
    """Tests may have been started in the background, where a shell has its processes ignore an interrupt."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def living(folder: Path) -> list[str]:
    """The processes that work in `folder`."""
    command_lines = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                command_lines.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return command_lines


def soon(condition: Callable[[], Any], within: float = 120.0) -> bool:
    """Does `condition` come true `within` so many seconds?"""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def worker_of(keeper: int) -> psutil.Process:
    """The process of a cell, once its keeper has started it.

    Args:
        keeper: id of a process.
    """
    while not (workers := psutil.Process(keeper).children()):
        time.sleep(0.005)
    return workers[0]


def gone(processes: Iterable[int], within: float) -> bool:
    """Are these processes, by id, at their end `within` so many seconds? A zombie is."""

    def alive(process: int) -> bool:
        try:
            return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    deadline = time.monotonic() + within
    while left := [p for p in processes if alive(p)]:
        if time.monotonic() > deadline:
            return not left
        time.sleep(0.02)
    return True
