"""The house: what each room may import, no circle between any two files, and nothing that is read from disk can run code."""

import ast
import re
from functools import cache
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).parent.parent
MOST_UNTYPED = 80  # lines with a dict[str, Any]
MOST_LINES = 120  # of a room's page
FLOORS = ("conf", "models", "systems", "runners", "results", "scripts", "hydra_plugins")

# What the files of a room may import beside their own room; a room stands for those within it too. A room is a folder or
# a file; the longest name counts. Those of `systems` stand in the order of their floors.
GRAPH, PLANS, EXECUTION, SIMULATE = (f"systems.scheduling.{name}" for name in ("graph", "plans", "execution", "simulate"))
FLOOR = {
    "conf",
    "systems.arithmetic",
    "systems.tolerance",
    "systems.base",
    "systems.notice",
    "systems.cache",
    "systems.preparing",
}
SCHEDULER = FLOOR | {
    "systems.scheduling.scheduler",
    "systems.scheduling.module",
    "systems.scheduling.decision",
    "systems.profiling",
    GRAPH,
    PLANS,
    EXECUTION,
}
COMPILER = FLOOR | {"systems.compilers"}
MAY_IMPORT: dict[str, set[str]] = {
    "run": {"runners.command"},
    "hydra_plugins": {"runners.checks", "runners.request", "runners.sweep"},
    "conf": set(),
    "models": {"conf", "models.neural"},
    "models.neural": set(),
    "models.tabular": {"models"},
    "results": {"conf"},
    "scripts": {"conf", "results"},
    # systems
    "systems": {"systems.registry"},
    "systems.arithmetic": {"models"},
    "systems.tolerance": set(),
    "systems.base": {"conf"},
    "systems.notice": set(),
    "systems.preparing": {"conf", "systems.base"},
    "systems.cache": {"systems.base", "systems.notice"},
    "systems.registry": {"conf", "systems.base"},
    "systems.training": {"conf", "systems.base"},
    GRAPH: {"conf", "systems.base", "systems.preparing", "systems.training"},
    "systems.scheduling.decision": set(),
    PLANS: {"conf", "systems.scheduling.decision", "systems.kernels", GRAPH},
    EXECUTION: {"conf", "systems.base", "systems.preparing", "systems.training", GRAPH, PLANS},
    "systems.kernels": set(),
    "systems.profiling": FLOOR | {"systems.kernels", GRAPH, PLANS, EXECUTION},
    SIMULATE: {"conf", "systems.base", "systems.cache", "systems.profiling", GRAPH, PLANS},
    "systems.scheduling.passes": FLOOR | {"systems.scheduling.decision", "systems.profiling", "systems.kernels", GRAPH},
    "systems.scheduling.scheduler": FLOOR | {"systems.scheduling", "systems.profiling"},
    "systems.scheduling.module": FLOOR | {"models", "systems.scheduling"},
    "systems.scheduling": set(),
    "systems.nimble": SCHEDULER,
    "systems.ios": SCHEDULER | {SIMULATE},
    "systems.opara": SCHEDULER,
    "systems.custom": SCHEDULER,
    "systems.checkout": {"conf", "systems.base", "systems.cache"},
    "systems.weave": SCHEDULER
    | {SIMULATE, "systems.registry", "systems.scheduling.passes", "systems.kernels", "systems.training"},
    "systems.advice": SCHEDULER | {SIMULATE, "systems.registry"},
    "systems.backends": {"conf", "systems.base", "systems.registry", "systems.scheduling.scheduler"},
    "systems.pytorch": FLOOR | {"systems.training", "systems.profiling", "systems.scheduling"},
    "systems.compilers": FLOOR | {"systems.pytorch", "systems.training", GRAPH},
    "systems.serving": FLOOR | {"systems.kernels", "systems.registry"},
    "systems.orca": FLOOR | {"systems.serving"},
    "systems.request_level": FLOOR | {"systems.serving"},
    "systems.peers": FLOOR | {"models", "systems.serving"},
    "systems.onnx": COMPILER,
    "systems.tvm": COMPILER,
    "systems.xla": COMPILER,
    "systems.tensorrt": COMPILER | {"systems.onnx"},
    "systems.tabular": {"conf", "models.neural", "models.tabular", "systems.base", "systems.registry"},
    "systems.windtunnel": {"conf", "systems.base", "models.neural", "models.tabular", "systems.registry", "systems.tabular"},
    # runners
    "runners": set(),
    "runners.checks": {"conf", "results"},
    "runners.discovery": set(),
    "runners.machine": {"results"},
    "runners.measurements": {
        "conf",
        "results",
        "models",
        "systems",
        "runners.checks",
        "runners.discovery",
        "runners.machine",
    }
    | {"runners.cell", "runners.serving"},
    "runners.cell": {"conf", "results", "models", "systems", "runners.machine", "runners.measurements"}
    | {"runners.showings"},
    "runners.serving": {
        *("conf", "results", "models", "systems"),
        *("runners.checks", "runners.machine", "runners.measurements", "runners.cell"),
    },
    "runners.roots": {
        "results",
        "models",
        "systems.registry",
        "runners.machine",
        "runners.measurements",
        "runners.showings",
    },
    "runners.request": {"conf", "results", "models", "runners.checks", "runners.machine", "runners.measurements"}
    | {"runners.showings"},
    "runners.sweep": {"conf", "results", "runners"},
    "runners.showings": {"conf", "results", "models", "systems", "runners"},
    "runners.command": {"conf", "runners.checks", "runners.execute", "runners.request"},
    "runners.execute": {"runners.checks", "runners.request", "runners.showings", "runners.sweep"},
}


@cache
def modules() -> dict[str, Path]:
    """Every module of the project, by its name; packages by theirs."""
    files = [ROOT / "run.py", *(f for floor in FLOORS for f in sorted((ROOT / floor).rglob("*.py")))]
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}
    return {name.removesuffix(".__init__"): file for name, file in names.items()}


def imported(name: str, file: Path) -> set[str]:
    """The modules that a file imports, wherever it does: at its top, in a function, for types alone; relative ones too."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    targets = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            members = {f"{source}.{alias.name}" for alias in node.names}
            inner = members & modules().keys()
            targets |= inner | ({source} if len(inner) < len(members) else set())
    return targets


@cache
def edges() -> dict[str, set[str]]:
    """For each module the modules of the project that it imports."""
    return {name: (imported(name, file) & modules().keys()) - {name} for name, file in modules().items()}


def room(name: str) -> str:
    """The room that a module is in."""
    parts = name.split(".")
    return next(key for end in range(len(parts), 0, -1) if (key := ".".join(parts[:end])) in MAY_IMPORT)


def test_the_reader_of_imports_sees_every_kind(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nimport models\nfrom . import cache\nfrom .base import System\n"
        "if TYPE_CHECKING:\n    from systems.ios import system\n"
        "def f():\n    from .scheduling.graph import program, capture\n    import results.store as s\n"
    )
    seen = imported("systems.x", file)
    assert {"models", "systems.cache", "systems.base", "systems.ios.system", "results.store"} <= seen
    assert {"systems.scheduling.graph.program", "systems.scheduling.graph.capture"} <= seen


@pytest.mark.parametrize("name", sorted(modules()))
def test_a_room_imports_what_it_may(name: str) -> None:
    own = room(name)
    for other in sorted(edges()[name]):
        is_allowed = any(f"{room(other)}.".startswith(f"{allowed}.") for allowed in MAY_IMPORT[own])
        assert room(other) == own or is_allowed, f"{name} is in {own} and imports {other}"


@pytest.mark.parametrize("name", sorted(modules()))
def test_what_is_imported_of_the_project_is_there(name: str) -> None:
    """A type checker that passes over missing imports does not see it."""
    own = {target for target in imported(name, modules()[name]) if target.split(".")[0] in (*FLOORS, "run")}
    assert own <= modules().keys()


def test_no_two_files_import_each_other() -> None:
    """Nor do more than two in a circle. A package's own __init__ counts where it is named."""
    graph = networkx.DiGraph([(name, other) for name, others in edges().items() for other in others])
    circles = [sorted(circle) for circle in networkx.strongly_connected_components(graph) if len(circle) > 1]
    assert circles == []


@pytest.mark.parametrize("name", sorted(modules()))
def test_nothing_read_from_disk_can_run_code(name: str) -> None:
    text = modules()[name].read_text()
    libraries = {target.split(".")[0] for target in imported(name, modules()[name])}
    assert not {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"} & libraries
    assert not re.search(r"\btorch\.(load|save|jit\.load)\(|\bnp\.load\(|\byaml\.(unsafe_)?load\(", text)


def test_dictionaries_of_anything_are_few() -> None:
    """What travels has a type."""
    lines = [line for file in modules().values() for line in file.read_text().splitlines()]
    assert sum("dict[str, Any]" in line for line in lines) <= MOST_UNTYPED


def test_every_room_has_a_page() -> None:
    for floor in FLOORS:
        if floor != "hydra_plugins":  # Hydra looks into it, and nobody else
            page = ROOT / floor / "README.md"
            assert page.is_file() and len(page.read_text().splitlines()) <= MOST_LINES, floor
