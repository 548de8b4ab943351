"""Compiles kernels in processes beside each other: Triton's compiler takes half a second a kernel, on one core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Any

import torch
from cattrs import Converter
from torch import Tensor

from .kernel import Kernel

FEW = 8  # kernels that this process compiles sooner than another one starts


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for of a tensor."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Shape:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def tensor(self) -> Tensor:
        """One on the meta device."""
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class Job:
    """A kernel and the tensors that it is to be compiled for."""

    kernel: Kernel
    shapes: tuple[Shape | None, ...]

    @classmethod
    def of(cls, kernel: Kernel, tensors: Iterable[Tensor | None]) -> Job:
        return cls(kernel, tuple(None if t is None else Shape.of(t) for t in tensors))

    def compile(self) -> None:
        self.kernel.compile(*(None if shape is None else shape.tensor() for shape in self.shapes))


_begun: set[Job] = set()  # by this process, whatever came of it


def compile_ahead(jobs: Iterable[Job]) -> None:
    """Fill Triton's cache, with as many processes as PyTorch has threads here (`OMP_NUM_THREADS`).

    A kernel that does not compile is left to whoever launches it, who learns why. Nothing is compiled here in Triton's
    interpreter, where there are few, or with one thread: cells beside each other have a core each.
    """
    new = [job for job in dict.fromkeys(jobs) if job not in _begun]
    if len(new) < FEW or torch.get_num_threads() == 1 or os.environ.get("TRITON_INTERPRET") == "1":
        return
    _begun.update(new)
    compile_for(_own_target(), new)


def _own_target() -> Any:
    from triton.runtime import driver

    return driver.active.get_current_target()


def compile_for(target: Any, jobs: Sequence[Job]) -> None:
    """Fill Triton's cache for a GPU, which need not be there.

    Args:
        target: Triton's `GPUTarget`.
    """
    count = min(torch.get_num_threads(), -(-len(jobs) // FEW))
    # All that this process imports from, in its order: Python's own modules come before those of packages.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "OMP_NUM_THREADS": "1"}
    compilers = [_start(target, jobs[i::count], environment) for i in range(count)]
    try:
        for compiler in compilers:
            compiler.wait()
    finally:
        for compiler in compilers:
            compiler.kill()
            compiler.wait()


def _start(target: Any, jobs: Sequence[Job], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    from triton.compiler.compiler import make_backend

    document = {
        "target": [target.backend, target.arch, target.warp_size],
        "compiler": make_backend(target).hash(),
        "jobs": _converter().unstructure(jobs),
    }
    with TemporaryFile() as file:
        file.write(json.dumps(document).encode())
        file.seek(0)
        silent = subprocess.DEVNULL
        return subprocess.Popen(
            [sys.executable, "-P", "-m", __name__], stdin=file, stdout=silent, stderr=silent, env=environment
        )


def _converter() -> Converter:
    """Of jobs to data for JSON and back."""
    from .attention import Attention  # all import Triton
    from .dense import Dense
    from .depthwise import Depthwise
    from .gemv import Gemv
    from .grouped import Grouped
    from .placed import Placed
    from .pooled import Pooled
    from .product import Product
    from .separable import Separable

    all_kernels: tuple[type[Kernel], ...]
    all_kernels = (Attention, Dense, Depthwise, Gemv, Grouped, Placed, Pooled, Product, Separable)
    classes = {each.__name__: each for each in all_kernels}
    converter = Converter()
    converter.register_unstructure_hook(torch.dtype, lambda dtype: str(dtype).removeprefix("torch."))
    converter.register_structure_hook(torch.dtype, lambda name, _: getattr(torch, name))
    converter.register_unstructure_hook(
        Job, lambda job: [type(job.kernel).__name__, converter.unstructure(job.kernel), converter.unstructure(job.shapes)]
    )

    def job(document: Any, _: type) -> Job:
        name, kernel, shapes = document
        return Job(converter.structure(kernel, classes[name]), converter.structure(shapes, tuple[Shape | None, ...]))

    converter.register_structure_hook(Job, job)
    return converter


class _Driver:
    """In the place of Triton's own, which opens the GPU: it knows for what to compile."""

    def __init__(self, target: Any):
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    """Compile the jobs that stand on the standard input, under the keys that they have in the process that wants them.

    TorchInductor sets another ptxas for its process and those that it starts. A process that has compiled keeps the keys of
    the one before.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime import driver

    document = json.load(sys.stdin)
    target = GPUTarget(*document["target"])
    driver.set_active(_Driver(target))
    type(make_backend(target)).hash = lambda _: document["compiler"]
    for job in _converter().structure(document["jobs"], list[Job]):
        with suppress(Exception):  # whoever launches it learns why
            job.compile()


if __name__ == "__main__":
    main()
