"""A record is as old as the code it ran: which changes of the sources change the digest of which cells."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT

import conf
import models
from models import registry
from results.cell import Cell, Conditions, choose
from runners.machine import code
from runners.machine.code import Sources, code_digest
from runners.measurements.registry import plan
from runners.roots import roots as roots_of_cell
from runners.showings import registry as showings

HERE = Sources(ROOT)


def roots(model: str, system: str, runner: str) -> tuple[str, ...]:
    cell = Cell(choose("model", model), choose("system", system), choose("runner", runner), Conditions(1, "cpu"))
    return roots_of_cell(cell)


class Copy(Sources):
    """The sources with one file edited; every other file is parsed once for all tests."""

    def __init__(self, folder: Path, name: str, edit: Callable[[str], str]):
        super().__init__(ROOT)
        original = HERE._file(name)
        assert original is not None
        self.changed = (name, folder / original.name)
        self.changed[1].write_text(edit(original.read_text()))

    def _file(self, name: str) -> Path | None:
        return self.changed[1] if name == self.changed[0] else HERE._file(name)

    def _module(self, name: str) -> code.Module:
        return super()._module(name) if name == self.changed[0] else HERE._module(name)


def digests(sources: Sources, runner: str = "latency") -> dict[str, str]:
    """The digest of resnet18's cell by system."""
    return {system: sources.digest(roots("resnet18", system, runner)) for system in ("eager", "nimble", "opara")}


def changed(
    folder: Path, name: str, runner: str = "latency", edit: Callable[[str], str] = lambda text: f"{text}\nADDED = 1\n"
) -> set[str]:
    """The systems whose digests change when a module is edited."""
    before, after = digests(HERE, runner), digests(Copy(folder, name, edit), runner)
    return {system for system in before if before[system] != after[system]}


@pytest.mark.parametrize(
    ("name", "systems"),
    [
        ("systems.opara.system", {"opara"}),
        ("systems.nimble.system", {"nimble"}),
        ("systems.pytorch.eager", {"eager"}),
        ("systems.scheduling.plans.verify", {"nimble", "opara"}),
        ("systems.ios.search", set()),
        ("models.vision", {"eager", "nimble", "opara"}),
        ("models.darts", set()),
        ("models", {"eager", "nimble", "opara"}),
        ("runners.cell.worker", {"eager", "nimble", "opara"}),
        ("runners.cell.session", {"eager", "nimble", "opara"}),
        ("runners.measurements.correctness", {"eager", "nimble", "opara"}),
        ("runners.measurements.throughput", set()),  # these are cells of runner=latency
        ("results.store", set()),
    ],
)
def test_a_change_makes_the_cells_new_that_run_the_file(tmp_path: Path, name: str, systems: set[str]) -> None:
    assert changed(tmp_path, name) == systems


def test_a_comment_or_a_docstring_changes_nothing(tmp_path: Path) -> None:
    def reworded(text: str) -> str:
        text, count = re.subn(r'"""(?=[A-Z])', '"""Another beginning of it: ', text)
        assert count > 1
        return text + "\n# a comment\n"

    def documented(text: str) -> str:
        return text + '\n\ndef added():\n    """Documented."""\n'

    assert changed(tmp_path, "systems.nimble.system", edit=reworded) == set()
    assert changed(tmp_path, "systems.nimble.system", edit=documented) == {"nimble"}


def test_a_runner_changes_the_cells_of_that_runner(tmp_path: Path) -> None:
    def runners(name: str) -> set[str]:
        return {runner for runner in conf.choices("runner") if changed(tmp_path, name, runner)}

    assert runners("runners.measurements.throughput") == {"bench", "throughput", "training"}  # training times its own
    assert runners("runners.measurements.active_warps") == {"active_warps"}
    assert runners("runners.measurements.training") == {"training"}
    assert changed(tmp_path, "systems.profiling.limits", "limits") == {"eager", "nimble", "opara"}
    assert changed(tmp_path, "systems.profiling.limits", "throughput") == set()


def test_the_list_is_of_every_model_and_every_system(tmp_path: Path) -> None:
    for name in ("models.darts", "systems.ios.search", "runners.showings.list"):
        assert changed(tmp_path, name, "list") == {"eager", "nimble", "opara"}


def test_every_runner_is_known_by_its_measurements() -> None:
    for runner in conf.choices("runner"):
        for root in roots("resnet18", "eager", runner):
            assert root in HERE.closure([root]), f"runner={runner} runs {root}, which is no file"
        if not showings.is_showing(choose("runner", runner)):
            wanted = {type(m).__module__ for m in plan(choose("runner", runner)).measurements}
            assert wanted <= set(roots("resnet18", "eager", runner)), runner


def test_every_kind_of_import_counts(tmp_path: Path) -> None:
    """Absolute and relative ones, of modules and of names, in functions and in branches; not those of type checkers."""
    files = {
        "a/__init__.py": "from .b import name\n",
        "a/b.py": "import json\nfrom . import c as other\n",
        "a/c.py": "def f():\n    if f:\n        import a.d.e as e\n",
        "a/d/__init__.py": "",
        "a/d/e.py": "from ..f import g\nif TYPE_CHECKING:\n    import a.h\nelse:\n    import a.i\n",
        **{f"a/{name}.py": "" for name in ("f", "h", "i", "j")},
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert Sources(tmp_path).closure(["a"]) == {"a", "a.b", "a.c", "a.d", "a.d.e", "a.f", "a.i"}
    (tmp_path / "a" / "i.py").write_text("run([python, '-m', module_name('a.j')])\nmodule_name(__name__)\n")
    assert Sources(tmp_path).closure(["a"]) == {"a", "a.b", "a.c", "a.d", "a.d.e", "a.f", "a.i", "a.j"}
    # As the package of a wheel the same files have another name before theirs.
    (tmp_path / "a" / "b.py").write_text("from opweave import a\nfrom opweave.a import c\nimport a.j\n")
    assert Sources(tmp_path, "opweave.").closure(["a"]) == {"a", "a.b", "a.c"}
    (tmp_path / "a" / "c.py").write_text("import opweave.a.d.e\n")
    assert Sources(tmp_path, "opweave.").closure(["a"]) == {"a", "a.b", "a.c", "a.d", "a.d.e", "a.f"}


@pytest.mark.parametrize(
    ("runner", "started"),
    [("serving", "runners.serving.client"), ("bench", "runners.cell.profiled"), ("latency", "runners.cell.worker")],
)
def test_a_process_that_a_cell_starts_counts(runner: str, started: str) -> None:
    assert started in HERE.closure(roots("gpt", "orca", runner))


def test_a_digest_imports_nothing_and_is_found_once() -> None:
    program = (
        "import sys; from runners.machine.environment import identity; from runners.roots import roots\n"
        "from results.cell import Cell, Conditions, choose\n"
        "chosen = (choose('model', 'resnet18'), choose('system', 'opara'), choose('runner', 'bench'))\n"
        "cell = Cell(*chosen, Conditions(1, 'cpu'))\n"
        "for _ in range(500): identity(cell, roots(cell), '0')\n"
        "assert 'torch' not in sys.modules and 'systems.opara.system' not in sys.modules\n"
        "from runners.machine.code import code_digest\n"
        "print(code_digest.cache_info().misses)"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["1"]


def test_a_custom_model_has_no_file_of_the_zoo() -> None:
    assert not [root for root in roots("custom", "eager", "latency") if root.startswith("models")]
    assert code_digest(roots("custom", "eager", "latency")) != code_digest(roots("resnet18", "eager", "latency"))
    with pytest.raises(models.BadModel):
        registry.module_name("resnet19")
