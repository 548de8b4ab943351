"""How near simulations with some costs are to engines that served the same traces for real.

python -m runners.serving.agreement COSTS ... -- RESULTS ... prints it as JSON, a list of `Point` for each. It takes no GPU.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from results.agreement import Point
from results.cell import Cell, choose
from results.document import part_to_json
from results.record import Record
from results.store import Store
from runners.measurements.base import options_of
from systems.base import BadOption

from . import metrics
from .options import SimulatedOptions, SimulationOptions
from .session import prompt_seed
from .simulated_session import SimulatedSession, costs_of


def points(costs: str, records: Iterable[Record]) -> Iterator[Point]:
    """Every rate of the records of runner=simulation that the costs are of: their model, split, precision and GPU.

    A trace of a file is left out: nobody else may have it.

    Args:
        costs: a file of runner=iteration_costs, or a committed one's name.
        records: of anything.
    """
    for record in records:
        if record.cell.runner.name != "simulation" or not record.is_ok or record.cell.runner.get("trace") is not None:
            continue
        options = SimulationOptions(**record.cell.runner.options)  # type: ignore[arg-type]
        load = {key: value for key, value in record.cell.runner.options.items() if key != "rates"}
        runner = choose("runner", "simulated", costs=costs, **load)
        conditions = replace(record.cell.conditions, device="cpu")
        session = _session(Cell(record.cell.model, record.cell.system, runner, conditions), record)
        if session is not None:
            for rate in options.all_rates:
                yield _point(session, record, rate)


def _session(cell: Cell, record: Record) -> SimulatedSession | None:
    """None where the costs are of something else than the record."""
    options = options_of(SimulatedOptions, cell.runner)
    try:
        if costs_of(options).device != record.environment.gpu:
            return None
        session = SimulatedSession(cell, "0", lambda phase: None)
    except BadOption:
        return None
    session.prepare()
    return session


def _point(session: SimulatedSession, record: Record, rate: float) -> Point:
    options, first = replace(session.options, rate=rate), session.cell.conditions.seed
    seeds = range(first, first + options.repeats)
    seen = [session.simulate(options.trace_of(seed), prompt_seed(seed, rate)) for seed in seeds]
    stable = [s for s in seen if metrics.is_stable(s.requests, 0)]
    latencies_ms = [median(metrics.latencies_ms(s)["normalized"]) for s in stable]
    throughput_real = _real(record, "throughput", rate)
    assert throughput_real is not None, "each trace has a throughput"
    return Point(
        record.id,
        record.cell,
        rate,
        throughput_real,
        median(map(metrics.request_throughput, seen)),
        _real(record, "normalized", rate),
        median(latencies_ms) if latencies_ms else None,
    )


def _real(record: Record, name: str, rate: float) -> float | None:
    quantity = record.measured["simulation"].quantity(f"{name}_real_at_{rate:g}")
    return quantity.value if quantity is not None else None


def main(arguments: Sequence[str]) -> None:
    """Print the points of each costs in some folders or packs."""
    at = arguments.index("--")
    gc.disable()  # the process makes what stays, of which a collection frees nothing, and ends
    records = [record for each in arguments[at + 1 :] for record in Store(Path(each)).read().records.values()]
    print(json.dumps([[part_to_json(point) for point in points(costs, records)] for costs in arguments[:at]]))


if __name__ == "__main__":
    main(sys.argv[1:])
