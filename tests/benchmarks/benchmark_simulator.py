"""How well the simulator predicts measured schedules, and how long it takes.

python tests/benchmarks/benchmark_simulator.py [SET.json.gz ...] [--fit]

Sets are files of `python run.py runner=profile`, by default those that are committed. --fit looks for the constants of
conf/gpu that predict the training models best, by coordinate descent, and prints them. Speed is of random graphs, the best
of three.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from time import process_time

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

from scripts.arguments import Parser
from systems.profiling.profile import Kernel, OperatorProfile, Profile
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.plans.stream_assignment import assign_streams
from systems.scheduling.simulate.baselines import baselines
from systems.scheduling.simulate.gpu import Gpu, find, load
from systems.scheduling.simulate.measured_set import MeasuredSet
from systems.scheduling.simulate.simulator import Simulator

SETS = Path(__file__).resolve().parent.parent.parent / "results" / "reference" / "simulation"
TRAINING = ("googlenet", "nasnet", "bert", "resnet50", "mobilenet_v2")
STEPS = {"sharing": 0.05, "branch_us": 0.1, "edge_us": 0.02, "dispatch_us": 0.05}  # that are fitted, and how finely
SIZES = (1_000, 5_000, 20_000)  # operators of the random graphs


def predictions(
    sets: Sequence[MeasuredSet], gpu: Gpu | None = None, state: str = "mixed"
) -> list[tuple[str, str, list[float]]]:
    """(model, system, microseconds measured, simulated, and by each baseline) of every schedule."""
    rows = []
    for measured in sets:
        device = next(iter(measured.programs.values())).profile.device
        on = gpu or find(device)
        if on is None:
            raise SystemExit(f"conf/gpu has no {device}")
        simulators = {name: Simulator(p.graph, p.profile, on, state) for name, p in measured.programs.items()}
        for each in measured.schedules:
            simulator = simulators[each.program]
            stated = baselines(each.schedule, simulator)
            figures = simulator(each.schedule).latency_us, stated.sum_us, stated.critical_path_us, stated.bound_us
            rows.append((measured.model, each.name, [mean(each.replay_ms) * 1e3, *figures]))
    return rows


def error(rows: Sequence[tuple[str, str, list[float]]], place: int = 1) -> np.ndarray:
    """Relative errors of one prediction."""
    return np.array([abs(figures[place] / figures[0] - 1) for *_, figures in rows])


def fitted(sets: Sequence[MeasuredSet], gpu: Gpu) -> Gpu:
    """The constants with the least mean error over the training models' schedules."""
    training = [s for s in sets if s.model in TRAINING]
    best, best_error = gpu, error(predictions(training, gpu)).mean()
    has_improved = True
    while has_improved:
        has_improved = False
        for name, step in STEPS.items():
            for sign in (1, -1):
                value = round(getattr(best, name) + sign * step, 3)
                if value < 0 or (name == "sharing" and value > 1):
                    continue
                candidate = replace(best, **{name: value})
                if (candidate_error := error(predictions(training, candidate)).mean()) < best_error:
                    best, best_error, has_improved = candidate, candidate_error, True
    return best


def seconds(n: int) -> float:
    """Of one core, to simulate Nimble's schedule of a random graph of n operators once warm."""
    rng = np.random.default_rng(0)
    edges = {(int(rng.integers(max(0, v - 20), v)), v) for v in range(1, n) for _ in range(2)}
    graph = OperatorGraph.from_edges(n, sorted(edges))
    kernel = Kernel("k", 0.003, (64, 1, 1), (128, 1, 1), 32, 0)
    profile = Profile("NVIDIA H200", ("k",) * n, (OperatorProfile(0.003, (kernel,), 10**5, 10**5),) * n, None)
    simulator, schedule = Simulator(graph, profile, load("h200")), assign_streams(graph)
    times = []
    for _ in range(3):
        begin = process_time()
        simulator(schedule)
        times.append(process_time() - begin)
    return min(times)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("sets", nargs="*", type=Path, metavar="SET.json.gz")
    parser.add_argument("--fit", action="store_true", help="look for constants, on the training models alone")
    arguments = parser.parse_args()
    sets = [MeasuredSet.read(file) for file in arguments.sets or sorted(SETS.glob("*.json.gz"))]
    console = Console(markup=False)
    if arguments.fit:
        best = fitted(sets, load("h200"))
        console.print(", ".join(f"{name}: {getattr(best, name)}" for name in STEPS))
    table = Table(title="Error of predicted latency, %")
    for column in ("schedules", "of", "number", "mean", "95th percentile", "sum", "critical path", "larger bound"):
        table.add_column(column)
    rows = predictions(sets)
    groups = {
        "training models": [r for r in rows if r[1] != "random" and r[0] in TRAINING],
        "other models": [r for r in rows if r[1] != "random" and r[0] not in TRAINING],
    }
    for name, chosen in groups.items():
        if chosen:
            means = [f"{error(chosen, place).mean():.1%}" for place in (1, 2, 3, 4)]
            table.add_row(
                "systems'", name, str(len(chosen)), means[0], f"{np.percentile(error(chosen), 95):.1%}", *means[1:]
            )
    console.print(table)
    for state in ("warm", "cold"):
        chosen = [r for r in predictions(sets, state=state) if r[1] != "random" and r[0] not in TRAINING]
        if chosen:
            console.print(f"all kernels {state}: mean {error(chosen).mean():.1%} of the other models")
    for measured in sets:
        drawn = [s for s in measured.schedules if s.name == "random"]
        if len(drawn) > 2:
            own = [r[2] for r in predictions([measured]) if r[1] == "random"]
            times = np.array([s.replay_ms for s in drawn])
            ceiling, correlation = (
                spearmanr(times[:, 0], times[:, 1])[0],
                spearmanr([r[0] for r in own], [r[1] for r in own])[0],
            )
            others = ", ".join(
                f"{name} {spearmanr([r[0] for r in own], [r[i] for r in own])[0]:.3f}"
                for i, name in ((3, "critical path"), (4, "larger bound"))
            )
            spread = times.max() / times.min()
            console.print(
                f"{measured.model}, batch {measured.batch}: {len(drawn)} random schedules over {spread:.2f}x, rank "
                f"correlation {correlation:.3f} (ceiling {ceiling:.4f}; {others})",
                soft_wrap=True,
            )
    for n in SIZES:
        console.print(f"{n:,} operators: {seconds(n) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
