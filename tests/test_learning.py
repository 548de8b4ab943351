"""Learning apart from preparing: what one process measures, another reads."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from torch import Tensor, nn

import systems
from systems.notice import Notice

pytestmark = pytest.mark.usefixtures("cache_folder")


class Branches(nn.Module):
    def __init__(self, kernel: int = 3) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).relu() + self.b(x).relu()


def prepared_notices(choice: str, module: nn.Module, x: Tensor, **options: bool) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        systems.load(choice, **options).prepare(module, (x,)).close()
    return [str(w.message) for w in caught if issubclass(w.category, Notice)]


@pytest.mark.parametrize(("choice", "options"), [("ios_parallel", {}), ("opara", {}), ("nimble", {"select_kernels": True})])
def test_what_was_learned_is_not_measured_again(choice: str, options: dict) -> None:
    module, x = Branches().eval(), torch.randn(1, 4, 8, 8)
    (notice,) = prepared_notices(choice, Branches(5).eval(), x, **options)
    assert notice.startswith("learned in place: the cache lacked ")
    systems.load(choice, **options).learn(module, (x,))
    assert prepared_notices(choice, module, x, **options) == []


@pytest.mark.parametrize(("cache", "told"), [("", 0), ("/proc/opweave", 1)])
@pytest.mark.slow
def test_python_is_told_only_what_one_can_act_on(tmp_path: Path, cache: str, told: int) -> None:
    """A process of its own, whose filters nobody has changed."""
    program = (
        "import opweave, torch; module, x = torch.nn.Conv2d(4, 4, 1), torch.randn(1, 4, 8, 8)\n"
        "opweave.load('nimble', select_kernels=True).prepare(module, (x,)).close()"
    )
    variables = os.environ | {"OPWEAVE_CACHE": cache or str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=variables, capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stderr.splitlines() if "Notice" in line or "Caution" in line]
    assert len(lines) == told and all("/proc/opweave cannot be written (No such file" in line for line in lines)


@pytest.mark.parametrize(("choice", "told"), [("ios_parallel", 2), ("onnxruntime", 1)])
def test_a_cache_that_cannot_be_written_is_told_once_and_nothing_contradicts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str, told: int
) -> None:
    """A file lies where the folder would: nobody can write there, not even root."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OPWEAVE_CACHE", str(tmp_path / "file"))
    notices = dict.fromkeys(prepared_notices(choice, Branches(5).eval(), torch.randn(1, 4, 8, 8)))
    lost = [line for line in notices if "cannot be written" in line]
    assert len(lost) == 1 and "is lost at this process's end" in lost[0] and len(notices) == told, notices
    assert "set OPWEAVE_CACHE to a folder that can be written" in lost[0]
    assert not any("next one reads" in line for line in notices)


@pytest.mark.parametrize(
    ("choice", "options", "learns"),
    [
        ("eager", {}, False),
        ("nimble", {}, False),
        ("nimble", {"fold_batch_norm": True, "fuse_elementwise": True}, False),
        *(
            ("nimble", {switch: True}, True)
            for switch in ("merge_linears", "select_kernels", "select_products", "select_layouts")
        ),
        *(("nimble", {switch: True}, True) for switch in ("fuse_convolution", "fuse_reductions")),
        ("ios", {}, True),
        ("ios_merge", {}, True),
        ("greedy", {}, False),
        ("sequential", {}, False),
        ("opara", {}, True),
        ("opara", {"launch_order": "depth_first"}, False),
        ("opara_fused", {"launch_order": "depth_first"}, True),
    ],
)
def test_a_system_learns_where_it_measures(choice: str, options: dict, learns: bool) -> None:
    assert systems.load(choice, **options).learns == learns


def test_ios_searches_once_for_what_a_search_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Branches().eval(), torch.randn(1, 4, 8, 8)
    searched = systems.load("ios").schedule(module, (x,))
    assert searched.search.measured
    with monkeypatch.context() as patch:
        patch.setattr("systems.ios.system.find_stages", lambda *_: pytest.fail("searched again"))
        assert systems.load("ios").schedule(module, (x,)) == searched
        assert systems.load("ios", barriers=False).schedule(module, (x,)).stages == searched.stages
        for options in ({"s": 1}, {"strategy": "parallel"}, {"units": "operator"}, {"exhaustive": True}):
            with pytest.raises(pytest.fail.Exception, match="searched again"):
                systems.load("ios", **options).schedule(module, (x,))
        with pytest.raises(pytest.fail.Exception, match="searched again"):
            systems.load("ios").schedule(module, (torch.randn(2, 4, 8, 8),))
        patch.setattr("systems.ios.stored.code_of", lambda *_: "of another version")
        with pytest.raises(pytest.fail.Exception, match="searched again"):
            systems.load("ios").schedule(module, (x,))


class Wired(nn.Module):
    """Two convolutions of the first input, or of one input each: operators and edges are the same."""

    def __init__(self, is_shared: bool) -> None:
        super().__init__()
        self.a, self.b, self.is_shared = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), is_shared

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.a(x) + self.b(x if self.is_shared else y)


def test_ios_tells_models_apart_that_differ_in_their_wiring_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = torch.randn(1, 4, 8, 8), torch.randn(1, 4, 8, 8)
    systems.load("ios_merge").learn(Wired(True).eval(), inputs)
    monkeypatch.setattr("systems.ios.system.find_stages", lambda *_: pytest.fail("searched again"))
    systems.load("ios_merge").schedule(Wired(True).eval(), inputs)
    with pytest.raises(pytest.fail.Exception, match="searched again"):
        systems.load("ios_merge").schedule(Wired(False).eval(), inputs)
