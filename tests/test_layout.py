"""The house: imports point one way, and nothing that is read back from disk can run code."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = {"run", "conf", "runners", "systems", "models", "results", "scripts"}
MAY_IMPORT = {
    "run": {"conf", "runners", "results", "systems", "models"},
    "conf": set(),
    "runners": {"conf", "systems", "models", "results"},
    "systems": {"conf", "models"},
    "models": {"conf"},
    "results": {"conf"},
    "scripts": {"conf", "results"},
}


def python_files() -> list[Path]:
    return [ROOT / "run.py", *(f for part in sorted(PARTS - {"run"}) for f in sorted((ROOT / part).rglob("*.py")))]


def imported(file: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.append(node.module)
    return names


@pytest.mark.parametrize("file", python_files(), ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_point_one_way(file: Path) -> None:
    part = file.relative_to(ROOT).parts[0].removesuffix(".py")
    for name in imported(file):
        other = name.split(".")[0]
        if other in PARTS and other != part:
            assert other in MAY_IMPORT[part], f"{part} imports {name}"


@pytest.mark.parametrize("file", python_files(), ids=lambda f: str(f.relative_to(ROOT)))
def test_nothing_read_from_disk_can_run_code(file: Path) -> None:
    assert not {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"} & {n.split(".")[0] for n in imported(file)}
    assert not re.search(r"\btorch\.(load|save|jit\.load)\(|\bnp\.load\(|\byaml\.(unsafe_)?load\(", file.read_text())
