"""How well runner=advise predicts what schedulers gain, on a CPU, against what was measured on an H200.

python tests/benchmarks/benchmark_advice.py [MODEL ...] [--quick] [--fit]

Each model, batch and precision of the committed sets and of the records of the zoo and of today's networks is captured
here, and advised twice: by the profiles that advise takes, and by the roofline rule alone, as if nobody had measured
anything. Gains are over one stream. In sets these are replays of schedules in one process. An `ios_simulated` there is of an
older search by simulated costs, and it is simulated in the place of advise's own; an `ios` is by measured costs. In records
they are calls of systems in turn, over cuda_graph, and IOS's costs are measured. --quick captures nothing: it simulates the
schedules of the sets by their own profiles, which for nimble and opara are those of advise. --fit looks for the constants
of simulate/estimate.py.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import inf, isfinite, log
from pathlib import Path
from statistics import mean

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from rich.console import Console
from rich.progress import track
from rich.table import Table

import conf
from results.advice import WORTH
from results.cell import Conditions, choose, named
from results.selection import read
from results.siblings import siblings
from runners.cell.arithmetic import set_arithmetic
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
IN_SET = {"nimble": ("nimble",), "opara": ("opara",), "ios": ("ios_simulated", "ios")}  # of which a set has one at most
OLDER = "ios_simulated"
PRECISIONS = ("fp16", "bf16")  # other than tf32: the end of the name of a set's file
PACKS = ("zoo", "today")


@dataclass(frozen=True, order=True)
class Setting:
    """What is captured."""

    model: str
    batch: int
    precision: str

    def __str__(self) -> str:
        return f"{self.model} {self.batch} {self.precision}"


@dataclass(frozen=True)
class Gain:
    """One scheduler's gain over one stream, measured and predicted.

    Args:
        measured_in: IN_SETS or IN_RECORDS.
        predicted_by: BY_PROFILE or BY_RULE.
        predicted: None where advise has no forecast, as of IOS where its search takes too long.
    """

    setting: Setting
    system: str
    measured_in: str
    predicted_by: str
    measured: float
    predicted: float | None

    @property
    def error(self) -> float:
        """Relative, with its sign; infinite without a forecast."""
        return inf if self.predicted is None else self.predicted / self.measured - 1


@cache
def sets_of_systems() -> dict[Setting, MeasuredSet]:
    """The committed sets that have a schedule of one stream, to which gains refer."""
    sets = {}
    for file in sorted((REFERENCE / "simulation").glob("*.json.gz")):
        measured = MeasuredSet.read(file)
        if any(each.name == "sequential" for each in measured.schedules):
            end = file.name.removesuffix(".json.gz").rpartition("-")[2]
            sets[Setting(measured.model, measured.batch, end if end in PRECISIONS else "tf32")] = measured
    return sets


def name_in(measured: MeasuredSet, system: str) -> str | None:
    """Of a system's schedule in a set."""
    names = {each.name for each in measured.schedules}
    return next((name for name in IN_SET[system] if name in names), None)


def measured_gains() -> dict[Setting, dict[tuple[str, str], float]]:
    """And then by (IN_SETS or IN_RECORDS, system)."""
    gains: dict[Setting, dict[tuple[str, str], float]] = {}
    for setting, measured in sets_of_systems().items():
        latency_ms = {each.name: each.latency_ms for each in measured.schedules}
        for system in SCHEDULERS:
            if (name := name_in(measured, system)) is not None:
                gains.setdefault(setting, {})[IN_SETS, system] = latency_ms["sequential"] / latency_ms[name]
    baseline = named("system", "cuda_graph")
    for group in siblings(read([REFERENCE / "h200" / f"{pack}.jsonl.gz" for pack in PACKS])):
        conditions = group.group.conditions
        if conditions.arithmetic == f"{conditions.precision}, contiguous" and not group.group.model.changed:
            for system in SCHEDULERS:
                speedup = group.over(named("system", system), baseline)
                if speedup is not None:
                    setting = Setting(group.group.model.choice, conditions.batch, conditions.precision)
                    gains.setdefault(setting, {})[IN_RECORDS, system] = speedup.ratio
    return gains


def captured(setting: Setting) -> Program:
    """As torch rounds by then."""
    set_arithmetic(setting.precision, "heuristic")
    shape = shape_of(choose("model", setting.model), Conditions(setting.batch, "cpu", setting.precision), runs=False)
    with torch.no_grad():
        return capture(shape.module, shape.inputs)


def predicted(setting: Setting, measured: dict[tuple[str, str], float]) -> Iterator[Gain]:
    """What advise says of one setting, beside what was measured."""
    program = captured(setting)
    own_set = sets_of_systems().get(setting)
    is_older = own_set is not None and name_in(own_set, "ios") == OLDER
    for by, sets in ((BY_PROFILE, known_sets(setting.model, setting.batch, program)), (BY_RULE, [])):
        wanted = {system for place, system in measured if not (is_older and (place, system) == (IN_SETS, "ios"))}
        said = outlook(program, sets, load("h200"), systems=[system for system in SCHEDULERS if system in wanted])
        latency_ms = {forecast.system: forecast.latency_ms for forecast in said.forecasts}
        for (place, system), gain in measured.items():
            if is_older and (place, system) == (IN_SETS, "ios"):
                if own_set is not None and sets:
                    yield Gain(setting, system, place, by, gain, simulated_gain(own_set, OLDER))
            else:
                own_ms = latency_ms[system]
                yield Gain(setting, system, place, by, gain, own_ms and said.one_stream_ms / own_ms)


def predicted_in_set(setting: Setting, measured: dict[tuple[str, str], float]) -> Iterator[Gain]:
    """As `predicted`, of the schedules in the setting's own set alone."""
    own_set = sets_of_systems().get(setting)
    for (place, system), gain in measured.items():
        if place == IN_SETS and own_set is not None and (name := name_in(own_set, system)) is not None:
            yield Gain(setting, system, place, BY_PROFILE, gain, simulated_gain(own_set, name))


def simulated_gain(measured: MeasuredSet, name: str) -> float:
    """Of a schedule in a set that has one stream's too."""
    simulated_us = {}
    for each in measured.schedules:
        if each.name in ("sequential", name):
            program = measured.programs[each.program]
            simulated_us[each.name] = Simulator(program.graph, program.profile, load("h200"))(each.schedule).latency_us
    return simulated_us["sequential"] / simulated_us[name]


def by_cell(rows: Sequence[Gain]) -> list[list[Gain]]:
    """Rows of one setting, measured in one place."""
    cells: dict[tuple[Setting, str], list[Gain]] = {}
    for row in rows:
        cells.setdefault((row.setting, row.measured_in), []).append(row)
    return list(cells.values())


def is_right(cell: Sequence[Gain]) -> bool:
    """Does the best of the systems gain more than WORTH where that is predicted of one, and nowhere else?"""
    return (most_predicted(cell) > WORTH) == (max(row.measured for row in cell) > WORTH)


def most_predicted(cell: Sequence[Gain]) -> float:
    """Of those that have a forecast; 1 of none."""
    return max((row.predicted for row in cell if row.predicted is not None), default=1.0)


def shares(rows: Sequence[Gain]) -> list[str]:
    """Gains within NEAR, as none without a forecast is; settings of which all are; right about WORTH; and for whoever says
    that nothing gains."""
    cells = by_cell(rows)
    return [
        str(len(cells)),
        str(len(rows)),
        f"{mean(abs(row.error) <= NEAR for row in rows):.1%}",
        f"{mean(all(abs(row.error) <= NEAR for row in cell) for cell in cells):.1%}",
        f"{mean(map(is_right, cells)):.1%}",
        f"{mean(abs(1 / row.measured - 1) <= NEAR for row in rows):.1%}",
        f"{mean(max(row.measured for row in cell) <= WORTH for cell in cells):.1%}",
    ]


def in_words(gain: float | None) -> str:
    """A predicted gain."""
    return "nothing" if gain is None else f"{gain:.3f}"


def fitted() -> dict[str, Rule]:
    """The constants with the least mean logarithmic error over the distinct operators of the training models."""
    gpu = load("h200")
    known: dict[str, dict[str, tuple[Demand, float]]] = {kind: {} for kind in RULES}
    training = [(setting, measured) for setting, measured in sets_of_systems().items() if setting.model in TRAINING]
    for setting, measured in track(training, "capturing"):
        program = captured(setting)
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
    measured = dict(sorted(measured_gains().items()))
    for model in arguments.models:
        if wrong := conf.not_one_of("MODEL", model, sorted({of.model for of in measured})):
            parser.error(wrong)
    measured = {of: g for of, g in measured.items() if not arguments.models or of.model in arguments.models}
    progress = track(measured.items(), "advising", console=Console(stderr=True))
    rows: list[Gain] = []
    for setting, own in progress:
        new = [*(predicted_in_set if arguments.quick else predicted)(setting, own)]
        said = (f"{r.system} in {r.measured_in} {r.measured:.3f}, by {r.predicted_by} {in_words(r.predicted)}" for r in new)
        print(f"{setting}: {'; '.join(said)}", file=sys.stderr, flush=True)
        rows += new
    table = Table(
        *("measured in", "by", "models", "settings", "gains", "within 10 %", "all within", "right"),
        *("none: within", "none: right"),
        title="Gains of nimble, opara and ios over one stream: within 10 % of the measured ones; right about more than 5 %",
        caption="a setting is a model, batch and precision; none: what those columns were, if no gain were ever predicted",
    )
    for place, by in product((IN_SETS, IN_RECORDS), (BY_PROFILE, BY_RULE)):
        of_kind = [row for row in rows if (row.measured_in, row.predicted_by) == (place, by)]
        chosen_rows = {
            "fitted on": [row for row in of_kind if row.setting.model in TRAINING],
            "others": [row for row in of_kind if row.setting.model not in TRAINING],
            "all": of_kind,
            "batch 1": [row for row in of_kind if row.setting.batch == 1],
        }
        for name, chosen in chosen_rows.items():
            if chosen:
                table.add_row(place, by, name, *shares(chosen))
    console.print(table)
    for cell in by_cell([row for row in rows if row.predicted_by == BY_PROFILE]):
        if not is_right(cell):
            best = max(row.measured for row in cell), most_predicted(cell)
            what = f"{cell[0].setting} in {cell[0].measured_in}"
            console.print(f"wrong: {what}: {best[0]:.3f} measured, {best[1]:.3f} predicted")
    for by in (BY_PROFILE,) if arguments.quick else (BY_PROFILE, BY_RULE):
        of_kind = [row for row in rows if row.predicted_by == by]
        if unknown := [f"{row.system} of {row.setting} in {row.measured_in}" for row in of_kind if row.predicted is None]:
            console.print(f"by {by} without a forecast: {', '.join(unknown)}")
        known = [row for row in of_kind if isfinite(row.error)]
        worst = sorted(known, key=lambda row: -abs(log(1 + row.error)))[:10]
        headings = "model", "batch", "precision", "system", "measured in", "measured", "predicted", "error"
        table = Table(*headings, title=f"The worst ten by {by}")
        for row in worst:
            gains = f"{row.measured:.2f}", in_words(row.predicted), f"{row.error:+.1%}"
            setting = row.setting
            table.add_row(setting.model, str(setting.batch), setting.precision, row.system, row.measured_in, *gains)
        console.print(table)


if __name__ == "__main__":
    main()
