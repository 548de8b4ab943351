"""Compiled kernels as data, for a GPU that need not be there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from systems.kernels.binaries import Binary

# Compiles one kernel for an H100, in a process of its own: this one's may have compiled it before.
SCRIPT = """
import json, sys, torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from systems.kernels.binaries import Binary
from systems.kernels.compiling import Job, _Driver
from systems.kernels.dense import Dense, DenseTile

driver.set_active(_Driver(GPUTarget("cuda", 90, 32)))
tile = DenseTile(16, 16, 16, warps=4, stages=2)
kernel = Dense((1, 1), (1, 1), (0, 0), (1, 1), "none", "relu", "tf32", False, tile)
tensors = [torch.empty(1, 16, 4, 4, device="meta"), torch.empty(16, 16, device="meta"), None, None, None]
document = json.load(sys.stdin)
if document is not None:
    def refused(*_, **__): raise SystemExit("it is compiled again")
    CUDABackend.add_stages = refused
    if document:
        Binary.from_json(document).put()
        Binary.from_json(document).put()
binary = Binary.of(kernel, tensors)
print(json.dumps(binary.to_json()))
"""


def compiled(folder: Path, document: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("TRITON_INTERPRET", None)
    arguments = [sys.executable, "-c", SCRIPT]
    return subprocess.run(arguments, input=json.dumps(document), capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_a_binary_stands_in_for_compiling(tmp_path: Path) -> None:
    first = compiled(tmp_path / "first", None)
    assert first.returncode == 0, first.stderr
    document = json.loads(first.stdout)
    assert Binary.from_json(document).code.startswith(b"\x7fELF") and document[1] == "_dense"
    again = compiled(tmp_path / "second", document)
    assert again.returncode == 0 and json.loads(again.stdout) == document, again.stderr
    assert not list((tmp_path / "second").rglob("*.ptx"))
    without = compiled(tmp_path / "third", [])
    assert without.returncode == 1 and "it is compiled again" in without.stderr


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
