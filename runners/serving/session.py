"""A cell that serves: a decoder made on its device, a server for it, and traces of requests."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

import systems
from models.decoders import load_decoder
from models.gpt import GPT
from results.cell import Cell
from results.record import Correctness, ServedTrace, Serving, now
from results.warning import Warning
from runners.cell.arithmetic import set_arithmetic
from runners.cell.calls import synchronize
from runners.cell.session import Session
from runners.machine.environment import cores
from runners.measurements.base import options_of
from systems.base import BadOption, Unsupported
from systems.serving.loop import Listed, RealClock, serve
from systems.serving.request import Request
from systems.serving.system import Server, ServingSystem

from . import metrics, traffic
from .correctness import Trial, compared, trials
from .options import ServingOptions

NUM_TRIALS, MOST_TRIAL_TOKENS = 4, 96  # requests that are compared, and prompt tokens of one
TRIAL_NEW = 6  # tokens that each generates
NUM_WARM, WARM_NEW = 4, 3  # requests before the first trace, and tokens that each generates
WARM_PROMPT = 64  # tokens of each where no trace says how many


def system_of(cell: Cell) -> ServingSystem:
    """The system of a cell that serves. Raises BadOption, Unsupported."""
    loaded = systems.load(cell.system.name, **cell.system.options)
    if not isinstance(loaded, ServingSystem):
        raise Unsupported(f"{cell.system.name} executes modules and serves no requests; system=orca does")
    if reason := loaded.unsupported(cell.device):
        raise Unsupported(reason)
    if cell.batch != 1:
        raise BadOption(f"batch={cell.batch} is of calls: what a server batches is system.max_batch_size")
    return loaded


def decoder_of(cell: Cell) -> GPT:
    """The decoder of a cell, on its device, with the arithmetic set. Raises BadModel, MemoryError."""
    set_arithmetic(cell.conditions.precision, cell.conditions.algorithms)
    if cell.device == "cpu":
        torch.set_num_threads(max(1, cores() - 1))  # one is that of whoever sends requests
    return load_decoder(cell.model.name, cell.device, cell.conditions.precision, **cell.model.options)


def warm_up(server: Server, longest_prompt: int) -> None:
    """A few requests, so that kernels are compiled and libraries have chosen theirs."""
    length = min(longest_prompt, server.bounds[1] - WARM_NEW, server.num_slots - WARM_NEW)
    requests = [Request(i, (i,) * length, WARM_NEW) for i in range(NUM_WARM)]
    serve(server.scheduler, server.engine, Listed(requests), lambda deliveries, now_s: None, RealClock())


def server_of(cell: Cell) -> Server:
    """A warm server of a cell, for whoever sends requests. Raises BadModel, BadOption, Unsupported, MemoryError."""
    system = system_of(cell)
    server = system.prepare_serving(decoder_of(cell))
    warm_up(server, WARM_PROMPT)
    return server


class ServingSession(Session):
    """Serves the traces of a cell, after a few requests have been compared with the model itself."""

    def __init__(self, cell: Cell, visible_device: str, phase: Callable[[str], None]):
        """Make the decoder on its device. Raises BadModel, BadOption, Unsupported, MemoryError."""
        self.cell, self.visible_device, self.phase = cell, visible_device, phase
        self.device, self.notices, self.known_limits = cell.device, (), None
        options = options_of(ServingOptions, cell.runner)
        assert isinstance(options, ServingOptions)
        self.options = options
        self.serving_system = system_of(cell)
        phase("making the model")
        self.decoder = decoder_of(cell)
        conditions = cell.conditions
        self.traces = [options.trace_of(conditions.seed + i) for i in range(options.repeats)]
        self._server: Server | None = None
        self._trials: list[Trial] = []

    @property
    def server(self) -> Server:
        assert self._server is not None, "prepare comes first"
        return self._server

    @property
    def schedule(self) -> None:
        return None

    @property
    def compilation(self) -> None:
        return None

    @property
    def operator_threads(self) -> int | None:
        return torch.get_num_threads() if self.device == "cpu" else None

    def before_preparing(self) -> None:
        """Compute what logits should be, while the memory is free."""
        self.phase("correctness")
        asked = self.traces[0][:NUM_TRIALS]
        lengths = [(min(a.prompt_tokens, MOST_TRIAL_TOKENS), min(a.max_new_tokens, TRIAL_NEW)) for a in asked]
        self._trials = trials(self.decoder, lengths, self.cell.conditions.seed)

    def prepare(self) -> float:
        self.phase("preparing")
        start = perf_counter()
        self._server = self.serving_system.prepare_serving(self.decoder)
        largest = max((a for trace in self.traces for a in trace), key=lambda a: a.max_tokens)
        num_slots, num_positions, _ = self._server.bounds
        for most, what, key in ((num_positions, "positions", "model.positions"), (num_slots, "K/V slots", "system.slots")):
            if largest.max_tokens > most:
                raise BadOption(
                    f"a request has {largest.prompt_tokens} prompt tokens and {largest.max_new_tokens} to generate, "
                    f"more than the {most} {what}: {key} has to be larger, or runner.prompt_tokens smaller"
                )
        warm_up(self._server, self.options.longest_prompt())
        synchronize(self.device)
        return perf_counter() - start

    def compare(self) -> Correctness:
        return compared(self.server, self._trials, self.decoder, self.cell.conditions.precision)

    def settle(self) -> tuple[Warning, ...]:
        return ()

    def serve(self) -> Serving:
        """Every trace through the server. Raises GeneratorEnded."""
        seen, stable = [], []
        for i, trace in enumerate(self.traces):
            self.phase(f"serving: trace {i + 1} of {len(self.traces)}, {len(trace)} requests")
            seen.append(traffic.run(self.server, trace, self.cell.conditions.seed + i, self.options.concurrency))
            stable.append(metrics.is_stable(seen[-1].requests, self.options.concurrency))
        served = tuple(
            ServedTrace(self.cell.conditions.seed + i, is_stable, s.requests, s.iterations)
            for i, (s, is_stable) in enumerate(zip(seen, stable, strict=True))
        )
        numbers = metrics.quantities(seen, stable, self.server.num_slots, self.options.slo_ms)
        return Serving(numbers, served, self.server.num_slots, "real", now())
