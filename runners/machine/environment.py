"""Where a cell runs: what decides whether a result may be taken over, and what else a reader wants to know."""

import hashlib
import importlib.metadata
import os
import platform
import socket
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from . import card

ROOT = Path(__file__).resolve().parent.parent.parent
LIBRARIES = (
    *("torch", "torchvision", "timm", "transformers", "triton", "numpy"),
    *("onnxscript", "onnxruntime", "onnxruntime-gpu", "apache-tvm", "apache-tvm-ffi", "tensorrt"),
)


# Settings of the shell that change how fast PyTorch runs, or what it computes.
SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")


def identity(config: dict[str, Any], visible_device: str, sources: str | None = None) -> dict[str, Any]:
    """What must be the same for a result to stand for a new run: machine, libraries, and the code that measures.

    sources: a digest of a custom model's files. Asked in the sweep's own process, which never imports torch.
    """
    environment: dict[str, Any] = {
        "host": socket.gethostname(),
        "cpu": cpu_name(),
        "cores": cores(),
        "python": platform.python_version(),
        "libraries": libraries(),
        "code": code_digest(),
    }
    if config["device"] == "cuda":
        environment |= card.identity(visible_device)
    if settings := {name: os.environ[name] for name in SETTINGS if name in os.environ}:
        environment["settings"] = settings
    if sources is not None:
        environment["sources"] = sources
    return environment


def describe(device: str, visible_device: str) -> dict[str, Any]:
    """What else stands in a record, asked in the cell's own process: CUDA, cuDNN, threads, clocks, git commit."""
    import torch

    environment: dict[str, Any] = {"os": platform.platform(), "threads": torch.get_num_threads(), **git_state()}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        environment |= {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "sm_count": properties.multi_processor_count,
            "gpu_memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "clocks": card.clocks(visible_device),
        }
    return environment


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


@cache
def code_digest() -> str:
    """A digest of the code that makes a result: a change to it makes results of the old code another cell's."""
    digest = hashlib.sha256()
    for part in ("models", "systems", "runners"):
        for file in sorted((ROOT / part).rglob("*.py")):
            digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]


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


@cache
def git_state() -> dict[str, Any]:
    """The commit that is checked out, and whether files differ from it; None where this is no checkout."""

    def git(*arguments: str) -> str | None:
        try:
            run = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return run.stdout.strip()

    commit = git("rev-parse", "HEAD")
    return {"commit": commit, "modified": bool(git("status", "--porcelain")) if commit else None}
