"""XLA: a module is exported, another process translates it by torchax, and `jax.jit` compiles that.

The cache keeps both: the translation, and beside it what JAX keeps of its own compiling.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor, nn

from conf.text import named_line
from systems.base import Compilation, Prepared, System, Unsupported
from systems.cache import JSON, MANIFEST, Artefact, Cache, code_in
from systems.compilers.compiled import Compiled, bytes_outside_torch
from systems.compilers.exported import Exported

from .translation import NARROW, translated, why_no_torchax

PACKAGES = "'jax[cuda13]' torchax flatbuffers"
# XLA would take most of the GPU's memory at once, and torch has its own there.
PREALLOCATION = "XLA_PYTHON_CLIENT_PREALLOCATE"
REFUSED = (torch.float64, torch.complex128)  # it would round them to 32 bits
FLAGS = "XLA_FLAGS"  # the environment variable of XLA's options
FUNCTION = "function.bin"  # the translation, in the folder of an artefact
# JAX's own cache of what it has compiled; without these it would leave out what compiles fast, and tell XLA to tune apart.
KEEPING = {
    "jax_enable_compilation_cache": True,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_persistent_cache_enable_xla_caches": "none",
    "jax_compilation_cache_max_size": -1,
}


class Xla(System):
    """XLA's own fusion and its own kernels, on one stream.

    XLA has one switch for TF32, which is that of `Exported.allow_tf32`. Weights are not copied, but for those in another
    layout than contiguous. Integers of 64 bits are computed with 32.
    """

    name = "xla"

    def unsupported(self, device: str) -> str | None:
        return _missing() or (None if device in _platforms() else f"this JAX has no {device}: pip install {PACKAGES}")

    @property
    def learns(self) -> bool:
        """XLA measures kernels as it compiles, and what it takes of a GPU's memory for that stays with the process."""
        return True

    def learn(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        with _artefact(_exported(module, inputs)):
            pass

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
        """As `System.prepare`.

        Raises:
            Unsupported: torch.export cannot capture the module, or torchax or XLA lacks an operator of it.
            ChildProcessError: the process that translates it ended before it had said more.
        """
        exported = _exported(module, inputs)
        bytes_before = bytes_outside_torch(exported.device)
        with _artefact(exported) as artefact:
            notes = artefact.notes
            weights = _weights(exported, cast("list[str]", notes["weights"]))
            kept, begin = _kept(artefact.folder), perf_counter()
            executable = _compiled(exported, weights, artefact.folder)
            seconds, is_found = perf_counter() - begin, bool(kept) and _kept(artefact.folder) == kept
        compilation = Compilation(
            export_s=cast(float, notes["export_s"]),
            is_exported_now=artefact.is_new,
            compile_s=cast(float, notes["compile_s"]) if artefact.is_new or is_found else seconds,
            is_compiled_now=artefact.is_new or not is_found,
        )
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


def _exported(module: nn.Module, inputs: tuple[Tensor, ...]) -> Exported:
    exported = Exported(module, inputs)
    tensors = [*exported.program.state_dict.values(), *exported.program.constants.values(), *exported.arguments]
    if wide := next((t.dtype for t in tensors if isinstance(t, Tensor) and t.dtype in REFUSED), None):
        raise Unsupported(f"JAX would round {str(wide).removeprefix('torch.')} to 32 bits")
    return exported


@contextmanager
def _artefact(exported: Exported) -> Iterator[Artefact]:
    """Hold the translation, with what JAX has kept of its compiling, and these notes.

    weights: names of the weights that the function takes, in order.
    export_s, compile_s: seconds that translating and compiling took.
    """

    def make(folder: Path) -> dict[str, JSON]:
        begin = perf_counter()
        translation = translated(exported)
        (folder / FUNCTION).write_bytes(translation.function)
        export_s, begin = perf_counter() - begin, perf_counter()
        _compiled(exported, _weights(exported, translation.weights), folder)
        return {"weights": [*translation.weights], "export_s": export_s, "compile_s": perf_counter() - begin}

    with Cache().artefact("xla", exported.label, _ingredients(exported), make) as artefact:
        yield artefact


def _ingredients(exported: Exported) -> dict[str, JSON]:
    """The model but for the values of its weights, which the function takes."""
    device = exported.device
    placeholders = [node.meta["val"] for node in exported.program.graph.nodes if node.op == "placeholder"]
    versions: dict[str, JSON] = {name: importlib.metadata.version(name) for name in ("torch", "torchax", "jax", "jaxlib")}
    return {
        "model": exported.structure,
        "strides": [list(x.stride()) for x in placeholders if isinstance(x, Tensor)],
        "allow_tf32": exported.allow_tf32,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "flags": os.environ.get(FLAGS, ""),
        "versions": versions,
        "code": code_in(__package__),
    }


def _weights(exported: Exported, names: Sequence[str]) -> list[Any]:
    """Parameters, buffers and constants of these names, as JAX's arrays on the program's device."""
    constants = {  # those of no dimensions may be on the CPU, and XLA takes one device
        name: value.to(exported.device) if isinstance(value, Tensor) else value
        for name, value in exported.program.constants.items()
    }
    by_name = {**exported.program.state_dict, **constants}
    return [_array(by_name[name]) for name in names]


def _compiled(exported: Exported, weights: list[Any], folder: Path) -> Any:
    """The executable of the translation in this folder, where JAX keeps what it compiles."""
    import jax
    import jax.export

    function = jax.export.deserialize(bytearray((folder / FUNCTION).read_bytes()))
    inputs = [_array(x) for x in exported.arguments]
    try:
        with _kept_in(folder):
            return jax.jit(function.call).lower(weights, inputs).compile()
    except Exception as error:  # whatever XLA raises of an operator it lacks
        raise Unsupported(f"XLA cannot compile it: {named_line(error)}") from error


def _kept(folder: Path) -> set[str]:
    """The files in which JAX has kept what it compiled: none where XLA cannot write an executable down."""
    return {file.name for file in folder.iterdir()} - {FUNCTION, MANIFEST}


@contextmanager
def _kept_in(folder: Path) -> Iterator[None]:
    """Have JAX keep here what it compiles, and take from here what it has kept. Its own settings stay as they are."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    settings = KEEPING | {"jax_compilation_cache_dir": str(folder)}
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # JAX opens its cache once
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


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
