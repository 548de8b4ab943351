"""How long scheduling takes: Nimble's and Opara's algorithms on captured models and random graphs of up to 20,000 operators.

python tests/benchmarks/benchmark_scheduling.py [SCHEDULE.json ...] [--zoo [MODEL ...]]

Schedule files (from `python run.py runner=schedule model=... output=FILE`) stand for captured models, as passes left them;
--zoo captures models of the zoo at batch 1, all of them if none is named, in a minute or two. Without either only random
graphs are scheduled. Times are the best of five, on one core, of the algorithm alone: Nimble's with its waits,
Opara's (its table I) without and with the search for the waits that are needed.
"""

import json
import random
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from dags import from_edges
from rich.console import Console
from rich.table import Table

import models
from scripts.arguments import Parser
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.stream_allocator import allocate_streams, needed_waits
from systems.scheduling.plans.stream_assignment import assign_streams
from systems.scheduling.plans.verify import verify

REPEATS = 5
SIZES = (5_000, 10_000, 20_000)  # operators of the random graphs


def random_graph(n: int, degree: int, reach: int, seed: int = 0) -> OperatorGraph:
    """n operators, each with up to `degree` producers among the `reach` operators before it."""
    chance = random.Random(seed)
    edges = {(chance.randrange(max(0, v - reach), v), v) for v in range(1, n) for _ in range(chance.randint(1, degree))}
    return from_edges(n, sorted(edges))


def best_of(function: Callable[[OperatorGraph], object], graph: OperatorGraph) -> float:
    """Seconds of the fastest of REPEATS calls, each on a graph that has computed nothing of itself yet."""
    times = []
    for _ in range(REPEATS):
        fresh = OperatorGraph(graph.operators, graph.predecessors)  # a graph keeps its minimum equivalent and its width
        start = perf_counter()
        function(fresh)
        times.append(perf_counter() - start)
    return min(times)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("schedules", nargs="*", type=Path, metavar="SCHEDULE.json")
    parser.add_argument("--zoo", nargs="*", metavar="MODEL", help="models to capture, all if none is named")
    arguments = parser.parse_args()
    graphs: list[tuple[str, OperatorGraph]] = []
    for file in arguments.schedules:
        try:
            document = json.loads(file.read_text())
            graph = Schedule.from_json(document).graph
            graphs.append((f"{document['model']} ({file.name})", graph))
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.unreadable(file, error)
    if arguments.zoo is not None:
        with Console(stderr=True).status("capturing") as status:
            for name in arguments.zoo or models.names():
                status.update(f"capturing {name}")
                try:
                    model = models.load(name, 1, device="meta")
                except models.BadModel as error:
                    parser.error(str(error))
                graphs.append((name, capture(model.module, model.inputs).graph))
    graphs.append(("random, local", random_graph(1_300, 3, 20)))
    for n in SIZES:
        graphs.append((f"random, local, {n:,}", random_graph(n, 3, 50)))
        graphs.append((f"random, {n:,}", random_graph(n, 8, n)))
    table = Table(title="Streams and waits; milliseconds of Nimble's assignment, Opara's allocation, the proof, the width")
    for column in (
        *("graph", "operators", "edges", "width"),
        *("streams: Nimble", "streams: Opara", "waits: Nimble", "waits: Opara"),
        *("Nimble", "Opara", "Opara with waits", "verify", "width", "peak MiB"),
    ):
        table.add_column(column, justify="left" if column == "graph" else "right", no_wrap=column == "graph")
    for name, graph in graphs:
        schedule = assign_streams(graph)
        streams = allocate_streams(graph)
        counts = (
            *(len(graph), len(graph.edges), graph.width),
            *(schedule.stream_count, max(streams) + 1, len(schedule.waits), len(needed_waits(graph, streams))),
        )
        times = (
            best_of(assign_streams, graph),
            best_of(allocate_streams, graph),
            best_of(lambda g: needed_waits(g, allocate_streams(g)), graph),
            best_of(lambda g, s=schedule: verify(g, s), graph),  # type: ignore[misc]
            best_of(lambda g: g.width, graph),
        )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        table.add_row(name, *(f"{x:,}" for x in counts), *(f"{t * 1e3:.2f}" for t in times), f"{peak:,.0f}")
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
