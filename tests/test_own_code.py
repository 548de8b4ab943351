"""The line of a person's own code that raised an error."""

import os
import runpy
from pathlib import Path

import pytest

from conf.own_code import with_own_line
from systems import load
from systems.base import BadOption


def test_an_error_of_ones_own_code_has_its_place(tmp_path: Path) -> None:
    (tmp_path / "own_model.py").write_text("import json\ndef wrong():\n\n    return json.loads('{')\n")
    space = runpy.run_path(str(tmp_path / "own_model.py"))
    try:
        try:
            space["wrong"]()
        except ValueError as error:
            raise RuntimeError("of it") from error
    except RuntimeError as error:
        error.__traceback__ = None  # of this file, which is one's own too
        message = with_own_line("it failed", error)
        assert message == f"it failed ({os.path.relpath(tmp_path / 'own_model.py')}:4)" == with_own_line(message, error)
    assert with_own_line("it failed", ValueError("raised nowhere")) == "it failed"
    with pytest.raises(BadOption) as caught:
        load("weave", budget_s=-1)
    caught.value.__traceback__ = caught.value.__traceback__ and caught.value.__traceback__.tb_next
    assert with_own_line("it failed", caught.value) == "it failed"
