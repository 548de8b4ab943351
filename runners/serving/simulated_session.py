"""A cell that serves under a virtual clock: no model is made, and no token is computed.

Everything that comes of it says so: the record's clock is virtual, and each number has its source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median

from conf.text import counted, first_line
from results.calls import Correctness
from results.cell import Cell
from results.document import part_from_json
from results.files import read_json
from results.record import now
from results.serving import ServedTrace, Serving
from runners.measurements.base import options_of
from systems.base import BadOption
from systems.serving.parts import REDUCTIONS
from systems.serving.simulated import SimulatedEngine, VirtualClock
from systems.serving.stage_costs import StageCosts
from systems.serving.system import Server, ServingSystem

from . import metrics
from .capacity import Tried
from .options import SimulatedOptions, costs_file
from .parted import parted
from .session import NUM_ALONE, ServingSession, check_alone, own_system_of, prompt_seed
from .simulation import simulated
from .traffic import Seen
from .workload import Arrival

APART_S = 3600.0  # between requests that are alone


def costs_of(options: SimulatedOptions) -> StageCosts:
    """From the files. Raises BadOption for files of something else."""
    read = {}
    for key in ("costs", "reductions"):
        if (name := getattr(options, key)) is not None:
            try:
                read[key] = part_from_json(read_json(costs_file(name)), StageCosts)
            except ValueError as error:
                raise BadOption(
                    f"runner.{key}={name} is not a file of runner=iteration_costs: {first_line(error)}"
                ) from None
    if "costs" not in read:
        raise BadOption("runner=simulated needs runner.costs: runner=iteration_costs output=FILE writes it")
    costs = read["costs"]
    if "reductions" in read:
        costs = replace(costs, reductions=read["reductions"].reductions)
    if costs.parts.tensor > 1 and costs.reductions is None:
        raise BadOption("the sums over parts were not measured: runner.reductions needs a file of a machine with two GPUs")
    return costs


class SimulatedSession(ServingSession):
    """As ServingSession, of an engine that only says how long an iteration takes."""

    is_clock_real = False

    def __init__(self, cell: Cell, visible_device: str, phase: Callable[[str], None]):
        """Raises BadModel, BadOption, Unsupported, MemoryError."""
        self.cell, self.visible_device, self.phase = cell, visible_device, phase
        self.device, self.notices, self.known_limits = cell.device, (), None
        self._check_batch()
        system = own_system_of(cell, "brings an engine of its own: system=orca is simulated")
        self.serving_system: ServingSystem = system
        self.traces = self._drawn_traces()
        self.costs = costs_of(self.options)
        self.decoder = self.parted = parted(cell, system.parts)
        self._check_positions()
        shape = self.parted.shape
        sizes = (shape.layers, shape.hidden, shape.heads, shape.positions, shape.vocabulary)
        of_file = (self.costs.shape, self.costs.parts, self.costs.precision)
        if of_file != (sizes, system.parts, cell.conditions.precision):
            raise BadOption(
                f"runner.costs={self.options.costs} is of another model, split or precision: "
                f"{counted(self.costs.shape[0], 'layer')} of {self.costs.shape[1]}, {self.costs.parts}, "
                f"precision={self.costs.precision}"
            )
        sums = self.costs.reductions
        if sums is not None and sums.kind in REDUCTIONS and sums.kind != system.reductions:
            raise BadOption(f"system.reductions={system.reductions}, but the sums that were measured are {sums.kind}")

    @property
    def options(self) -> SimulatedOptions:
        return options_of(SimulatedOptions, self.cell.runner)

    @property
    def source(self) -> str:
        """What every number is of."""
        sums, of_delays = self.costs.reductions, self.costs.delay_parts
        measured = f", sums over {sums.degree} processes" if sums is not None and self.costs.parts.tensor > 1 else ""
        measured += f", delays of {of_delays.num_ranks} processes" if of_delays is not None else ""
        return f"simulated: virtual clock, iteration costs of one part measured on {self.costs.device}{measured}"

    @property
    def operator_threads(self) -> None:
        return None

    def before_preparing(self) -> None:
        """Nothing is compared."""

    def prepare(self) -> float:
        """Raises MemoryError and BadOption where a GPU as that of the costs has not the room."""
        system = self.serving_system
        num_slots = system.slots_on(system.rooms(self.parted, self.costs.gpu_bytes))
        engine = SimulatedEngine(VirtualClock(), self.costs, system.parts.pipeline)
        self._server: Server = system.server_of(engine, num_slots, self.parted.shape)
        self._check_slots()
        return 0.0

    def compare(self) -> Correctness:
        return Correctness(True, "simulated: no token is computed", None, None, None, is_checked=False)

    def simulate(self, trace: tuple[Arrival, ...], seed: str) -> Seen:
        """What a client would see of one trace, whose prompts are of a seed."""
        server = self._server
        return simulated(server.scheduler, self.costs, trace, server.engine.num_workers, seed, self.options.shared_tokens)

    def serve(self) -> Serving:
        seen = [self.simulate(trace, str(self.cell.conditions.seed + i)) for i, trace in enumerate(self.traces)]
        stable = [metrics.is_stable(s.requests, 0) for s in seen]
        served = tuple(
            ServedTrace(self.cell.conditions.seed + i, is_stable, s.requests, s.iterations)
            for i, (s, is_stable) in enumerate(zip(seen, stable, strict=True))
        )
        quantities = metrics.quantities(seen, stable, self._server.num_slots, self.options.slo_ms)
        numbers = tuple(replace(quantity, source=self.source) for quantity in quantities)
        return Serving(numbers, served, self._server.num_slots, "virtual", now())

    def try_rate(self, rate: float) -> Tried:
        options, first = self.options, self.cell.conditions.seed
        seeds = range(first, first + options.repeats)
        return Tried.of(rate, [self.simulate(options.trace_at(rate, seed), prompt_seed(seed, rate)) for seed in seeds])

    def alone_ms(self, prompt_tokens: int, new_tokens: int) -> float:
        check_alone(prompt_tokens, new_tokens, self._server.bounds)
        trace = tuple(Arrival(i * APART_S, prompt_tokens, new_tokens) for i in range(NUM_ALONE))
        return median(metrics.latencies_ms(self.simulate(trace, "alone"))["normalized"])
