"""Compiled kernels as data, for a GPU that need not be there, and who comes to execute them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from systems.kernels.binaries import Binary, _key

# Compiles one kernel for an H100, in a process of its own: this one's may have compiled it before. Prints the binary.
SCRIPT = """
import json, sys, torch
from dataclasses import replace
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from systems.kernels.binaries import Binary, Library, Stored
from systems.kernels.compiling import _Driver
from systems.kernels.dense import Dense, DenseTile

driver.set_active(_Driver(GPUTarget("cuda", 90, 32)))
tile = DenseTile(16, 16, 16, warps=4, stages=2)
kernel = Dense((1, 1), (1, 1), (0, 0), (1, 1), "none", "relu", "tf32", False, tile)
tensors = [torch.empty(1, 16, 4, 4, device="meta"), torch.empty(16, 16, device="meta"), None, None, None]
what, documents = json.load(sys.stdin)
binaries = [Binary.from_json(document) for document in documents]
if what == "refuse":
    def refused(*_, **__): raise SystemExit("it is compiled again")
    CUDABackend.add_stages = refused
library = Library(binaries)
stored = Stored(kernel, library)
if what == "early":
    stored = replace(stored, is_early=True)
stored.compile(*tensors)
stored.compile(*tensors)
own = library.collected()
if what == "alter":
    others = [kernel.compile(*tensors).asm["cubin"], Library().compile(kernel.launch(*tensors)).asm["cubin"]]
    assert stored.compile(*tensors).asm["cubin"] == binaries[0].code and stored.compile(*tensors).src.fn.fn is not None
    assert binaries[0].code not in others and others[0] == others[1]
print(json.dumps([binary.to_json() for binary in own]))
"""


def compiled(folder: Path, what: str, documents: list[list[str]]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("TRITON_INTERPRET", None)
    arguments = [sys.executable, "-c", SCRIPT]
    return subprocess.run(arguments, input=json.dumps([what, documents]), capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The binary of the script's kernel."""
    first = compiled(tmp_path_factory.mktemp("first"), "compile", [])
    assert first.returncode == 0, first.stderr
    (made,) = json.loads(first.stdout)
    return made  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_binary_stands_in_for_compiling_and_leaves_nothing(document: list[str], tmp_path: Path) -> None:
    assert Binary.from_json(document).code.startswith(b"\x7fELF") and document[1] == "_dense"
    again = compiled(tmp_path / "second", "refuse", [document])
    assert again.returncode == 0 and not list((tmp_path / "second").rglob("*.*")), again.stderr
    without = compiled(tmp_path / "third", "refuse", [])
    assert without.returncode == 1 and "it is compiled again" in without.stderr


@pytest.mark.slow
def test_a_kernel_that_is_launched_early_is_another(document: list[str], tmp_path: Path) -> None:
    early = compiled(tmp_path, "early", [document])
    assert early.returncode == 0, early.stderr
    ((key, *_),) = json.loads(early.stdout)
    assert key != document[0] and list(tmp_path.rglob("*.cubin"))


@pytest.mark.slow
def test_a_plan_changes_no_kernel_of_others(document: list[str], tmp_path: Path) -> None:
    """Code that somebody altered is its library's alone: neither the kernel itself nor another library comes to it."""
    binary = Binary.from_json(document)
    altered = Binary(binary.key, binary.name, binary.metadata, binary.code + b"altered").to_json()
    done = compiled(tmp_path / "one", "alter", [altered])
    assert done.returncode == 0, done.stderr
    files = list((tmp_path / "one").rglob("*.cubin"))
    assert [file.read_bytes() for file in files] == [binary.code]  # the kernel's own


@pytest.mark.parametrize(
    ("place", "value"), [(0, "../../x"), (0, "A" * 64), (1, "../x"), (1, ""), (3, "no code"), (3, "AAAA")]
)
def test_a_binary_names_no_other_file(place: int, value: str) -> None:
    document = Binary("0" * 64, "_dense", "{}", b"code").to_json()
    assert Binary.from_json(document) == Binary("0" * 64, "_dense", "{}", b"code")
    document[place] = value
    with pytest.raises(ValueError):
        Binary.from_json(document)
    with pytest.raises(ValueError):
        Binary.from_json(document[:3])


def test_a_key_is_of_the_source_the_target_and_the_options_but_of_no_file() -> None:
    """The library that is linked lies elsewhere on another machine, and a plan is executed there."""

    class Source(str):
        def hash(self) -> str:
            return str(self)

    options = {"num_warps": 4, "extern_libs": (("libdevice", "/one/libdevice.10.bc"),)}
    key = _key(Source("one"), "cuda:90", options)
    assert key == _key(Source("one"), "cuda:90", options | {"extern_libs": (("libdevice", "/other/libdevice.10.bc"),)})
    others = [
        _key(Source("other"), "cuda:90", options),
        _key(Source("one"), "cuda:80", options),
        _key(Source("one"), "cuda:90", options | {"num_warps": 8}),
        _key(Source("one"), "cuda:90", options | {"num_stages": 2}),
    ]
    assert len({key, *others}) == 5
