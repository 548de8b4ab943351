"""Schedulers of requests: Algorithm 2 beside a transcription of its own, static batches beside their definitions."""

from collections import Counter, deque
from collections.abc import Sequence
from itertools import combinations

import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from serving_parts import slot_of
from workloads import NUM_POSITIONS, NUM_SLOTS, Asked, books, run, token_of, workloads

from systems.serving.batch import Batch
from systems.serving.iteration_level import IterationLevel, select
from systems.serving.request import Delivery, Request, Sampling, refusal
from systems.serving.request_level import BATCHINGS, RequestLevel
from systems.serving.slots import ContiguousSlots, PagedSlots, Region, Slots


class Transcribed:
    """Algorithm 2 as it is printed, on sets and counters; lines 9 to 15 are the caller's."""

    def __init__(self, num_workers: int, max_batch_size: int, num_slots: int):
        self.state: dict[int, str] = {}
        self.remaining: dict[int, int] = {}
        self.max_tokens: dict[int, int] = {}
        self.arrival: dict[int, tuple[int, int]] = {}
        self.n_workers, self.max_bs, self.n_slots = num_workers, max_batch_size, num_slots
        self.n_scheduled = self.n_rsrv = 0

    def select(self) -> list[int]:
        batch: list[int] = []
        pool = [r for r in self.state if self.state[r] != "running"]
        for r in sorted(pool, key=lambda r: self.arrival[r]):
            if len(batch) == self.max_bs:
                break
            if self.state[r] == "initiation":
                new = self.n_rsrv + self.max_tokens[r]
                if new > self.n_slots:
                    break
                self.n_rsrv = new
            batch.append(r)
        return batch

    def run(self, workload: Sequence[Asked]) -> list[list[int]]:
        batches: list[list[int]] = []
        flight: deque[list[int]] = deque()
        turn = 0
        while turn <= 40 or self.state:
            for i, client_request in enumerate(workload):
                if client_request.turn == turn:
                    self.state[i], self.remaining[i], self.arrival[i] = "initiation", client_request.length, (turn, i)
                    self.max_tokens[i] = client_request.prompt + client_request.new
            while self.n_scheduled < self.n_workers and (batch := self.select()):
                for r in batch:
                    self.state[r] = "running"
                self.n_scheduled += 1
                flight.append(batch)
                batches.append(batch)
            if flight:
                for r in flight.popleft():
                    self.state[r] = "increment"
                    self.remaining[r] -= 1
                    if not self.remaining[r]:
                        self.n_rsrv -= self.max_tokens[r]
                        del self.state[r]
                self.n_scheduled -= 1
            turn += 1
        return batches


@examples(300)
@given(workloads(), st.integers(1, 4), st.integers(1, 4), st.integers(12, NUM_SLOTS))
def test_batches_are_those_of_algorithm_2_as_printed(
    workload: list[Asked], num_workers: int, max_batch_size: int, num_slots: int
) -> None:
    scheduler = IterationLevel(PagedSlots.all_free(num_slots, 1), max_batch_size, num_workers)
    batches = run(scheduler, workload).batches
    expected = Transcribed(num_workers, max_batch_size, num_slots).run(workload)
    assert [[row.request_id for row in batch.rows] for batch in batches] == expected


@examples(300)
@given(
    workloads(is_cancelling=True), books(), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.sampled_from([0, 1, 3])
)
def test_iteration_level_scheduling_keeps_its_invariants(
    workload: list[Asked], slots: Slots, max_batch_size: int, num_workers: int, is_prefetching: bool, chunk: int
) -> None:
    scheduler = IterationLevel(slots, max_batch_size, num_workers, is_prefetching, chunk)
    done = run(scheduler, workload)
    fed: dict[int, list[int]] = {}
    runs = Counter[int]()
    for batch in done.batches:
        assert 0 < len(batch.rows) <= max_batch_size and len({row.request_id for row in batch.rows}) == len(batch.rows)
        assert not chunk or batch.num_tokens <= chunk
        context_slots = [slot_of(row.region, at) for row in batch.rows for at in range(row.num_context)]
        assert len(context_slots) == len(set(context_slots)) and all(0 <= slot < NUM_SLOTS for slot in context_slots)
        for row in batch.rows:
            assert row.begin == len(fed.setdefault(row.request_id, []))
            fed[row.request_id] += row.tokens
            runs[row.request_id] += 1
    for i, client_request in enumerate(workload):
        whole = [token_of(i, at) for at in range(client_request.length)]
        if client_request.cancelled is None:
            assert done.tokens[i] == whole and fed[i] == [*range(client_request.prompt), *whole[:-1]]
            assert chunk or runs[i] == client_request.length
        else:
            assert done.tokens.get(i, []) == whole[: len(done.tokens.get(i, []))]


@examples(200)
@given(workloads(), st.integers(1, 4), st.integers(1, 3))
def test_who_arrives_earlier_has_run_as_often_at_least(workload: list[Asked], max_batch_size: int, num_workers: int) -> None:
    """While both are unfinished: iteration-level FCFS."""
    runs = Counter[int]()
    order = sorted(range(len(workload)), key=lambda i: (workload[i].turn, i))
    for batch in run(IterationLevel(PagedSlots.all_free(24, 1), max_batch_size, num_workers), workload).batches:
        runs.update(row.request_id for row in batch.rows)
        for earlier, later in combinations(order, 2):
            assert runs[earlier] >= min(runs[later], workload[earlier].length)


@given(workloads(), st.integers(1, 4), st.integers(1, 3), st.integers(12, NUM_SLOTS))
def test_blocks_of_one_slot_admit_every_batch_that_runs_of_slots_do(
    workload: list[Asked], max_batch_size: int, num_workers: int, num_slots: int
) -> None:
    """Whatever runs have left free, and in what pieces: blocks admit the same requests, and perhaps more behind them."""

    class Beside(IterationLevel):
        def next_batch(self) -> Batch | None:
            pool = (*self.started.values(), *self.waiting)
            blocks = PagedSlots(num_slots, 1, tuple(range(self.slots.num_free)))
            by_runs, by_blocks = (
                [(part.request.id, part.num_tokens) for part in select(pool, book, max_batch_size).parts]
                for book in (self.slots, blocks)
            )
            assert by_blocks[: len(by_runs)] == by_runs
            return super().next_batch()

    run(Beside(ContiguousSlots.all_free(num_slots), max_batch_size, num_workers), workload)


def test_blocks_of_one_slot_admit_a_request_that_no_run_holds_and_larger_ones_may_refuse_it() -> None:
    pool = [Request(0, (1,) * 6, 2)]
    in_pieces = ContiguousSlots(12, ((0, 4), (8, 12)))
    assert not select(pool, in_pieces, 4).parts and select(pool, PagedSlots(12, 1, (*range(4), *range(8, 12))), 4).parts
    two = [Request(i, (1,) * 4, 2) for i in range(2)]
    books = ContiguousSlots.all_free(12), PagedSlots.all_free(12, 5)
    assert [len(select(two, book, 4).parts) for book in books] == [2, 1]  # six slots are two blocks of five


def test_selecting_changes_nothing() -> None:
    pool = [Request(i, (1, 2, 3), 4, arrival_s=-i) for i in range(5)]
    before = [vars(request).copy() for request in pool]
    slots = ContiguousSlots.all_free(16)
    selection = select(pool, slots, 4)
    assert [part.request.id for part in selection.parts] == [4, 3] and selection.slots.num_reserved == 14
    assert [vars(request) for request in pool] == before and slots.num_free == 16


def test_a_request_that_finds_no_slots_is_counted() -> None:
    scheduler = IterationLevel(ContiguousSlots.all_free(12), 8)
    for i, new in enumerate((1, 3, 1)):
        scheduler.add(Request(i, (1, 2, 3), new, arrival_s=i))
    batch = scheduler.next_batch()
    assert batch is not None and [row.request_id for row in batch.rows] == [0, 1] and scheduler.num_short == 1
    scheduler.take_back(batch, [5, 5])  # request 0 ends: slots 0 to 4 are free, and 10 to 12, but in no piece of 6
    scheduler.cancel(2)
    scheduler.add(Request(3, (1, 2, 3), 3, arrival_s=3))
    assert scheduler.next_batch() is not None and scheduler.num_short == 2


@examples(200)
@given(workloads(is_cancelling=True), st.sampled_from(BATCHINGS), st.integers(1, 4), st.booleans(), st.integers(0, 2))
def test_static_batches_compute_what_their_definition_says(
    workload: list[Asked], batching: str, max_batch_size: int, is_early: bool, microbatch_size: int
) -> None:
    num_workers = 2 if microbatch_size else 1
    scheduler = RequestLevel(NUM_SLOTS, NUM_POSITIONS, max_batch_size, batching, is_early, num_workers, microbatch_size)
    done = run(scheduler, workload)
    rows: dict[int, list] = {}
    for batch in done.batches:
        context_slots = [slot_of(row.region, at) for row in batch.rows for at in range(row.num_context)]
        assert len(context_slots) == len(set(context_slots)) and all(0 <= slot < NUM_SLOTS for slot in context_slots)
        assert all(row.num_context <= row.region.num_slots for row in batch.rows)
        assert batch.num_useful <= batch.num_tokens
        for row in batch.rows:
            assert row.begin == sum(len(earlier.tokens) for earlier in rows.setdefault(row.request_id, []))
            rows[row.request_id].append(row)
    for i, client_request in enumerate(workload):
        whole = [token_of(i, at) for at in range(client_request.length)]
        if client_request.cancelled is None:
            assert done.tokens[i] == whole
            useful = sum(row.num_useful for row in rows[i])
            assert useful == client_request.prompt + client_request.length - 1
            fed = [token for row in rows[i] for token in row.tokens][rows[i][0].num_padding :]
            assert fed[:useful] == [*range(client_request.prompt), *whole[:-1]]
            if batching == "ragged":
                assert len(rows[i]) == client_request.length


@pytest.mark.parametrize(
    ("batching", "iterations", "tokens"),
    [
        ("ragged", 4, (5 + 3, 2, 1, 1)),  # row 0 leaves after two iterations
        ("padded", 4, (5 + 5, 2, 2, 2)),
        ("shortest_prompt", 4, (3 + 3, 2, 2, 2)),  # prompts 5 and 3: row 0 is fed 2 more of its prompt
    ],
)
def test_one_batch_of_each_kind(batching: str, iterations: int, tokens: tuple[int, ...]) -> None:
    done = run(RequestLevel(NUM_SLOTS, NUM_POSITIONS, 4, batching), [Asked(5, 2, 0), Asked(3, 4, 0)])
    assert len(done.batches) == iterations and tuple(batch.num_tokens for batch in done.batches) == tokens
    assert done.last_turn[0] == done.last_turn[1]  # all return together
    early = run(RequestLevel(NUM_SLOTS, NUM_POSITIONS, 4, batching, is_early_return=True), [Asked(5, 2, 0), Asked(3, 4, 0)])
    assert early.last_turn[0] <= early.last_turn[1] and (early.last_turn[0] < early.last_turn[1]) == (
        batching != "shortest_prompt"
    )


@examples(50)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 3))
def test_equal_requests_that_arrive_together_are_scheduled_alike(prompt: int, new: int, count: int) -> None:
    workload = [Asked(prompt, new, 0)] * count
    orca = run(IterationLevel(PagedSlots.all_free(NUM_SLOTS, 1), count), workload)
    ragged = run(RequestLevel(NUM_SLOTS, NUM_POSITIONS, count, "ragged"), workload)
    assert [[r.tokens for r in b.rows] for b in orca.batches] == [[r.tokens for r in b.rows] for b in ragged.batches]


def test_the_chapters_early_finish() -> None:
    """A request's last token does not wait for a batch mate's, and a late one joins (figure 4.1, C1)."""
    workload = [Asked(2, 4, 0), Asked(2, 2, 0), Asked(2, 1, 1)]
    orca = run(IterationLevel(ContiguousSlots.all_free(NUM_SLOTS), 4), workload).last_turn
    static = run(RequestLevel(NUM_SLOTS, NUM_POSITIONS, 4, "ragged"), workload).last_turn
    assert orca == {0: 3, 1: 1, 2: 1} and static == {0: 3, 1: 3, 2: 4}


def test_microbatches_fill_the_pipeline_and_wait_for_their_own_return() -> None:
    """Figure 4.6b: A1 and B1 go, and A2 only when A1 is back."""
    done = run(RequestLevel(NUM_SLOTS, NUM_POSITIONS, 2, "ragged", num_workers=3, microbatch_size=1), [Asked(2, 2, 0)] * 2)
    assert [[row.request_id for row in batch.rows] for batch in done.batches] == [[0], [1], [0], [1]]


def test_microbatches_end_with_the_last_request_and_not_with_the_most_tokens() -> None:
    """Where stop tokens end all requests while a microbatch is in flight."""
    scheduler = RequestLevel(NUM_SLOTS, NUM_POSITIONS, 2, "padded", num_workers=2, microbatch_size=1)
    done = run(scheduler, [Asked(2, 4, 0, stop=1), Asked(2, 4, 0, stop=1)])
    assert [[row.request_id for row in batch.rows] for batch in done.batches] == [[0], [1], [0]]


def test_a_static_batch_that_nobody_wants_computes_nothing_more() -> None:
    scheduler = RequestLevel(NUM_SLOTS, NUM_POSITIONS, 2, "padded", num_workers=2, microbatch_size=1)
    for number in range(2):
        scheduler.add(Request(number, (1, 2), 4))
    batches = [scheduler.next_batch() for _ in range(2)]
    for number in range(2):
        assert scheduler.cancel(number) == []
    for batch in batches:
        assert batch is not None and scheduler.take_back(batch, [7]) == [] and scheduler.next_batch() is None
    assert scheduler.num_unfinished == scheduler.num_reserved == scheduler.num_in_flight == 0


def test_a_cancel_lets_out_what_others_have_waited_for() -> None:
    scheduler = RequestLevel(NUM_SLOTS, NUM_POSITIONS, 2, "padded")
    scheduler.add(Request(0, (1,), 1))
    scheduler.add(Request(1, (1,), 4))
    batch = scheduler.next_batch()
    assert batch is not None and scheduler.take_back(batch, [7, 8]) == []
    assert scheduler.cancel(1) == [Delivery(0, (7,), True)] and scheduler.num_unfinished == 0


@examples(200)
@given(st.lists(st.integers(1, 9) | st.none(), max_size=40), st.sampled_from([0, 1, 4]))
def test_books_of_slots_lose_none(sizes: list[int | None], block_size: int) -> None:
    """A number reserves that many; None releases the region that was reserved first."""
    book: Slots = PagedSlots.all_free(20, block_size) if block_size else ContiguousSlots.all_free(20)
    regions: deque[Region] = deque()
    for size in sizes:
        if size is None:
            if regions:
                book = book.released(regions.popleft())
        elif (reservation := book.reserved(size)) is not None:
            book, region = reservation
            regions.append(region)
        else:
            assert not block_size or book.num_free < size
        slots = [slot_of(region, at) for region in regions for at in range(region.num_slots)]
        assert len(slots) == len(set(slots)) == book.num_reserved and set(slots) <= set(range(20))
    for region in regions:
        book = book.released(region)
    assert book.num_reserved == 0 and book.reserved(20) is not None


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request(0, (), 1), "empty"),
        (Request(0, (1,), 0), "max_tokens=0"),
        (Request(0, (1, 99), 1), "token id 99 is not in the vocabulary of 50"),
        (Request(0, (49, 50), 1), "token id 50 is"),
        (Request(0, (-1,), 1), "token id -1"),
        (Request(0, (1,) * 10, 3), "12 positions"),
        (Request(0, (1,) * 8, 3), "10 K/V slots"),
        (Request(0, (1,) * 9, 3), "10 K/V slots"),
        (Request(0, (1,), 1, sampling=Sampling(-0.5)), "temperature=-0.5"),
        (Request(0, (1,), 1, sampling=Sampling(float("inf"))), "temperature=inf"),
        (Request(0, (1,), 1, sampling=Sampling(1.0, 0.0)), "top_p=0.0"),
        (Request(0, (1,), 1, sampling=Sampling(1.0, 1.5)), "top_p=1.5"),
        (Request(0, (1,), 1, sampling=Sampling(seed=2**63)), f"seed={2**63} is not an integer of 64 bits"),
        (Request(0, (10**300,), 1), "is not in the vocabulary of 50"),
        (Request(0, (1,), 10**300), "12 positions"),
        (Request(0, (1,), 1, sampling=Sampling(seed=10**300)), "is not an integer of 64 bits"),
        (Request(0, (1,) * 8, 2), None),
    ],
)
def test_what_can_never_be_served_is_refused(request_: Request, words: str | None) -> None:
    line = refusal(request_, num_slots=10, num_positions=12, vocabulary=50)
    assert line is None if words is None else line is not None and words in line and "\n" not in line and len(line) < 150


def test_a_stop_token_ends_a_request() -> None:
    scheduler = IterationLevel(ContiguousSlots.all_free(NUM_SLOTS), 2)
    scheduler.add(request := Request(0, (1, 2), 4, stop_tokens=frozenset({9})))
    for token in (5, 9):
        batch = scheduler.next_batch()
        assert batch is not None
        deliveries = scheduler.take_back(batch, [token])
    assert deliveries == [Delivery(0, (9,), True)] and request.region is None and scheduler.num_reserved == 0
