"""The real TVM on the CPU: agreement with eager, libraries that are kept, as many threads as PyTorch has."""

import importlib.metadata
import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from modules import Lambda
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import models
import systems
from runners.measurements.correctness import relative_error
from systems.base import BadOption, Unsupported
from systems.compilers.exported import Exported
from systems.tvm import system as tvm_system
from systems.tvm.system import Tvm

pytest.importorskip("tvm", reason="needs the extra tvm")
if reason := Tvm().unsupported("cpu"):
    pytest.skip(reason, allow_module_level=True)

from systems.tvm import build as tvm_build

pytestmark = pytest.mark.usefixtures("cache_folder")
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
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
        *(pytest.param(model, {}, "cpu", marks=pytest.mark.slow) for model in ("squeezenet", "resnet18", "nasnet")),
        *(pytest.param("squeezenet", {"cuda_graph": captured}, "cuda", marks=GPU) for captured in (False, True)),
        *(pytest.param(model, {"cuda_graph": True}, "cuda", marks=GPU) for model in ("nasnet", "bert", "t5")),
    ],
)
def test_agrees_with_eager(model: str, options: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    loaded = models.load(model, 1, device=device)
    prepared = systems.load("tvm", **options).prepare(loaded.module, loaded.inputs)
    assert prepared.compilation.is_compiled_now and prepared.compilation.compile_s > 0
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
@pytest.mark.slow
def test_dtypes_and_layouts(dtype: torch.dtype, layout: torch.memory_format, tolerance: float) -> None:
    module = small().to(dtype).to(memory_format=layout)
    x = image()[0].to(dtype).contiguous(memory_format=layout)
    agree(Tvm().prepare(module, (x,)), module, [(x,), (x * 2,)], tolerance)


@pytest.mark.skipif(importlib.util.find_spec("nvidia") is None, reason="this PyTorch brings no CUDA compiler (NVRTC)")
@pytest.mark.slow
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


@pytest.mark.slow
def test_the_library_is_kept_and_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again, other = (Tvm().prepare(small(seed), image()) for seed in (0, 0, 1))
    assert [p.compilation.is_compiled_now for p in (first, again, other)] == [True, False, True]
    assert first.compilation.compile_s == again.compilation.compile_s
    agree(again, small(), [image()])
    agree(other, small(1), [image()])
    with pytest.raises(ValueError, match="prepare it again"):
        again(*image(3))
    monkeypatch.setattr(tvm_system, "code_of", lambda *modules: "older")
    assert Tvm().prepare(small(), image()).compilation.is_compiled_now


@pytest.mark.slow
def test_batch_norms_need_no_folding_by_tvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is one multiplication and one addition of constants."""
    import tvm

    built = []
    build = tvm.tirx.build
    monkeypatch.setattr(tvm.tirx, "build", lambda *args, **options: built.append(args) or build(*args, **options))
    exported = Exported(small(), image())
    text = tvm_build.lowered(exported, tvm_build.target_for(exported.device)).script()
    assert not built and "sqrt" not in text


@pytest.mark.slow
def test_a_batch_norm_without_statistics_in_the_model_is_the_importers() -> None:
    batch_norm = Lambda(lambda x, mean, var: nn.functional.batch_norm(x, mean, var)).eval()
    draws = [(torch.randn(2, 3, 4, 4), torch.randn(3), torch.rand(3) + 1) for _ in range(2)]
    agree(Tvm().prepare(batch_norm, draws[0]), batch_norm, draws)


def test_an_operator_that_the_importer_lacks_is_named() -> None:
    module = Lambda(lambda x: torch.special.airy_ai(x))
    with pytest.raises(Unsupported, match="special_airy_ai"):
        Tvm().prepare(module, (torch.ones(2),))


def test_options_and_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong, said in (
        ({"trials": -1}, "trials"),
        ({"budget_s": -1.0}, "seconds, not negative"),
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


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
@pytest.mark.slow
def test_threads_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the thread that runs the library, for each of which TVM has a pool, and in the processes that the tuner starts."""
    from tvm.support.popen_pool import PopenPoolExecutor

    for variable in ("OMP_NUM_THREADS", "TVM_NUM_THREADS"):  # both of which TVM heeds
        monkeypatch.setenv(variable, "1")
    monkeypatch.delenv("TVM_BIND_THREADS")
    cores = os.sched_getaffinity(0)

    def number() -> int:
        import tvm

        return tvm.get_global_func("runtime.NumThreads")()

    def thread_counts() -> list[int]:
        before, numbers = torch.get_num_threads(), []
        for threads in (2, 1):
            torch.set_num_threads(threads)
            Tvm().prepare(nn.Linear(4, 4).eval(), (torch.ones(2, 4),))
            numbers.append(number())
            assert os.sched_getaffinity(0) == cores
            if threads == 2:
                elsewhere = PopenPoolExecutor(1)
                numbers.append(elsewhere.submit(number).result())
                elsewhere.shutdown()
        torch.set_num_threads(before)
        return numbers

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(thread_counts).result() == [2, 2, 1]
