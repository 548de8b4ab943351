"""A cell that serves: a decoder made on its device, a server for it, and traces of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import TypeVar, cast

import torch
from torch import nn

import systems
from conf.text import counted
from models.decoders import AnyDecoder, decoder_size, load_decoder
from results.calls import Correctness
from results.cell import Cell
from results.record import now
from results.serving import ServedTrace, Serving
from results.warning import Warning
from runners.cell.arithmetic import set_arithmetic
from runners.cell.calls import synchronize
from runners.cell.session import Session
from runners.machine.environment import cores
from runners.measurements.base import options_of
from systems.base import BadOption, Unsupported
from systems.serving import costs
from systems.serving.batch import Batch
from systems.serving.engine import LocalEngine
from systems.serving.loop import Course, Listed, RealClock, discard
from systems.serving.parts import Parts
from systems.serving.peer import PeerServer
from systems.serving.request import Request, refusal
from systems.serving.system import AnyServingSystem, Server, ServingSystem

from . import metrics, traffic
from .capacity import Tried
from .correctness import Trial, compared, compared_peer, trials
from .lengths import check_lengths
from .options import EngineOptions, ServingOptions, SimulationOptions
from .parted import Parted, parted
from .simulation import simulated
from .traffic import Seen
from .workload import Arrival

NUM_TRIALS, MOST_TRIAL_TOKENS = 4, 96  # requests that are compared, and prompt tokens of one
TRIAL_NEW = 6  # tokens that each generates
NUM_WARM, WARM_NEW = 4, 3  # requests before the first trace, and tokens that each generates
S = TypeVar("S", bound=AnyServingSystem)
NUM_ALONE = 3  # requests, one after another, that say what one takes alone
WARM_PROMPT = 64  # tokens of each where no trace says how many


def system_of(cell: Cell) -> AnyServingSystem:
    """The system of a cell that serves. Raises BadOption, Unsupported."""
    return _supported(_loaded(cell), cell.device)


def own_system_of(cell: Cell, why: str) -> ServingSystem:
    """The same, and one of ours. Raises BadOption, Unsupported.

    why: what is said of a peer.
    """
    loaded = _loaded(cell)
    if not isinstance(loaded, ServingSystem):  # before it is looked whether a peer is installed
        raise Unsupported(f"{cell.system.choice} {why}")
    return _supported(loaded, cell.device)


def _loaded(cell: Cell) -> AnyServingSystem:
    loaded = systems.load(cell.system.name, **cell.system.options)
    if not isinstance(loaded, AnyServingSystem):
        raise Unsupported(f"{cell.system.name} executes modules and serves no requests; system=orca does")
    return loaded


def _supported(system: S, device: str) -> S:
    if reason := system.unsupported(device):
        raise Unsupported(reason)
    return system


def decoder_of(cell: Cell, parts: Parts) -> AnyDecoder | Parted:
    """The decoder of a cell, on its device, with the arithmetic set; without weights where it has parts.

    Raises BadModel, MemoryError.
    """
    set_arithmetic(cell.conditions.precision, cell.conditions.algorithms)
    if cell.device == "cpu":
        torch.set_num_threads(max(1, cores() - 1))  # one is that of whoever sends requests
    if parts.num_ranks > 1:
        return parted(cell, parts)
    return load_decoder(cell.model.name, cell.device, cell.conditions.precision, **cell.model.options)


def warm_up(server: Server | PeerServer, longest_prompt: int) -> None:
    """A few requests, so that kernels are compiled and libraries have chosen theirs. Raises BadOption where none fits."""
    room = min(server.num_slots, server.bounds[1])
    count = max(1, min(WARM_NEW, room - 1))
    length = max(1, min(longest_prompt, room - count))
    requests = [Request(i, (i % server.bounds[-1],) * length, count) for i in range(NUM_WARM)]
    if reason := refusal(requests[0], *server.bounds):
        raise BadOption(f"there is room for no request: {reason}")
    server.serve(Listed(requests), discard, RealClock())


def server_of(cell: Cell) -> Server:
    """A warm server of a cell, for whoever sends requests. Raises BadModel, BadOption, Unsupported, MemoryError."""
    system = own_system_of(cell, "is measured as a peer: runner=serve has our own, as system=orca")
    server = system.prepare_serving(decoder_of(cell, system.parts))
    warm_up(server, WARM_PROMPT)
    return server


def check_alone(prompt_tokens: int, new_tokens: int, bounds: tuple[int, int, int]) -> None:
    """Raises BadOption where a request that is to be alone can never be served. bounds: of the server."""
    if reason := refusal(Request(0, (0,) * prompt_tokens, new_tokens), *bounds):
        raise BadOption(f"a request alone says what the SLO is: {reason}; or say an SLO, runner.slo_ms=MILLISECONDS")


class ServingSession(Session):
    """Serves the traces of a cell, after a few requests have been compared with the model itself."""

    calls_are_batches = False

    def __init__(self, cell: Cell, visible_device: str, phase: Callable[[str], None]):
        """Make the decoder on its device. Raises BadModel, BadOption, Unsupported, MemoryError."""
        self.cell, self.visible_device, self.phase = cell, visible_device, phase
        self.device, self.notices, self.known_limits = cell.device, (), None
        self.serving_system = system_of(cell)
        self._check_batch()
        self.traces = self._drawn_traces()
        phase("making the model")
        self.decoder: AnyDecoder | Parted = decoder_size(cell.model.name, **cell.model.options)
        self._check_positions()  # before minutes of making weights
        if self.serving_system.needs_weights:
            self.decoder = decoder_of(cell, self.serving_system.parts)
        self._server: Server | PeerServer | None = None
        self._trials: list[Trial] = []

    def _drawn_traces(self) -> list[tuple[Arrival, ...]]:
        """The traces that the runner asks for."""
        return [self.options.trace_of(self.cell.conditions.seed + i) for i in range(self.options.repeats)]

    @property
    def options(self) -> ServingOptions:
        return options_of(ServingOptions, self.cell.runner)

    @property
    def server(self) -> Server | PeerServer:
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
        if not self.serving_system.needs_weights:
            return
        self.phase("correctness")
        trial_requests = self.traces[0][:NUM_TRIALS]
        lengths = [(min(a.prompt_tokens, MOST_TRIAL_TOKENS), min(a.max_new_tokens, TRIAL_NEW)) for a in trial_requests]
        self._trials = trials(self.decoder, lengths, self.cell.conditions.seed)

    def prepare(self) -> float:
        self.phase("preparing")
        start = perf_counter()
        self._server = self.serving_system.prepare_serving(cast(AnyDecoder, self.decoder))  # a peer's model has one part
        self._check_slots()
        warm_up(self._server, max(a.prompt_tokens for trace in self.traces for a in trace))
        synchronize(self.device)
        return perf_counter() - start

    def _check_batch(self) -> None:
        """Raises BadOption for a batch of calls where there are none."""
        if self.cell.batch != 1 and not self.calls_are_batches:
            raise BadOption(f"batch={self.cell.batch} is of calls: what a server batches is system.max_batch_size")

    def _check_positions(self) -> None:
        """Raises BadOption for a request that is longer than the model takes."""
        num_more = int(self.decoder.start_token is not None)
        check_lengths(self.cell, self.traces, self.decoder.shape.positions, "positions", "model.positions", num_more)

    def _check_slots(self) -> None:
        """Raises BadOption for a request that is never served."""
        num_more = int(isinstance(self.server, Server) and self.server.start_token is not None)
        num_slots = self.server.num_slots + num_more
        check_lengths(self.cell, self.traces, num_slots, "K/V slots", "system.slots", num_more)

    def compare(self) -> Correctness:
        precision = self.cell.conditions.precision
        if isinstance(self.server, Server):
            return compared(self.server, self._trials, self.decoder, precision)
        return compared_peer(self.server, self._trials, cast(AnyDecoder, self.decoder), precision)

    def settle(self) -> tuple[Warning, ...]:
        return ()

    def serve(self) -> Serving:
        """Every trace through the server. Raises GeneratorEnded."""
        options, seen, stable = self.options, [], []
        for i, trace in enumerate(self.traces):
            seed = self.cell.conditions.seed + i
            tell = partial(self._tell, i, trace)
            seen.append(traffic.run(self.server, trace, str(seed), options.concurrency, options.shared_tokens, tell))
            stable.append(metrics.is_stable(seen[-1].requests, options.concurrency))
        served = tuple(
            ServedTrace(self.cell.conditions.seed + i, is_stable, s.requests, s.iterations)
            for i, (s, is_stable) in enumerate(zip(seen, stable, strict=True))
        )
        numbers = metrics.quantities(seen, stable, self.server.num_slots, options.slo_ms)
        return Serving(numbers, served, self.server.num_slots, "real", now())

    def _tell(self, number: int, trace: Sequence[Arrival], finished: int) -> None:
        """Show how far a trace is."""
        lasts = "" if self.options.concurrency else f", which come in {trace[-1].due_s:,.0f} s"
        done = f"{finished} of {counted(len(trace), 'request')} finished{lasts}"
        self.phase(f"serving: trace {number + 1} of {len(self.traces)}, {done}")

    def try_rate(self, rate: float) -> Tried:
        """A trace of each seed at another rate."""
        options, seen = self.options, []
        for seed in range(self.cell.conditions.seed, self.cell.conditions.seed + options.repeats):
            self.phase(f"serving: {rate:.3g} requests a second")
            trace, prompts = options.trace_at(rate, seed), prompt_seed(seed, rate)
            seen.append(traffic.run(self.server, trace, prompts, 0, options.shared_tokens))
        return Tried.of(rate, seen)

    def both_clocks(self) -> tuple[tuple[ClockedTrace, ...], dict[str, tuple[float, ...]]]:
        """Every trace of each rate for real, and under a virtual clock with the costs of this engine's iterations; these."""
        options = options_of(SimulationOptions, self.cell.runner)
        self.phase("measuring iterations")
        server = self.server
        if not isinstance(server, Server):
            raise BadOption(f"runner=simulation has our schedulers alone: system={self.cell.system.choice} has its own")
        block_size = int(self.cell.system.options.get("block_size") or 0)
        load_s = costs.LOAD_S[self.cell.device]
        table = costs.of_server(server, self.serving_system.max_batch_size, block_size, load_s)
        clocked = []
        for rate in options.all_rates:
            for seed in range(self.cell.conditions.seed, self.cell.conditions.seed + options.repeats):
                self.phase(f"serving: {rate:.3g} requests a second")
                trace = replace(options, rate=rate).trace_of(seed)
                prompts, shared = prompt_seed(seed, rate), options.shared_tokens
                real = traffic.run(server, trace, prompts, 0, shared)
                # Other prompts: the cache of a scheduler has those by now.
                virtual = simulated(server.scheduler, table, trace, server.engine.num_workers, f"{prompts} again", shared)
                throughputs = metrics.request_throughput(real), metrics.request_throughput(virtual)
                latencies_ms = _normalized_ms(real), _normalized_ms(virtual)
                clocked.append(ClockedTrace(rate, *throughputs, *latencies_ms, metrics.lag_p99_ms(real)))
        return tuple(clocked), table.samples()

    def alone_ms(self, prompt_tokens: int, new_tokens: int) -> float:
        """Normalized latency of one request alone, the median of a few.

        A peer is held to what the request takes under system=orca: an SLO of its own would be the easier the slower it is.

        Raises:
            BadOption: a request that can never be served, or a peer whose weights are not here.
        """
        if isinstance(self.server, Server):
            return self._alone_ms(self.server, prompt_tokens, new_tokens)
        if not self.serving_system.needs_weights:
            raise BadOption(f"system={self.cell.system.choice} keeps its weights: say an SLO, runner.slo_ms=MILLISECONDS")
        orca = systems.load("orca", max_batch_size=1, slots=prompt_tokens + new_tokens + 1)
        assert isinstance(orca, ServingSystem)
        server = orca.prepare_serving(cast(AnyDecoder, self.decoder))
        try:
            warm_up(server, prompt_tokens)
            return self._alone_ms(server, prompt_tokens, new_tokens)
        finally:
            server.engine.close()

    def _alone_ms(self, server: Server, prompt_tokens: int, new_tokens: int) -> float:
        check_alone(prompt_tokens, new_tokens, server.bounds)
        trace = [Arrival(0.0, prompt_tokens, new_tokens)] * NUM_ALONE
        seen = traffic.run(server, trace, f"{self.cell.conditions.seed} alone", concurrency=1)
        return median(metrics.latencies_ms(seen)["normalized"])


@dataclass(frozen=True)
class ClockedTrace:
    """One trace under two clocks.

    Args:
        rate: of arrivals, requests a second.
        real_throughput, virtual_throughput: requests finished a second.
        real_ms, virtual_ms: median normalized latencies; None where requests came faster than they were finished.
        lag_ms: of the real load generator, p99.
    """

    rate: float
    real_throughput: float
    virtual_throughput: float
    real_ms: float | None
    virtual_ms: float | None
    lag_ms: float


def prompt_seed(seed: int, rate: float) -> str:
    """Of a trace of several rates: a server that keeps prompts has seen none of them before."""
    return f"{seed} at {rate:g}"


def _normalized_ms(seen: Seen) -> float | None:
    return median(metrics.latencies_ms(seen)["normalized"]) if metrics.is_stable(seen.requests, 0) else None


@dataclass(frozen=True)
class BatchTimes:
    """Of one batch of equal requests.

    Args:
        batch_ms: from its submission to its last token.
        prompts_ms: to the return of the last iteration with prompts.
        increments_ms: from one return to the next, of each iteration after it.
    """

    batch_ms: float
    prompts_ms: float
    increments_ms: tuple[float, ...]


class EngineSession(ServingSession):
    """Serves batches of equal requests that come at once, with no load generator: the engine alone (section 4.5.1)."""

    calls_are_batches = True
    num_batches = 0
    _middle: Batch | None = None  # of increments, with half of the tokens to come

    def _drawn_traces(self) -> list[tuple[Arrival, ...]]:
        options = options_of(EngineOptions, self.cell.runner)
        return [(Arrival(0.0, options.prompt_tokens, options.new_tokens),) * self.cell.batch]

    def prepare(self) -> float:
        """Raises MemoryError where the batch's keys and values do not fit, BadOption where it is no batch of the system."""
        seconds = super().prepare()
        if self.cell.batch > self.serving_system.max_batch_size:
            most = self.serving_system.max_batch_size
            raise BadOption(f"batch={self.cell.batch} is more than system.max_batch_size={most}")
        scheduler = self.server.scheduler if isinstance(self.server, Server) else None  # a peer does not say
        num_short = scheduler.num_short if scheduler else 0
        self._serve()
        if scheduler and scheduler.num_short > num_short:
            raise MemoryError(f"the keys and values of {counted(self.cell.batch, 'request')} do not fit at once")
        return seconds

    def batch_times(self) -> BatchTimes:
        """Of one batch, from its submission to its last token."""
        start = perf_counter()
        iterations = self._serve().iterations
        batch_ms = (perf_counter() - start) * 1e3
        have_prompts = [iteration.num_tokens > iteration.num_rows for iteration in iterations]
        last = max((i for i, has_prompts in enumerate(have_prompts) if has_prompts), default=0)
        prompts_ms = (iterations[last].end_s - iterations[0].begin_s) * 1e3
        increments_ms = tuple((after.end_s - before.end_s) * 1e3 for before, after in pairwise(iterations[last:]))
        self._middle = iterations[(last + 1 + len(iterations)) // 2].batch if increments_ms else None
        return BatchTimes(batch_ms, prompts_ms, increments_ms)

    def replay_ms(self) -> float | None:
        """Of the increments in the middle of the batch served last, by the device alone; None where no graph has them."""
        server = self.server
        if self._middle is None or not isinstance(server, Server) or not isinstance(server.engine, LocalEngine):
            return None
        return server.engine.replay_ms(self._middle)

    def prompt_flops(self) -> float | None:
        """Of the products of a batch's prompts with the weights of blocks; None where no weights are here."""
        blocks = getattr(self.decoder, "blocks", None)
        if not isinstance(blocks, nn.Module):
            return None
        weights = sum(linear.weight.numel() for linear in blocks.modules() if isinstance(linear, nn.Linear))
        return 2.0 * weights * sum(arrival.prompt_tokens for arrival in self.traces[0])

    def _serve(self) -> Course:
        (trace,) = self.traces
        self.num_batches += 1  # no prompt is that of an earlier batch: nothing is there of it
        first = self.num_batches % self.server.bounds[-1]
        others = min(100, self.server.bounds[-1])
        prompts = [(first, *(i % others,) * (a.prompt_tokens - 1)) for i, a in enumerate(trace)]
        requests = [Request(i, prompts[i], a.max_new_tokens) for i, a in enumerate(trace)]
        return self.server.serve(Listed(requests), lambda deliveries, now_s: None, RealClock())
