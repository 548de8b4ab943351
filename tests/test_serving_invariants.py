"""The invariants that Orca's study asks for and the bad inputs that it names, and which tests hold them.

Here are those tests that no other file has.
"""

from __future__ import annotations

import ast
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from serving_parts import slot_of
from test_serving_simulated import LinearCost, simulated
from workloads import Asked, books, run, token_of, workloads

from systems.serving import worker
from systems.serving.batch import Batch
from systems.serving.iteration_level import IterationLevel, select
from systems.serving.message import to_bytes
from systems.serving.prefix_cache import CachedSlots
from systems.serving.request import Request
from systems.serving.slots import ContiguousSlots, PagedSlots, Slots
from systems.serving.worker import Worker

HELD = {
    "1 tokens of any mix are those of each alone": [
        "test_serving_engine.test_tokens_of_any_mix_are_those_of_each_request_alone",
        "test_serving_models.test_tokens_of_any_mix_are_those_of_each_request_alone",
        "test_serving_extensions.test_tokens_under_each_switch_are_those_of_each_request_alone",
    ],
    "2 the same for every attention, book, chunk, cache and split": [
        "test_serving_engine.test_tokens_of_any_mix_are_those_of_each_request_alone",
        "test_serving_kernels.test_kernels_are_what_pytorch_computes_in_tritons_interpreter",
        "test_serving_extensions.test_tokens_under_each_switch_are_those_of_each_request_alone",
        "test_serving_increments.test_tokens_are_the_same_whatever_executes_increments",
        "test_serving_parallel.test_any_split_is_one_process",
        "test_serving_parallel.test_three_stages_are_one_process",
        "test_serving_parallel.test_chunks_of_prompts_that_begin_alike_in_blocks_are_one_process",
    ],
    "3 reserved slots are those of started requests": [
        "test_serving_invariants.test_reserved_slots_are_those_of_started_requests",
        "test_serving_schedulers.test_books_of_slots_lose_none",
        "test_serving_schedulers.test_static_batches_compute_what_their_definition_says",
        "test_serving_extensions.test_no_switch_loses_a_slot_or_a_token",
    ],
    "4 sizes of batches, of the flight, and first come first served": [
        "test_serving_schedulers.test_iteration_level_scheduling_keeps_its_invariants",
        "test_serving_schedulers.test_who_arrives_earlier_has_run_as_often_at_least",
        "test_serving_schedulers.test_batches_are_those_of_algorithm_2_as_printed",
        "test_serving_definitions.test_iterations_are_those_of_their_definition",
    ],
    "5 no engine idles while something can be selected, and nobody starves": [
        "test_serving_invariants.test_whoever_has_started_finishes_in_time",
        "test_serving_simulated.test_a_simulation_is_the_engine_batch_by_batch",
    ],
    "6 nobody waits for a later batch mate": [
        "test_serving_invariants.test_longer_mates_make_nobody_wait",
        "test_serving_simulated.test_nobody_waits_for_a_batch_mate_that_finishes_later",
    ],
    "7 static batches compute what their definition says": [
        "test_serving_schedulers.test_static_batches_compute_what_their_definition_says",
        "test_serving_schedulers.test_equal_requests_that_arrive_together_are_scheduled_alike",
        "test_serving_definitions.test_static_batches_are_those_of_their_definition",
    ],
    "8 cancels free slots, and a killed worker ends all with one line": [
        "test_serving_invariants.test_reserved_slots_are_those_of_started_requests",
        "test_serving_extensions.test_no_switch_loses_a_slot_or_a_token",
        "test_serving_schedulers.test_a_static_batch_that_nobody_wants_computes_nothing_more",
        "test_serving_bridge.test_a_thousand_requests_with_random_cancels_lose_nothing",
        "test_serving_ends.test_whichever_worker_is_killed_ends_all",
        "test_serving_ends.test_of_a_thousand_requests_none_is_lost_silently",
    ],
    "9 a message is the batch, and goes on before anything is launched": [
        "test_serving_worker.test_a_message_is_the_batch",
        "test_serving_invariants.test_a_message_goes_on_before_anything_is_launched",
    ],
    "10 a simulation is the engine": [
        "test_serving_simulated.test_a_simulation_is_the_engine_batch_by_batch",
        "test_serving_simulated.test_who_arrives_while_a_place_is_free_begins_at_once_and_waits_for_each_stage",
    ],
    "11 a translated pipeline is the pipeline, and trains what it names": [
        *(f"test_windtunnel_trees.test_{library}" for library in ("lightgbm", "xgboost", "sklearn")),
        "test_windtunnel_trees.test_one_leaf_and_constant_features",
        "test_windtunnel_forests.test_soft_becomes_hard_as_the_temperature_falls",
        "test_windtunnel_forests.test_levels_give_the_same_and_train_what_they_name",
        "test_windtunnel_forests.test_gradients_are_those_of_the_function",
        "test_windtunnel_translate.test_gradients_reach_the_encoders_behind_trees",
        "test_windtunnel_encoders.test_the_codes_are_those_of_the_figure",  # of two that collide too, after a step
        "test_windtunnel_saving.test_saved_and_loaded_it_is_the_same_to_the_bit",
        "test_windtunnel_estimator.test_behind_a_scaler_it_is_the_pipeline_to_the_last_row",
        "test_windtunnel_estimator.test_columns_go_by_their_names",
    ],
}
NEVER_SERVED = "test_serving_schedulers.test_what_can_never_be_served_is_refused"
NO_TRACE = "test_serving_traces.test_a_file_that_is_no_trace_is_refused_in_one_line"
NOT_TUNED = "test_windtunnel_estimator.test_other_bad_requests"
NO_PARAMETERS = "test_windtunnel_estimator.test_bad_requests_are_one_line_and_lose_nothing"
NO_DATA = ["test_tabular.test_wrong_files_are_one_line", "test_tabular.test_files_that_are_not_there"]
REFUSED = {
    "prompt empty, longer than positions or of ids outside the vocabulary": [
        NEVER_SERVED,
        "test_serving_endpoint.test_a_body_that_asks_for_what_cannot_be_is_told_so",
    ],
    "max_tokens 0; prompt and max_tokens more than positions or slots": [NEVER_SERVED],
    "slots more than memory; positions fewer than the largest request of the trace": [
        "test_serving_refusals.test_more_slots_than_there_is_memory_for_are_told_beside_what_fits",
        "test_serving_refusals.test_a_model_of_few_positions_is_told_before_anything_is_made",
    ],
    "slots fewer than the largest request of the trace": [
        "test_serving_refusals.test_a_request_that_no_slots_hold_is_refused_before_anything_is_served",
        "test_serving_refusals.test_what_a_refusal_advises_is_enough",
    ],
    "max_batch_size 0": ["test_serving_refusals.test_options_of_systems_that_cannot_be_are_refused"],
    "parts that do not divide heads or layers": ["test_serving_placement.test_what_cannot_be_placed_is_refused_in_one_line"],
    "more parts than GPUs": ["test_serving_placement.test_more_parts_than_gpus_are_refused_in_one_line"],
    "rate 0, negative or infinite": ["test_serving_traces.test_options_that_cannot_be_are_refused"],
    "trace without a column, unsorted, negative or empty": [NO_TRACE],
    "port taken": ["test_serving_endpoint.test_a_port_that_is_taken_is_one_line"],
    "body above 8 MB; another model than the one served": [
        "test_serving_endpoint.test_a_body_too_large_and_one_that_is_no_json_are_refused",
        "test_serving_endpoint.test_other_paths",
    ],
    "several models of one endpoint": ["test_serving_start.test_a_sweep_is_one_line"],
    "client gone within a stream, or there and reading nothing": [
        "test_serving_endpoint.test_a_client_that_goes_away_gives_its_slots_back",
        "test_serving_unread.test_a_stream_that_nobody_reads_is_cancelled_and_its_connection_closed",
    ],
    "a GPU's attention on a CPU; weights that do not fit": [
        "test_serving_refusals.test_a_server_executes_no_module_and_a_model_may_generate_nothing"
    ],
    "pipeline not fitted; sparse, of words, of one class, of another number of columns": [NOT_TUNED],
    "operator that has no translation behind one that has": [
        "test_windtunnel_translate.test_what_stands_behind_a_translated_operator_is_refused_with_both_names"
    ],
    "data set unknown, absent or of another table": NO_DATA,
    "loss that a pipeline has not; level 5; temperature 0": [NO_PARAMETERS],
    "loss that is no number": ["test_windtunnel_estimator.test_a_loss_that_is_no_number_stops_and_keeps_the_best"],
}


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((Path(__file__).parent / f"{file}.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_invariant_and_refusal_is_held_by_tests_that_exist() -> None:
    for invariant, names in (HELD | REFUSED).items():
        for name in names:
            file, _, test = name.partition(".")
            assert test in functions_of(file), (invariant, name)


def steps(scheduler: IterationLevel, workload: Sequence[Asked]) -> list[tuple[Batch, list[Request]]]:
    """Serve a workload. Before each batch is submitted, and after each return, the invariants of the book are looked at.

    Returns:
        Each batch as it returned, with the requests that were started and unfinished before it went.
    """
    flight: deque[tuple[Batch, list[Request]]] = deque()
    returned = []
    turn, cancelled = 0, set[int]()

    def look() -> None:
        started = list(scheduler.started.values())
        assert scheduler.num_reserved <= scheduler.slots.num_slots
        size = scheduler.slots.block_size if isinstance(scheduler.slots, PagedSlots) else 1
        assert scheduler.num_reserved == sum(-(-request.max_tokens // size) * size for request in started)
        regions = [request.region for request in started if request.region is not None]
        places = [slot_of(region, at) for region in regions for at in range(region.num_slots)]
        assert len(regions) == len(started) and len(places) == len(set(places)) == scheduler.num_reserved
        running = [row.request_id for batch, _ in flight for row in batch.rows]
        assert len(running) == len(set(running)) and len(flight) <= scheduler.num_in_flight_max
        assert {request.id for request in started} & cancelled <= set(running), "it is given up, and holds slots"

    while turn <= 40 or scheduler.num_unfinished:
        for i, asked in enumerate(workload):
            if asked.turn == turn and i not in cancelled:
                scheduler.add(asked.request(i))
            if asked.cancelled == turn:
                scheduler.cancel(i)
                cancelled.add(i)
                look()
        while (batch := scheduler.next_batch()) is not None:
            assert not cancelled & {row.request_id for row in batch.rows}, "it is given up, and runs on"
            flight.append((batch, list(scheduler.started.values())))
            look()
        if not scheduler.is_full:
            pool = (*scheduler.started.values(), *scheduler.waiting)
            assert not select(pool, scheduler.slots, scheduler.max_batch_size).parts, "it idles, and something can run"
        if flight:
            returned.append(flight.popleft())
            batch = returned[-1][0]
            scheduler.take_back(batch, [token_of(row.request_id, row.draw) for row in batch.rows])
            look()
        turn += 1
        assert turn < 2000, "nothing moves any more"
    assert scheduler.num_reserved == 0 and not flight
    return returned


@examples(200)
@given(workloads(is_cancelling=True), books(), st.integers(1, 4), st.integers(1, 3))
def test_reserved_slots_are_those_of_started_requests(
    workload: list[Asked], slots: Slots, max_batch_size: int, num_workers: int
) -> None:
    """Invariants 3 and 4: at every moment, not at the end alone."""
    steps(IterationLevel(slots, max_batch_size, num_workers), workload)


@examples(200)
@given(workloads(), st.integers(1, 4), st.integers(1, 3))
def test_whoever_has_started_finishes_in_time(workload: list[Asked], max_batch_size: int, num_workers: int) -> None:
    """Invariant 5: within as many iterations as those that came before it, and it, have tokens to generate."""
    returned = steps(IterationLevel(PagedSlots.all_free(24, 1), max_batch_size, num_workers), workload)
    order = sorted(range(len(workload)), key=lambda i: (workload[i].turn, i))
    for place, i in enumerate(order):
        numbers = [n for n, (batch, _) in enumerate(returned) if i in [row.request_id for row in batch.rows]]
        before = sum(workload[earlier].length for earlier in order[: place + 1])
        assert numbers[-1] - numbers[0] < before + num_workers * workload[i].length


@examples(100)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(0, 8)), min_size=2, max_size=6),
    st.integers(1, 30),
    st.integers(1, 3),
)
def test_longer_mates_make_nobody_wait(workload: list[tuple[int, int, int]], more: int, num_workers: int) -> None:
    """Invariant 6: whoever finishes later may finish any later; those before it have each token at the same moment."""

    def times(news: list[int]) -> dict[int, list[float]]:
        requests = [
            Request(i, (1,) * n, new, float(at)) for i, ((n, _, at), new) in enumerate(zip(workload, news, strict=True))
        ]
        scheduler = IterationLevel(ContiguousSlots.all_free(1000), 3, num_workers)
        return simulated(scheduler, requests, LinearCost(1.0, 0.125, 0.0625), num_workers)[1]

    news = [new for _, new, _ in workload]
    before = times(news)
    last = max(before, key=lambda i: (before[i][-1], i))
    after = times([new + more * (i == last) for i, new in enumerate(news)])
    assert {i: moments for i, moments in after.items() if i != last} == {i: m for i, m in before.items() if i != last}
    assert after[last][: news[last]] == before[last] and len(after[last]) == news[last] + more


@pytest.mark.parametrize("is_awake", [False, True])
def test_a_message_goes_on_before_anything_is_launched(monkeypatch: pytest.MonkeyPatch, is_awake: bool) -> None:
    """Invariant 9, of a worker whose device and pipes only note what is done."""
    scheduler = IterationLevel(ContiguousSlots.all_free(20), 2)
    scheduler.add(Request(0, (1, 2), 2))
    batch = scheduler.next_batch()
    assert batch is not None
    notes: list[str] = []
    messages = iter((to_bytes(batch), to_bytes(batch), b""))

    def launched(batch: Batch) -> torch.Tensor:
        notes.append("launched")
        return torch.zeros(len(batch.rows), 3)

    one = object.__new__(Worker)

    def receive(meanwhile: Callable[[], bool] | None) -> bytes:
        assert (meanwhile is not None) == is_awake
        while meanwhile is not None and meanwhile():
            pass
        return next(messages)

    one.control = SimpleNamespace(  # type: ignore[assignment]
        receive=receive, forward=lambda message: notes.append("forwarded" if message else "ended")
    )
    one.engine = SimpleNamespace(launched=launched)  # type: ignore[assignment]
    answers: list[bytes] = []
    one.answers = SimpleNamespace(send_bytes=answers.append)  # type: ignore[assignment]
    one.num_slots, one.device, one.is_awake, one.pending = 20, torch.device("cpu"), is_awake, None
    one.unanswered = worker.queue.SimpleQueue()
    monkeypatch.setattr(worker.dist, "barrier", lambda: None)
    one.run()
    assert notes == ["forwarded", "launched"] * 2 + ["ended"]
    assert [array("q", answer).tolist() for answer in answers] == [[20], [0], [0]]  # it is ready, and a token of each batch


def contents(book: Slots) -> list[object]:
    """All that a book says, the order of what is idle with it."""
    return [[*value.items()] if isinstance(value, Mapping) else value for value in vars(book).values()]


@examples(60)
@given(workloads(), st.sampled_from([ContiguousSlots, PagedSlots, CachedSlots]), st.booleans(), st.sampled_from([0, 3]))
def test_selecting_leaves_requests_and_books_as_they_are(
    workload: list[Asked], kind: type[Slots], is_preempting: bool, chunk: int
) -> None:
    """Whatever is reserved, shared, extended or given up in a selection, and by the next ones."""
    is_preempting &= kind is not ContiguousSlots
    slots = kind.all_free(18, *[2] * (kind is not ContiguousSlots))  # type: ignore[attr-defined]
    books: list[tuple[Slots, list[object]]] = []

    class Beside(IterationLevel):
        def next_batch(self) -> Batch | None:
            pool = [*self.started.values(), *self.waiting]
            before = [deepcopy(vars(request)) for request in pool]
            books.append((self.slots, contents(self.slots)))
            options = self.max_batch_size, chunk, is_preempting
            first, again = (select(pool, self.slots, *options) for _ in range(2))
            assert [vars(request) for request in pool] == before
            assert (first.parts, first.preempted) == (again.parts, again.preempted)
            assert contents(first.slots) == contents(again.slots)
            return super().next_batch()

    run(Beside(slots, 3, 2, max_num_batched_tokens=chunk, is_preempting=is_preempting), workload)
    assert all(contents(book) == before for book, before in books)
