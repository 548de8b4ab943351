"""`system=checkout`: a system of another checkout of this project, which takes turns with those of this one.

Both have modules of the same names. So those of this checkout are set aside while the other's prepare a module, and the
other's while anything else runs.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from torch import Tensor, nn

from conf.text import first_line
from systems.base import BadOption, Prepared, System, Unsupported
from systems.cache import default_folder

ROOMS = ("conf", "models", "results", "runners", "scripts", "systems")
CODE = ("*.py", "*.yaml")
HERE = Path(__file__).resolve().parents[2]  # where this checkout's rooms lie


class Checkout(System):
    """A system as it is at another commit, in a process of its own, as each cell has: torch has an operator of a name once.

    Args:
        folder: with that commit checked out.
        runs: a file of its conf/system.
        settings: of that system, in the place of that file's: "key=value key=value".
    """

    name = "checkout"

    def __init__(self, folder: str | None = None, runs: str = "nimble_fused", settings: str | None = None):
        for key, text in (("folder", folder), ("settings", settings)):
            if not isinstance(text, str | None):
                raise BadOption(f"system.{key}={text} is no text")
        self.root, self.runs = Path(folder or HERE).expanduser().resolve(), runs
        self.is_named = folder is not None
        file = self.root / "conf" / "system" / f"{runs}.yaml"
        if not (self.root / "systems" / "registry.py").is_file():
            raise BadOption(f"system.folder={folder} is no checkout of this project")
        if self.is_named and not file.is_file():
            raise BadOption(f"system.runs={runs}: that checkout has no {file.relative_to(self.root)}")
        words = [word.partition("=") for word in (settings or "").split()]
        if wrong := next((key for key, sign, _ in words if not sign), None):
            raise BadOption(f"system.settings={settings}: {wrong} has no value: write key=value, blanks between several")
        self.settings = {key: yaml.safe_load(value) for key, _, value in words}
        self.modules: dict[str, ModuleType] = {}  # the other's
        self.digest = digest_of(self.root) if self.is_named else None

    @property
    def learns(self) -> bool:
        if not self.is_named:
            return False
        with self._other() as system:
            return bool(getattr(system, "learns", True))

    def unsupported(self, device: str) -> str | None:
        if not self.is_named:
            return "system.folder names no other checkout: git worktree add FOLDER COMMIT makes one"
        with self._other() as system:
            reason: str | None = system.unsupported(device)
            return reason

    def learn(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """As the other does; by preparing once where it learns as it prepares. Its cache holds what it measured."""
        with self._other() as system:
            if hasattr(system, "learn"):
                system.learn(module, inputs)
            else:
                system.prepare(module, inputs).close()

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
        with self._other() as system:
            return OtherPrepared(self, system.prepare(module, inputs))

    @contextmanager
    def _other(self) -> Iterator[Any]:
        """The other checkout's system, for as long as the other's modules are those that are imported."""
        with self.imported():
            try:
                yield self._system()
            except Exception as error:
                kind = type(error)
                same = {"Unsupported": Unsupported, "BadOption": BadOption}.get(kind.__name__)
                if same is None or kind is same:
                    raise
                raise same(first_line(error)) from error

    def _system(self) -> Any:
        registry, conf = import_module("systems.registry"), import_module("conf")
        if getattr(conf, "__file__", "") is None:  # a folder alone
            del conf.__file__  # else inspect.getmodule, which torch.export asks, fails after it has seen ours
        if hasattr(conf, "options"):
            return registry.load(self.runs, **self.settings)
        # A checkout without that has flat files.
        options = yaml.safe_load((self.root / "conf" / "system" / f"{self.runs}.yaml").read_text(encoding="utf-8"))
        return registry.load(**options | self.settings)

    @contextmanager
    def imported(self) -> Iterator[None]:
        """Imports find the other's modules, and its cache is one of its own."""
        ours = _taken()
        before = os.environ.get("OPWEAVE_CACHE")
        os.environ["OPWEAVE_CACHE"] = str(default_folder() / "checkouts" / (self.digest or ""))
        paths = sys.path[:]
        sys.path[:] = [str(self.root), *(path for path in paths if Path(path or os.curdir).resolve() != HERE)]
        sys.modules.update(self.modules)
        try:
            yield
        finally:
            self.modules = _taken()
            sys.path[:] = paths
            sys.modules.update(ours)
            if before is None:
                del os.environ["OPWEAVE_CACHE"]
            else:
                os.environ["OPWEAVE_CACHE"] = before


class OtherPrepared(Prepared):
    """What the other checkout has prepared. Calls go to it as they are."""

    def __init__(self, system: Checkout, prepared: Any):
        self.system, self.prepared = system, prepared
        self.call = prepared.__call__
        self.is_captured = bool(getattr(prepared, "is_captured", getattr(prepared, "captured", False)))

    @property
    def memory(self) -> dict[str, int]:
        """As the other says it."""
        return dict(self.prepared.memory)

    def __call__(self, *inputs: Tensor) -> Any:
        return self.call(*inputs)

    def close(self) -> None:
        with self.system.imported():
            self.prepared.close()


def digest_of(root: Path) -> str:
    """Of the code and the choices of a checkout's rooms."""
    digest = hashlib.sha256()
    for room in ROOMS:
        for file in sorted(path for pattern in CODE for path in (root / room).rglob(pattern)):
            digest.update(str(file.relative_to(root)).encode() + b"\n" + file.read_bytes())
    return digest.hexdigest()[:12]


def _taken() -> dict[str, ModuleType]:
    """The modules of the rooms that are imported, which are not afterwards."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in ROOMS}
