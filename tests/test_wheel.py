"""The wheel: built, installed and used where the checkout is not, beside modules of the user's own with the rooms' names."""

import ast
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from completion import completions
from conftest import ROOT, TINY, environment, records

sys.path.append(str(ROOT))
from build_opweave import FILES, MODULES, PLUGINS, ROOMS, rewritten

METADATA = ("LICENSE", "README.md", "build_opweave.py", "pyproject.toml")
OWN = ("models", "results", "systems", "runners", "conf", "scripts", "run")  # names that the user's modules have

API = """
import sys
import opweave
assert "torch" not in sys.modules and opweave.__file__.startswith(sys.prefix), opweave.__file__
import torch
from torch import nn
import models, results, systems
assert (models.MINE, results.MINE, systems.MINE) == (1, 1, 1)

module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
x = torch.randn(3, 4)
with torch.no_grad():
    expected = module(x)
    assert torch.allclose(opweave.load("nimble").prepare(module, (x,))(x), expected)
    assert torch.allclose(torch.compile(module, backend="opweave_nimble", dynamic=False)(x), expected)
assert "nimble" in opweave.names() and opweave.__version__ == VERSION
try:
    opweave.load("nimbel")
except ValueError as error:
    assert "nimble" in str(error)
else:
    raise AssertionError("there is no nimbel")
print(*sorted({name.partition(".")[0] for name in sys.modules} & ROOMS))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the checkout, since a build leaves files beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for room in (*ROOMS, PLUGINS):
        unwanted = ("__pycache__", *(("reference", "runs", "cache") if room == "results" else ()))
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns(*unwanted))
    for file in (*METADATA, *FILES.values()):
        shutil.copy(ROOT / file, source)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path) -> Path:
    """A Python with the wheel, and what it depends on; it does not see the checkout's editable install."""
    folder = wheel.parent / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    interpreter = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    dependencies = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    # Folders that a .pth file names are searched for packages, but not for .pth files, which make an editable install.
    (packages / "dependencies.pth").write_text("\n".join(dependencies))
    pip("--python", str(interpreter), "install", "--no-deps", "--no-compile", "--quiet", "--ignore-installed", str(wheel))
    return interpreter


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PIP_NO_INDEX": "1"})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The working directory of a user whose own modules have the names of our rooms."""
    for name in OWN:
        (tmp_path / f"{name}.py").write_text(TINY + "\n\nMINE = 1\n")
    return tmp_path


def used(command: list[str], place: Path) -> "subprocess.CompletedProcess[str]":
    """Runs a command in `place`, without a path that leads to the checkout."""
    settings = environment(TMPDIR=str(place / "tmp"), OPWEAVE_CACHE=str(place / "cache"))
    (place / "tmp").mkdir(exist_ok=True)
    settings.pop("PYTHONPATH", None)
    return subprocess.run(command, cwd=place, env=settings, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
def test_only_two_names_are_installed(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        tops = {name.partition("/")[0] for name in names}
        (info,) = [top for top in tops if top.endswith(".dist-info")]
        assert tops == {"opweave", PLUGINS, info}
        assert {name for name in names if name.startswith(PLUGINS)} == {
            f"{PLUGINS}/{name}.py" for name in ("opweave_sweeper", "opweave_launchers")
        }
        assert archive.read(f"{info}/top_level.txt").split() == [PLUGINS.encode(), b"opweave"]
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    targets = [line.partition("=")[2].strip() for line in entry_points.splitlines() if "=" in line]
    assert len(targets) == sum(map(len, project["entry-points"].values())) + len(project["scripts"])
    assert all(target.startswith("opweave.") for target in targets)
    assert "License-Expression: Apache-2.0" in metadata


@pytest.mark.slow
def test_every_file_of_the_rooms_is_in_it_and_no_import_leaves_it(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
        sources = {name: archive.read(name) for name in names if name.endswith(".py")}
    wanted = {
        *(ROOT / "conf").rglob("*.yaml"),
        *(ROOT / "results" / "published").iterdir(),
        *(ROOT / "scripts" / "page").iterdir(),
    }
    wanted |= {file for room in ROOMS for file in (ROOT / room).rglob("*.py")}
    missing = {f"opweave/{file.relative_to(ROOT).as_posix()}" for file in wanted if file.is_file()} - names
    assert not {name for name in missing if "__pycache__" not in name}
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module or ""]
            assert not {module.partition(".")[0] for module in modules} & set(MODULES), f"{name} imports {modules}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from systems.base import A, B\n", "from opweave.systems.base import A, B\n"),
        ("from  models import (\n    A,  # one\n    B,\n)\n", "from  opweave.models import (\n    A,  # one\n    B,\n)\n"),
        ("import models\n", "from opweave import models\n"),
        ("import models as zoo, json\n", "from opweave import models as zoo; import json\n"),
        ("import systems.base as base\n", "import opweave.systems.base as base\n"),
        ("import systems.base\n", "import opweave.systems.base; from opweave import systems\n"),
        (
            "def f():\n    from results import record; return record\n",
            "def f():\n    from opweave.results import record; return record\n",
        ),
        ('é = "é"; from conf import é\n', 'é = "é"; from opweave.conf import é\n'),
        *[
            (same, same)
            for same in ("from . import models\n", "from .models import a\n", "import modelspace\n", "'import models'\n")
        ],
        *[(same, same) for same in ("from hydra_plugins import models\n", "# import models\n", "from a.models import b\n")],
    ],
)
def test_imports_of_rooms_go_through_the_package(source: str, expected: str) -> None:
    assert rewritten(source.encode()).decode() == expected


@pytest.mark.slow
def test_the_python_interface_and_the_compile_backend(python: Path, place: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    program = f"VERSION, ROOMS = {version!r}, {set(MODULES)!r}\n{API}"
    (place / "program.py").write_text(program)
    done = used([str(python), "program.py"], place)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["models", "results", "systems"]  # the user's own


@pytest.mark.slow
def test_the_command_writes_a_schedule(python: Path, place: Path) -> None:
    arguments = ["runner=schedule", "model=squeezenet", "system=nimble", "device=cpu", "output=schedule.json"]
    done = used([str(python.parent / "opweave"), *arguments], place)
    assert done.returncode == 0, done.stderr
    assert json.loads((place / "schedule.json").read_text())["streams"] > 1


@pytest.mark.slow
def test_a_shell_completes_the_command(python: Path, place: Path) -> None:
    assert completions("opweave", "model=na", python.parent, place) == ["model=nasnet", "model=nasnet_large"]


@pytest.mark.slow
def test_the_command_measures_a_model_of_the_users(python: Path, place: Path) -> None:
    arguments = ["model=custom", "model.factory=models:make", "system=nimble", "device=cpu", "runner=latency"]
    done = used([str(python.parent / "opweave"), *arguments, "runner.samples=3"], place)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = records(place / "results" / "runs").values()
    assert record["status"] == "ok"
    assert "commit" not in record["environment"] and record["environment"]["code"]


@pytest.mark.slow
def test_an_editable_install_has_the_checkouts_names(python: Path, wheel: Path, place: Path) -> None:
    """As make and the Docker images install it: names, entry points and the command are of the files as they lie."""
    source, folder = wheel.parent / "source", wheel.parent / "editable"
    shutil.copytree(wheel.parent / "venv", folder, symlinks=True)
    interpreter = folder / "bin" / "python"
    pip("--python", str(interpreter), "install", "--no-deps", "--no-build-isolation", "--quiet", "--editable", str(source))
    program = (
        "import importlib.metadata, conf, models, opweave, systems, hydra_plugins.opweave_sweeper as sweeper\n"
        "entry_points = importlib.metadata.entry_points(group='torch_dynamo_backends', name='opweave_nimble')\n"
        "files = [module.__file__ for module in (conf, models, opweave, systems, sweeper)]\n"
        "print(*files, *(entry_point.value for entry_point in entry_points), sep='\\n')"
    )
    empty = place / "empty"
    empty.mkdir()
    (empty / "tmp").mkdir()
    done = used([str(interpreter), "-c", program], empty)
    *files, backend = done.stdout.splitlines()
    assert done.returncode == 0 and all(file.startswith(str(source)) for file in files), done.stdout + done.stderr
    assert not backend.startswith("opweave")
    wrong = used([str(folder / "bin" / "opweave"), "system=nimbel"], empty)
    assert wrong.returncode == 2 and wrong.stderr == "opweave: no system is named 'nimbel': did you mean nimble?\n"


def test_license_and_citation_say_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert project["license"] == citation["license"] == "Apache-2.0"
    assert project["version"] == citation["version"] and citation["authors"] == project["authors"]
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0" in text and "The Opweave authors" in text
