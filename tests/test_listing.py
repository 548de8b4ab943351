"""runner=list: what it says of a model needs no memory for the model's weights."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import models
import systems
from results.cell import Cell, Conditions, choose
from runners.cell.shape import shape_of
from runners.showings import list as listing

KIBIBYTE, PARAMETER_BYTES = 1024, 4
ROW = """
import resource
from results.cell import Cell, Conditions, choose
from runners.showings.list import _row
cell = Cell(choose("model", "gptj_6b"), choose("system", "eager"), choose("runner", "list"), Conditions(1, "cpu"))
row = _row("gptj_6b", cell)
print(row.parameters, row.operators, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_forks_make_the_rows_and_each_is_its_models(monkeypatch: pytest.MonkeyPatch) -> None:
    names, forks, phases = ["gpt", "ios_sample", "squeezenet"], [], []
    cell = Cell(choose("model", "gpt"), choose("system", "eager"), choose("runner", "list"), Conditions(1, "cpu"))
    monkeypatch.setattr(models, "names", lambda: names)
    monkeypatch.setattr(systems, "names", lambda: ["eager"])
    monkeypatch.setattr(listing.environment, "cores", lambda: 2)
    fork = os.fork
    monkeypatch.setattr(os, "fork", lambda: forks.append(1) or fork())
    shown = listing.List(cell.runner).show(cell, "0", phases.append)
    assert [row["model"] for row in shown["models"]] == names and len(forks) == 2
    assert phases == [f"{name} ({i} of 3)" for i, name in enumerate(names, 1)]
    forks.clear()
    own = [listing._row(name, replace(cell, model=choose("model", name))) for name in names]
    assert shown["models"] == list(listing.part_to_json(listing.Catalogue(tuple(own), ()))["models"]) and not forks


@pytest.mark.parametrize(("name", "parameters"), [("t5", 60_506_624), ("gpt2", 124_439_808)])
def test_weights_that_an_embedding_and_a_head_share_count_once(name: str, parameters: int) -> None:
    """As `models.count` has them of the model itself."""
    cell = Cell(choose("model", name), choose("system", "eager"), choose("runner", "list"), Conditions(1, "cpu"))
    assert listing._row(name, cell).parameters == parameters


def test_a_shape_keeps_what_is_shared() -> None:
    """With what will run it and with what only captures it."""
    for runs in (True, False):
        module = shape_of(choose("model", "gpt2"), Conditions(1, "cpu"), runs=runs).module
        own = models.load("gpt2", 1, device="meta").module
        shared = [
            {name for name, p in m.named_parameters(remove_duplicate=False)} - {name for name, _ in m.named_parameters()}
            for m in (module, own)
        ]
        assert shared[0] == shared[1] != set()


def test_a_catalogue_that_cannot_be_kept_says_what_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cache").write_text("")  # a file where the folder would be
    listing._keep(tmp_path / "cache" / "catalogue-cpu.json", {}, {})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"opweave: {tmp_path / 'cache'} cannot be written (")
    assert line.endswith("so the next runner=list takes as long: make that folder writable")


@pytest.mark.slow
def test_a_row_takes_a_small_part_of_what_the_weights_would() -> None:
    answer = subprocess.run([sys.executable, "-c", ROW], capture_output=True, text=True, check=True).stdout
    parameters, operators, peak = map(int, answer.split())
    assert parameters > 6e9 and operators > 1000
    assert peak * KIBIBYTE < parameters * PARAMETER_BYTES / 4
