"""XLA: a module is exported, torchax says it in JAX's operators, and `jax.jit` compiles it."""

from __future__ import annotations

import os
import warnings
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

PACKAGES = "'jax[cuda13]' torchax"
# XLA would take most of the GPU's memory at once, and torch has its own there.
PREALLOCATION = "XLA_PYTHON_CLIENT_PREALLOCATE"
NARROW = {torch.int64: torch.int32}  # JAX computes with integers of 32 bits
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
        """Raises Unsupported where torch.export cannot capture the module, or torchax or XLA lacks an operator of it."""
        begin = perf_counter()
        exported = Exported(module, inputs)
        bytes_before = bytes_outside_torch(exported.device)
        tensors = [*exported.program.state_dict.values(), *exported.program.constants.values(), *exported.arguments]
        if wide := next((t.dtype for t in tensors if isinstance(t, Tensor) and t.dtype in REFUSED), None):
            raise Unsupported(f"JAX would round {str(wide).removeprefix('torch.')} to 32 bits")
        weights, function, export_s = _in_jax(exported, begin)
        begin = perf_counter()
        try:
            executable = _compiled(exported, weights, function)
        except Exception as error:  # whatever torchax or XLA raises of an operator it lacks
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


def _in_jax(exported: Exported, begin: float) -> tuple[list[Any], Any, float]:
    """The weights as JAX's arrays, the model as a function of JAX, and the seconds since `begin`."""
    from torchax.export import exported_program_to_jax

    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, weights, function = exported_program_to_jax(exported.program, export_raw=True)
    except Exception as error:  # a decomposition that fails
        raise Unsupported(f"torchax cannot translate it: {named_line(error)}") from error
    return [_array(w) for w in weights], function, perf_counter() - begin


def _compiled(exported: Exported, weights: list[Any], function: Any) -> Any:
    import jax

    inputs = [_array(x) for x in exported.arguments]
    precision = "tensorfloat32" if exported.allow_tf32 else "float32"
    with jax.default_matmul_precision(precision), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of integers that have 32 bits
        return jax.jit(lambda weights, inputs: function(weights, tuple(inputs))).lower(weights, inputs).compile()


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
    lacking = [name for name in ("jax", "torchax") if find_spec(name) is None]
    if lacking:
        return f"{' and '.join(lacking)} not installed: pip install {PACKAGES}"
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        with _devices_open(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torchax.export
            import torchax.ops.jaten  # noqa: F401 - operators come into its registry by their import
    except Exception as error:  # torchax 0.0.13 does not import beside torch 2.15
        return f"torchax does not import beside torch {torch.__version__}: {named_line(error)}"
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)  # which torchax turns off, for every module of the process
    return None


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
