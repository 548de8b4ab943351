"""runner=list: what it says of a model needs no memory for the model's weights."""

import subprocess
import sys

import pytest

KIBIBYTE, PARAMETER_BYTES = 1024, 4
ROW = """
import resource
from results.cell import Cell, Conditions, choose
from runners.showings.list import _row
cell = Cell(choose("model", "gptj_6b"), choose("system", "eager"), choose("runner", "list"), Conditions(1, "cpu"))
row = _row("gptj_6b", cell)
print(row.parameters, row.operators, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_a_row_takes_a_small_part_of_what_the_weights_would() -> None:
    answer = subprocess.run([sys.executable, "-c", ROW], capture_output=True, text=True, check=True).stdout
    parameters, operators, peak = map(int, answer.split())
    assert parameters > 6e9 and operators > 1000
    assert peak * KIBIBYTE < parameters * PARAMETER_BYTES / 4
