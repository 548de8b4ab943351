"""What Orca's scheduler can do beyond the chapter: shared prefixes, preemption, a batch before the last one is back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from drawing import examples
from hypothesis import example, given
from hypothesis import strategies as st
from serving_parts import slot_of
from test_serving_engine import MODULE, NUM_SLOTS, NUM_STOPS, SHAPE, SIZES, alone, requests_of, served
from workloads import Asked, token_of, workloads

import systems
from models.gpt import made
from runners.serving.correctness import compared, trials
from systems.base import BadOption
from systems.serving import persistent_map
from systems.serving.batch import Batch
from systems.serving.engine import LocalEngine
from systems.serving.iteration_level import IterationLevel, select
from systems.serving.persistent_map import PersistentMap
from systems.serving.prefix_cache import CachedSlots, extend_digests
from systems.serving.request import Request, Sampling
from systems.serving.slots import BlockSlots, PagedSlots, Region
from systems.serving.system import Server, ServingSystem

BOOKS = {"paged": PagedSlots, "cached": CachedSlots}


class Memory:
    """What an engine's slots hold: of each the stream up to its token. It samples what `token_of` says."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[int, ...]] = {}
        self.sampled: list[int] = []

    def run(self, batch: Batch) -> list[int]:
        """Write every row's tokens, then look at all that every row attends to. Returns the streams' next tokens."""
        streams = []
        for row in batch.rows:
            tokens = [token if token >= 0 else self.sampled[-1 - token] for token in row.tokens]
            before = self.slots[slot_of(row.region, row.begin - 1)] if row.begin else ()
            assert len(before) == row.begin
            for at in range(row.begin, row.num_context):
                self.slots[slot_of(row.region, at)] = (*before, *tokens[: at + 1 - row.begin])
            streams.append((*before, *tokens))
        for row, stream in zip(batch.rows, streams, strict=True):
            attended = [self.slots[slot_of(row.region, at)] for at in range(row.num_context)]
            assert attended == [stream[: at + 1] for at in range(row.num_context)]
        self.sampled = [token_of(row.request_id, row.draw) for row in batch.rows]
        return self.sampled


def check(book: BlockSlots, regions: Sequence[Region], num_slots: int) -> None:
    """No block is lost, nor of two kinds."""
    blocks_of_regions = [block for region in regions for block in region.blocks]
    blocks = set(blocks_of_regions)
    assert isinstance(book, CachedSlots) or len(blocks_of_regions) == len(blocks)
    idle = set(book.idle) if isinstance(book, CachedSlots) else set()
    assert len(book.free) == len(set(book.free)) and not set(book.free) & blocks and not idle & (blocks | set(book.free))
    assert blocks | idle | set(book.free) == set(range(0, num_slots // book.block_size * book.block_size, book.block_size))
    if isinstance(book, CachedSlots):
        assert set(book.uses) == blocks
        assert all(count == sum(block in r.blocks for r in regions) for block, count in book.uses.items())
        assert {block: digest for digest, block in book.by_digest.items()} == dict(book.digests)


@examples(400)
@example(  # the earliest that holds slots is cancelled and in flight: the next may lose its own
    [Asked(1, 3, 13), Asked(1, 4, 13), Asked(8, 2, 14), Asked(4, 4, 13, 25)],
    "paged",
    1,
    15,
    1,
    1,
    5,
    True,
    "prefetch",
    False,
)
@example(  # cancelled with two batches in flight: the second fills a block with a token that the stream never has
    [Asked(3, 4, 0, 0)], "cached", 4, 12, 1, 1, 0, False, "async", True
)
@given(
    workloads(is_cancelling=True), st.sampled_from(sorted(BOOKS)), st.sampled_from([1, 2, 4]), st.integers(12, 40),
    st.integers(1, 4), st.integers(1, 3), st.sampled_from([0, 2, 5]), st.booleans(),
    st.sampled_from(["", "prefetch", "async"]), st.booleans(),
)  # fmt: skip
def test_no_switch_loses_a_slot_or_a_token(
    workload: list[Asked],
    book: str,
    block_size: int,
    num_slots: int,
    max_batch_size: int,
    num_workers: int,
    chunk: int,
    is_preempting: bool,
    ahead: str,
    is_late: bool,
) -> None:
    """is_late: requests are cancelled once the batches of their turn are in flight, and not before."""
    slots = BOOKS[book].all_free(num_slots, block_size)
    num_workers = 1 if ahead == "async" else num_workers
    scheduler = IterationLevel(
        slots, max_batch_size, num_workers, ahead == "prefetch", chunk, is_preempting, ahead == "async"
    )
    requests = {i: asked.request(i) for i, asked in enumerate(workload)}
    flight: deque[tuple[Batch, list[int]]] = deque()
    memory = Memory()
    tokens: dict[int, list[int]] = {i: [] for i in requests}
    turn = 0
    while turn <= 40 or scheduler.num_unfinished:
        for i, a in enumerate(workload):
            if a.turn == turn and (a.cancelled is None or a.cancelled >= turn + (not is_late)):
                scheduler.add(requests[i])
        cancelled = [i for i, a in enumerate(workload) if a.cancelled == turn]
        for i in cancelled if not is_late else ():
            scheduler.cancel(i)
        holders = [r for r in scheduler.started.values() if r.region is not None]
        while (batch := scheduler.next_batch()) is not None:
            assert 0 < len(batch.rows) <= max_batch_size and (not chunk or batch.num_tokens <= chunk)
            assert all(row.num_context <= row.region.num_slots for row in batch.rows)
            flight.append((batch, memory.run(batch)))
            assert len(flight) <= scheduler.num_in_flight_max
        if holders:
            earliest = min(holders, key=lambda r: (r.arrival_s, r.id))
            assert earliest.region is not None, "the earliest is never preempted"
        for i in cancelled if is_late else ():
            scheduler.cancel(i)
        regions = [r.region for r in requests.values() if r.region is not None]
        assert isinstance(scheduler.slots, BlockSlots)
        check(scheduler.slots, regions, num_slots)
        assert is_preempting or scheduler.num_preempted == 0
        if flight:
            for delivery in scheduler.take_back(*flight.popleft()):
                tokens[delivery.request_id] += delivery.tokens
                assert delivery.is_last == requests[delivery.request_id].is_complete
        turn += 1
        assert turn < 3000, "nothing moves any more"
    assert scheduler.num_in_flight == scheduler.num_reserved == scheduler.num_waiting == 0
    for i, a in enumerate(workload):
        whole = [token_of(i, at) for at in range(a.length)]
        assert tokens[i] == whole[: len(tokens[i])] and (a.cancelled is not None or tokens[i] == whole)


SWITCHES = {
    "prefixes": {"is_cached": True},
    "preemption": {"is_preempting": True},
    "asynchronous": {"is_asynchronous": True},
    "prefixes, preemption": {"is_cached": True, "is_preempting": True},
    "all": {"is_cached": True, "is_preempting": True, "is_asynchronous": True},
    "all, in chunks": {"is_cached": True, "is_preempting": True, "is_asynchronous": True, "max_num_batched_tokens": 5},
}


@pytest.mark.parametrize("switch", SWITCHES)
@examples(15)
@given(
    SIZES, st.integers(0, 2), st.sampled_from([1, 2, 4]), st.integers(0, 9), st.sampled_from([20, 28, NUM_SLOTS]), NUM_STOPS
)
def test_tokens_under_each_switch_are_those_of_each_request_alone(
    switch: str, sizes: list[tuple[int, int]], apart: int, block_size: int, num_common: int, num_slots: int, num_stops: int
) -> None:
    """Of requests that begin alike, on so few slots that they must wait or be preempted."""
    options = dict(SWITCHES[switch])
    book = CachedSlots if options.pop("is_cached", False) else PagedSlots

    drawn = requests_of(sizes, num_stops=num_stops)
    longest = max((r.prompt for r in drawn), key=len)
    common = [min(num_common, len(r.prompt) - 1) for r in drawn]
    requests = [replace(r, prompt=longest[:n] + r.prompt[n:]) for r, n in zip(drawn, common, strict=True)]
    scheduler = IterationLevel(book.all_free(num_slots, block_size), 3, **options)
    tokens = served(scheduler, LocalEngine(MODULE, num_slots, block_size), requests, apart)
    assert tokens == {request.id: alone(MODULE, request) for request in requests}
    assert scheduler.num_reserved == 0


def test_equal_beginnings_are_computed_once() -> None:
    scheduler = IterationLevel(CachedSlots.all_free(NUM_SLOTS, 4), 4)
    engine = LocalEngine(MODULE, NUM_SLOTS, 4)
    first, second, third = requests_of([(12, 4), (12, 4), (12, 4)])
    second = replace(second, prompt=first.prompt[:10] + second.prompt[10:])
    third = replace(third, prompt=first.prompt)
    sizes: list[int] = []

    class Counted(LocalEngine):
        def submit(self, batch: Batch) -> None:
            sizes.extend(len(row.tokens) for row in batch.rows if len(row.tokens) > 1)
            super().submit(batch)

    engine = Counted(MODULE, NUM_SLOTS, 4)
    tokens = served(scheduler, engine, [first, second, third], 2)
    assert tokens == {r.id: alone(MODULE, r) for r in (first, second, third)}
    assert sizes == [12, 4, 4]  # two blocks of the second are there, and two of the third: its last token is computed


def test_idle_blocks_are_kept_until_they_are_wanted() -> None:
    book = CachedSlots.all_free(12, 4)
    digests: list[bytes] = []
    extend_digests(digests, range(11), 4)
    assert len(digests) == 2
    reservation = book.reserved(12, digests)
    assert reservation is not None and reservation[1].num_cached == 0
    book, region = reservation
    book = book.filled(region.blocks[:2], digests).released(region)
    assert book.num_free == 12 and len(book.idle) == 2
    again = book.reserved(12, digests)
    assert again is not None and again[1].num_cached == 8 and again[1].blocks[:2] == region.blocks[:2]
    other = book.reserved(8, ())  # one free block, and the end of the idle stream
    assert other is not None and list(other[0].idle) == [region.blocks[0]]
    after = other[0].reserved(4, digests[:1])
    assert after is not None and after[1].num_cached == 4


@patch.object(persistent_map, "LEAST_CHANGES", 3)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 12), max_size=4)), max_size=20))
def test_versions_of_a_map_are_dicts_that_never_change(steps: list[tuple[bool, list[int]]]) -> None:
    """Keys are set, or taken out; one that is set anew is the last."""
    versions: list[tuple[PersistentMap[int, int], dict[int, int]]] = [(PersistentMap(), {})]
    for number, (is_set, keys) in enumerate(steps):
        version, before = versions[-1]
        changed = dict.fromkeys(keys, number) if is_set else {}
        version = version.updated(changed) if is_set else version.without(keys)
        versions.append((version, {k: v for k, v in before.items() if k not in keys} | changed))
    for version, expected in versions:
        assert [*version.items()] == [*expected.items()] and len(version) == len(expected)
        assert [key in version for key in range(13)] == [key in expected for key in range(13)]


def test_digests_tell_streams_apart_by_all_that_is_before() -> None:
    streams = ((1, 2, 3, 4), (1, 2, 3, 5), (9, 2, 3, 4), (1, 2, 3, 4, 5))
    digests: list[list[bytes]] = [[] for _ in streams]
    for ours, stream in zip(digests, streams, strict=True):
        extend_digests(ours, stream, 2)
    assert digests[0] == digests[3] and digests[0][0] == digests[1][0] and digests[0][1] != digests[1][1]
    assert digests[0][1] != digests[2][1], "the same tokens after others"


def test_the_youngest_gives_up_its_slots_to_an_earlier_one() -> None:
    slots = PagedSlots.all_free(6, 1)
    pool = []
    for i, num_new in enumerate((4, 4, 4)):
        reservation = slots.reserved(2)
        assert reservation is not None
        slots, region = reservation
        request = Request(i, (1, 2), num_new, float(i), generated=[5], num_fed=2, region=region)
        pool.append(request)
    selection = select(pool, slots, 8, is_preempting=True)
    assert [part.request.id for part in selection.parts] == [0, 1] and [r.id for r in selection.preempted] == [2]
    assert [part.region.num_slots for part in selection.parts] == [3, 3] and slots.num_free == 0
    assert pool[2].region is not None, "selecting changes nothing"


def test_nobody_overtakes_a_request_that_gives_up_its_slots_in_flight() -> None:
    slots = PagedSlots.all_free(6, 1)
    pool = []
    for i, num_fed in enumerate((3, 3)):
        reservation = slots.reserved(num_fed)
        assert reservation is not None
        slots, region = reservation
        pool.append(Request(i, (1,) * num_fed, 2, float(i), num_fed=num_fed, region=region))
    pool[0].generated, pool[1].num_in_flight, pool[1].num_pending = [5], 1, 1
    selection = select([*pool, Request(2, (1,), 1, 2.0)], slots, 8, is_preempting=True)
    assert [part.request.id for part in selection.parts] == [0] and selection.preempted == (pool[1],)
    assert selection.slots.num_free == 2, "there is room for the third"


def test_a_stop_token_ends_a_request_whose_next_batch_is_under_way() -> None:
    scheduler = IterationLevel(PagedSlots.all_free(NUM_SLOTS, 4), 2, is_asynchronous=True)
    scheduler.add(request := Request(0, (1, 2), 6, stop_tokens=frozenset({9})))
    first, second = scheduler.next_batch(), scheduler.next_batch()
    assert first is not None and second is not None and second.rows[0].tokens == (-1,) and scheduler.next_batch() is None
    (delivery,) = scheduler.take_back(first, [9])
    assert delivery.is_last and scheduler.num_reserved > 0  # its second batch still writes
    assert scheduler.take_back(second, [3]) == [] and request.generated == [9]
    assert scheduler.num_reserved == scheduler.num_unfinished == 0


def test_drawn_tokens_are_the_same_when_the_host_does_not_wait_for_them() -> None:
    sampling = Sampling(temperature=1.5, top_p=0.9, seed=3)
    sizes = [(5, 6), (9, 3), (2, 6)]
    schedulers = [IterationLevel(PagedSlots.all_free(NUM_SLOTS, 4), 3, is_asynchronous=value) for value in (False, True)]
    engines = [LocalEngine(MODULE, NUM_SLOTS, 4) for _ in schedulers]
    waited, ahead = (served(s, e, requests_of(sizes, sampling), 1) for s, e in zip(schedulers, engines, strict=True))
    assert waited == ahead


def test_logits_are_compared_under_every_switch() -> None:
    """The given continuation is fed in the place of what the device has sampled, and a wrong position would be seen."""
    decoder = made(SHAPE, "cpu", torch.float32)
    for options in SWITCHES.values():
        chosen = dict(options)
        book = CachedSlots if chosen.pop("is_cached", False) else PagedSlots
        scheduler = IterationLevel(book.all_free(24, 4), 3, **chosen)
        server = Server(scheduler, LocalEngine(decoder, 24, 4), (24, SHAPE.positions, SHAPE.vocabulary))
        assert compared(server, trials(decoder, [(5, 6), (9, 5), (12, 6)], 0), decoder, "fp32").is_correct


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefix_caching": True}, "system.prefix_caching=true needs system.block_size above 0"),
        ({"preemption": "recompute"}, "system.preemption=recompute needs system.block_size above 0"),
        ({"preemption": "swap"}, "system.preemption=swap"),
        ({"prefetch": True, "asynchronous": True}, "system.prefetch and system.asynchronous"),
    ],
)
def test_switches_that_do_not_go_together_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(BadOption) as caught:
        systems.load("orca", **options)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_every_choice_of_a_switch_serves() -> None:
    for choice in ("orca_prefixes", "orca_preempting", "orca_asynchronous"):
        system = systems.load(choice, slots=40, block_size=4)
        assert isinstance(system, ServingSystem)
        server = system.prepare_serving(made(SHAPE, "cpu", torch.float32))
        requests = requests_of([(5, 4), (9, 6), (3, 5)])
        assert isinstance(server.engine, LocalEngine)
        tokens = served(server.scheduler, server.engine, requests, 1)
        assert {i: len(of) for i, of in tokens.items()} == {0: 4, 1: 6, 2: 5} and server.scheduler.num_reserved == 0
