"""Compiled kernels as data, so that a plan brings them along and nothing but the plan executes them."""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from .kernel import Kernel, Launch, Written, libraries

CODE = "cubin"  # the part of a compiled kernel that the GPU runs; the others are on the way to it


@dataclass(frozen=True)
class Binary:
    """A kernel as it was compiled.

    Args:
        key: a digest of the source, and of what it is compiled for.
        name: of the function.
        metadata: JSON, what the launch has to know.
        code: of the GPU.
    """

    key: str
    name: str
    metadata: str
    code: bytes

    @classmethod
    def of(cls, key: str, compiled: Any) -> Binary | None:
        """Of Triton's compiled kernel; None where that has no code of a GPU."""
        files = {Path(file).suffix: Path(file) for file in compiled.metadata_group.values()}
        if not {".json", f".{CODE}"} <= files.keys():
            return None
        metadata = files[".json"]
        return cls(key, metadata.stem, metadata.read_text(encoding="utf-8"), files[f".{CODE}"].read_bytes())

    def to_json(self) -> list[str]:
        return [self.key, self.name, self.metadata, base64.b64encode(zlib.compress(self.code)).decode()]

    @classmethod
    def from_json(cls, document: Any) -> Binary:
        """Raises ValueError where it is not of `to_json`: its name becomes one of files."""
        try:
            key, name, metadata, code = map(str, document)
            content = zlib.decompress(base64.b64decode(code, validate=True))
        except (TypeError, zlib.error) as error:
            raise ValueError(f"this is no compiled kernel: {error}") from error
        if not re.fullmatch(r"[0-9a-f]{64}", key) or not re.fullmatch(r"\w+", name):
            raise ValueError("this is no compiled kernel: its key or its name is none")
        return cls(key, name, metadata, content)

    def compiled(self, source: Any) -> Any:
        """Triton's compiled kernel.

        Args:
            source: what it was compiled from, Triton's `ASTSource`.
        """
        from triton.compiler import CompiledKernel

        with TemporaryDirectory() as folder:  # it reads the files now, and never again
            files = {name: Path(folder, name) for name in (f"{self.name}.json", f"{self.name}.{CODE}")}
            files[f"{self.name}.json"].write_text(self.metadata, encoding="utf-8")
            files[f"{self.name}.{CODE}"].write_bytes(self.code)
            return CompiledKernel(source, {name: str(file) for name, file in files.items()}, self.key)


class Library:
    """Compiled kernels, and what launches them.

    Invariant: only calls of this library come to its binaries. They lie in memory, by keys of their own: no other code of
    this process or of a later one executes them. What it lacks Triton compiles, and keeps in its cache as ever.

    Args:
        binaries: to launch.
    """

    def __init__(self, binaries: Iterable[Binary] = ()):
        self.binaries = {binary.key: binary for binary in binaries}
        self.functions: dict[Any, Any] = {}  # of this library, by Triton's own
        self.compiled: dict[str, Any] = {}  # by key: all that was launched or compiled

    def run(self, launch: Launch) -> Written:
        """Launch it on the current stream; returns what it writes."""
        self._own(launch.function)[launch.grid](*launch.arguments, **launch.options, **libraries())
        return launch.out

    def compile(self, launch: Launch) -> Any:
        """Have it compiled, where there is no binary; nothing runs, and tensors may be on the meta device."""
        return self._own(launch.function).warmup(*launch.arguments, grid=launch.grid, **launch.options, **libraries())

    def collected(self) -> tuple[Binary, ...]:
        """Binaries of all that was launched or compiled."""
        made = (self.binaries.get(key) or Binary.of(key, compiled) for key, compiled in self.compiled.items())
        return tuple(binary for binary in made if binary is not None)

    def _own(self, function: Any) -> Any:
        """A function of this library alone, which asks it for compiled kernels."""
        if not hasattr(function, "create_binder"):
            return function  # of Triton's interpreter, which compiles nothing
        if function not in self.functions:
            self.functions[function] = _function(function, self._compiled)
        return self.functions[function]

    def _compiled(self, source: Any, target: Any = None, options: Mapping[str, Any] | None = None, **others: Any) -> Any:
        """In the place of Triton's `compile`."""
        from triton.compiler import compile

        key = _key(source, target, options or {})
        if key not in self.compiled:
            binary = self.binaries.get(key)
            made = compile(source, target=target, options=options, **others) if binary is None else binary.compiled(source)
            self.compiled[key] = made
        return self.compiled[key]


def _function(function: Any, compiled: Any) -> Any:
    """Triton's function once more, with caches of its own in memory and another `compile`."""
    from triton.runtime.jit import JITFunction

    class Own(JITFunction):  # type: ignore[type-arg, misc]
        def create_binder(self) -> Any:
            binder = super().create_binder()  # which sets `compile`
            self.compile = compiled
            return binder

    return Own(function.fn, do_not_specialize=function.do_not_specialize)


def _key(source: Any, target: Any, options: Mapping[str, Any]) -> str:
    """Of the source with what it is specialised for, and of the options; whose library is linked is a file's name here."""
    words = sorted(f"{name}={value}" for name, value in options.items() if name != "extern_libs")
    return hashlib.sha256("\0".join([source.hash(), str(target), *words]).encode()).hexdigest()


@dataclass(frozen=True)
class Stored(Kernel):
    """A kernel that is launched from a library.

    Args:
        kernel: itself.
        library: of a plan.
    """

    kernel: Kernel
    library: Library = field(compare=False, repr=False)

    @property
    def is_compiled(self) -> bool:
        return True

    @property
    def is_grouped(self) -> bool:
        return self.kernel.is_grouped

    def __str__(self) -> str:
        return str(self.kernel)

    def launch(self, *tensors: Tensor | None) -> Launch:
        return replace(self.kernel, is_early=self.is_early).launch(*tensors)

    def __call__(self, *tensors: Tensor | None) -> Written:
        return self.library.run(self.launch(*tensors))

    def compile(self, *tensors: Tensor | None) -> Any:
        return self.library.compile(self.launch(*tensors))
