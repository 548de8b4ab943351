"""Where a cell runs: what decides whether a result may be taken over, and what else a reader wants to know."""

import importlib.metadata
import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from results.cell import Cell
from results.environment import Environment

from . import card
from .code import code_digest
from .manifest import code_state

LIBRARIES = (
    *("torch", "torchvision", "timm", "transformers", "triton", "numpy"),
    *("onnxscript", "onnxruntime", "onnxruntime-gpu", "apache-tvm", "apache-tvm-ffi", "tensorrt"),
    *("scikit-learn", "lightgbm", "tabm", "rtdl-revisiting-models", "hummingbird-ml", "xgboost", "vllm"),
)


# Settings of the shell that change how fast PyTorch runs, or what it computes: names, and how further names begin.
SETTINGS = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    *("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_ALLOC_CONF"),
    *("PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"),
)
BEGINNINGS = ("TORCHINDUCTOR_", "TORCH_CUDNN_", "NCCL_")
NO_SETTINGS = ("_DIR", "_FILE", "_PATH", "_VERSION", "_DEBUG")  # ends of names that change neither


def settings_of(shell: Mapping[str, str]) -> dict[str, str]:
    """The variables of a shell that are SETTINGS."""
    names = [name for name in shell if name in SETTINGS or (name.startswith(BEGINNINGS) and not name.endswith(NO_SETTINGS))]
    return {name: shell[name] for name in sorted(names)}


def identity(cell: Cell, roots: tuple[str, ...], visible_device: str, sources: str | None = None) -> Environment:
    """What must be the same for a result to stand for a new run: machine, libraries, and the code that measures.

    With them the operating system and the git commit, which stand in the record of a cell that fails too. The sweep's own
    process asks, which never imports torch.

    Args:
        cell: what runs.
        roots: the modules that it starts from, as `runners.roots` names them.
        visible_device: the number or the UUID of the GPU.
        sources: digests of the files of a custom model and a custom scheduler.
    """
    gpu, driver = card.identity(visible_device) if cell.device == "cuda" else (None, None)
    state = code_state()
    return Environment(
        host=socket.gethostname(),
        cpu=cpu_name(),
        cores=cores(),
        python=platform.python_version(),
        libraries=libraries(),
        code=code_digest(roots),
        settings=settings_of(os.environ),
        sources=sources,
        gpu=gpu,
        driver=driver,
        os=platform.platform(),
        commit=state.commit,
        modified=state.modified,
    )


def described(environment: Environment, device: str, visible_device: str) -> Environment:
    """With what else stands in a record, asked in the cell's own process: CUDA, cuDNN, threads, clocks."""
    import torch

    environment = replace(environment, threads=torch.get_num_threads())
    if device != "cuda":
        return environment
    properties = torch.cuda.get_device_properties(0)
    return replace(
        environment,
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(),
        sm_count=properties.multi_processor_count,
        gpu_memory_bytes=properties.total_memory,
        compute_capability=f"{properties.major}.{properties.minor}",
        clocks=card.clocks(visible_device),
    )


@cache
def libraries() -> dict[str, str]:
    """Version by name, of those installed."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def cpu_name() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
