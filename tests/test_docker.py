"""The images' recipe: linted, and what it promises read from it. docker/rehearse.sh carries it out, by hand."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT

DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
TARGETS = ("cpu", "cuda", "cpu-compiler", "cuda-compiler")
BUILD_TOOLS = {"gcc", "g++", "make", "cmake", "build-essential", "git", "python3-dev", "python3-venv", "python3-pip"}


def tool(name: str) -> str:
    """The path of a program beside this Python or on the PATH; skips the test where there is none."""
    path = shutil.which(name, path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def stages() -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """By its name, what a stage is built on and its instructions, continued lines as one."""
    stages_by_name: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    instructions: list[tuple[str, str]] = []
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE)
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            if word == "FROM":
                base, _, name = rest.partition(" AS ")
                instructions = []
                stages_by_name[name] = base, instructions
            else:
                instructions.append((word, rest))
    return stages_by_name


def lineage(target: str) -> list[tuple[str, str]]:
    """All instructions that a target's image is made by, without those of stages that it copies from."""
    base, instructions = stages()[target]
    return [*(lineage(base) if base in stages() else []), *instructions]


def installed(instructions: list[tuple[str, str]]) -> set[str]:
    """Debian's packages that they install."""
    commands = " && ".join(rest for word, rest in instructions if word == "RUN")
    return {name for match in re.findall(r"apt-get install ([^&]*)", commands) for name in match.split() if name[0] != "-"}


def test_hadolint_has_nothing_to_say() -> None:
    done = subprocess.run(
        [tool("hadolint"), "--no-color", str(DOCKER / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", ["entrypoint.sh", "rehearse.sh"])
def test_the_scripts_are_right(script: str) -> None:
    assert os.access(DOCKER / script, os.X_OK)
    done = subprocess.run([tool("shellcheck"), str(DOCKER / script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_ends_without_root(target: str) -> None:
    users = [rest for word, rest in lineage(target) if word == "USER"]
    assert users[-1] == "1000"
    (entrypoint,) = [rest for word, rest in lineage(target) if word == "ENTRYPOINT"]
    assert entrypoint == '["/opweave/docker/entrypoint.sh"]'


def test_no_build_tools_are_left() -> None:
    """They are in the stage that the environment is copied from, and in the images that say so by their name."""
    assert len(stages()) == len(set(TARGETS)) + 3
    for target in ("cpu", "cuda"):
        assert not installed(lineage(target)) & BUILD_TOOLS and installed(lineage(target)) == {"python3"}
        assert ("COPY", "--from=build /opt/venv /opt/venv") in lineage(target)
    for target in ("cpu-compiler", "cuda-compiler"):
        assert installed(lineage(target)) == {"python3", "g++", "python3-dev"}
    assert any("pip uninstall --yes pip" in rest for _, rest in stages()["build"][1])


def test_every_package_is_pinned_by_the_lock() -> None:
    commands = [rest for word, rest in stages()["build"][1] if word == "RUN" and "pip install" in rest]
    assert len(commands) == 2
    assert "--constraint requirements.lock" in commands[0] and "--no-deps --no-build-isolation" in commands[1]
    locked = {re.split(r"[=\s;]", line)[0].lower() for line in (ROOT / "requirements.lock").read_text().splitlines()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {re.split(r"[<>=\s;\[]", requirement)[0].lower() for requirement in project["dependencies"]}
    assert wanted <= locked, wanted - locked


def test_what_is_copied_is_sent_to_the_builder() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    exceptions = {rule[1:] for rule in rules if rule.startswith("!")}
    assert all((ROOT / path).exists() for path in exceptions)
    for _, rest in (i for _, instructions in stages().values() for i in instructions if i[0] == "COPY"):
        if "--from" not in rest:
            assert all(source in (*exceptions, ".") for source in rest.split()[:-1]), rest
    packages = {file.name for file in ROOT.iterdir() if (file / "__init__.py").exists()} - {"tests"}
    files = {"run.py", "opweave.py", "build_opweave.py", "LICENSE", "pyproject.toml", "requirements.lock"}
    assert packages | files | {"conf", "hydra_plugins", "docker/entrypoint.sh"} <= exceptions
    assert any(fnmatch("results/runs", rule) for rule in rules)  # nobody's own records


def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return document


@pytest.mark.parametrize("service", ["bench", "bench-cuda"])
def test_a_service_builds_an_image_and_writes_to_the_host(service: str) -> None:
    definition = compose()["services"][service]
    assert (DOCKER / definition["build"]["context"]).resolve() == ROOT
    assert (ROOT / definition["build"]["dockerfile"]).exists()
    for compiler in ("", "-compiler"):
        assert definition["build"]["target"].replace("${OPWEAVE_COMPILER:-}", compiler) in TARGETS
    (volume,) = definition["volumes"]
    host, _, inside = volume.partition(":")
    assert (DOCKER / host).resolve() == ROOT / "results"
    assert f"results={inside}/runs" in (DOCKER / "entrypoint.sh").read_text()
    assert definition["user"] == "${OPWEAVE_USER:-1000:1000}"
    assert definition["uts"] == "host"  # or each container would be a machine of its own, and measure everything anew
    devices = definition.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
    assert [d["capabilities"] for d in devices] == ([["gpu"]] if service == "bench-cuda" else [])


def test_the_entrypoint_hands_over_the_arguments(tmp_path: Path) -> None:
    """It is run for what it is, with a stand-in for Python that shows what it is given."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$TMPDIR" "$OPWEAVE_CACHE" "$@"\n')
    python.chmod(0o755)
    script = (DOCKER / "entrypoint.sh").read_text().replace("/results", str(tmp_path / "results"))
    arguments = ["-m", "model=custom", "model.factory=a b:c"]
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = ["sh", "-c", script, "entrypoint.sh", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=path, check=True)
    results = tmp_path / "results"
    places = [f"{results}/cache", f"{results}/cache/kept"]
    assert done.stdout.splitlines() == [*places, "run.py", f"results={results}/runs", *arguments]
    named = subprocess.run(command, capture_output=True, text=True, env=path | {"OPWEAVE_CACHE": "/elsewhere"}, check=True)
    assert named.stdout.splitlines()[1] == "/elsewhere"
    assert (results / "cache").is_dir()


@pytest.mark.slow  # minutes, root, 25 GB and the network
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("target", ["cpu"])
def test_every_instruction_is_carried_out_without_an_engine(target: str) -> None:
    tool("debootstrap"), tool("buildah")
    if os.getuid() != 0:
        pytest.skip("debootstrap and chroot need root")
    done = subprocess.run([str(DOCKER / "rehearse.sh"), target], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert done.stdout.splitlines()[-1].startswith(f"{target}: built, and its records are on the host")


def test_a_rehearsal_says_what_it_needs(tmp_path: Path) -> None:
    if os.getuid() != 0:
        done = subprocess.run([str(DOCKER / "rehearse.sh")], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and "must be run by root" in done.stderr
        return
    for program in ("bash", "id", "dirname"):
        (tmp_path / program).symlink_to(shutil.which(program) or "")
    environment = {"PATH": str(tmp_path)}
    done = subprocess.run([str(DOCKER / "rehearse.sh")], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2 and done.stderr == "docker/rehearse.sh needs debootstrap: apt-get install debootstrap\n"
