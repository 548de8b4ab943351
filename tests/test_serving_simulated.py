"""The loop under a virtual clock: what it does is what the engine does, and latencies are what arithmetic says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from test_serving_engine import MODULE, NUM_SLOTS, NUM_STOPS, SHAPE, alone
from test_serving_simulated_runner import rows_of

from results.cell import Cell, Conditions, choose
from results.document import part_from_json
from results.files import read_json
from results.timeline import Timeline
from runners.serving import metrics, timeline
from runners.serving.options import costs_file
from runners.serving.simulation import simulated as simulated_trace
from runners.serving.workload import Arrival, at_rate, drawn
from systems.serving.batch import Batch
from systems.serving.costs import CostTable
from systems.serving.engine import Engine, LocalEngine, Returned
from systems.serving.iteration_level import IterationLevel
from systems.serving.loop import Course, Listed, RealClock, serve
from systems.serving.prefix_cache import CachedSlots
from systems.serving.request import Delivery, Request
from systems.serving.request_level import RequestLevel
from systems.serving.scheduler import Scheduler
from systems.serving.simulated import LinearCost, SimulatedEngine, VirtualClock
from systems.serving.slots import BlockSlots, ContiguousSlots, PagedSlots, Slots
from systems.serving.stage_costs import StageCosts

FEW_SLOTS = 24  # requests wait for some, or give up theirs


def by_iteration(slots: Slots, **options: Any) -> Callable[[int], Scheduler]:
    return lambda workers: IterationLevel(slots, 3, workers, **options)


def by_request(batching: str, **options: Any) -> Callable[[int], Scheduler]:
    return lambda workers: RequestLevel(NUM_SLOTS, SHAPE.positions, 3, batching, num_workers=workers, **options)


AHEAD = {"asynchronous", "all"}  # they have one worker: others have not the token that is fed
ALL = {"is_preempting": True, "max_num_batched_tokens": 5, "is_asynchronous": True}
SCHEDULERS = {
    "orca": by_iteration(ContiguousSlots.all_free(NUM_SLOTS)),
    "prefetching": by_iteration(PagedSlots.all_free(NUM_SLOTS, 1), is_prefetching=True),
    "asynchronous": by_iteration(ContiguousSlots.all_free(NUM_SLOTS), is_asynchronous=True),
    "cached": by_iteration(CachedSlots.all_free(FEW_SLOTS, 2)),
    "preempting": by_iteration(PagedSlots.all_free(FEW_SLOTS, 2), is_preempting=True),
    "chunked": by_iteration(ContiguousSlots.all_free(NUM_SLOTS), max_num_batched_tokens=5),
    "all": by_iteration(CachedSlots.all_free(FEW_SLOTS, 2), **ALL),
    "shortest_prompt": by_request("shortest_prompt"),
    "padded": by_request("padded", microbatch_size=1),
    "ragged": by_request("ragged"),
    "early": by_request("padded", is_early_return=True),
}
WORKLOADS = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(0, 80).map(lambda sixteenths: sixteenths / 16)),
    min_size=1,
    max_size=6,
)


def made(workload: Sequence[tuple[int, int, float]], num_stops: int = 0) -> list[Request]:
    """Requests whose prompts begin as every other's. num_stops: of the vocabulary, each a stop token."""
    begins, stops = (1, 5), frozenset(range(num_stops))
    prompts = [tuple(range(begins[i % 2], begins[i % 2] + n)) for i, (n, _, _) in enumerate(workload)]
    return [Request(i, prompts[i], new, arrival, stop_tokens=stops) for i, (_, new, arrival) in enumerate(workload)]


def engine_of(scheduler: Scheduler) -> LocalEngine:
    slots = scheduler.slots if isinstance(scheduler, IterationLevel) else None
    return LocalEngine(MODULE, NUM_SLOTS, slots.block_size if isinstance(slots, BlockSlots) else 0)


@cache
def alone_once(prompt: tuple[int, ...], new: int, stops: frozenset[int]) -> list[int]:
    return alone(MODULE, Request(0, prompt, new, stop_tokens=stops))


class Known(Engine):
    """Tokens that are known beforehand, by request; beyond a stream's end a token that ends nothing."""

    def __init__(self, streams: dict[int, list[int]]):
        self.streams, self.flights = streams, deque[Batch]()

    @property
    def num_in_flight(self) -> int:
        return len(self.flights)

    def submit(self, batch: Batch) -> None:
        self.flights.append(batch)

    def has_returned(self) -> bool:
        return bool(self.flights)

    def collect(self) -> Returned:
        batch = self.flights.popleft()
        streams = [[*self.streams[row.request_id], *[-1] * SHAPE.positions] for row in batch.rows]
        return Returned(batch, [stream[row.draw] for stream, row in zip(streams, batch.rows, strict=True)])


def simulated(
    scheduler: Scheduler,
    requests: list[Request],
    cost: LinearCost,
    workers: int = 1,
    tokens: Engine | None = None,
) -> tuple[Course, dict[int, list[float]]]:
    """The course, and when each token of each request was delivered."""
    clock = VirtualClock()
    times: dict[int, list[float]] = {}

    def deliver(deliveries: Sequence[Delivery], now_s: float) -> None:
        for delivery in deliveries:
            times.setdefault(delivery.request_id, []).extend([now_s] * len(delivery.tokens))

    return serve(scheduler, SimulatedEngine(clock, cost, workers, tokens), Listed(requests), deliver, clock), times


def batches(course: Course) -> list[list[tuple[int, int, int]]]:
    return [[(row.request_id, row.begin, len(row.tokens)) for row in i.batch.rows] for i in course.iterations]


@pytest.mark.parametrize("name", SCHEDULERS)
@examples(30)
@given(WORKLOADS, st.integers(1, 3), NUM_STOPS)
def test_a_simulation_is_the_engine_batch_by_batch(
    name: str, workload: list[tuple[int, int, float]], workers: int, num_stops: int
) -> None:
    """Invariant 10: with equal costs and the tokens that the whole model generates, or none where no token is a stop."""
    cost = LinearCost(1.0, 0.125, 0.0625, delay_s=0.5 if name in AHEAD else 0.0)
    workers = 1 if name in AHEAD else workers
    scheduler, requests = SCHEDULERS[name](workers), made(workload, num_stops)
    streams = {r.id: alone_once(r.prompt, r.max_new_tokens, r.stop_tokens) for r in requests}
    real = simulated(scheduler, requests, cost, workers, engine_of(scheduler))
    assert {request.id: request.generated for request in requests} == streams and scheduler.num_reserved == 0
    for tokens in (Known(streams), *[None][: num_stops == 0]):
        virtual = simulated(SCHEDULERS[name](workers), made(workload, num_stops), cost, workers, tokens)
        assert batches(real[0]) == batches(virtual[0]) and real[1] == virtual[1]
    assert {i: len(times) for i, times in real[1].items()} == {i: len(stream) for i, stream in streams.items()}
    iterations = real[0].iterations
    assert [i.end_s for i in iterations] == sorted(i.end_s for i in iterations)
    if scheduler.num_in_flight_max == 1:
        assert all(i.end_s - i.begin_s == cost(i.batch) for i in iterations)
        arrivals = {arrival for _, _, arrival in workload}
        for before, after in pairwise(iterations):  # it is idle only where nobody waits
            assert after.begin_s == before.end_s or after.begin_s in arrivals


def test_a_real_clock_gives_the_same_batches_where_all_arrive_at_once() -> None:
    workload = [(5, 4, 0.0), (3, 2, 0.0), (8, 5, 0.0), (2, 3, 0.0), (6, 1, 0.0)]
    for name, scheduler in SCHEDULERS.items():
        engine = engine_of(scheduler(1))
        real = serve(scheduler(1), engine, Listed(made(workload)), lambda deliveries, now_s: None, RealClock())
        assert batches(real) == batches(simulated(scheduler(1), made(workload), LinearCost(1.0))[0]), name


def test_one_request_alone_takes_what_its_iterations_take() -> None:
    course, times = simulated(SCHEDULERS["orca"](1), [Request(0, (1,) * 4, 3, 2.0)], LinearCost(1.0, 0.5))
    assert times == {0: [2 + 3.0, 2 + 4.5, 2 + 6.0]} and [i.num_reserved for i in course.iterations] == [7, 7, 7]


def test_a_pipeline_has_as_many_batches_in_flight_as_stages() -> None:
    """Figure 4.6a: batches AB, CD and EF follow each other, and AB comes again when it is back."""
    scheduler = IterationLevel(PagedSlots.all_free(NUM_SLOTS, 1), 2, num_workers=3)
    requests = [Request(i, (1,), 3, 0.0) for i in range(6)]
    course, _ = simulated(scheduler, requests, LinearCost(1.0), workers=3)
    assert [[row[0] for row in batch] for batch in batches(course)] == [[0, 1], [2, 3], [4, 5]] * 3
    assert [i.end_s for i in course.iterations] == [float(3 + n) for n in range(9)]


def test_who_arrives_while_a_place_is_free_begins_at_once_and_waits_for_each_stage() -> None:
    """Of two stages the first is free again after a second."""
    scheduler = IterationLevel(PagedSlots.all_free(NUM_SLOTS, 1), 1, num_workers=2)
    course, _ = simulated(scheduler, [Request(0, (1,), 1, 0.0), Request(1, (1,), 1, 0.25)], LinearCost(1.0), workers=2)
    assert [(i.begin_s, i.end_s) for i in course.iterations] == [(0.0, 2.0), (0.25, 3.0)]


def test_nobody_waits_for_a_batch_mate_that_finishes_later() -> None:
    """Invariant 6, and its opposite in a static batch."""

    def end(scheduler: Scheduler, mates: int) -> float:
        requests = [Request(0, (1, 2), 3, 0.0), Request(1, (1, 2), mates, 0.0)]
        return simulated(scheduler, requests, LinearCost(1.0))[1][0][-1]

    assert end(SCHEDULERS["orca"](1), 3) == end(SCHEDULERS["orca"](1), 30) == 3.0
    assert end(SCHEDULERS["ragged"](1), 30) == 30.0


def test_a_request_that_is_given_up_leaves_its_slots() -> None:
    scheduler = SCHEDULERS["orca"](1)

    class Impatient(Listed):
        """Gives request 0 up once request 1 has arrived."""

        def cancelled(self) -> Sequence[int]:
            return () if self.waiting else (0,)

    clock = VirtualClock()
    delivered: list[Delivery] = []
    requests = [Request(0, (1,), 30, 0.0), Request(1, (1,), 2, 4.5)]
    serve(scheduler, SimulatedEngine(clock, LinearCost(1.0)), Impatient(requests), lambda d, _: delivered.extend(d), clock)
    assert [d.request_id for d in delivered] == [0, 0, 0, 0, 0, 1, 1]
    assert scheduler.num_reserved == scheduler.num_unfinished == 0


def test_batches_return_in_the_order_of_their_submission() -> None:
    """Where the first takes longer to come back than the second takes in all."""
    clock = VirtualClock()
    engine = SimulatedEngine(clock, CostTable((1, 2), (1.0, 2.0), 0.0, (0.0, 9.0)))
    for num_tokens in (2, 1):
        engine.submit(rows_of(num_tokens))
    returned = [(len(engine.collect().tokens), clock.now()) for _ in range(2)]
    assert returned == [(2, 11.0), (1, 11.0)]


def test_clients_have_their_tokens_while_the_next_iteration_runs() -> None:
    """Each token goes out once, in order, after the next batch went to the device, and before the loop waits."""
    done: list[str] = []

    class Logged(SimulatedEngine):
        def submit(self, batch: Batch) -> None:
            done.append("submit")
            super().submit(batch)

        def collect(self) -> Returned:
            done.append("collect")
            return super().collect()

    clock = VirtualClock()
    requests = [Request(0, (1,), 3, 0.0), Request(1, (1,), 1, 9.0)]
    serve(SCHEDULERS["orca"](1), Logged(clock, LinearCost(1.0)), Listed(requests), lambda d, at: done.append(f"{at}"), clock)
    assert done == [*("submit", "collect", "submit", "1.0", "collect", "submit", "2.0", "collect", "3.0", "submit"),
                    *("collect", "10.0")]  # fmt: skip


def test_tokens_that_are_there_go_out_though_the_engine_fails() -> None:
    delivered: list[Delivery] = []

    class Failing(SimulatedEngine):
        def submit(self, batch: Batch) -> None:
            if self.clock.now() > 0:
                raise RuntimeError("the GPU is gone")
            super().submit(batch)

    clock = VirtualClock()
    requests = [Request(0, (1,), 1, 0.0), Request(1, (1,), 9, 0.0)]
    with pytest.raises(RuntimeError, match="the GPU is gone"):
        serve(
            SCHEDULERS["orca"](1), Failing(clock, LinearCost(1.0)), Listed(requests), lambda d, _: delivered.extend(d), clock
        )
    assert [(d.request_id, d.is_last) for d in delivered] == [(0, True), (1, False)]


# --- Which rates are stable ---


ON_H200 = part_from_json(read_json(costs_file("gpt_13b-h200")), StageCosts)
SLOTS_ON_H200, POSITIONS = 130_000, 2048
OF_13B: dict[str, Callable[[], Scheduler]] = {
    "orca, 8": lambda: IterationLevel(ContiguousSlots.all_free(SLOTS_ON_H200), 8),
    "orca, 64": lambda: IterationLevel(ContiguousSlots.all_free(SLOTS_ON_H200), 64),
    "request_level, 8": lambda: RequestLevel(SLOTS_ON_H200, POSITIONS, 8, "padded"),
}


def trace_of_13b(count: int, rate: float, seed: int) -> tuple[Arrival, ...]:
    """Figure 4.8's requests, which come at this very rate."""
    return at_rate(drawn(count, 1.0, 1.0, (32, 512), (1, 128), seed), rate)


@cache
def saturation(name: str) -> float:
    """Requests a second that are finished where all have come: of those between the first and the last quarter."""
    requests = simulated_trace(OF_13B[name](), ON_H200, trace_of_13b(600, 1e6, 0)).requests
    ends = sorted(tokens[-1] for tokens in requests.token_s)
    return 300 / (ends[450] - ends[150])


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param(name, count, marks=[pytest.mark.slow] * ((name, count) != ("orca, 64", 100)))
        for name in OF_13B
        for count in (100, 200, 400)
    ],
)
def test_rates_that_a_server_keeps_up_with_are_stable_and_others_are_not(name: str, count: int) -> None:
    """Of most traces: a short one is a matter of luck. For a batch of 64 a hundred requests are few at any rate."""

    def are_most(share: float, is_stable: bool) -> bool:
        """Is more than half of the traces so? The rest of them is left once that is known."""
        num_traces, num_so = 800 // count, 0
        for seed in range(num_traces):
            seen = simulated_trace(OF_13B[name](), ON_H200, trace_of_13b(count, share * saturation(name), seed))
            num_so += metrics.is_stable(seen.requests, 0) == is_stable
            if 2 * num_so > num_traces:
                return True
        return False

    highest = 0.6 if (name, count) == ("orca, 64", 100) else 0.85
    assert [are_most(share, is_stable=True) for share in (0.3, highest)] == [True, True]
    assert [are_most(share, is_stable=False) for share in (1.15, 2.8)] == [True, True]


@pytest.mark.parametrize("num_slots", [2_000, 4_000, 8_000, 16_000])
def test_blocks_of_16_hold_more_requests_than_runs_of_slots(num_slots: int) -> None:
    """Though each request's slots are rounded up: what no run can use is more."""

    def mean_rows(book: Slots) -> float:
        iterations = simulated_trace(IterationLevel(book, 64), ON_H200, trace_of_13b(150, 1e6, 0)).iterations
        lengths_s = [end - begin for begin, end in zip(iterations.begin_s, iterations.end_s, strict=True)]
        return sum(rows * length_s for rows, length_s in zip(iterations.rows, lengths_s, strict=True)) / sum(lengths_s)

    assert mean_rows(PagedSlots.all_free(num_slots, 16)) > mean_rows(ContiguousSlots.all_free(num_slots))


# --- Models in parts ---


def test_the_timeline_of_a_pipeline_is_that_of_figure_4_6() -> None:
    """Six requests in batches of two through three stages: after the first of a stage it has always something to do."""

    def timeline_of(choice: str) -> Timeline:
        system = choose("system", choice, pipeline_parallel=3, max_batch_size=2)
        cell = Cell(choose("model", "gpt"), system, choose("runner", "timeline"), Conditions(1, "cpu", "fp32"))
        return timeline.of_cell(cell)

    orca = timeline_of("orca")
    by_stage = {stage: [(bar.start, bar.name) for bar in orca.bars if bar.stream == stage] for stage in range(3)}
    names = ["A1B1", "C1D1", "E1F1", "A2B2", "C2D2", "E2F2", "A3B3", "C3D3", "E3F3"]
    assert by_stage == {stage: [(float(stage + at), name) for at, name in enumerate(names)] for stage in range(3)}
    static = [bar for bar in timeline_of("request_level_microbatches").bars if bar.stream == 0]
    assert [(bar.start, bar.name) for bar in static[:4]] == [(0.0, "A1"), (1.0, "B1"), (3.0, "A2"), (4.0, "B2")]  # bubbles
    assert orca.num_scheduled_streams == 3
