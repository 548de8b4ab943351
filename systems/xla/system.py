"""XLA: a module is exported, another process translates it by torchax, and `jax.jit` compiles that."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from conf.text import named_line
from systems.base import Compilation, Prepared, System, Unsupported
from systems.compilers.compiled import Compiled, bytes_outside_torch
from systems.compilers.exported import Exported

from .translation import NARROW, translated, why_no_torchax

PACKAGES = "'jax[cuda13]' torchax flatbuffers"
# XLA would take most of the GPU's memory at once, and torch has its own there.
PREALLOCATION = "XLA_PYTHON_CLIENT_PREALLOCATE"
REFUSED = (torch.float64, torch.complex128)  # it would round them to 32 bits


class Xla(System):
    """XLA's own fusion and its own kernels, on one stream.

    XLA has one switch for TF32, which is that of `Exported.allow_tf32`. Weights are not copied, but for those in another
    layout than contiguous. Integers of 64 bits are computed with 32.
    """

    name = "xla"

    def unsupported(self, device: str) -> str | None:
        return _missing() or (None if device in _platforms() else f"this JAX has no {device}: pip install {PACKAGES}")

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
        """As `System.prepare`.

        Raises:
            Unsupported: torch.export cannot capture the module, or torchax or XLA lacks an operator of it.
            ChildProcessError: the process that translates it ended before it had said more.
        """
        begin = perf_counter()
        exported = Exported(module, inputs)
        bytes_before = bytes_outside_torch(exported.device)
        tensors = [*exported.program.state_dict.values(), *exported.program.constants.values(), *exported.arguments]
        if wide := next((t.dtype for t in tensors if isinstance(t, Tensor) and t.dtype in REFUSED), None):
            raise Unsupported(f"JAX would round {str(wide).removeprefix('torch.')} to 32 bits")
        translation = translated(exported)
        export_s = perf_counter() - begin
        begin = perf_counter()
        constants = {  # those of no dimensions may be on the CPU, and XLA takes one device
            name: value.to(exported.device) if isinstance(value, Tensor) else value
            for name, value in exported.program.constants.items()
        }
        by_name = {**exported.program.state_dict, **constants}
        weights = [_array(by_name[name]) for name in translation.weights]
        try:
            executable = _compiled(exported, weights, translation.function)
        except Exception as error:  # whatever XLA raises of an operator it lacks
            raise Unsupported(f"XLA cannot compile it: {named_line(error)}") from error
        seconds = perf_counter() - begin
        compilation = Compilation(export_s=export_s, is_exported_now=True, compile_s=seconds, is_compiled_now=True)
        return PreparedXla(executable, weights, exported, bytes_before, compilation)


class PreparedXla(Compiled):
    """An executable of XLA.

    Args:
        executable: called with the weights and the inputs, as JAX's arrays.
        weights: parameters, buffers and constants, as JAX's arrays over the module's memory.
    """

    def __init__(self, executable: Any, weights: list[Any], exported: Exported, bytes_before: int, compilation: Compilation):
        super().__init__(exported, bytes_before, compilation)
        self.executable, self.weights = executable, weights
        self.dtypes = [output.dtype for output in exported.outputs()]

    @property
    def memory(self) -> dict[str, int]:
        """As `Compiled.memory`; own_weights is 0, since they lie in the module's memory."""
        added = bytes_outside_torch(self.exported.device) - self.bytes_before
        return {"outside_torch": max(0, added), "own_weights": 0} if self.exported.device.type == "cuda" else {}

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        if self.executable is None:
            raise RuntimeError("this executor is closed")
        outputs = self.executable(self.weights, [_array(x) for x in inputs])
        tensors = [torch.from_dlpack(array) for array in outputs]  # torch's stream waits for XLA's
        return [t if t.dtype == dtype else t.to(dtype) for t, dtype in zip(tensors, self.dtypes, strict=True)]

    def close(self) -> None:
        self.executable, self.weights = None, []


def _compiled(exported: Exported, weights: list[Any], function: bytearray) -> Any:
    import jax
    import jax.export

    inputs = [_array(x) for x in exported.arguments]
    return jax.jit(jax.export.deserialize(function).call).lower(weights, inputs).compile()


def _array(tensor: Tensor) -> Any:
    """A tensor as JAX's array, in its memory where it is contiguous and of a type that JAX has."""
    import jax

    if tensor.dtype in NARROW:
        tensor = tensor.to(NARROW[tensor.dtype])
    with _devices_open():
        return jax.dlpack.from_dlpack(tensor.detach().contiguous())


@cache
def _missing() -> str | None:
    """Why torchax or JAX cannot be imported, or None."""
    lacking = [name for name in ("jax", "torchax", "flatbuffers") if find_spec(name) is None]
    if lacking:
        return f"{' and '.join(lacking)} not installed: pip install {PACKAGES}"
    reason = why_no_torchax()  # torchax 0.0.13 does not import beside torch 2.15
    return reason and f"torchax does not import beside torch {torch.__version__}: {reason}"


@cache
def _platforms() -> frozenset[str]:
    """The kinds of devices that JAX has, by torch's names."""
    import jax

    platforms = set()
    for platform in ("cpu", "cuda"):
        try:
            with _devices_open():
                jax.devices(platform)
        except RuntimeError:  # there is none, or its plugin does not load
            continue
        platforms.add(platform)
    return frozenset(platforms)


@contextmanager
def _devices_open() -> Iterator[None]:
    """JAX opens its devices at first use, and reads then how much memory to take."""
    before = os.environ.get(PREALLOCATION)
    os.environ[PREALLOCATION] = before or "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[PREALLOCATION]
