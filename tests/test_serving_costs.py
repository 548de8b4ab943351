"""What iterations of an engine cost: measured, in tables, and between what was measured."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_serving_engine import MODULE, NUM_SLOTS, SHAPE
from test_serving_simulated import SCHEDULERS
from test_serving_simulated_runner import SUMS, rows_of

from results.cell import Cell, Conditions, choose
from results.document import part_from_json
from runners.serving.parted import Parted
from runners.showings.iteration_costs import FEW_LAYERS, IterationCosts
from systems.serving import costs
from systems.serving.batch import Batch, Row
from systems.serving.costs import CostTable
from systems.serving.engine import Engine, LocalEngine
from systems.serving.iteration_level import IterationLevel
from systems.serving.loop import Course, Inbox, Iteration, Listed, serve
from systems.serving.parts import Parts
from systems.serving.request import Request, Sampling
from systems.serving.simulated import LinearCost, SimulatedEngine, VirtualClock
from systems.serving.slots import PagedSlots, Region
from systems.serving.stage_costs import Alone, StageCosts
from systems.serving.system import Server


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


def test_iterations_of_a_real_engine_have_a_cost() -> None:
    table = costs.measured(LocalEngine(MODULE, NUM_SLOTS), NUM_SLOTS, SHAPE.positions, 3)
    assert min(table.seconds) >= 0 < max(table.seconds) and table.place_s >= 0
    assert list(table.seconds) == sorted(table.seconds) and min(table.delays) >= 0
