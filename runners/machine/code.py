"""The code that makes a cell's record, and a digest of it.

Invariant: the digest changes if and only if a file that the cell may run changes in its syntax tree without docstrings.
These files are the import closure of the modules that the cell starts from, with those that it starts processes from. The
closure is read from the sources: nothing is imported, and imports inside functions count.
"""

import ast
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from .installation import PREFIX, ROOT


@dataclass(frozen=True)
class Module:
    """A source file of the project.

    Attributes:
        digest: of its syntax tree without docstrings.
        imports: the project's modules that it may import, with the packages that they lie in.
    """

    digest: str
    imports: frozenset[str]


class Sources:
    """The project's modules by name, each parsed once.

    Args:
        root: the folder that holds the rooms.
        prefix: what stands before a module's name there, as `installation.PREFIX`.
    """

    def __init__(self, root: Path, prefix: str = ""):
        self.root, self.prefix = root, prefix
        self._modules: dict[str, Module] = {}
        self._files: dict[str, Path | None] = {}

    def digest(self, roots: Iterable[str]) -> str:
        """A digest of the names and contents of all modules that `roots` lead to, themselves included."""
        digest = hashlib.sha256()
        for name in sorted(self.closure(roots)):
            digest.update(f"{name} {self._module(name).digest}\n".encode())
        return digest.hexdigest()[:12]

    def closure(self, roots: Iterable[str]) -> set[str]:
        """The names of all modules of the project that `roots` may import, at any depth, with their packages."""
        reached: set[str] = set()
        waiting = [name for root in roots for name in self._with_packages(root)]
        while waiting:
            name = waiting.pop()
            if name in reached:
                continue
            reached.add(name)
            waiting += self._module(name).imports
        return reached

    def _with_packages(self, name: str) -> Iterator[str]:
        """The module and the packages that it lies in, as far as they are files of the project."""
        while name:
            if self._file(name) is not None:
                yield name
            name = name.rpartition(".")[0]

    def _file(self, name: str) -> Path | None:
        if name not in self._files:
            path = self.root.joinpath(*name.split("."))
            files = path.with_suffix(".py"), path / "__init__.py"
            self._files[name] = next((file for file in files if file.is_file()), None)
        return self._files[name]

    def _module(self, name: str) -> Module:
        if name not in self._modules:
            file = self._file(name)
            assert file is not None, name
            source = file.read_bytes()
            tree = ast.parse(source)
            package = self.prefix + (name if file.stem == "__init__" else name.rpartition(".")[0])
            names = {name for name in _imports(tree, package.rstrip(".")) if name.startswith(self.prefix)}
            if b"-m" in source:
                names |= {f"{self.prefix}{name}" for name in _started(tree)}
            imports = {module for name in names for module in self._with_packages(name.removeprefix(self.prefix))}
            self._modules[name] = Module(_digest(tree), frozenset(imports))
        return self._modules[name]


def _digest(tree: ast.Module) -> str:
    """The digest of a syntax tree; changes `tree`: its docstrings go."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            ast.get_docstring(node, clean=False) is not None
        ):
            del node.body[0]
        waiting += [
            child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)
        ]  # they hold no statement
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Every absolute name that the statements under `tree` may import, without those for type checkers alone.

    `from a.b import c` gives "a.b" and "a.b.c".
    """
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting += node.orelse
        elif not isinstance(node, ast.expr):
            waiting += ast.iter_child_nodes(node)


def _started(tree: ast.AST) -> Iterator[str]:
    """Every module that a process of its own starts from: of a command `-m module_name("a.b")`, "a.b"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple):
            for option, module in pairwise(node.elts):
                if isinstance(option, ast.Constant) and option.value == "-m" and isinstance(module, ast.Call):
                    yield from (str(name.value) for name in module.args if isinstance(name, ast.Constant))


@cache
def _here() -> Sources:
    return Sources(ROOT, PREFIX)


@cache
def code_digest(roots: tuple[str, ...]) -> str:
    """A digest of the code that makes a cell's record; a record of another digest is another cell's.

    Args:
        roots: the modules that the cell starts from, as `runners.roots` names them.
    """
    return _here().digest(roots)
