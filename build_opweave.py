"""Builds Opweave with setuptools: an editable install as the checkout lies, or a wheel of one package.

An editable install has the checkout's top-level names. In a wheel these names (models, results, ...) could be another
package's, so every room lies in the package `opweave` there, and this file rewrites the imports of the rooms. Hydra demands
the name `hydra_plugins`, which keeps its place.

Invariant: in a wheel no import names a room but through `opweave`, and every other byte of a source is as in the checkout.
"""

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from setuptools import Distribution, build_meta, find_packages
from setuptools.build_meta import (  # hooks of the build backend, as they are
    build_editable,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
)
from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info

__all__ = [
    "BuildPy",
    "EggInfo",
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
    "rewritten",
]

PACKAGE = "opweave"
ROOMS = ("conf", "models", "results", "runners", "scripts", "systems")
PLUGINS = "hydra_plugins"
FILES = {"__init__": "opweave.py", "run": "run.py"}  # of the package itself: by module, the checkout's file
MODULES = (*ROOMS, "run")  # what imports in the checkout name, and in the wheel only with the package before it

_is_package = False  # does this process build the one package? A front end runs every hook in a process of its own


Settings: TypeAlias = "dict[str, str | list[str] | None] | None"  # a front end's, for a hook


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """PEP 517's hook."""
    global _is_package
    _is_package = True
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    """PEP 517's hook."""
    global _is_package
    _is_package = True
    return build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """PEP 517's hook: the sources that a wheel needs, each where the checkout has it."""
    global _is_package
    _is_package = True
    return build_meta.build_sdist(sdist_directory, config_settings)


class EggInfo(egg_info):
    """Writes the metadata: in a wheel, of the one package."""

    def initialize_options(self) -> None:
        super().initialize_options()
        gather(self.distribution)


class BuildPy(build_py):
    """Copies the sources: into a wheel, with the imports of the rooms rewritten."""

    def initialize_options(self) -> None:
        super().initialize_options()
        gather(self.distribution)

    def run(self) -> None:
        """Everything, into an empty folder."""
        if _is_package:
            shutil.rmtree(self.build_lib, ignore_errors=True)  # or files of an earlier build would be in the wheel
        super().run()

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """The modules of one package as (package, module, file)."""
        if _is_package and package == PACKAGE:
            return [(package, module, file) for module, file in FILES.items()]
        return super().find_package_modules(package, package_dir)

    def build_module(self, module: str, module_file: str, package: str) -> tuple[str, bool]:
        """Copy one file; returns where it lies then, and whether it was copied."""
        outfile, is_copied = super().build_module(module, module_file, package)
        if _is_package:
            Path(outfile).write_bytes(rewritten(Path(module_file).read_bytes()))
        return outfile, is_copied

    def get_source_files(self) -> list[str]:
        """The sources, for a source distribution; this file builds the wheel from it."""
        return [*super().get_source_files(), Path(__file__).name]


def gather(distribution: Distribution) -> None:
    """Put every room into the package, unless the install is editable."""
    if not _is_package or PACKAGE in (distribution.packages or ()):
        return
    rooms = find_packages(include=[pattern for room in ROOMS for pattern in (room, f"{room}.*")])
    data = distribution.package_data
    distribution.packages = [PACKAGE, *(f"{PACKAGE}.{room}" for room in rooms), PLUGINS]
    distribution.package_dir = {PACKAGE: ".", **{f"{PACKAGE}.{room}": room for room in ROOMS}}
    distribution.package_data = {f"{PACKAGE}.{room}": patterns for room, patterns in data.items()}
    distribution.py_modules = []
    distribution.entry_points = {
        group: [
            f"{name.strip()} = {PACKAGE}.{target.strip()}" for name, _, target in (line.partition("=") for line in lines)
        ]
        for group, lines in distribution.entry_points.items()
    }


def rewritten(source: bytes) -> bytes:
    """A Python file with every import of a room made one through the package. Lines keep their numbers.

    Args:
        source: in UTF-8.
    """
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    edits = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom) and (statement := _statement(node, source, starts)) is not None:
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            edits.append((begin, end, statement))
    for begin, end, statement in sorted(edits, reverse=True):  # from the end, so that earlier offsets stay true
        source = source[:begin] + statement + source[end:]
    return source


def _statement(node: ast.Import | ast.ImportFrom, source: bytes, starts: list[int]) -> bytes | None:
    """What stands in the wheel for an import; None where it stays."""
    if isinstance(node, ast.ImportFrom):
        if node.level or not _is_of_a_room(node.module or ""):
            return None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        module = source.index((node.module or "").encode(), begin + len(b"from"))
        return source[begin:module] + f"{PACKAGE}.".encode() + source[module:end]
    if not any(_is_of_a_room(alias.name) for alias in node.names):
        return None
    return "; ".join(part for alias in node.names for part in _imported(alias)).encode()


def _imported(alias: ast.alias) -> Iterator[str]:
    """The statements that bind in the wheel what `import ...` of one module binds in the checkout."""
    name, other = alias.name, f" as {alias.asname}" if alias.asname else ""
    top, dot, _ = name.partition(".")
    if not _is_of_a_room(name):
        yield f"import {name}{other}"
    elif dot and not other:  # `import a.b` binds a
        yield f"import {PACKAGE}.{name}"
        yield f"from {PACKAGE} import {top}"
    elif dot:
        yield f"import {PACKAGE}.{name}{other}"
    else:
        yield f"from {PACKAGE} import {top}{other}"


def _is_of_a_room(name: str) -> bool:
    return name.partition(".")[0] in MODULES
