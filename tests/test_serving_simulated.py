"""The loop under a virtual clock: what it does is what the engine does, and latencies are what arithmetic says."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy
import pytest
import torch
from conftest import Run
from hypothesis import given, settings
from hypothesis import strategies as st
from made_records import record
from test_serving_engine import MODULE, NUM_SLOTS, NUM_STOPS, SHAPE, alone

from results.cell import Cell, Conditions, choose
from results.document import part_from_json
from results.files import read_json
from results.quantity import Measured
from results.serving import Serving
from results.store import Store
from results.timeline import Timeline
from runners.cell.measuring import measured
from runners.checks import BadRequest
from runners.measurements.capacity import Capacity
from runners.measurements.registry import plan
from runners.measurements.serving import ServingMeasurement
from runners.serving import metrics, timeline
from runners.serving.options import costs_file
from runners.serving.parted import Parted
from runners.serving.simulated_session import SimulatedSession
from runners.serving.simulation import simulated as simulated_trace
from runners.serving.traffic import Seen
from runners.serving.workload import Arrival, at_rate, drawn
from runners.showings.iteration_costs import FEW_LAYERS, IterationCosts
from systems.base import BadOption
from systems.serving import costs
from systems.serving.batch import Batch, Row
from systems.serving.costs import CostTable
from systems.serving.engine import Engine, LocalEngine, Returned
from systems.serving.iteration_level import IterationLevel
from systems.serving.loop import Course, Inbox, Iteration, Listed, RealClock, serve
from systems.serving.parts import Parts
from systems.serving.prefix_cache import CachedSlots
from systems.serving.reductions import Reductions
from systems.serving.request import Delivery, Request, Sampling
from systems.serving.request_level import RequestLevel
from systems.serving.scheduler import Scheduler
from systems.serving.simulated import LinearCost, SimulatedEngine, VirtualClock
from systems.serving.slots import BlockSlots, ContiguousSlots, PagedSlots, Region, Slots
from systems.serving.stage_costs import Alone, StageCosts
from systems.serving.system import Server

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
@settings(max_examples=30, deadline=None)
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


def test_a_table_of_costs_is_a_line_between_what_was_measured() -> None:
    table = CostTable((1, 4, 64), (1.0, 2.5, 14.5), 0.25)

    def cost(num_rows: int, num_context: int) -> float:
        region = Region((0,), 100, 100)
        row = Row(0, region, num_context - 1, (0,), 0, 1, 0, Sampling())
        return table(Batch(0, (row,) * num_rows)) - 0.25 * num_rows * num_context

    assert [cost(n, 8) for n in (1, 2, 4, 34, 64, 74)] == pytest.approx([1.0, 1.5, 2.5, 8.5, 14.5, 16.5])


@pytest.mark.parametrize("block_size", [0, 4])
def test_measured_costs_are_those_of_the_engine(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one whose iterations take what a formula says: the formula comes back."""
    formula = LinearCost(5.0, 0.5, 0.125)
    monkeypatch.setattr(costs, "seconds_of", lambda engine, batch: costs.Seconds(formula(batch), 0.25 * batch.num_tokens))
    table = costs.measured(LocalEngine(MODULE, NUM_SLOTS, block_size), NUM_SLOTS, SHAPE.positions, 3, block_size)
    assert table.place_s == pytest.approx(0.125) and table.tokens[:3] == (1, 2, 3)
    for batch in (costs._batch([(3, 1)], 0), costs._batch([(0, 20), (7, 1)], 0)):
        assert table(batch) == pytest.approx(formula(batch))
        assert table.delay(batch) == pytest.approx(0.25 * batch.num_tokens)


@given(st.integers(1, 600), st.integers(1, 40), st.floats(0, 1))
def test_prompts_of_an_iteration_have_its_tokens_and_are_none_too_long(longest: int, most_rows: int, share: float) -> None:
    num_tokens = max(round(share * longest * most_rows), 1)
    lengths = [length for _, length in costs._prompts(num_tokens, longest, most_rows)]
    assert sum(lengths) == num_tokens and len(lengths) <= most_rows
    assert min(lengths) > 0 and max(lengths) <= longest and max(lengths) - min(lengths) <= 1
    if longest >= 2 * costs.PROMPT and costs.PROMPT <= num_tokens <= costs.PROMPT * most_rows:
        assert 0.6 * costs.PROMPT < num_tokens / len(lengths) < 1.5 * costs.PROMPT + 1


def test_iterations_that_are_timed_fill_tiles_more_or_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """On average half a tile, as the largest do; a prompt is timed where hardly anything fits."""
    monkeypatch.setattr(costs, "seconds_of", lambda engine, batch: costs.Seconds(batch.num_tokens, 0.0))
    tokens = costs.measured(LocalEngine(MODULE, NUM_SLOTS), 10**5, 2048, 64).tokens
    used = [(count % costs.TILE) / costs.TILE for count in tokens if count > 64]
    assert numpy.mean(used) == pytest.approx(0.5, abs=0.06) and max(numpy.diff(sorted(used))) < 0.2
    assert tokens[-1] % costs.TILE == costs.TILE // 2
    assert costs.measured(LocalEngine(MODULE, NUM_SLOTS), NUM_SLOTS, 40, 1).tokens == (1, 40)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([3.0], (3.0,)), ([3.0, 1.0], (3.0, 1.0)), ([1.0, 9.0, 2.0, 3.0], (1.0, 2.0, 3.0, 3.0)), ([2.0] * 3, (2.0,) * 3)],
)
def test_a_delay_that_stands_out_is_not_taken(values: list[float], expected: tuple[float, ...]) -> None:
    assert costs._smoothed(values) == expected


def test_a_table_has_no_delay_that_stands_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "seconds_of", lambda engine, batch: costs.Seconds(1.0, 9.0 if batch.num_tokens == 2 else 0.5))
    assert set(costs.measured(LocalEngine(MODULE, NUM_SLOTS), NUM_SLOTS, SHAPE.positions, 3).delays) == {0.5}


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_stage_and_the_way_back_are_told_apart(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an engine whose stages take 4 s, and whose tokens are there 1.5 s after the last one's end."""
    clock = VirtualClock()
    monkeypatch.setattr(costs, "perf_counter", clock.now)
    engine = SimulatedEngine(clock, LinearCost(4.0, delay_s=1.5), workers)
    assert costs.seconds_of(engine, rows_of(1)) == pytest.approx((4.0, 1.5))
    assert engine.num_in_flight == 0


def test_what_follows_an_iteration_is_hidden_where_two_are_in_flight() -> None:
    """The loop waits for it between iterations; with another in flight the device goes on meanwhile."""

    def ends_s(**options: bool) -> list[float]:
        scheduler = IterationLevel(PagedSlots.all_free(NUM_SLOTS, 1), 1, **options)
        clock = VirtualClock()
        engine = SimulatedEngine(clock, LinearCost(1.0, delay_s=0.25))
        requests = Listed([Request(i, (1,), 3, 0.0) for i in range(2)])
        return [i.end_s for i in serve(scheduler, engine, requests, lambda deliveries, now_s: None, clock).iterations]

    assert ends_s() == [1.25 * (n + 1) for n in range(6)]
    assert ends_s(is_prefetching=True) == ends_s(is_asynchronous=True) == [1.25 + n for n in range(6)]


def test_batches_return_in_the_order_of_their_submission() -> None:
    """Where the first takes longer to come back than the second takes in all."""
    clock = VirtualClock()
    engine = SimulatedEngine(clock, CostTable((1, 2), (1.0, 2.0), 0.0, (0.0, 9.0)))
    for num_tokens in (2, 1):
        engine.submit(rows_of(num_tokens))
    returned = [(len(engine.collect().tokens), clock.now()) for _ in range(2)]
    assert returned == [(2, 11.0), (1, 11.0)]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_gpu_is_under_load_before_anything_is_timed(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations of 4 s behind each other, until 30 s are over and all of them are back."""
    clock, submitted = VirtualClock(), []

    class Counting(SimulatedEngine):
        def submit(self, batch: Batch) -> None:
            submitted.append(batch)
            super().submit(batch)

    monkeypatch.setattr(costs, "perf_counter", clock.now)
    engine = Counting(clock, LinearCost(4.0), workers)
    costs._load(engine, rows_of(1), 30.0)
    assert not engine.num_in_flight and 30.0 <= clock.now() <= 30.0 + 4.0 * (workers + 1)
    assert clock.now() == 4.0 * (len(submitted) + workers - 1)  # no stage has waited
    calls: list[tuple[str, int, float]] = []

    def timed(engine: Engine, batch: Batch) -> costs.Seconds:
        calls.append(("timed", batch.num_tokens, 0.0))
        return costs.Seconds(batch.num_tokens, 0.0)

    monkeypatch.setattr(costs, "_load", lambda engine, batch, load_s: calls.append(("load", batch.num_tokens, load_s)))
    monkeypatch.setattr(costs, "seconds_of", timed)
    table = costs.measured(LocalEngine(MODULE, NUM_SLOTS), NUM_SLOTS, SHAPE.positions, 3, load_s=5.0)
    most = max(table.tokens)
    assert calls[:2] == [("load", most, 5.0), ("timed", most, 0.0)] and [what for what, *_ in calls].count("load") == 1


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 9)), min_size=2, max_size=6, unique_by=lambda pair: pair[0]))
def test_a_table_is_delayed_by_what_goes_between_processes(measured: list[tuple[int, float]]) -> None:
    counts, delays = zip(*sorted(measured), strict=True)
    in_processes = CostTable(counts, (1.0,) * len(counts), 0.5, delays, 3.0, 0.25)
    in_one = CostTable((1, 99), (5.0, 6.0), 0.0, (0.5, 0.5), 1.0, 0.5)
    tokens = tuple(range(counts[0], counts[-1] + 1))
    own = CostTable(tokens, tuple(map(float, tokens)), 0.125, (0.25,) * len(tokens), 0.5, 0.5)
    table = own.delayed_by(in_processes, in_one)
    assert table.delays == pytest.approx(numpy.interp(tokens, counts, delays) - 0.25)
    assert (table.loop_s, table.loop_row_s) == pytest.approx((2.5, 0.25))
    assert table.place_s == 0.125 and table.seconds == own.seconds
    assert own.delayed_by(in_one, in_one) == own


def test_the_delays_of_a_part_are_those_of_processes_beside_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of its own delay of 2, few layers in one process of 0.5, and in two of 1.5."""
    seen: list[tuple[str, int, int, Parts, float]] = []

    def table_of(delay: float) -> CostTable:
        return CostTable((1, 9), (1.0, 5.0), 0.0, (delay, delay))

    def in_one(_: object, system: object, model: Parted, parts: Parts, block_size: int, load_s: float = 0.0) -> CostTable:
        seen.append(("one", model.shape.layers, model.shape.vocabulary, parts, load_s))
        return table_of(2.0 if parts.tensor == 4 else 0.5)

    def in_processes(_: object, system: object, model: Parted, parts: Parts, block_size: int) -> CostTable:
        seen.append(("processes", model.shape.layers, model.shape.vocabulary, parts, 0.0))
        return table_of(1.5)

    monkeypatch.setattr(IterationCosts, "_in_one", in_one)
    monkeypatch.setattr(IterationCosts, "_in_processes", in_processes)
    monkeypatch.setitem(costs.LOAD_S, "cpu", 7.0)
    system = choose("system", "orca", pipeline_parallel=2, tensor_parallel=4)
    monkeypatch.setattr("systems.serving.reductions.measured", lambda *_: SUMS)
    cell = Cell(choose("model", "gpt", heads=8), system, choose("runner", "iteration_costs"), Conditions(1, "cpu", "fp32"))
    of_stage = part_from_json(IterationCosts(cell.runner).show(cell, "0", lambda _: None), StageCosts)
    assert of_stage.table.delays == (3.0, 3.0) and of_stage.delay_parts == Parts(2, 1)
    vocabulary = of_stage.shape[-1]
    few = (2 * FEW_LAYERS, -(-vocabulary // 4), Parts(2, 1), 0.0)
    assert seen == [("processes", *few), ("one", *few), ("one", of_stage.shape[0], vocabulary, Parts(2, 4), 7.0)]


def test_a_part_alone_receives_numbers_as_others_would_send() -> None:
    """A GPU multiplies zeros faster than numbers that differ."""
    torch.manual_seed(0)
    x = torch.zeros(64, 32)
    Alone(2).receive(x)
    assert float(x.mean()) == pytest.approx(0, abs=0.1) and float(x.std()) == pytest.approx(1, abs=0.1)


@given(st.integers(1, 5), st.sampled_from([1, 2, 4, 6, 8]), st.integers(1, 20))
def test_parts_within_a_number_of_processes(pipeline: int, tensor: int, count: int) -> None:
    """As many stages as fit, and then the largest part of each that divides it."""
    few = Parts(pipeline, tensor).within(count)
    fitting = [
        (stages, degree)
        for stages in range(1, pipeline + 1)
        for degree in range(1, tensor + 1)
        if stages * degree <= count and tensor % degree == 0
    ]
    assert (few.pipeline, few.tensor) == max(fitting)


def test_what_the_loop_takes_between_iterations_is_measured_by_rows() -> None:
    """Of a loop that takes 2 s between iterations and a quarter for each request; or submits before a return."""

    def course(inbox: Inbox, between_s: float, row_s: float) -> Course:
        requests = inbox.arrived(0.0)
        assert {len(request.prompt) + request.max_new_tokens for request in requests} == {9}
        period_s = 5.0 + between_s + row_s * len(requests)
        batch = Batch(0, ())
        return Course([Iteration(i * period_s, i * period_s + 5.0, 1, 1, 1, 0, batch) for i in range(4)])

    table = CostTable((1, 3), (1.0, 1.0), 0.0, (0.5, 1.5))
    looped = costs.looped(table, lambda inbox: course(inbox, 2.0, 0.25), 5, 9)
    assert (looped.loop_s, looped.loop_row_s) == pytest.approx((2.0, 0.25))
    assert looped.delay(rows_of(3)) == pytest.approx(1.5 + 2.0 + 0.75) and looped(rows_of(3)) == table(rows_of(3))
    hidden = costs.looped(table, lambda inbox: course(inbox, -3.0, 0.0), 5, 9)
    assert hidden == table
    real = LocalEngine(MODULE, NUM_SLOTS)
    server = Server(SCHEDULERS["orca"](1), real, (NUM_SLOTS, SHAPE.positions, SHAPE.vocabulary))
    of_server = costs.of_server(server, 3)
    assert of_server.loop_s + of_server.loop_row_s > 0 and server.scheduler.num_unfinished == 0
    assert of_server.tokens[:3] == (1, 2, 3) and max(of_server.seconds) > 0


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20))
def test_more_tokens_cost_no_less_and_the_nearest_such_costs_are_taken(sixteenths: list[int]) -> None:
    isotonic = pytest.importorskip("sklearn.isotonic", reason="pip install '.[windtunnel]'")
    values = [count / 16 for count in sixteenths]
    expected = isotonic.IsotonicRegression().fit_transform(range(len(values)), values)
    assert costs._ascending(values) == pytest.approx(tuple(expected))


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


def test_iterations_of_a_real_engine_have_a_cost() -> None:
    table = costs.measured(LocalEngine(MODULE, NUM_SLOTS), NUM_SLOTS, SHAPE.positions, 3)
    assert min(table.seconds) >= 0 < max(table.seconds) and table.place_s >= 0
    assert list(table.seconds) == sorted(table.seconds) and min(table.delays) >= 0


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


@pytest.mark.parametrize("count", [100, *(pytest.param(count, marks=pytest.mark.slow) for count in (200, 400))])
@pytest.mark.parametrize("name", OF_13B)
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

SUMS = Reductions(2, (1000, 3000, 5000), (1.0, 2.0, 4.0))
DIRECT = replace(SUMS, kind="direct")
COSTS = StageCosts(
    "H",
    2**40,
    "fp32",
    (4, 128, 8, 2048, 512),
    Parts(2, 8),
    512,
    CostTable((1, 4), (1.0, 4.0), 0.0, (0.5, 2.0)),
    DIRECT,
)


def rows_of(num_tokens: int) -> Batch:
    row = Row(0, Region((0,), 100, 100), 0, (0,), 0, 1, 0, Sampling())
    return Batch(0, (row,) * num_tokens)


def test_sums_over_more_gpus_load_a_link_as_a_larger_tensor_does() -> None:
    assert SUMS(1000, 2) == 1.0 and SUMS(4000, 2) == 3.0 and SUMS(6000, 2) == 5.0 and SUMS(10, 2) == 1.0
    assert SUMS(2000, 4) == SUMS(3000, 2)  # 3/4 of the bytes twice, beside 1/2
    assert SUMS(2000, 8) == SUMS(3500, 2)


def test_a_gpu_that_sums_by_itself_reads_as_many_parts_as_there_are_others() -> None:
    assert DIRECT(1000, 2) == SUMS(1000, 2) and DIRECT(1000, 4) == SUMS(3000, 2) > SUMS(1000, 4)


def test_a_stage_costs_its_part_and_two_sums_a_layer() -> None:
    for num_tokens in (1, 4, 8):
        expected = num_tokens * 1.0 + 2 * (4 / 2) * DIRECT(num_tokens * 512, 8)
        assert COSTS(rows_of(num_tokens)) == pytest.approx(expected)
    assert replace(COSTS, parts=Parts(2, 1), reductions=None)(rows_of(4)) == 4.0 and COSTS.delay(rows_of(2)) == 1.0


def test_costs_are_read_as_they_were_written() -> None:
    with_loop = replace(COSTS, table=replace(COSTS.table, loop_s=0.25, loop_row_s=0.5))
    for costs_of_stage in (COSTS, with_loop, replace(COSTS, reductions=SUMS), replace(COSTS, reductions=None)):
        assert part_from_json(json.loads(costs_of_stage.to_json()), StageCosts) == costs_of_stage


def test_committed_costs_are_named(tmp_path: Path) -> None:
    """A file of that name wins over a committed one."""
    assert "NVIDIA H200" in part_from_json(read_json(costs_file("gpt_13b-h200")), StageCosts).device
    (tmp_path / "gpt_13b-h200").write_text("{}")
    assert costs_file(str(tmp_path / "gpt_13b-h200")) == tmp_path / "gpt_13b-h200"
    with pytest.raises(BadRequest, match=r"runner.costs=gpt_31b-h200 is not a file.*committed are .*gpt_13b-h200"):
        plan(choose("runner", "simulated", costs="gpt_31b-h200"))


def simulated_session(folder: Path, costs_of_stage: StageCosts, slots: int = 4000, **options: object) -> SimulatedSession:
    file = folder / "costs.json"
    file.write_text(costs_of_stage.to_json())
    parts = costs_of_stage.parts
    splits = {"pipeline_parallel": parts.pipeline, "tensor_parallel": parts.tensor}
    system = choose("system", "orca", max_batch_size=4, slots=slots, **splits)
    runner = choose("runner", "simulated", costs=str(file), **{"requests": 30, "rate": 0.01, **options})  # type: ignore[arg-type]
    model = choose("model", "gpt", heads=8)
    session = SimulatedSession(Cell(model, system, runner, Conditions(1, "cpu", "fp32")), "0", lambda phase: None)
    session.prepare()
    return session


def test_a_simulated_record_says_so_everywhere(tmp_path: Path) -> None:
    part = ServingMeasurement(choose("runner", "simulated")).measure(simulated_session(tmp_path, COSTS))
    assert isinstance(part, Serving) and part.clock == "virtual" and part.quantities
    assert all(
        "simulated" in str(quantity.source) and "measured on H" in str(quantity.source) for quantity in part.quantities
    )
    rate = Capacity(choose("runner", "simulated")).measure(simulated_session(tmp_path, COSTS))
    assert isinstance(rate, Measured) and all("simulated" in str(quantity.source) for quantity in rate.quantities)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("token_bytes", None, "None is not int"),
        ("table", {"tokens": "x"}, "table"),
        ("parts", [1, 1], "parts"),
        ("more", 1, "more"),
    ],
)
def test_a_file_that_holds_no_costs_is_one_line(tmp_path: Path, key: str, value: object, words: str) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(json.loads(COSTS.to_json()) | {key: value}))
    runner = choose("runner", "simulated", costs=str(file))
    cell = Cell(choose("model", "gpt", heads=8), choose("system", "orca"), runner, Conditions(1, "cpu", "fp32"))
    with pytest.raises(BadOption, match=f"is not a file of runner=iteration_costs: .*{words}") as caught:
        SimulatedSession(cell, "0", lambda phase: None)
    assert "\n" not in str(caught.value)


def test_what_else_the_machine_does_slows_no_virtual_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runners.machine.cpu_load.CpuLoad.share_of_others", lambda _: 0.9)
    session = simulated_session(tmp_path, COSTS)
    made = measured(session, replace(record(of=session.cell), warnings=()))
    assert made.is_ok and made.serving is not None and made.warnings == ()


def test_a_simulated_rate_has_a_trace_of_each_seed(tmp_path: Path) -> None:
    one, three = (simulated_session(tmp_path, COSTS, repeats=repeats).try_rate(1e-7) for repeats in (1, 3))
    assert one.trace_ms == three.trace_ms[:1] and len({*three.trace_ms}) == 3
    assert three.normalized_ms == median(filter(None, three.trace_ms))


def test_a_simulated_rate_is_that_of_its_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As drawn they come at others, whatever the rate."""
    session = simulated_session(tmp_path, COSTS, requests=30, repeats=2)
    last_s: list[float] = []
    simulate = session.simulate

    def noting(trace: tuple[Arrival, ...], seed: str) -> Seen:
        last_s.append(trace[-1].due_s)
        return simulate(trace, seed)

    monkeypatch.setattr(session, "simulate", noting)
    assert session.try_rate(4.0).rate == 4.0 and last_s == pytest.approx([29 / 4] * 2)


def test_a_request_alone_that_no_slots_hold_is_refused(tmp_path: Path) -> None:
    few = simulated_session(tmp_path, COSTS, 150, prompt_tokens=8, new_tokens=4)
    with pytest.raises(BadOption, match=r"128 prompt .* more than the 150 K/V slots; or say an SLO"):
        Capacity(choose("runner", "simulated")).measure(few)


def test_a_stage_more_is_a_latency_more_and_no_throughput_less(tmp_path: Path) -> None:
    """A request alone goes through both stages; many keep both busy."""
    table = CostTable((1, 2), (0.001, 0.001), 0.0)  # whatever the tokens
    one = replace(COSTS, parts=Parts(1, 1), table=table, reductions=None)
    alone_ms = [simulated_session(tmp_path, each).alone_ms(8, 16) for each in (one, replace(one, parts=Parts(2, 1)))]
    assert alone_ms == pytest.approx([1.0, 2.0])
    saturated = [
        simulated_session(tmp_path, each, rate=1e6, requests=200).try_rate(1e6).throughput
        for each in (one, replace(one, parts=Parts(2, 1)))
    ]
    assert saturated[1] == pytest.approx(saturated[0], rel=0.1)  # a batch for each time of a stage, with as many stages busy


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shape": (5, 128, 8, 2048, 512)}, "is of another model, split or precision: 5 layers of 128"),
        ({"reductions": SUMS}, "system.reductions=direct, but the sums that were measured are nccl"),
        ({"precision": "fp16"}, "precision=fp16$"),
        ({"reductions": None}, "the sums over parts were not measured"),
    ],
)
def test_costs_of_something_else_are_refused(changes: dict[str, object], says: str, tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=says):
        simulated_session(tmp_path, replace(COSTS, **changes))  # type: ignore[arg-type]


def test_what_does_not_fit_is_not_simulated(tmp_path: Path) -> None:
    with pytest.raises(MemoryError, match=r"^rank 0 of 16"):
        simulated_session(tmp_path, replace(COSTS, gpu_bytes=2**20))


def test_slots_that_do_not_fit_are_not_simulated(tmp_path: Path) -> None:
    """Each part has 2 of the 4 layers and one head of 16: a slot is 256 bytes."""
    most = 20_000_000  # 4.8 GiB beside weights
    simulated_session(tmp_path, replace(COSTS, gpu_bytes=5 * 2**30), most)
    with pytest.raises(BadOption, match=r"^system.slots=21000000 take 5.0 GiB, and 5.0 are free: there is room for 20"):
        simulated_session(tmp_path, replace(COSTS, gpu_bytes=5 * 2**30), 21_000_000)
    parts = replace(COSTS, gpu_bytes=5 * 2**30, parts=Parts(), reductions=None)
    with pytest.raises(BadOption, match=rf"^system.slots={most} take 76.3 GiB"):
        simulated_session(tmp_path, parts, most)


@pytest.mark.slow
def test_costs_of_a_part_are_measured_and_simulated(run: Run, tmp_path: Path) -> None:
    """The command lines, with a simulation that costs what the file says."""
    options = [
        "model=gpt",
        "model.heads=8",
        "system=orca",
        "system.tensor_parallel=4",
        "system.max_batch_size=4",
        "device=cpu",
    ]
    done = run("runner=iteration_costs", *options, f"output={tmp_path / 'costs.json'}")
    assert done.returncode == 0, done.stderr
    costs_of_stage = part_from_json(read_json(tmp_path / "costs.json"), StageCosts)
    assert costs_of_stage.parts == Parts(1, 4) and costs_of_stage.reductions is not None and costs_of_stage.device == "cpu"
    assert costs_of_stage.delay_parts == Parts(1, 2)
    assert max(costs_of_stage.table.seconds) > 0 and min(costs_of_stage.reductions.seconds) > 0
    load = [
        "runner.requests=1",
        "runner.prompt_tokens=1-1",
        "runner.new_tokens=1-1",
        f"runner.costs={tmp_path / 'costs.json'}",
    ]
    done = run("runner=simulated", *options, *load, f"results={tmp_path / 'r'}")
    assert done.returncode == 0 and "(simulated)" in done.stdout, done.stderr
    (record,) = Store(tmp_path / "r").read().records.values()
    assert record.serving is not None and record.serving.clock == "virtual"
    requests = record.serving.traces[0].requests
    latency_s = requests.token_s[0][0] - requests.due_s[0]
    assert latency_s == pytest.approx(costs_of_stage(rows_of(1)) + costs_of_stage.delay(rows_of(1)), rel=1e-6)


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
