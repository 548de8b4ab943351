"""The engine: whatever the schedule, each request gets the tokens that it would get alone."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from serving_parts import slot_of

from models.gpt import GPT, Shape, made
from systems.serving.batch import Batch, Row, row_of
from systems.serving.engine import LocalEngine, indexes_faster_than_larger
from systems.serving.iteration_level import IterationLevel
from systems.serving.layout import TILE, LayoutBuffer, Room
from systems.serving.request import Request, Sampling
from systems.serving.request_level import RequestLevel
from systems.serving.sampling import sampled
from systems.serving.scheduler import Scheduler
from systems.serving.slots import ContiguousSlots, PagedSlots, Region

SHAPE = Shape(layers=2, hidden=32, heads=2, positions=40, vocabulary=50)
NUM_SLOTS = 120
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def telling(dtype: torch.dtype = torch.float64, device: str = "cpu", shape: Shape = SHAPE) -> GPT:
    """A GPT whose next token depends on all before it: with weights as small as usual it repeats the last."""
    module = made(shape, device, dtype)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" not in name:
                parameter.mul_(12)
        module.tokens.weight.div_(6)
    return module


MODULE = telling()


def alone(module: GPT, request: Request) -> list[int]:
    """Greedy generation of one request by the whole forward pass, without any cache."""
    stream = list(request.prompt)
    for _ in range(request.max_new_tokens):
        stream.append(int(module(torch.tensor([stream], device=module.tokens.weight.device))[0, -1].argmax()))
        if stream[-1] in request.stop_tokens:
            break
    return stream[len(request.prompt) :]


def served(scheduler: Scheduler, engine: LocalEngine, requests: list[Request], apart: int) -> dict[int, list[int]]:
    """Tokens by request, which arrive `apart` iterations from each other."""
    waiting = deque(requests)
    tokens: dict[int, list[int]] = {}
    turn = 0
    while waiting or scheduler.num_unfinished:
        while waiting and (turn % (apart + 1) == 0):
            scheduler.add(waiting.popleft())
            if apart:
                break
        while (batch := scheduler.next_batch()) is not None:
            engine.submit(batch)
        if engine.num_in_flight:
            returned = engine.collect()
            for delivery in scheduler.take_back(returned.batch, returned.tokens):
                tokens.setdefault(delivery.request_id, []).extend(delivery.tokens)
        turn += 1
    return tokens


GREEDY = Sampling()


def requests_of(sizes: list[tuple[int, int]], sampling: Sampling = GREEDY, num_stops: int = 0) -> list[Request]:
    """Requests of so many prompt and new tokens, one after another. num_stops: of the vocabulary, each a stop token."""
    stop_tokens = frozenset(range(num_stops))
    generator = torch.Generator().manual_seed(sum(sum(size) for size in sizes))
    draw = [torch.randint(SHAPE.vocabulary, (prompt,), generator=generator).tolist() for prompt, _ in sizes]
    return [
        Request(i, tuple(p), new, float(i), sampling, stop_tokens)
        for i, (p, (_, new)) in enumerate(zip(draw, sizes, strict=True))
    ]


KINDS = {
    "orca": (lambda: IterationLevel(ContiguousSlots.all_free(NUM_SLOTS), 3), 0),
    "orca, prefetching": (lambda: IterationLevel(ContiguousSlots.all_free(NUM_SLOTS), 2, is_prefetching=True), 0),
    "orca, asynchronous": (lambda: IterationLevel(ContiguousSlots.all_free(NUM_SLOTS), 3, is_asynchronous=True), 0),
    "paged by 1": (lambda: IterationLevel(PagedSlots.all_free(NUM_SLOTS, 1), 4), 1),
    "paged by 16": (lambda: IterationLevel(PagedSlots.all_free(NUM_SLOTS, 16), 4), 16),
    "chunks of 3": (lambda: IterationLevel(PagedSlots.all_free(NUM_SLOTS, 2), 4, max_num_batched_tokens=3), 2),
    "chunks of 7": (lambda: IterationLevel(ContiguousSlots.all_free(NUM_SLOTS), 4, max_num_batched_tokens=7), 0),
    "shortest_prompt": (lambda: RequestLevel(NUM_SLOTS, SHAPE.positions, 3, "shortest_prompt"), 0),
    "padded": (lambda: RequestLevel(NUM_SLOTS, SHAPE.positions, 3, "padded"), 0),
    "padded, early": (lambda: RequestLevel(NUM_SLOTS, SHAPE.positions, 3, "padded", True), 0),
    "ragged": (lambda: RequestLevel(NUM_SLOTS, SHAPE.positions, 3, "ragged"), 0),
    "microbatches": (lambda: RequestLevel(NUM_SLOTS, SHAPE.positions, 3, "padded", num_workers=2, microbatch_size=1), 0),
}
SIZES = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6)), min_size=1, max_size=5)
NUM_STOPS = st.sampled_from([0, 12])  # of the vocabulary's 50: about every fourth token ends a request


@pytest.mark.parametrize("kind", KINDS)
@examples(20)
@given(SIZES, st.integers(0, 2), NUM_STOPS)
def test_tokens_of_any_mix_are_those_of_each_request_alone(
    kind: str, sizes: list[tuple[int, int]], apart: int, num_stops: int
) -> None:
    """Invariant 1: in float64 and greedily, under every schedule."""
    scheduler, block_size = KINDS[kind][0](), KINDS[kind][1]
    requests = requests_of(sizes, num_stops=num_stops)
    tokens = served(scheduler, LocalEngine(MODULE, NUM_SLOTS, block_size), requests, apart)
    assert tokens == {request.id: alone(MODULE, request) for request in requests}
    assert scheduler.num_reserved == 0


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("microbatch_size", [0, 1])
def test_a_padded_batch_may_go_beyond_the_models_positions(is_early: bool, microbatch_size: int) -> None:
    """A long prompt beside a long answer: each fits, and the row that has ended is computed on to the end of the other."""
    requests = requests_of([(SHAPE.positions - 2, 2), (1, SHAPE.positions - 1)])
    num_slots = 2 * 2 * SHAPE.positions
    scheduler = RequestLevel(num_slots, SHAPE.positions, 2, "padded", is_early, microbatch_size=microbatch_size)
    tokens = served(scheduler, LocalEngine(MODULE, num_slots, 0), requests, 0)
    assert tokens == {request.id: alone(MODULE, request) for request in requests}


def test_the_tokens_depend_on_the_whole_stream() -> None:
    """Else the test above could not see a wrong attention."""
    (request,) = requests_of([(12, 6)])
    other = Request(0, ((request.prompt[0] + 1) % SHAPE.vocabulary, *request.prompt[1:]), 6)
    assert alone(MODULE, request) != alone(MODULE, other) and len(set(alone(MODULE, request))) > 2


def test_drawn_tokens_are_the_same_under_any_schedule() -> None:
    sizes = [(5, 6), (9, 3), (2, 6)]
    sampling = Sampling(temperature=1.5, top_p=0.9, seed=3)
    results = [
        served(KINDS[kind][0](), LocalEngine(MODULE, NUM_SLOTS, KINDS[kind][1]), requests_of(sizes, sampling), 1)
        for kind in ("orca", "paged by 16", "chunks of 3", "padded, early")
    ]
    assert all(result == results[0] for result in results)
    assert results[0] != {request.id: alone(MODULE, request) for request in requests_of(sizes)}


def test_drawing_follows_the_distribution() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0]).repeat(4000, 1)
    request = Request(0, (1,), 1)
    engine_rows = []
    for temperature, top_p in ((1.0, 1.0), (2.0, 1.0), (1.0, 0.7), (0.0, 1.0)):
        for i in range(1000):
            request.sampling, request.generated = Sampling(temperature, top_p, seed=i % 10), [0] * (i // 10)
            engine_rows.append(row_of(request, Region((0,), 1, 1), 1))
    drawn = sampled(logits, tuple(engine_rows)).view(4, 1000)
    counts = torch.stack([row.bincount(minlength=4) / 1000 for row in drawn])
    plain, warm = logits[0].softmax(0), (logits[0] / 2).softmax(0)
    cut = torch.tensor([0.0, plain[1], plain[2], 0.0]) / (plain[1] + plain[2])
    expected = torch.stack([plain, warm, cut, torch.tensor([0.0, 1.0, 0.0, 0.0])])
    assert (counts - expected).abs().max() < 0.05 and counts[2][[0, 3]].sum() == 0


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 1e-46), (1.0, 1e-320), (1e-39, 1.0), (1e-39, 1e-46), (1e-320, 1.0), (0.0, 1.0)]
)
def test_the_least_that_can_be_asked_for_is_the_likeliest_token(temperature: float, top_p: float) -> None:
    """Also beside a row that draws, and where a number is 0 in the precision of the device."""
    logits = torch.tensor([5.0, 1.0, 0.0, -9.0]).repeat(2, 1)
    request = Request(0, (1,), 1)
    rows = []
    for sampling in (Sampling(temperature, top_p, seed=1), Sampling(1.0)):
        request.sampling = sampling
        rows.append(row_of(request, Region((0,), 1, 1), 1))
    assert int(sampled(logits, tuple(rows))[0]) == int(sampled(logits[:1], tuple(rows[:1]))) == 0


@pytest.mark.parametrize(("top_p", "token"), [(0.5, 1), (0.8, 2), (1.0, 3)])
def test_the_largest_random_number_draws_the_last_of_the_likeliest(
    monkeypatch: pytest.MonkeyPatch, top_p: float, token: int
) -> None:
    """Though it is 1 in 32 bits."""
    monkeypatch.setattr("systems.serving.sampling._uniform", lambda row: 1 - 2.0**-53)
    request = Request(0, (1,), 1, sampling=Sampling(1.0, top_p))
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    assert int(sampled(logits, (row_of(request, Region((0,), 1, 1), 1),))) == token


def test_weights_are_the_same_each_time_and_not_the_callers_random_state() -> None:
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    first, second = made(SHAPE, "cpu", torch.float32), made(SHAPE, "cpu", torch.float32)
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True))
    assert not torch.equal(first.blocks[0].out.weight, first.blocks[1].out.weight)


@st.composite
def batches(draw: st.DrawFn, block_size: int, most_tokens: int) -> Batch:
    """Rows anywhere in 200 slots, prompts and increments; as slots are only read, they may be of two rows."""
    rows = []
    for number in range(draw(st.integers(1, 5))):
        begin, num_tokens = draw(st.integers(0, 90)), draw(st.integers(1, most_tokens))
        num_slots = begin + num_tokens
        if block_size:
            count = -(-num_slots // block_size)
            region = Region(tuple(draw(st.permutations(range(0, 200, block_size)))[:count]), block_size, count * block_size)
        else:
            region = Region((draw(st.integers(0, 200 - num_slots)),), num_slots, num_slots)
        tokens = tuple(draw(st.lists(st.integers(-3, 49), min_size=num_tokens, max_size=num_tokens)))
        num_padding, num_source = draw(st.integers(0, 9)), draw(st.integers(0, 9))
        rows.append(Row(number, region, begin, tokens, num_padding, num_tokens, 0, GREEDY, num_source))
    return Batch(0, tuple(rows))


@pytest.mark.parametrize("block_size", [0, 8])
@examples(60)
@given(st.data(), st.integers(0, 3))
def test_a_layout_says_where_each_token_lies(block_size: int, data: st.DataObject, num_more: int) -> None:
    """Token by token; rows beyond the batch's have one token each, in the slot after the last."""
    layouts = LayoutBuffer(torch.device("cpu"), 200, 200 // block_size if block_size else 1, block_size)
    batch = data.draw(batches(block_size, 100))
    numbers, sizes = layouts.packed(batch, len(batch.rows) + num_more)
    layout = layouts.layout(torch.from_numpy(numbers), sizes)
    tokens, places, slots, tiles = [], [], [], []
    for at, row in enumerate((*batch.rows, *(layouts.dead_row,) * num_more)):
        assert layout.row_begins[at] == len(tokens)
        for position, token in enumerate(row.tokens, row.begin):
            tokens.append(token)
            places.append(max(position - row.num_padding, 0))
            slots.append(slot_of(row.region, position))
        assert layout.lasts[at] == len(tokens) - 1
        assert (layout.num_contexts[at], layout.num_paddings[at]) == (row.begin + len(row.tokens), row.num_padding)
        assert layout.num_sources[at] == row.num_source
        assert layout.blocks[at, : len(row.region.blocks)].tolist() == list(row.region.blocks)
        tiles += [(at, begin) for begin in range(0, len(row.tokens), TILE)]
    assert layout.row_begins[-1] == len(tokens) and len(layout.row_begins) == len(batch.rows) + num_more + 1
    assert [part.tolist() for part in (layout.tokens, layout.places, layout.slots)] == [tokens, places, slots]
    assert [*zip(layout.tile_rows.tolist(), layout.tile_begins.tolist(), strict=True)] == tiles
    tensors = [value for value in vars(layout).values() if isinstance(value, torch.Tensor) and value is not layout.tickets]
    assert len(tensors) == 11 and all(tensor.storage_offset() % 4 == 0 for tensor in tensors)  # 16 bytes


@pytest.mark.parametrize("block_size", [0, 8])
@examples(60)
@given(st.data())
def test_a_layout_of_increments_takes_another_batch(block_size: int, data: st.DataObject) -> None:
    """What a CUDA graph reads is written anew for each batch; what would stay of the one before would be a wrong token."""
    layouts = LayoutBuffer(torch.device("cpu"), 200, 200 // block_size if block_size else 1, block_size)
    numbers, sizes = layouts.packed(data.draw(batches(block_size, 1)), 5)
    after = data.draw(batches(block_size, 1))
    layouts.refill(layouts.layout(torch.from_numpy(numbers), sizes), after)
    assert numbers.tolist() == layouts.packed(after, 5)[0].tolist()


@pytest.mark.parametrize("block_size", [0, 8])
@examples(60)
@given(st.data())
def test_a_layout_is_filled_up_to_a_room(block_size: int, data: st.DataObject) -> None:
    """What the batch has is as in a layout of its own; the other tokens are stored where nobody reads, and in no tile."""
    layouts = LayoutBuffer(torch.device("cpu"), 200, 200 // block_size if block_size else 1, block_size)
    batch = data.draw(batches(block_size, 100))
    num_tokens, num_rows = batch.num_tokens, len(batch.rows)
    most_tokens, most_rows = num_tokens + data.draw(st.integers(0, 70)), num_rows + data.draw(st.integers(0, 4))
    room = Room.of(most_tokens, most_rows)
    assert room.takes(batch) and not Room.of(num_tokens - 1, most_rows).takes(batch)
    if num_rows > 1:
        assert not Room.of(most_tokens, num_rows - 1).takes(batch)
    own, filled = (
        layouts.layout(torch.from_numpy(numbers), sizes)
        for numbers, sizes in (layouts.packed(batch, num_rows), layouts.filled_up(batch, room))
    )
    for name, count in {"tokens": num_tokens, "places": num_tokens, "slots": num_tokens, "lasts": num_rows}.items():
        assert torch.equal(getattr(filled, name)[:count], getattr(own, name)), name
    for name in ("num_contexts", "num_paddings", "num_sources", "blocks"):
        assert torch.equal(getattr(filled, name)[:num_rows], getattr(own, name)), name
    assert filled.slots[num_tokens:].tolist() == [200] * (most_tokens - num_tokens)
    begins = filled.row_begins.tolist()
    assert begins[: num_rows + 1] == own.row_begins.tolist() and set(begins[num_rows:]) == {num_tokens}
    assert len(begins) == len(filled.lasts) + 1 and len(filled.lasts) > num_rows
    num_tiles = len(own.tile_rows)
    tiles, own_tiles = ([*zip(each.tile_rows.tolist(), each.tile_begins.tolist(), strict=True)] for each in (filled, own))
    assert tiles[:num_tiles] == own_tiles and all(begins[row] == begins[row + 1] for row, _ in tiles[num_tiles:])


@given(st.lists(st.integers(1, 9), max_size=12))
def test_no_graph_is_kept_that_a_larger_one_is_as_fast_as(seconds: list[int]) -> None:
    expected = [i for i, own in enumerate(seconds) if all(own < other for other in seconds[i + 1 :])]
    assert indexes_faster_than_larger(seconds) == expected


@pytest.mark.parametrize("uses_graphs", [pytest.param(value, marks=GPU) for value in (False, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_gives_each_request_its_own_tokens(kind: str, uses_graphs: bool) -> None:
    module = telling(torch.float32, "cuda")
    scheduler, block_size = KINDS[kind][0](), KINDS[kind][1]
    sizes = [(5, 6), (12, 3), (2, 6), (7, 5)]
    engine = LocalEngine(module, NUM_SLOTS, block_size, "fused", uses_graphs, max_batch_size=4)
    assert bool(engine.prompt_graphs) == bool(engine.graphs) == uses_graphs
    tokens = served(scheduler, engine, requests_of(sizes), 1)
    assert tokens == {request.id: alone(module, request) for request in requests_of(sizes)}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=GPU) for kind in ("orca", "paged by 16")])
def test_no_batch_compiles_attention_anew(kind: str) -> None:
    """Triton tells pointers that are aligned from others: numbers of layouts are, however many tokens and rows there are."""
    from systems.serving.attention import fused

    module = telling(torch.float32, "cuda")
    engine = LocalEngine(module, NUM_SLOTS, KINDS[kind][1], "fused")
    kernels = fused._attend_kernel.device_caches[torch.cuda.current_device()][0]
    numbers_of_kernels = []
    for sizes in ([(5, 3), (6, 2)], [(7, 6), (12, 3), (2, 6), (9, 5), (3, 1)]):
        served(KINDS[kind][0](), engine, requests_of(sizes), 1)
        numbers_of_kernels.append(len(kernels))
    assert numbers_of_kernels[0] == numbers_of_kernels[1] > 0


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
def test_drawing_waits_for_no_iteration(device: str) -> None:
    """What is submitted behind a running iteration comes back to the host at once."""
    logits = torch.zeros(3, 50, device=device)
    request = Request(0, (1,), 1, sampling=Sampling(1.0, 0.9, seed=1))
    rows = (row_of(request, Region((0,), 1, 1), 1),) * 3
    sampled(logits, rows)
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # clocks: some seconds
    ended = torch.cuda.Event()
    ended.record()
    sampled(logits, rows)
    assert not ended.query()
    torch.cuda.synchronize()
