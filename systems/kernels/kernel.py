"""What every kernel of this project is; imports no Triton."""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

Written: TypeAlias = Tensor | tuple[Tensor, ...]  # by a launch
EARLY_CAPABILITY = (9, 0)  # compute capability from which GPUs launch kernels early


def launches_early(device: torch.device) -> bool:
    """Does a device launch a kernel while the one before it ends?"""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= EARLY_CAPABILITY


@dataclass(frozen=True)
class Launch:
    """One launch of a function that Triton compiles.

    Args:
        function: of Triton's `jit`.
        grid: blocks.
        arguments: of the function, in its order.
        options: of the launch, such as `num_warps`.
        out: what the function writes: a tensor, or several.
    """

    function: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    out: Written


@dataclass(frozen=True, kw_only=True)
class Kernel(ABC):
    """A kernel with all that it is compiled for.

    Args:
        is_early: whether it is launched while the kernel before it ends (programmatic dependent launch). Its blocks take up
            SMs and wait there until that kernel has ended and what it wrote is seen.
    """

    is_early: bool = False

    @property
    def code(self) -> str:
        """A digest of the source that it is compiled from: what was measured of other code is not taken for this one's."""
        return _digest(type(self).__module__)

    @property
    def target(self) -> str:
        """Its name as an operator of a program: with all that decides what it takes."""
        return f"opweave.{type(self).__name__.lower()}[{self}, code {self.code}]"

    @property
    def is_grouped(self) -> bool:
        """Does its third argument say where groups of the rows of its first one end?"""
        return False

    @property
    def is_compiled(self) -> bool:
        """Is it known to need no compiling?"""
        return False

    @abstractmethod
    def launch(self, *tensors: Tensor | None) -> Launch:
        """Its launch on these tensors. Each kernel says what they are."""

    def __call__(self, *tensors: Tensor | None) -> Written:
        """Launch it on the current stream; returns what it writes: a tensor, or several.

        Raises:
            Exception: what Triton raises where a tile takes more than a multiprocessor has.
        """
        launch = self.launch(*tensors)
        launch.function[launch.grid](*launch.arguments, **launch.options, **libraries())
        return launch.out

    def compile(self, *tensors: Tensor | None) -> Any:
        """Compile it for such tensors, which may be on the meta device, into Triton's cache; nothing runs.

        Returns:
            Triton's compiled kernel.
        """
        launch = self.launch(*tensors)
        return launch.function.warmup(*launch.arguments, grid=launch.grid, **launch.options, **libraries())


@cache
def _digest(module: str) -> str:
    """Of a module of this package and all of the package that it imports."""
    pending, sources = [module], dict[str, str]()
    while pending:
        name = pending.pop()
        if name not in sources:
            sources[name] = inspect.getsource(sys.modules[name])
            members = vars(sys.modules[name]).values()
            pending += sorted({str(getattr(member, "__module__", "")) for member in members if _is_here(member)})
    return sha256("\0".join(sources[name] for name in sorted(sources)).encode()).hexdigest()[:8]


def _is_here(member: object) -> bool:
    return str(getattr(member, "__module__", "")).startswith(f"{__package__}.")


@cache
def libraries() -> dict[str, Any]:
    """The option that links Triton's own library of functions.

    TorchInductor sets another one for the whole process when it first compiles. A kernel would then be another one to
    Triton's cache, and be compiled again.
    """
    backend = find_spec("triton.backends.nvidia")
    folders = backend.submodule_search_locations if backend is not None else None
    files = [Path(folder, "lib", "libdevice.10.bc") for folder in folders or ()]
    own = next((str(file) for file in files if file.is_file()), None)
    return {"extern_libs": {"libdevice": own}} if own else {}
