"""How long scheduling takes: Nimble's algorithm on a captured model and on random graphs of up to 20,000 operators.

python scripts/benchmark_scheduling.py [SCHEDULE.json ...]

Schedule files (from `python run.py runner=schedule model=... output=FILE`) stand for captured models; without one, only
random graphs are scheduled. Times are the best of five, on one core, of the algorithm alone.
"""

import argparse
import json
import random
import resource
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table

from systems.nimble.stream_assignment import assign_streams
from systems.scheduling.operator_graph import OperatorGraph
from systems.scheduling.schedule import Schedule
from systems.scheduling.verify import verify

REPEATS = 5


def random_graph(n: int, degree: int, reach: int, seed: int = 0) -> OperatorGraph:
    """n operators, each with up to `degree` producers among the `reach` operators before it."""
    chance = random.Random(seed)
    edges = {(chance.randrange(max(0, v - reach), v), v) for v in range(1, n) for _ in range(chance.randint(1, degree))}
    return OperatorGraph.from_edges(n, sorted(edges))


def best_of(function: Callable[[], object]) -> float:
    """Seconds of the fastest of REPEATS calls."""
    times = []
    for _ in range(REPEATS):
        start = perf_counter()
        function()
        times.append(perf_counter() - start)
    return min(times)


def fresh(graph: OperatorGraph) -> OperatorGraph:
    """The same graph with nothing computed yet: it caches its minimum equivalent graph and its width."""
    return OperatorGraph(graph.operators, graph.predecessors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedules", nargs="*", type=Path, metavar="SCHEDULE.json")
    arguments = parser.parse_args()
    graphs = {}
    for file in arguments.schedules:
        try:
            document = json.loads(file.read_text())
            graphs[f"{document['model']}, captured"] = Schedule.from_json(document).graph
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"{file}: {error}")
    graphs["random, local"] = random_graph(1_300, 3, 20)
    for n in (5_000, 10_000, 20_000):
        graphs[f"random, local, {n:,}"] = random_graph(n, 3, 50)
        graphs[f"random, {n:,}"] = random_graph(n, 8, n)
    table = Table(title="Nimble's stream assignment (Algorithm 1), proof and width")
    for column in (
        "graph",
        "operators",
        "edges",
        "streams",
        "waits",
        "width",
        "assign ms",
        "verify ms",
        "width ms",
        "peak MiB",
    ):
        table.add_column(column, justify="left" if column == "graph" else "right")
    for name, graph in graphs.items():
        schedule = assign_streams(graph)
        times = (
            best_of(lambda g=graph: assign_streams(fresh(g))),  # type: ignore[misc]
            best_of(lambda g=graph, s=schedule: verify(g, s)),  # type: ignore[misc]
            best_of(lambda g=graph: fresh(g).width),  # type: ignore[misc]
        )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        table.add_row(
            name,
            *(f"{x:,}" for x in (len(graph), len(graph.edges), schedule.stream_count, len(schedule.waits), graph.width)),
            *(f"{t * 1e3:.1f}" for t in times),
            f"{peak:,.0f}",
        )
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
