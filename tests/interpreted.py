"""Runs functions of tests in a process in which Triton interprets kernels: it reads TRITON_INTERPRET when it is imported."""

import json
import os
import subprocess
import sys
from typing import Any

from conftest import ROOT


def interpreted(module: str, call: str) -> Any:
    """What a call gives, as JSON has it.

    Args:
        module: of tests/, which the call sees as `test`.
        call: an expression.
    """
    done = subprocess.run(
        [sys.executable, "-c", f"import json, torch, {module} as test; print(json.dumps({call}))"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
