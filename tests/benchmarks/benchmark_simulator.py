"""How well the simulator predicts measured schedules, and how long it takes.

python tests/benchmarks/benchmark_simulator.py [SET.json.gz ...] [--fit] [--speed]

Sets are files of `python run.py runner=profile`, by default those that are committed. --fit looks for the constants of
conf/gpu that predict the training models best, by coordinate descent, and prints them. --speed prints speed alone.

What IOS loses by simulated costs is of the committed records of `python run.py experiment=reference/ios_costs`.

Speed is of random graphs and of two models: minimum and median of some rounds, in time of this thread, which other
processes slow down nevertheless. So the load of the machine stands beside it.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from time import thread_time

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from dags import from_edges
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

from results.comparison import speedup
from results.siblings import siblings
from results.statistics import interval, resampled_medians
from results.store import Store
from scripts.arguments import Parser
from systems.profiling.profile import Kernel, OperatorProfile, Profile
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.stream_assignment import assign_streams
from systems.scheduling.simulate.alone import STATES
from systems.scheduling.simulate.baselines import baselines
from systems.scheduling.simulate.events import compiled
from systems.scheduling.simulate.gpu import Gpu, find, load
from systems.scheduling.simulate.measured_set import MeasuredSet
from systems.scheduling.simulate.simulator import Simulator
from systems.weave.search import SLOW

REFERENCE = Path(__file__).resolve().parent.parent.parent / "results" / "reference"
SETS = REFERENCE / "simulation"
IOS_COSTS = REFERENCE / "h200" / "ios-costs.jsonl.gz"  # of experiment=reference/ios_costs
TRAINING = ("googlenet", "nasnet", "bert", "resnet50", "mobilenet_v2")
# Constants that are fitted, and how finely.
STEPS = {"sharing": 0.05, "branch_us": 0.05, "edge_us": 0.02, "dispatch_us": 0.05, "join_us": 0.01}
SIZES = (1_000, 5_000, 20_000)  # operators of the random graphs
TIMED = (("nasnet", 1), ("nasnet_large", 1))  # models at a batch
ROUNDS = 9  # of each timed simulation
MIN_ROUNDS = 20  # of schedules in turn, for a ratio of two of them


@dataclass(frozen=True)
class Prediction:
    """What one schedule took and what is said of it, in microseconds.

    Args:
        name: Of the system, or "random".
        rounds_us: Measured, once or more often.
        simulated_us, sum_us, critical_path_us, bound_us: By the simulator and by the baselines.
    """

    model: str
    batch: int
    name: str
    rounds_us: tuple[float, ...]
    simulated_us: float
    sum_us: float
    critical_path_us: float
    bound_us: float

    @property
    def measured_us(self) -> float:
        return median(self.rounds_us)

    def error(self, of: str = "simulated_us") -> float:
        """Relative, with its sign."""
        return float(getattr(self, of) / self.measured_us - 1)


PREDICTORS = {"simulator": "simulated_us", "sum": "sum_us", "critical path": "critical_path_us", "larger bound": "bound_us"}


def predictions(sets: Sequence[MeasuredSet], gpu: Gpu | None = None, state: str = "mixed") -> list[Prediction]:
    """Of every schedule, in the order of the sets."""
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
            rounds_us = tuple(ms * 1e3 for ms in each.replay_ms)
            figures = simulator(each.schedule).latency_us, stated.sum_us, stated.critical_path_us, stated.bound_us
            rows.append(Prediction(measured.model, measured.batch, each.name, rounds_us, *figures))
    return rows


def mean_error(rows: Sequence[Prediction], of: str = "simulated_us") -> float:
    """Without the sign."""
    return mean(abs(row.error(of)) for row in rows)


def fitted(sets: Sequence[MeasuredSet], gpu: Gpu) -> Gpu:
    """The constants with the least mean error over the training models' schedules, random ones among them."""
    training = [s for s in sets if s.model in TRAINING]
    best, best_error = gpu, mean_error(predictions(training, gpu))
    has_improved = True
    while has_improved:
        has_improved = False
        for name, step in STEPS.items():
            for sign in (1, -1):
                value = round(getattr(best, name) + sign * step, 3)
                if value < 0 or (name == "sharing" and value > 1):
                    continue
                candidate = replace(best, **{name: value})
                if (candidate_error := mean_error(predictions(training, candidate))) < best_error:
                    best, best_error, has_improved = candidate, candidate_error, True
    return best


def spared(rows: Sequence[Prediction]) -> tuple[int, float]:
    """Of the schedules of one model in this order, what weave's rule leaves unmeasured, and what that costs.

    Returns:
        How many are simulated as SLOW times the best measured before them; the best of the others over the best of all.
    """
    best = rows[0]
    num_spared = 0
    for row in rows[1:]:
        if row.simulated_us > SLOW * best.simulated_us:
            num_spared += 1
        elif row.measured_us < best.measured_us:
            best = row
    return num_spared, best.measured_us / min(row.measured_us for row in rows) - 1


def random_program(n: int) -> tuple[Simulator, Schedule]:
    """Nimble's schedule of a random graph of n operators."""
    rng = np.random.default_rng(0)
    edges = {(int(rng.integers(max(0, v - 20), v)), v) for v in range(1, n) for _ in range(2)}
    graph = from_edges(n, sorted(edges))
    kernel = Kernel("k", 0.003, (64, 1, 1), (128, 1, 1), 32, 0)
    profile = Profile("NVIDIA H200", ("k",) * n, (OperatorProfile(0.003, (kernel,), 10**5, 10**5),) * n, None)
    return Simulator(graph, profile, load("h200")), assign_streams(graph)


def timed_programs(sets: Sequence[MeasuredSet]) -> Iterator[tuple[str, Simulator, Schedule]]:
    """Random graphs, and Nimble's and the sequential schedule of each of TIMED, by name."""
    for n in SIZES:
        yield "random, nimble", *random_program(n)
    for measured in sets:
        if (measured.model, measured.batch) in TIMED and (program := measured.programs.get("captured")):
            simulator = Simulator(program.graph, program.profile, load("h200"))
            schedules = {each.name: each.schedule for each in measured.schedules if each.program == "captured"}
            if "sequential" in schedules:  # the sets with several IOS searches have none
                for name in ("nimble", "sequential"):
                    yield f"{measured.model}, {name}", simulator, schedules[name]


def milliseconds(simulator: Simulator, schedule: Schedule) -> list[float]:
    """Of ROUNDS simulations once warm, each in the time that this thread ran."""
    simulator(schedule)
    times = []
    for _ in range(ROUNDS):
        begin = thread_time()
        simulator(schedule)
        times.append((thread_time() - begin) * 1e3)
    return times


def speed(sets: Sequence[MeasuredSet]) -> Table:
    """An event is a kernel that is dispatched, or a batch of blocks that ends."""
    by = "machine code" if compiled() is not None else "Python, since Numba is not installed"
    title = f"Speed by {by}: one thread of {os.cpu_count()} cores, {ROUNDS} rounds, load {os.getloadavg()[0]:.1f} before"
    table = Table("schedule", "operators", "kernels", "events", "minimum ms", "median ms", "ns an event", title=title)
    table.columns[0].no_wrap = True
    for name, simulator, schedule in timed_programs(sets):
        times, num_kernels = milliseconds(simulator, schedule), len(simulator.kernels.nodes)
        num_events = num_kernels + len(simulator(schedule).batches)
        counts = (f"{n:,}" for n in (len(schedule.graph), num_kernels, num_events))
        figures = (f"{min(times):.2f}", f"{median(times):.2f}", f"{min(times) * 1e6 / num_events:.0f}")
        table.add_row(name, *counts, *figures)
    table.caption = f"load {os.getloadavg()[0]:.1f} after"
    return table


def searches(measured: MeasuredSet) -> list[str]:
    """Of a set with stages of IOS: what each schedule takes over IOS's by measured costs, or over Nimble's, in the same
    rounds; and what their searches measured. A line each."""
    schedules = {each.name: each for each in measured.schedules}
    if "ios_simulated" not in schedules or len(schedules["ios_simulated"].replay_ms) < MIN_ROUNDS:
        return []
    base = "ios" if "ios" in schedules else "nimble"
    own, lines = schedules.pop(base), []
    for name, each in schedules.items():
        ratios = [one / other for one, other in zip(each.replay_ms, own.replay_ms, strict=True)]
        low, high = interval(resampled_medians(ratios))
        lines.append(f"{measured.model} {measured.batch}: {name} over {base} {median(ratios):.3f} ({low:.3f} to {high:.3f})")
    for each in (*schedules.values(), own):
        if each.search is not None:
            counts = f"{each.search.measured} stages measured, {each.search.simulated or 0} simulated alone"
            lines.append(f"{measured.model} {measured.batch}: {each.name}: {counts}")
    return lines


def costs_in_turn(pack: Path = IOS_COSTS) -> list[str]:
    """What IOS's schedules by simulated costs take over those by measured ones, in shared rounds; a line a model."""
    lines = []
    for group in siblings(Store(pack).read().records.values()):
        by_costs = {str(record.cell.system.options["costs"]): record for record in group.records.values()}
        if (ratio := speedup(by_costs["measured"], by_costs["simulated"])) is not None:
            numbers = f"{ratio.ratio:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
            lines.append(f"{group.group.model.name}: IOS by simulated over measured costs {numbers}")
    return lines


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("sets", nargs="*", type=Path, metavar="SET.json.gz")
    parser.add_argument("--fit", action="store_true", help="look for constants, on the training models alone")
    parser.add_argument("--speed", action="store_true", help="print speed alone")
    arguments = parser.parse_args()
    sets = [MeasuredSet.read(file) for file in arguments.sets or sorted(SETS.glob("*.json.gz"))]
    console = Console(markup=False)
    if arguments.speed:
        console.print(speed(sets))
        return
    if arguments.fit:
        best = fitted(sets, load("h200"))
        error = mean_error(predictions([s for s in sets if s.model in TRAINING], best))
        console.print(", ".join(f"{name}: {getattr(best, name)}" for name in STEPS), f"with a mean error of {error:.1%}")
    rows = predictions(sets)
    of_systems = [row for row in rows if row.name != "random"]
    groups = {
        "training models": [row for row in of_systems if row.model in TRAINING],
        "other models": [row for row in of_systems if row.model not in TRAINING],
    }
    table = Table(
        "of", "number", *PREDICTORS, "95th percentile", title="Mean error of predicted latency of systems' schedules"
    )
    for name, chosen in groups.items():
        if chosen:
            means = [f"{mean_error(chosen, predictor):.1%}" for predictor in PREDICTORS.values()]
            percentile = np.percentile([abs(row.error()) for row in chosen], 95)
            table.add_row(name, str(len(chosen)), *means, f"{percentile:.1%}")
    console.print(table)
    for state in STATES[1:]:
        chosen = [r for r in predictions(sets, state=state) if r.name != "random" and r.model not in TRAINING]
        if chosen:
            console.print(f"all kernels as in state {state}: mean {mean_error(chosen):.1%} of the other models")
    table = Table(
        "of",
        "number",
        "spread",
        "largest gap",
        "ceiling",
        *PREDICTORS,
        "mean error",
        title="Rank correlation, random schedules",
    )
    drawn = [s for s in sets if any(each.name == "random" for each in s.schedules)]
    for measured in drawn:
        own = [r for r in rows if (r.model, r.batch, r.name) == (measured.model, measured.batch, "random")]
        if len(own) > 2:
            times = sorted(row.measured_us for row in own)
            gap = max(b - a for a, b in pairwise(times)) / (times[-1] - times[0])
            rounds = zip(*(row.rounds_us[:2] for row in own), strict=True)
            measured_us = [row.measured_us for row in own]
            ranks = [_rank_correlation(measured_us, [getattr(row, name) for row in own]) for name in PREDICTORS.values()]
            figures = [f"{times[-1] / times[0]:.2f}x", f"{gap:.0%}", f"{_rank_correlation(*rounds):.4f}"]
            correlations = [f"{rank:.3f}" for rank in ranks]
            error = f"{mean_error(own):.1%}"
            table.add_row(f"{measured.model} {measured.batch}", str(len(own)), *figures, *correlations, error)
    console.print(table)
    table = Table("model", "batch", "schedule", "measured us", "simulated us", "error", title="The worst ten")
    for row in sorted(of_systems, key=lambda row: -abs(row.error()))[:10]:
        times_us = f"{row.measured_us:.0f}", f"{row.simulated_us:.0f}"
        table.add_row(row.model, str(row.batch), row.name, *times_us, f"{row.error():+.1%}")
    console.print(table)
    for measured in drawn:
        group = [r for r in rows if (r.model, r.batch) == (measured.model, measured.batch)]
        num_spared, loss = spared(group[::-1])  # systems' own schedules, which are among the best, come last
        console.print(f"{measured.model}: weave's rule spares {num_spared} of {len(group)} schedules and loses {loss:.1%}")
    for measured in sets:
        for line in searches(measured):
            console.print(line)
    for line in costs_in_turn():
        console.print(line)
    console.print(speed(sets))


def _rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """NaN where either is constant."""
    return float(spearmanr(one, other)[0]) if len(set(one)) > 1 < len(set(other)) else float("nan")


if __name__ == "__main__":
    main()
