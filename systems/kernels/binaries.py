"""Compiled kernels as data: what Triton's cache holds of them, so that a plan brings them along."""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from .kernel import Kernel

CODE = "cubin"  # the part of a compiled kernel that the GPU runs; the others are on the way to it


@dataclass(frozen=True)
class Binary:
    """A kernel as it was compiled.

    Args:
        key: in Triton's cache: a digest of the source, of what it is compiled for, and of the compiler.
        name: of the function.
        metadata: JSON, what the launch has to know.
        code: of the GPU.
    """

    key: str
    name: str
    metadata: str
    code: bytes

    @classmethod
    def of(cls, kernel: Kernel, tensors: Sequence[Tensor | None]) -> Binary | None:
        """The kernel for such tensors, compiled now unless the cache has it; None where that leaves no code of a GPU."""
        compiled = kernel.compile(*tensors)
        group: dict[str, str] = getattr(compiled, "metadata_group", {})
        files = {Path(file).suffix: Path(file) for file in group.values()}
        if not {".json", f".{CODE}"} <= files.keys():
            return None
        metadata = files[".json"]
        return cls(compiled.hash, metadata.stem, metadata.read_text(encoding="utf-8"), files[f".{CODE}"].read_bytes())

    def to_json(self) -> list[str]:
        return [self.key, self.name, self.metadata, base64.b64encode(zlib.compress(self.code)).decode()]

    @classmethod
    def from_json(cls, document: Any) -> Binary:
        """Raises ValueError where it is not of `to_json`: key and name become names of files."""
        try:
            key, name, metadata, code = map(str, document)
            content = zlib.decompress(base64.b64decode(code, validate=True))
        except (TypeError, zlib.error) as error:
            raise ValueError(f"this is no compiled kernel: {error}") from error
        if not re.fullmatch(r"[0-9a-f]{64}", key) or not re.fullmatch(r"\w+", name):
            raise ValueError("this is no compiled kernel: its key or its name is none")
        return cls(key, name, metadata, content)

    def put(self) -> None:
        """Lay it into Triton's cache, where nothing has its key there."""
        from triton.runtime.cache import get_cache_manager

        cache, metadata = get_cache_manager(self.key), f"{self.name}.json"
        if cache.get_group(metadata):
            return
        code = f"{self.name}.{CODE}"
        group = {metadata: cache.put(self.metadata, metadata, binary=False), code: cache.put(self.code, code)}
        cache.put_group(metadata, group)
