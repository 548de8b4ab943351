"""How well runner=advise predicts what schedulers gain, on a CPU, against what was measured on an H200.

python tests/benchmarks/benchmark_advice.py [MODEL ...] [--quick] [--fit]

Each model and batch of the committed sets and of the records of the zoo is captured here, and advised twice: by the
profiles that advise takes, and by the roofline rule alone, as if nobody had measured anything. Gains are over one stream. In
sets these are replays of schedules in one process. IOS's there is of an older search by simulated costs, and it is simulated
in the place of advise's own. In records they are calls of systems in turn, over cuda_graph, and IOS's costs are measured.
--quick captures nothing: it simulates the schedules of the sets by their own profiles, which for nimble and opara are those
of advise. --fit looks for the constants of simulate/estimate.py.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import log
from pathlib import Path
from statistics import mean

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from rich.console import Console
from rich.progress import track
from rich.table import Table

from results.advice import WORTH
from results.cell import Conditions, choose, named
from results.selection import read
from results.siblings import siblings
from runners.cell.shape import shape_of
from runners.showings.advise import known_sets
from scripts.arguments import Parser
from systems.advice import SCHEDULERS, outlook
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.scheduling.simulate.alone import alone_us
from systems.scheduling.simulate.estimate import RULES, Demand, Rule, demand_of
from systems.scheduling.simulate.gpu import load
from systems.scheduling.simulate.measured_set import MeasuredSet
from systems.scheduling.simulate.simulator import Simulator
from systems.scheduling.simulate.stored import StoredOperators

REFERENCE = Path(__file__).resolve().parent.parent.parent / "results" / "reference"
TRAINING = ("googlenet", "nasnet", "bert", "resnet50", "mobilenet_v2")  # on which constants were fitted
NEAR = 0.1
IN_SETS, IN_RECORDS = "sets", "records"
BY_PROFILE, BY_RULE = "profiles", "rule"
IN_SET = {"nimble": "nimble", "opara": "opara", "ios": "ios_simulated"}


@dataclass(frozen=True)
class Gain:
    """One scheduler's gain over one stream, measured and predicted.

    Args:
        measured_in: IN_SETS or IN_RECORDS.
        predicted_by: BY_PROFILE or BY_RULE.
    """

    model: str
    batch: int
    system: str
    measured_in: str
    predicted_by: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative, with its sign."""
        return self.predicted / self.measured - 1


def measured_gains() -> dict[tuple[str, int], dict[tuple[str, str], float]]:
    """By (model, batch), and then by (IN_SETS or IN_RECORDS, system)."""
    gains: dict[tuple[str, int], dict[tuple[str, str], float]] = {}
    for file in sorted((REFERENCE / "simulation").glob("*.json.gz")):
        measured = MeasuredSet.read(file)
        latency_ms = {each.name: each.latency_ms for each in measured.schedules if each.name != "random"}
        if "sequential" in latency_ms:
            own = gains.setdefault((measured.model, measured.batch), {})
            for system, name in IN_SET.items():
                if name in latency_ms:
                    own[IN_SETS, system] = latency_ms["sequential"] / latency_ms[name]
    baseline = named("system", "cuda_graph")
    for group in siblings(read([REFERENCE / "h200" / "zoo.jsonl.gz"])):
        if group.group.conditions.arithmetic == "tf32, contiguous" and not group.group.model.changed:
            own = gains.setdefault((group.group.model.choice, group.group.conditions.batch), {})
            for system in SCHEDULERS:
                speedup = group.over(named("system", system), baseline)
                if speedup is not None:
                    own[IN_RECORDS, system] = speedup.ratio
    return gains


def captured(model: str, batch: int) -> Program:
    shape = shape_of(choose("model", model), Conditions(batch, "cpu"))
    with torch.no_grad():
        return capture(shape.module, shape.inputs)


def predicted(model: str, batch: int, measured: dict[tuple[str, str], float]) -> Iterator[Gain]:
    """What advise says of one model and batch, beside what was measured."""
    program = captured(model, batch)
    for by, sets in ((BY_PROFILE, known_sets(model, batch, program)), (BY_RULE, [])):
        wanted = {system for place, system in measured if (place, system) != (IN_SETS, "ios")}
        said = outlook(program, sets, load("h200"), systems=[system for system in SCHEDULERS if system in wanted])
        latency_ms = {forecast.system: forecast.latency_ms for forecast in said.forecasts}
        for (place, system), gain in measured.items():
            if (place, system) == (IN_SETS, "ios"):
                if sets:
                    yield Gain(model, batch, system, place, by, gain, simulated_gain(sets, IN_SET["ios"]))
            elif (own_ms := latency_ms[system]) is not None:
                yield Gain(model, batch, system, place, by, gain, said.one_stream_ms / own_ms)


def predicted_in_set(model: str, batch: int, measured: dict[tuple[str, str], float]) -> Iterator[Gain]:
    """As `predicted`, of the schedules in the model's own set alone."""
    file = REFERENCE / "simulation" / f"{model}-b{batch}.json.gz"
    sets = [MeasuredSet.read(file)] if file.is_file() else []
    for (place, system), gain in measured.items():
        if place == IN_SETS:
            yield Gain(model, batch, system, place, BY_PROFILE, gain, simulated_gain(sets, IN_SET[system]))


def simulated_gain(sets: Sequence[MeasuredSet], name: str) -> float:
    """Of a schedule in the set of a model that has one stream's too."""
    (measured,) = (each for each in sets if any(s.name == "sequential" for s in each.schedules))
    program = measured.programs["captured"]
    simulator = Simulator(program.graph, program.profile, load("h200"))
    schedules = {each.name: each.schedule for each in measured.schedules}
    return simulator(schedules["sequential"]).latency_us / simulator(schedules[name]).latency_us


def by_cell(rows: Sequence[Gain]) -> list[list[Gain]]:
    """Rows of one model and batch, measured in one place."""
    cells: dict[tuple[str, int, str], list[Gain]] = {}
    for row in rows:
        cells.setdefault((row.model, row.batch, row.measured_in), []).append(row)
    return list(cells.values())


def is_right(cell: Sequence[Gain]) -> bool:
    """Does the best of the systems gain more than WORTH where that is predicted, and nowhere else?"""
    return (max(row.predicted for row in cell) > WORTH) == (max(row.measured for row in cell) > WORTH)


def shares(rows: Sequence[Gain]) -> list[str]:
    """Within NEAR; right about WORTH; and both for whoever says that nothing gains."""
    cells = by_cell(rows)
    return [
        f"{mean(abs(row.error) <= NEAR for row in rows):.1%}",
        f"{mean(map(is_right, cells)):.1%}",
        f"{mean(abs(1 / row.measured - 1) <= NEAR for row in rows):.1%}",
        f"{mean(max(row.measured for row in cell) <= WORTH for cell in cells):.1%}",
    ]


def fitted() -> dict[str, Rule]:
    """The constants with the least mean logarithmic error over the distinct operators of the training models."""
    gpu = load("h200")
    known: dict[str, dict[str, tuple[Demand, float]]] = {kind: {} for kind in RULES}
    files = [f for f in sorted((REFERENCE / "simulation").glob("*.json.gz")) if f.name.count("-") == 1]
    for measured in track([MeasuredSet.read(f) for f in files if f.name.split("-")[0] in TRAINING], "capturing"):
        program = captured(measured.model, measured.batch)
        profile = StoredOperators([measured]).profile(program)
        for v, times_us in enumerate(alone_us(program.graph, profile, gpu)):
            if times_us:
                demand = demand_of(program, v, gpu)
                known[demand.kind][profile.signatures[v]] = demand, sum(times_us)
    return {kind: _fitted(RULES[kind], [*rows.values()]) for kind, rows in known.items() if rows}


def _fitted(rule: Rule, rows: Sequence[tuple[Demand, float]]) -> Rule:
    arithmetic_us, memory_us, measured_us = (
        np.array([getattr(demand, name) for demand, _ in rows]) if name else np.array([us for _, us in rows])
        for name in ("arithmetic_us", "memory_us", "")
    )
    best, least = rule, float("inf")
    shares = np.arange(0.04, 1.01, 0.02) if rule.share is not None else [None]
    for start_us, share, bandwidth in product(np.arange(0.5, 8.01, 0.25), shares, np.arange(0.05, 1.01, 0.05)):
        busy_us = np.maximum(arithmetic_us / share if share else 0.0, memory_us / bandwidth)
        error = float(np.abs(np.log((start_us + busy_us) / measured_us)).mean())
        if error < least - 1e-9:
            own = None if share is None else round(float(share), 2)
            best = replace(rule, start_us=round(float(start_us), 2), bandwidth=round(float(bandwidth), 2), share=own)
            least = error
    return best


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--quick", action="store_true", help="the schedules of the sets alone: seconds")
    parser.add_argument("--fit", action="store_true", help="look for the rule's constants, on the training models alone")
    arguments = parser.parse_args()
    console = Console(markup=False)
    if arguments.fit:
        for kind, rule in fitted().items():
            console.print(f"{kind}: start_us={rule.start_us}, share={rule.share}, bandwidth={rule.bandwidth}")
        return
    measured = {key: g for key, g in sorted(measured_gains().items()) if not arguments.models or key[0] in arguments.models}
    progress = track(measured.items(), "advising", console=Console(stderr=True))
    rows: list[Gain] = []
    for (model, batch), own in progress:
        new = [*(predicted_in_set if arguments.quick else predicted)(model, batch, own)]
        said = (f"{r.system} in {r.measured_in} {r.measured:.3f}, by {r.predicted_by} {r.predicted:.3f}" for r in new)
        print(f"{model} {batch}: {'; '.join(said)}", file=sys.stderr, flush=True)
        rows += new
    table = Table(
        *("measured in", "predicted by", "models", "gains", "within 10 %", "right", "none: within", "none: right"),
        title="Gains of nimble, opara and ios over one stream: within 10 % of the measured ones; right about more than 5 %",
        caption="none: what those columns were, if none were ever predicted to gain",
    )
    for place, by in product((IN_SETS, IN_RECORDS), (BY_PROFILE, BY_RULE)):
        of_kind = [row for row in rows if (row.measured_in, row.predicted_by) == (place, by)]
        for name, is_fitted in (("fitted on", True), ("others", False)):
            chosen = [row for row in of_kind if (row.model in TRAINING) == is_fitted]
            if chosen:
                table.add_row(place, by, name, str(len(chosen)), *shares(chosen))
        if of_kind:
            table.add_row(place, by, "all", str(len(of_kind)), *shares(of_kind))
    console.print(table)
    for cell in by_cell([row for row in rows if row.predicted_by == BY_PROFILE]):
        if not is_right(cell):
            best = max(row.measured for row in cell), max(row.predicted for row in cell)
            what = f"{cell[0].model} {cell[0].batch} in {cell[0].measured_in}"
            console.print(f"wrong: {what}: {best[0]:.3f} measured, {best[1]:.3f} predicted")
    for by in (BY_PROFILE,) if arguments.quick else (BY_PROFILE, BY_RULE):
        worst = sorted((row for row in rows if row.predicted_by == by), key=lambda row: -abs(log(1 + row.error)))[:10]
        headings = "model", "batch", "system", "measured in", "measured", "predicted", "error"
        table = Table(*headings, title=f"The worst ten by {by}")
        for row in worst:
            gains = f"{row.measured:.2f}", f"{row.predicted:.2f}", f"{row.error:+.1%}"
            table.add_row(row.model, str(row.batch), row.system, row.measured_in, *gains)
        console.print(table)


if __name__ == "__main__":
    main()
