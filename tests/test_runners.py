"""The measurements, each against something that is known."""

import itertools
import os
import random
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import worker_of
from made_records import cell, record
from scipy.stats import bootstrap

from results.cell import Cell, Conditions, choose
from results.limits import Limits
from results.record import Record
from results.statistics import describe, spread
from results.warning import Warning
from results.words import one_line
from runners.cell import calls
from runners.cell.arithmetic import set_arithmetic
from runners.cell.measuring import measured
from runners.cell.messages import Failed
from runners.cell.session import Session
from runners.cell.worker import Phases
from runners.checks import BadRequest
from runners.machine.device import visible
from runners.machine.environment import identity, settings_of
from runners.measurements import kernels, latency, sm_efficiency, throughput
from runners.measurements.parts import limits_of_model
from runners.measurements.sm_efficiency import CountersUnavailable, occupied, parse_counters
from runners.request.request import Request, SweepOptions
from runners.showings import asking
from runners.showings.iteration_costs import IterationCosts
from runners.sweep.cell_process import CellProcess
from runners.sweep.checking import digest_of_file, sources_of
from runners.sweep.cores import shares
from runners.sweep.progress import Progress
from systems.notice import Notice
from systems.profiling.trace import covered
from systems.pytorch.eager import Eager


@pytest.mark.parametrize("seed", range(3))
def test_statistics_are_those_of_scipy(seed: int) -> None:
    samples = np.random.default_rng(seed).lognormal(0.0, 0.3, 101)
    statistics = describe(samples.tolist())
    theirs = bootstrap((samples,), np.median, method="percentile", n_resamples=5000, rng=seed).confidence_interval
    width = theirs.high - theirs.low
    assert statistics.median == np.median(samples) and statistics.min == samples.min() and statistics.n == 101
    assert statistics.mean == pytest.approx(samples.mean())
    assert [statistics.p90, statistics.p99] == pytest.approx(np.percentile(samples, [90, 99]).tolist())
    low, high = statistics.ci95
    assert abs(low - theirs.low) < 0.25 * width and abs(high - theirs.high) < 0.25 * width
    assert describe(samples.tolist()) == statistics


def test_statistics_of_equal_samples_and_of_none() -> None:
    assert describe([2.0] * 5).ci95 == (2.0, 2.0) and spread([2.0] * 5) == 0.0
    with pytest.raises(ValueError):
        describe([])


def test_latency_is_that_of_one_call() -> None:
    part = latency.measure(lambda: time.sleep(0.002), "cpu", samples=100, warmup_calls=20)
    assert len(part.host_ms) >= 100 and part.device_ms is None and part.device is None and part.warmup_calls == 20
    assert 2.0 <= part.host.min <= part.host.median < 4.0


def test_warm_up_goes_on_until_calls_are_steady() -> None:
    seconds = iter([0.02] * 15 + [0.001] * 1000)
    assert 30 <= calls.warm_up(lambda: time.sleep(next(seconds)), "cpu") <= calls.WARM_UP_CALLS


def test_warm_up_of_what_is_never_steady_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    medians_ms = itertools.cycle([1.0, 2.0])
    monkeypatch.setattr(calls, "sample", lambda *_: [next(medians_ms)])
    monkeypatch.setattr(calls, "WARM_UP_SECONDS", 30.0)
    assert calls.warm_up(lambda: None, "cpu") == calls.WARM_UP_CALLS


def test_throughput_counts_samples_of_calls_back_to_back() -> None:
    part = throughput.measure(lambda: time.sleep(0.002), "cpu", batch=8, expected_ms=2.0)
    assert len(part.runs) == throughput.RUNS and 1000 < part.statistics.median <= 4000


def test_occupied_share_against_small_steps_of_time() -> None:
    generator = random.Random(0)
    for _ in range(20):
        kernels = [
            (s := generator.randrange(50), s + generator.randrange(1, 20), generator.randrange(1, 9)) for _ in range(6)
        ]
        begin, end = min(k[0] for k in kernels), max(k[1] for k in kernels)
        steps = [min(1.0, sum(b for s, e, b in kernels if s <= t < e) / 4) for t in range(begin, end)]
        assert occupied([(float(s), float(e), b) for s, e, b in kernels], 4) == pytest.approx(sum(steps) / len(steps))
    assert occupied([], 4) == 0.0


def test_covered_time_against_small_steps_of_time() -> None:
    generator = random.Random(0)
    for _ in range(20):
        spans = [(s := generator.randrange(50), s + generator.randrange(1, 20)) for _ in range(6)]
        assert covered(spans) == sum(any(s <= t < e for s, e in spans) for t in range(80))
    assert covered([]) == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_of_a_call_are_those_that_it_launches() -> None:
    x = torch.randn(1 << 20, device="cuda")
    part = kernels.measure(lambda: (x * 2, x.clone()), "cuda")
    assert part.count == 2 and 0 < (part.covered_ms or 0) <= (part.sum_ms or 0)


def test_counters_are_read_from_nsight_computes_csv() -> None:
    heading = '"ID","Kernel Name","gpu__time_duration.sum","sm__cycles_active.avg.pct_of_peak_sustained_elapsed"'
    text = f'==PROF== Connected\n{heading}\n"","","ns","%"\n"0","graph","3,000","50.0"\n"1","graph","1000","10"\n'
    assert parse_counters(text) == pytest.approx((1600.0, 4000.0))
    for nothing in ("", "==PROF== No kernels were profiled.\n", f'{heading}\n"","","ns","%"\n'):
        with pytest.raises(CountersUnavailable):
            parse_counters(nothing)


def test_a_cpu_has_no_sm_efficiency_and_says_so() -> None:
    part = sm_efficiency.measure(lambda: None, cell("eager"), sm_efficiency.KERNELS, "auto", 1.0)
    assert part.value is None and part.source is None and "CPU" in (part.reason or "")


def small(runner: str = "correctness", **conditions: Any) -> Cell:
    """A cell that runs in a moment."""
    options = {"samples": 5} if runner == "latency" else {}
    chosen = choose("model", "mobilenet_v2_cifar10"), choose("system", "eager"), choose("runner", runner, **options)
    return Cell(*chosen, Conditions(1, "cpu", "fp32", **conditions))


def measure(small_cell: Cell) -> Record:
    return measured(Session(small_cell, "0", lambda _: None), record(of=small_cell))


@pytest.mark.parametrize(("algorithms", "is_timed"), [("timed", True), ("heuristic", False)])
def test_cudnn_chooses_as_the_cell_asks(monkeypatch: pytest.MonkeyPatch, algorithms: str, is_timed: bool) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not is_timed)
    Session(small(algorithms=algorithms), "0", lambda _: None)
    assert torch.backends.cudnn.benchmark == is_timed


KERNELS = """
import sys
from results.cell import Cell, Conditions, choose
from runners.cell.session import Session
from systems.profiling import trace
chosen = choose("model", "squeezenet"), choose("system", "eager"), choose("runner", "latency")
session = Session(Cell(*chosen, Conditions(1, "cuda")), "0", lambda _: None)
session.prepare()
for _ in range(3):
    session.call()
print(*(event.name for event in trace.traced(session.call, 1)), sep="\\n")
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_heuristic_algorithms_are_the_same_in_every_process() -> None:
    processes = [
        subprocess.run([sys.executable, "-c", KERNELS], capture_output=True, text=True, check=True) for _ in range(2)
    ]
    first, second = (one.stdout.splitlines() for one in processes)
    assert len(first) > 30 and first == second


def test_a_notice_stands_in_the_record_and_other_warnings_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = Eager.prepare

    def warned(self: Eager, *arguments: Any) -> Any:
        warnings.warn("nothing is kept", category=Notice, stacklevel=1)
        warnings.warn("nothing\n is \x1b[31mkept", category=Notice, stacklevel=1)
        warnings.warn("long" + "x" * 2**20, category=Notice, stacklevel=1)
        warnings.warn("what a library says", category=DeprecationWarning, stacklevel=1)
        return prepare(self, *arguments)

    monkeypatch.setattr(Eager, "prepare", warned)
    with pytest.warns(DeprecationWarning, match="what a library says"):
        result = measure(small())
    of_the_cell = [warning for warning in result.warnings if warning.kind != "busy_cpu"]  # of tests that run beside
    assert of_the_cell == [Warning("notice", {"text": text}) for text in ("nothing is kept", one_line("long" + "x" * 2**20))]


def test_what_a_system_learns_is_timed_and_its_notices_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Session(small(), "0", lambda _: None).learn() is None  # eager has nothing to learn

    def learn(self: Eager, *arguments: Any) -> None:
        time.sleep(0.05)
        warnings.warn("the cache is full", category=Notice, stacklevel=1)

    monkeypatch.setattr(Eager, "learns", True)
    monkeypatch.setattr(Eager, "learn", learn)
    phases: list[str] = []
    session = Session(small(), "0", phases.append)
    seconds = session.learn()
    assert seconds is not None and 0.05 <= seconds < 5 and phases[-1] == "learning"
    assert session.notices == (Warning("notice", {"text": "the cache is full"}),)


def test_a_gpu_without_room_for_another_context_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings", reason="this PyTorch comes without CUDA's bindings")
    session = object.__new__(Session)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    for device, room, number in (("cpu", False, 0), ("cuda", True, 0), ("cuda", False, 1)):
        monkeypatch.setattr("systems.scheduling.execution.context_switch.switch_contexts", lambda _, room=room: room)
        session.device = device
        assert len(session.settle()) == number


def test_tf32_is_for_convolutions_alone_and_where_it_was_asked_for() -> None:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, cudnn.benchmark, matmul.allow_tf32
    try:
        for precision, is_allowed in (("tf32", True), ("fp32", False), ("fp16", True)):
            matmul.allow_tf32 = True
            set_arithmetic(precision, "heuristic")
            assert cudnn.allow_tf32 == is_allowed and not matmul.allow_tf32
    finally:
        cudnn.allow_tf32, cudnn.benchmark, matmul.allow_tf32 = before


def test_siblings_take_over_the_limits_of_the_model_alone() -> None:
    limits = Limits(1.0, 2.0, rewritten=Limits(0.5, 1.0))
    assert limits_of_model(record(limits=limits)) == Limits(1.0, 2.0)
    assert limits_of_model(record(limits=Limits(None, None, reason="no capture"))) is None is limits_of_model(record())


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no process to cores")
def test_gpus_measured_at_once_have_cores_of_their_own() -> None:
    cores = os.sched_getaffinity(0)
    assert shares(1) == [[]] and shares(len(cores) + 1) == [[]] * (len(cores) + 1)
    shared = shares(len(cores)) if len(cores) > 1 else [[*cores]]
    assert all(shared) and sorted(c for share in shared for c in share) == sorted(cores)
    process = CellProcess("cpu", "0", shared[-1])
    assert worker_of(process.process.pid).cpu_affinity() == shared[-1]
    process.close()


@pytest.mark.parametrize("siblings", ["{0},{1}\n", None])
def test_threads_of_a_physical_core_go_to_one_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, siblings: str | None
) -> None:
    """Eight threads, of which i and i + 4 share a core, for two GPUs; where Linux does not say so, as they are counted."""
    for core in range(8):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        if siblings:
            (folder / "thread_siblings_list").write_text(siblings.format(core % 4, core % 4 + 4))
    monkeypatch.setattr("runners.sweep.cores.CORES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert shares(2) == ([[0, 1, 4, 5], [2, 3, 6, 7]] if siblings else [[0, 1, 2, 3], [4, 5, 6, 7]])


def test_waiting_for_another_sweep_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(1)
    for _ in range(3):
        progress.wait("0", cell("eager", "vgg16"))
    assert capsys.readouterr().err == "vgg16 eager b1: waiting for another sweep on this device\n"


def test_a_process_sees_the_one_card_that_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for shell, cards in (("", ["0", "1"]), ("3, GPU-6b2cfc51", ["3", "GPU-6b2cfc51"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shell)
        assert [visible(0), visible(1)] == cards


def test_the_shells_settings_and_the_models_files_make_another_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    machine = identity(cell(device="cpu"), (), "0", "0a1b")
    assert machine.settings["OMP_NUM_THREADS"] == "3" and "MKL_NUM_THREADS" not in machine.settings
    assert machine.sources == "0a1b" and machine.gpu is None and machine.cores == len(os.sched_getaffinity(0))
    shell = {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_ALGO": "Ring", "TORCHINDUCTOR_MAX_AUTOTUNE": "1"}
    others = {"NCCL_VERSION": "2", "TORCHINDUCTOR_CACHE_DIR": "/a", "CUDA_HOME": "/b", "CUDA_VISIBLE_DEVICES": "1"}
    assert settings_of(shell | others) == shell


@pytest.mark.parametrize(
    ("group", "key", "choice"), [("runner", "trace", "serving"), ("system", "schedule", "ios"), ("model", "path", "hf")]
)
def test_a_users_file_that_changes_makes_another_cell(tmp_path: Path, group: str, key: str, choice: str) -> None:
    place = tmp_path / "file"
    file = place if key != "path" else place / "config.json"
    of = replace(cell(device="cpu"), **{group: choose(group, choice, **{key: str(place)})})
    assert sources_of(of, {}) is None  # not there
    file.parent.mkdir(exist_ok=True)
    seen = set()
    for text in ("a", "bc"):
        file.write_text(text)
        seen.add(sources_of(of, {of.model: "0a1b"}))
    assert len(seen) == 2 and all(str(one).startswith("0a1b+") for one in seen)
    assert sources_of(cell(device="cpu"), {}) is None


def test_a_users_file_that_cannot_be_read_is_refused_and_a_word_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").symlink_to(tmp_path / "nowhere")
    assert digest_of_file(str(tmp_path / "model"))  # a link is told by itself
    with pytest.raises(BadRequest, match=r"x\.csv cannot be read: File name too long$"):
        digest_of_file("x" * 300 + "x.csv")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "measured").mkdir()
    assert digest_of_file("measured") is None  # as system.costs=measured


def test_phases_add_up_to_the_time_that_passed() -> None:
    reported: list[str] = []
    begin = time.perf_counter()
    phases = Phases(reported.append)
    for phase in ("loading", "preparing", "preparing: 1 stage", "memory", "preparing: 2 stages"):
        phases(phase)
        time.sleep(0.01)
    seconds = phases.seconds()
    assert list(seconds) == ["loading", "preparing", "memory"] and reported[2] == "preparing: 1 stage"
    assert 0.05 <= sum(seconds.values()) <= time.perf_counter() - begin and seconds["preparing"] > 0.03


def test_what_a_cell_shows_runs_on_the_gpu_that_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = list[str]()

    class Process:
        """A worker that answers at once: there is no GPU 3 here."""

        def __init__(self, device: str, visible_device: str):
            seen.append(visible_device)

        def ask(self, *arguments: object) -> Failed:
            return Failed("error", "no GPU")

        def close(self) -> None:
            pass

    monkeypatch.setattr(asking, "CellProcess", Process)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    split = Cell(
        choose("model", "gpt"),
        choose("system", "orca", tensor_parallel=2),
        choose("runner", "iteration_costs"),
        Conditions(1, "cuda", "fp16"),
    )
    options = SweepOptions(tmp_path, False, 60, None, rounds=0, max_load=1.0, gpus=(3, 1, 2), output=None)
    asking.ask(split, options)
    IterationCosts(split.runner).run(Request((split,), replace(options, output=tmp_path / "costs.json")))
    assert seen == ["3", "3,1"]
