"""What XLA keeps of a program for the next process: its translation, and what JAX has compiled."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from torch import nn

import systems
from systems.xla import system as xla

REASON = systems.load("xla").unsupported("cpu")
RUNS = pytest.mark.skipif(REASON is not None, reason=str(REASON))

KEPT = """
import json, sys
import jax
import torch
from torch import nn
import systems

jax.config.update("jax_persistent_cache_min_compile_time_secs", 7.0)
torch.manual_seed(0)
module, x = nn.Sequential(nn.Linear(3, int(sys.argv[1])), nn.Tanh()).eval(), torch.randn(4, 3)
prepared = systems.load("xla").prepare(module, (x,))
torch.testing.assert_close(prepared(x), module(x))
done = prepared.compilation
assert jax.config.jax_persistent_cache_min_compile_time_secs == 7 and jax.config.jax_compilation_cache_dir is None
print(json.dumps([done.is_exported_now, done.is_compiled_now, done.export_s, done.compile_s]))
"""


@RUNS
def test_what_is_translated_and_compiled_is_kept(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For another process, whatever the weights' values. Another program, or other options of XLA's, are translated anew."""

    def prepare(size: int) -> list[Any]:
        done = subprocess.run([sys.executable, "-c", KEPT, str(size)], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        answer: list[Any] = json.loads(done.stdout)
        return answer

    first = prepare(2)
    assert first[:2] == [True, True] and prepare(2) == [False, False, *first[2:]]
    assert prepare(5)[:2] == [True, True]
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert prepare(2)[:2] == [True, True]


@RUNS
def test_what_jax_cannot_keep_is_compiled_again(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(xla.KEEPING, "jax_enable_compilation_cache", False)
    module, x = nn.Linear(3, 2).eval(), torch.randn(4, 3)
    done = [systems.load("xla").prepare(module, (x,)).compilation for _ in range(2)]
    assert [c and (c.is_exported_now, c.is_compiled_now) for c in done] == [(True, True), (False, True)]


@RUNS
def test_learning_leaves_all_that_preparing_needs(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x, system = nn.Linear(3, 2).eval(), torch.randn(4, 3), systems.load("xla")
    assert system.learns
    system.learn(module, (x,))
    monkeypatch.setattr(xla, "translated", None)
    with torch.no_grad():
        module.weight.neg_()
    prepared = system.prepare(module, (x,))
    assert prepared.compilation is not None and not prepared.compilation.is_compiled_now
    torch.testing.assert_close(prepared(x), module(x))
