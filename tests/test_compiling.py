"""Kernels that are compiled ahead by processes of their own, for a GPU that need not be there."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from systems.kernels import compiling
from systems.kernels.attention import Attention, AttentionTile
from systems.kernels.compiling import Job, compile_ahead, compile_for
from systems.kernels.dense import Dense, DenseTile
from systems.kernels.grouped import Grouped, GroupedTile
from systems.kernels.product import Product
from systems.kernels.separable import Separable, Tile

H100 = GPUTarget("cuda", 90, 32)
PLAIN = (1, 1), (1, 1), (0, 0), (1, 1)
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def dense_job(channels: int, precision: str = "tf32", dtype: torch.dtype = torch.float32, depth: int = 16) -> Job:
    tile = DenseTile(16, 16, depth, warps=4, stages=2)
    kernel = Dense(*PLAIN, "none", "relu", precision, False, tile)
    x = torch.empty(1, channels, 4, 4, dtype=dtype).to(memory_format=torch.channels_last)
    return Job.of(kernel, [x, torch.empty(16, channels, dtype=dtype), None, None, None])


def separable_job() -> Job:
    kernel = Separable((3, 3), (1, 1), (1, 1), (1, 1), "relu", "none", "none", "ieee", True, Tile(16, 16, 16, 4, 1))
    x, taps = torch.empty(1, 16, 4, 4), torch.empty(9, 16)
    return Job.of(replace(kernel, is_early=True), [x, taps, None, torch.empty(16, 16, 1, 1), torch.empty(16), None])


def product_job() -> Job:
    tile = DenseTile(16, 16, 16, warps=4, stages=2, splits=2)
    tickets = torch.zeros(1, dtype=torch.int32)
    return Job.of(Product("ieee", tile), [torch.empty(2, 3, 32), torch.empty(16, 32), torch.empty(16), tickets])


def attention_job() -> Job:
    tile = AttentionTile(16, 16, 2)
    return Job.of(Attention(0.5, True, "ieee", True, tile), [*torch.empty(3, 1, 2, 16, 16), None])


def grouped_job() -> Job:
    kernel = Grouped("silu", "tf32", GroupedTile(16, 16, 16, 4, 3), is_early=True)
    weight, ends = torch.empty(4, 32, 16, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
    return Job.of(kernel, [weight[0], weight.transpose(1, 2), ends, torch.zeros(64, dtype=torch.int64)])


def cubins(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.rglob("*.cubin"))


@pytest.mark.slow
def test_processes_compile_each_kernel_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first does not compile: its depth is no power of two. The third is of the same process, and does."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(compiling, "FEW", 2)
    jobs = [dense_job(16, depth=17), dense_job(16), separable_job(), product_job(), attention_job(), grouped_job()]
    compile_for(H100, jobs)
    names = ["_attention", "_dense", "_dense", "_grouped", "_separable"]
    assert cubins(tmp_path) == [f"{name}.cubin" for name in names]


@pytest.mark.slow
def test_a_kernel_stays_the_same_when_torchinductor_sets_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does when it first compiles: without the option this kernel is compiled a second time."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    own = Path(triton.__file__).parent / "backends" / "nvidia" / "lib" / "libdevice.10.bc"
    (tmp_path / "other.bc").write_bytes(own.read_bytes() + b"\n")
    for library in (own, tmp_path / "other.bc"):
        # Each in a process of its own, as what is compiled stays in memory.
        monkeypatch.setenv("TRITON_LIBDEVICE_PATH", str(library))
        compile_for(H100, [dense_job(16)])
    assert cubins(tmp_path) == ["_dense.cubin"]


@pytest.mark.slow
def test_a_kernel_stays_the_same_when_torchinductor_sets_its_ptxas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does when it first compiles. This process has compiled before, and keeps its keys."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    compile_for(H100, [dense_job(16)])
    assert cubins(tmp_path) == ["_dense.cubin"]
    for name in ("ptxas", "ptxas-blackwell"):
        own = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
        other = tmp_path / name
        other.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo another\nexec {own} "$@"\n')
        other.chmod(0o755)
        monkeypatch.setenv(f"TRITON_{name.upper().replace('-', '_')}_PATH", str(other))
    compile_for(H100, [dense_job(16)])
    assert cubins(tmp_path) == ["_dense.cubin"]


def test_a_job_travels_as_json() -> None:
    jobs = [dense_job(16), dense_job(3, "ieee", torch.bfloat16), separable_job(), attention_job(), grouped_job()]
    converter = compiling._converter()
    assert converter.structure(json.loads(json.dumps(converter.unstructure(jobs))), list[Job]) == jobs
    x = jobs[1].shapes[0]
    assert x is not None and x.tensor().is_contiguous(memory_format=torch.channels_last)
    assert x.tensor().dtype == torch.bfloat16


def test_few_kernels_known_ones_and_one_thread_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    monkeypatch.setattr(compiling, "compile_for", lambda target, jobs: begun.append(len(jobs)))
    monkeypatch.setattr(compiling, "_begun", set())
    monkeypatch.setattr(compiling, "_own_target", lambda: H100)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    compile_ahead(dense_job(channels) for channels in range(1, compiling.FEW))
    assert begun == []
    compile_ahead(dense_job(channels) for channels in range(1, compiling.FEW + 1))
    compile_ahead(dense_job(channels) for channels in range(1, compiling.FEW + 1))
    assert begun == [compiling.FEW]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    compile_ahead(dense_job(channels) for channels in range(100, 200))
    assert begun == [compiling.FEW]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    compile_ahead(dense_job(channels) for channels in range(100, 200))
    assert begun == [compiling.FEW]


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
def test_what_was_compiled_ahead_is_not_compiled_again(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert "TRITON_INTERPRET" not in os.environ
    job = dense_job(32)
    capability = torch.cuda.get_device_capability()
    compile_for(GPUTarget("cuda", 10 * capability[0] + capability[1], 32), [job])
    times = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.cubin")}
    tensors = [
        None if s is None else torch.zeros(s.sizes, dtype=s.dtype, device=device).as_strided(s.sizes, s.strides)
        for s in job.shapes
    ]
    job.kernel(*tensors)
    assert len(times) == 1 and {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.cubin")} == times
