"""What a call takes to compare its inputs with the prepared ones before it launches anything.

python tests/benchmarks/benchmark_inputs.py

`in Python` is check_inputs of systems/scheduling/graph/program.py. `by form` is InputForm of input_check.py there: a call
asks it whether its inputs have the form of the last call's. Microseconds on the host, the least of several turns. Needs
no GPU.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch

from scripts.arguments import Parser
from systems.scheduling.graph.input_check import InputForm
from systems.scheduling.graph.program import check_inputs

INPUTS = {"an image": [(1, 3, 224, 224)], "a recommender's row": [(1, 13), *[(1,)] * 26]}
TURNS, CALLS = 9, 2000


def microseconds(call: Callable[[], object]) -> float:
    """A call's, in the turn that took the least."""
    turns = []
    for _ in range(TURNS):
        begin = perf_counter()
        for _ in range(CALLS):
            call()
        turns.append((perf_counter() - begin) / CALLS * 1e6)
    return min(turns)


def main() -> int:
    Parser(__doc__).parse_args()
    for name, shapes in INPUTS.items():
        prepared, inputs = ([torch.rand(shape) for shape in shapes] for _ in range(2))
        form = InputForm(prepared)
        assert form.is_of(inputs)
        in_python = microseconds(lambda x=inputs, y=prepared: check_inputs(x, y))  # type: ignore[misc]
        by_form = microseconds(lambda x=inputs, form=form: form.is_of(x))  # type: ignore[misc]
        print(f"{name}, {len(inputs)} inputs: in Python {in_python:.1f} us, by form {by_form:.1f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
