"""The real TVM on the CPU: agreement with eager, tuning that survives a kill, libraries that are kept."""

import importlib.metadata
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT
from modules import Lambda
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import models
import systems
import systems.tvm as tvm_system
from runners.correctness import relative_error
from systems.base import BadOption, Unsupported
from systems.cache import Cache
from systems.exported import Exported
from systems.tvm import Tvm

pytest.importorskip("tvm", reason="needs the extra tvm")
if reason := Tvm().unsupported("cpu"):
    pytest.skip(reason, allow_module_level=True)

from systems import tvm_build, tvm_measuring, tvm_tuning
from systems.tvm_tuning import EMPTY, RECORDS, SPENT, Function, TuningLog

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setenv("OPWEAVE_CACHE", str(tmp_path / "cache"))
    return Cache()


EM_CUDA = 190  # the machine that an ELF file is for


def small(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = (
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 1),
        nn.BatchNorm2d(4, affine=False),
    )
    module = nn.Sequential(*layers).eval()
    for norm in (module[1], module[4]):
        nn.init.uniform_(norm.running_mean, -1, 1)
        nn.init.uniform_(norm.running_var, 0.5, 2)
    return module


def image(batch: int = 2) -> tuple[Tensor]:
    return (torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(1)),)


@torch.no_grad()
def agree(prepared: Any, module: nn.Module, draws: list[tuple[Tensor, ...]], tolerance: float = 1e-4) -> None:
    """On every draw, with all outputs looked at last, so that a later call must not overwrite them."""
    outputs = [prepared(*x) for x in draws]
    for x, out in zip(draws, outputs, strict=True):
        for got, expected in zip(tree_leaves(out), tree_leaves(module(*x)), strict=True):
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
            assert relative_error(got, expected) < tolerance


@pytest.mark.parametrize(
    ("model", "options", "device"),
    [
        *((model, {}, "cpu") for model in ("squeezenet", "resnet18", "nasnet")),
        *(pytest.param("squeezenet", {"cuda_graph": captured}, "cuda", marks=GPU) for captured in (False, True)),
        *(pytest.param(model, {"cuda_graph": True}, "cuda", marks=GPU) for model in ("nasnet", "bert", "t5")),
    ],
)
def test_agrees_with_eager(model: str, options: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    loaded = models.load(model, 1, device=device)
    prepared = systems.load("tvm", **options).prepare(loaded.module, loaded.inputs)
    assert prepared.compilation["compiled_now"] and prepared.compilation["compile_s"] > 0
    agree(prepared, loaded.module, [loaded.fresh_inputs(s) for s in (11, 12)])
    prepared.close()
    with pytest.raises(RuntimeError, match="closed"):
        prepared(*loaded.inputs)


@pytest.mark.parametrize(
    ("dtype", "layout", "tolerance"),
    [
        (torch.float32, torch.channels_last, 1e-4),
        (torch.float16, torch.contiguous_format, 1e-2),
        (torch.bfloat16, torch.contiguous_format, 1e-1),
    ],
)
def test_dtypes_and_layouts(dtype: torch.dtype, layout: torch.memory_format, tolerance: float) -> None:
    module = small().to(dtype).to(memory_format=layout)
    x = image()[0].to(dtype).contiguous(memory_format=layout)
    agree(Tvm().prepare(module, (x,)), module, [(x,), (x * 2,)], tolerance)


@pytest.mark.skipif(importlib.util.find_spec("nvidia") is None, reason="this PyTorch brings no CUDA compiler (NVRTC)")
def test_compiles_for_a_gpu_that_is_not_here() -> None:
    """With the headers that PyTorch brings, where there is no toolkit. Without a GPU the library would hold the source."""
    import tvm
    from tvm.support import nvcc

    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(2)
            return nn.functional.scaled_dot_product_attention(x, x, x)

    class Powers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.pow(2) + x**3 + x**4

    target = tvm_build.cuda_target("sm_90")
    with target:
        module = tvm_build.lowered(Exported(nn.Sequential(small(), Attention(), Powers()).eval(), image()), target)
        (on_host,) = tvm.compile(module, target=target).mod.imports
        (on_gpu,) = on_host.imports
    assert "pow" not in on_gpu.inspect_source()  # CUDA's fast one is NaN for a negative base
    with tvm_build.cuda_headers():
        kernels = nvcc.compile_cuda(on_gpu.inspect_source(), target_format="cubin", arch="sm_90", compiler="nvrtc")
    assert int.from_bytes(kernels[18:20], "little") == EM_CUDA


def test_a_model_on_a_gpu_is_imported_as_on_the_host() -> None:
    """The GPU is PyTorch's fake one: tensors without contents, on a device that need not be here."""

    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(11, 8), nn.Embedding(5, 8)

        def forward(self, words: Tensor) -> Tensor:
            x = self.words(words) + self.places(torch.arange(5, device=words.device))
            return nn.functional.scaled_dot_product_attention(x, x, x) * torch.ones(8).to(words.device)

    def exported(device: str) -> Exported:
        with torch.device(device):
            return Exported(Embedded().eval(), (torch.zeros(1, 5, dtype=torch.long),))

    on_host = tvm_build._decomposed(exported("cpu"))
    with FakeTensorMode():
        on_gpu = exported("cuda")
    imported = tvm_build._decomposed(on_gpu)
    assert imported.graph_module.code == on_host.graph_module.code
    assert {x.device.type for x in (*imported.state_dict.values(), *imported.constants.values())} == {"cpu"}
    assert {x.device.type for x in (*on_gpu.program.state_dict.values(), *on_gpu.outputs())} == {"cuda"}


def test_the_library_is_kept_and_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again, other = (Tvm().prepare(small(seed), image()) for seed in (0, 0, 1))
    assert [p.compilation["compiled_now"] for p in (first, again, other)] == [True, False, True]
    assert first.compilation["compile_s"] == again.compilation["compile_s"]
    agree(again, small(), [image()])
    agree(other, small(1), [image()])
    with pytest.raises(ValueError, match="prepare it again"):
        again(*image(3))
    monkeypatch.setattr(tvm_system, "code_of", lambda *modules: "older")
    assert Tvm().prepare(small(), image()).compilation["compiled_now"]


def test_batch_norms_need_no_folding_by_tvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is one multiplication and one addition of constants; without statistics in the model it is the importer's."""
    import tvm

    built = []
    build = tvm.tirx.build
    monkeypatch.setattr(tvm.tirx, "build", lambda *args, **options: built.append(args) or build(*args, **options))
    exported = Exported(small(), image())
    text = tvm_build.lowered(exported, tvm_build.target_for(exported.device)).script()
    assert not built and "sqrt" not in text

    given = Lambda(lambda x, mean, var: nn.functional.batch_norm(x, mean, var)).eval()
    draws = [(torch.randn(2, 3, 4, 4), torch.randn(3), torch.rand(3) + 1) for _ in range(2)]
    agree(Tvm().prepare(given, draws[0]), given, draws)


def test_an_operator_that_the_importer_lacks_is_named() -> None:
    module = Lambda(lambda x: torch.special.airy_ai(x))
    with pytest.raises(Unsupported, match="special_airy_ai"):
        Tvm().prepare(module, (torch.ones(2),))


def test_options_and_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong, said in (
        ({"trials": -1}, "trials"),
        ({"budget_s": -1.0}, "seconds"),
        ({"budget_s": float("nan")}, "seconds"),
    ):
        with pytest.raises(BadOption, match=said):
            Tvm(**wrong)
    assert Tvm(cuda_graph=True).unsupported("cpu") == "a CUDA Graph needs a CUDA device"
    version = importlib.metadata.version
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: "0.1.15" if name == "apache-tvm-ffi" else version(name))
        assert "apache-tvm-ffi<0.1.15" in str(Tvm().unsupported("cpu"))
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        assert "C++ compiler" in str(Tvm().unsupported("cpu"))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tvm" else find(name))
    assert Tvm().unsupported("cpu") == "apache-tvm is not installed: pip install 'opweave[tvm]'"


class TestLog:
    """A log as TVM writes it, of lines that only TVM reads."""

    @staticmethod
    def log(folder: Path, batches: list[tuple[int, float]]) -> TuningLog:
        log = TuningLog(folder)
        for trials, seconds in batches:
            with (folder / RECORDS).open("ab") as file:
                file.writelines(b'["trial %d"]\n' % (log.trials + i) for i in range(trials))
            log.spend(seconds)
        return log

    def test_trials_and_seconds_add_up(self, tmp_path: Path) -> None:
        log = self.log(tmp_path, [(4, 10.0), (4, 20.0)])
        assert (log.trials, log.seconds) == (8, 30.0)
        assert (TuningLog(tmp_path).trials, TuningLog(tmp_path).seconds) == (8, 30.0)

    @pytest.mark.parametrize(
        ("trials", "budget", "usable", "seconds"),
        [
            (8, 100, 8, 30.0),
            (99, 100, 8, 30.0),
            (4, 100, 4, 10.0),
            (8, 10, 4, 10.0),
            (8, 11, 8, 30.0),
            (8, 0, 0, 0.0),
            (0, 100, 0, 0.0),
        ],
    )
    def test_a_smaller_budget_sees_what_it_would_have_measured(
        self, trials: int, budget: float, usable: int, seconds: float, tmp_path: Path
    ) -> None:
        found = self.log(tmp_path, [(4, 10.0), (4, 20.0)]).within(trials, budget)
        assert (len(found.records), found.seconds) == (usable, seconds)

    def test_a_torn_line_is_cut_off(self, tmp_path: Path) -> None:
        self.log(tmp_path, [(2, 1.0)])
        with (tmp_path / RECORDS).open("ab") as file:
            file.write(b'["half a')
        assert TuningLog(tmp_path).trials == 2
        assert (tmp_path / RECORDS).read_bytes().endswith(b'["trial 1"]\n')


THREADS = """
import torch
from tvm.support.popen_pool import PopenPoolExecutor
from systems.tvm import Tvm

def threads():
    import tvm
    return tvm.get_global_func("runtime.NumThreads")()

torch.set_num_threads(2)
Tvm().prepare(torch.nn.Linear(4, 4).eval(), (torch.ones(2, 4),))
elsewhere = PopenPoolExecutor(1)
print(threads(), elsewhere.submit(threads).result())
elsewhere.shutdown()
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_threads_are_pytorchs() -> None:
    """In the process that runs the library, and in those that the tuner starts."""
    one = {**os.environ, "OMP_NUM_THREADS": "1"}  # which TVM heeds too
    run = subprocess.run([sys.executable, "-c", THREADS], cwd=ROOT, env=one, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["2", "2"]


def test_a_candidate_is_timed_once_all_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On cores that are not busy compiling the next."""
    import tvm

    exported = Exported(nn.Linear(4, 4).eval(), (torch.ones(2, 4),))
    target = tvm_build.target_for(exported.device)
    tvm_build.register_intrinsics()
    functions = tvm_build.lowered(exported, target).functions.values()
    function = next(f for f in functions if isinstance(f, tvm.tirx.PrimFunc))
    alone = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    module = tvm_build.default_schedule(alone, target)
    measuring = tvm_measuring.Measuring(target, tmp_path, 1)
    pool, runner, done = measuring.pool, measuring.runner, []

    def building(build: Any, modules: list[Any]) -> Any:
        for result in pool.map_with_error_catching(build, modules):
            done.append("built")
            yield result

    def timing(inputs: list[Any]) -> Any:
        done.append("timed")
        return runner.run(inputs)

    monkeypatch.setattr(measuring, "pool", SimpleNamespace(map_with_error_catching=building, shutdown=pool.shutdown))
    monkeypatch.setattr(measuring, "runner", SimpleNamespace(run=timing, pool=runner.pool))
    results = measuring([module] * 3)
    measuring.close()
    assert done == ["built"] * 3 + ["timed"] * 3 and all(0 < r.run_secs[0] < 1 for r in results)


PROCESS = """
import sys
from test_tvm import tuned
tuned(int(sys.argv[1]), lambda phase: print(phase, flush=True))
"""


def tuned(trials: int, report: Any = lambda phase: None) -> dict[str, Any]:
    """What tuning a small model says of itself, once it agrees with eager."""
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).eval(), torch.ones(2, 16)
    system = Tvm(trials, budget_s=300.0)
    system.report = report
    prepared = system.prepare(module, (x,))
    agree(prepared, module, [(x,), (x * 2,)])
    return prepared.compilation


def test_tuning_goes_on_after_a_kill(cache: Cache) -> None:
    """SIGKILL in the midst; then what is missing is measured and nothing twice, and after that nothing."""
    killed = subprocess.Popen(
        [sys.executable, "-c", PROCESS, "8"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    records = wait_for(cache, killed)
    os.killpg(killed.pid, signal.SIGKILL)
    assert killed.wait(timeout=60) == -signal.SIGKILL
    before = records.read_bytes()[: records.read_bytes().rfind(b"\n") + 1]
    done = before.count(b"\n")
    assert 0 < done < 8
    said: list[str] = []
    found = tuned(done + 2, said.append)
    assert said[0].startswith(f"tuning: {done} of {done + 2} trials") and found["trials"] == done + 2
    assert found["tuning_s"] > 0 and found["compiled_now"] and found["functions"] == 2
    after = records.read_bytes()
    assert after.startswith(before) and after.count(b"\n") == len(candidates(records)) == done + 2
    assert all(max(seconds) < 1 for seconds in candidates(records).values())  # they run, and so do the defaults
    assert all(seconds < 1 for seconds in TuningLog(records.parent).defaults.values())
    assert json.loads((records.parent / SPENT).read_text())[-1][0] == done + 2
    assert not list(records.parent.glob("built-*"))
    said.clear()
    assert tuned(done + 2, said.append)["compiled_now"] is False and not said
    assert records.read_bytes() == after


def candidates(records: Path) -> dict[str, list[float]]:
    """Seconds of what was measured, by function and schedule."""
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    return {json.dumps([workload, trace]): seconds for workload, (trace, seconds, *_) in lines}


class Timed:
    """In the place of compiling and timing: default schedules take `default` seconds each, candidates `candidate`."""

    default, candidate = 1.0, 0.5
    measured: list[int]  # how many at once

    def __init__(self, target: Any, built: Path, at_once: int):
        self.asked = 0

    def __call__(self, modules: list[Any]) -> list[Any]:
        from tvm.s_tir.meta_schedule.runner import RunnerResult

        self.measured.append(len(modules))
        seconds = self.candidate if self.asked else self.default
        self.asked += 1
        return [RunnerResult([seconds], None) for _ in modules]

    def close(self) -> None:
        pass


def tuned_as_timed(
    trials: int, budget_s: float, default: float, candidate: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], list[int], list[str]]:
    """compilation, how many were measured at once, what was said; of a model with a large and a small product."""
    timed = type("Timed", (Timed,), {"default": default, "candidate": candidate, "measured": []})
    monkeypatch.setattr(tvm_tuning, "Measuring", timed)
    said: list[str] = []
    system = Tvm(trials, budget_s)
    system.report = said.append
    module, x = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 4)).eval(), torch.ones(1, 8)
    prepared = system.prepare(module, (x,))
    agree(prepared, module, [(x,)])
    return prepared.compilation, timed.measured, said


def test_a_candidate_is_used_where_it_beats_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    found, measured, said = tuned_as_timed(4, 300.0, 1.0, 0.5, monkeypatch)
    assert measured == [2, 2, 2] and (found["functions"], found["tuned"], found["trials"]) == (2, 2, 4)
    assert [line.split(",")[0] for line in said] == [f"tuning: {n} of 4 trials" for n in (0, 0, 2, 4)] + ["building"]


def test_a_gpus_candidates_are_of_its_own_schedule_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not of functions that measuring the defaults has scheduled. The GPU need not be here, nor times be real."""
    monkeypatch.setattr(tvm_tuning, "Measuring", type("Timed", (Timed,), {"measured": []}))
    target, log = tvm_build.cuda_target("sm_90"), TuningLog(tmp_path / "log")
    exported = Exported(nn.Conv2d(16, 64, 1).eval(), (torch.randn(1, 16, 16, 16),))
    log.folder.mkdir()
    tvm_tuning.tune(lambda: tvm_build.lowered(exported, target), target, log, 4, 300.0)
    assert b"SamplePerfectTile" in (log.folder / RECORDS).read_bytes()
    with tvm_build.cuda_headers():
        found = tvm_build.build(tvm_build.lowered(exported, target), target, tmp_path, log.best(log.within(4, 300.0)))
    assert found == {"functions": 1, "tuned": 1}


def test_a_function_keeps_a_default_that_no_candidate_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _, _ = tuned_as_timed(2, 300.0, 0.5, 0.5, monkeypatch)
    assert (found["functions"], found["tuned"], found["trials"]) == (2, 0, 2)


def test_a_spent_budget_ends_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the defaults, which take of it too."""
    found, measured, said = tuned_as_timed(4, 1e-9, 1.0, 0.5, monkeypatch)
    assert measured == [2] and (found["tuned"], found["trials"]) == (0, 0) and found["tuning_s"] > 1e-9
    assert said[-1] == "building"


def test_nothing_that_can_be_measured_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from tvm.s_tir.meta_schedule.runner import RunnerResult

    error = "Traceback: ...\nRuntimeError: no compiler\n"
    monkeypatch.setattr(Timed, "__call__", lambda self, modules: [RunnerResult(None, error) for _ in modules])
    with pytest.raises(RuntimeError, match=r"cannot measure anything here: RuntimeError: no compiler$"):
        tuned_as_timed(4, 300.0, 1.0, 0.5, monkeypatch)


def function(weight: int, *best: float, empty: int = 0) -> Function:
    return Function(None, weight, None, list(best), set(), empty=empty)


def test_trials_go_where_they_pay() -> None:
    """Ordered by what a batch of trials promises of the whole model's time."""
    order = [
        function(1, math.inf),  # whose default does not run
        function(3, 4.0),
        function(1, 8.0),
        function(1, 8.0, 8.0),
        function(1, 8.0, 4.0, 4.0, 4.0, 3.0),  # it still gets better, which another no longer does
        function(1, 3.0, 3.0, 3.0, 3.0, 3.0),
        function(1, 0.4),
    ]
    promises = [f.promise() for f in order]
    assert promises == sorted(promises, reverse=True) and len(set(promises)) == len(order)
    assert not function(1, *[math.inf] * 4).promise() and not function(1, 8.0, empty=EMPTY).promise()


def wait_for(cache: Cache, process: "subprocess.Popen[str]") -> Path:
    """The log, once trials are in it."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        for file in cache.root.glob(f"entries/tvm-log-*/{RECORDS}"):
            if b"\n" in file.read_bytes():
                return file
        time.sleep(0.05)
    raise AssertionError("no trial was measured")
