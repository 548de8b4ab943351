"""A system of another checkout, beside those of this one."""

import inspect
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from torch import nn

import systems
from systems.base import BadOption, Unsupported
from systems.checkout.system import ROOMS, digest_of

EAGER = "systems/pytorch/eager.py"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This checkout, but that its eager execution gives twice what it should."""
    folder = tmp_path_factory.mktemp("other")
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__", "*.gz", "*.svg", "*.csv"))
    file = folder / EAGER
    text = file.read_text(encoding="utf-8")
    file.write_text(
        text.replace("return PreparedModule(module)", "return PreparedModule(lambda *inputs: module(*inputs) * 2)"),
        encoding="utf-8",
    )
    assert file.read_text(encoding="utf-8") != text
    return folder


def state() -> tuple[dict[str, object], list[str], dict[str, str]]:
    ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ROOMS}
    return ours, list(sys.path), dict(os.environ)


def test_the_other_runs_and_leaves_ours_as_they_are(other: Path) -> None:
    module, x = nn.Linear(3, 2).eval(), torch.ones(1, 3)
    ours = systems.load("eager").prepare(module, (x,))
    before = state()
    theirs = systems.load("checkout", folder=str(other), runs="eager")
    prepared = theirs.prepare(module, (x,))
    assert state() == before
    with torch.no_grad():
        torch.testing.assert_close(prepared(x), 2 * module(x))
        torch.testing.assert_close(ours(x), module(x))
    prepared.close()
    again = theirs.prepare(module, (x,))
    torch.testing.assert_close(again(x), 2 * module(x))
    assert state() == before and type(again.prepared) is type(prepared.prepared)  # imported once


def test_a_scheduler_of_the_other_takes_settings(other: Path) -> None:
    theirs = systems.load("checkout", folder=str(other), runs="nimble", settings="multi_stream=false fold_batch_norm=true")
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    x = torch.randn(1, 3, 8, 8)
    prepared = theirs.prepare(module, (x,))
    with torch.no_grad():
        torch.testing.assert_close(prepared(x), module(x), rtol=1e-4, atol=1e-5)
    assert not isinstance(prepared.prepared, type(systems.load("nimble").prepare(module, (x,))))
    prepared.close()
    with pytest.raises(BadOption, match="fuse"):
        systems.load("checkout", folder=str(other), runs="nimble", settings="fuse=3").prepare(module, (x,))


def test_no_folder_is_told_as_unsupported() -> None:
    assert "worktree" in str(systems.load("checkout").unsupported("cpu"))


@pytest.mark.parametrize("options", [{"folder": 3}, {"settings": 0.5}])
def test_a_number_in_the_place_of_a_text_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(BadOption, match=r"is no text$"):
        systems.load("checkout", **options)


def test_a_checkout_of_flat_files_is_read_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As this project's first ones, whose conf was no package."""
    (tmp_path / "systems").mkdir()
    (tmp_path / "conf" / "system").mkdir(parents=True)
    (tmp_path / "systems" / "__init__.py").touch()
    (tmp_path / "conf" / "system" / "twice.yaml").write_text("name: multiplied\nby: 2\nplus: 1\n", encoding="utf-8")
    program = """
from types import SimpleNamespace
class Unsupported(Exception):
    pass
def load(name, by, plus):
    assert name == "multiplied"
    if by == 0:
        raise Unsupported("nothing is\\nmultiplied")
    call = lambda x: x * by + plus
    return SimpleNamespace(
        unsupported=lambda device: None,
        prepare=lambda module, inputs: SimpleNamespace(
            __call__=call, memory={"mine": 7}, close=lambda: print("closed")
        ),
    )
"""
    (tmp_path / "systems" / "registry.py").write_text(program, encoding="utf-8")
    theirs = systems.load("checkout", folder=str(tmp_path), runs="twice", settings="plus=5")
    prepared = theirs.prepare(nn.Identity(), (torch.ones(2),))
    assert prepared(torch.ones(2)).tolist() == [7.0, 7.0] and prepared.memory == {"mine": 7}
    assert theirs.learns and not capsys.readouterr().out
    of_no_module = compile("0", str(ROOT / "README.md"), "eval")
    inspect.getmodule(of_no_module)  # asks every module for its file, as torch.export does, and remembers
    with theirs._other():
        assert inspect.getmodule(of_no_module) is None
    before = state()
    with pytest.raises(Unsupported, match=r"^nothing is$"):
        systems.load("checkout", folder=str(tmp_path), runs="twice", settings="plus=5 by=0").prepare(nn.Identity(), ())
    assert state() == before
    theirs.learn(nn.Identity(), (torch.ones(2),))
    assert capsys.readouterr().out == "closed\n"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"folder": "/nowhere"}, "system.folder=/nowhere is no checkout of this project"),
        ({"runs": "nimbel"}, "system.runs=nimbel: that checkout has no conf/system/nimbel.yaml"),
        ({"settings": "a=1 b"}, "system.settings=a=1 b: b has no value: write key=value, blanks between several"),
    ],
)
def test_a_wrong_option_is_told_in_one_line(other: Path, options: dict[str, str], line: str) -> None:
    with pytest.raises(BadOption) as raised:
        systems.load("checkout", **{"folder": str(other), **options})
    assert str(raised.value) == line


def test_a_record_is_as_old_as_the_other_checkout(other: Path) -> None:
    before = digest_of(other)
    file = other / "conf" / "system" / "nimble.yaml"
    text = file.read_text(encoding="utf-8")
    try:
        file.write_text(f"{text}# more\n", encoding="utf-8")
        assert digest_of(other) != before
    finally:
        file.write_text(text, encoding="utf-8")
    (other / "systems" / "notes.txt").write_text("no code", encoding="utf-8")
    assert digest_of(other) == before
