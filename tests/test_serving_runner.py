"""runner=serving: traces, the process that sends them, what its times come to, and what is refused."""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import ROOT, Run, records
from hypothesis import given
from hypothesis import strategies as st
from made_records import record as made_record
from test_serving_engine import MODULE, NUM_SLOTS, SHAPE

import systems
from conf import Value
from models import BadModel
from models.decoders import load_decoder
from models.gpt import GPT, made
from results.cell import Cell, Choice, Conditions, choose
from results.quantity import Measured
from runners.cell import measuring
from runners.checks import BadRequest
from runners.measurements import capacity
from runners.measurements.registry import plan
from runners.serving import session as serving_session
from runners.serving import traffic
from runners.serving.client import Client, prompt_of
from runners.serving.correctness import compared, trials
from runners.serving.session import BatchTimes, EngineSession, ServingSession
from runners.serving.simulation import simulated
from runners.serving.traffic import GeneratorEnded, Seen
from runners.serving.wire import HEADER, Frames, Kind, Plan, numbers, send, tokens_body
from runners.serving.workload import Arrival, drawn
from systems.base import BadOption, Unsupported
from systems.serving import costs
from systems.serving.attention import split
from systems.serving.engine import LocalEngine
from systems.serving.iteration_level import IterationLevel
from systems.serving.loop import Listed, RealClock
from systems.serving.prefix_cache import CachedSlots
from systems.serving.request import Delivery, Request
from systems.serving.simulated import LinearCost
from systems.serving.slots import ContiguousSlots
from systems.serving.system import Server, ServingSystem

OPTIONS = {
    **{"prompt_tokens": "4-12", "new_tokens": "1-6", "requests": 8, "rate": 50.0, "burstiness": 1.0},
    **{"concurrency": 0, "trace": None, "trace_speed": 1.0, "shared_tokens": 0, "slo_ms": 0.0, "repeats": 1},
}


# --- The wire ---


@given(st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=40)), max_size=6), st.integers(1, 50))
def test_frames_come_whole_however_they_are_cut(frames: list[tuple[Kind, bytes]], size: int) -> None:
    stream = b"".join(HEADER.pack(kind, len(body)) + body for kind, body in frames)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader, came = Frames(ours), []
        for begin in range(0, len(stream), size):
            theirs.sendall(stream[begin : begin + size])
            reader.receive()
            came += reader.whole()
    assert came == frames


# --- A trace through a server ---


def server(max_batch_size: int = 3) -> Server:
    scheduler = IterationLevel(ContiguousSlots.all_free(NUM_SLOTS), max_batch_size)
    return Server(scheduler, LocalEngine(MODULE, NUM_SLOTS), (NUM_SLOTS, SHAPE.positions, SHAPE.vocabulary))


def test_every_token_of_a_trace_comes_to_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = drawn(12, 60.0, 1.0, (2, 12), (1, 6), seed=0)
    monkeypatch.setattr(traffic, "TELL_S", 0.0)
    told: list[int] = []
    seen = traffic.run(server(), trace, seed="5", concurrency=0, tell=told.append)
    assert told == sorted(told) and (told[0], told[-1]) == (0, 12)
    of = seen.requests
    assert [len(tokens) for tokens in of.token_s] == [a.max_new_tokens for a in trace]
    assert of.due_s == tuple(round(a.due_s, 6) for a in trace) and of.prompt_tokens == tuple(a.prompt_tokens for a in trace)
    for due, sent, tokens in zip(of.due_s, of.sent_s, of.token_s, strict=True):
        assert due <= sent <= tokens[0] and list(tokens) == sorted(tokens)
    assert sum(seen.iterations.useful_tokens) == sum(a.max_tokens - 1 for a in trace) == sum(seen.iterations.tokens)
    assert max(seen.iterations.rows) <= 3 and max(seen.iterations.reserved_slots) <= NUM_SLOTS
    assert all(queued >= -0.001 for queued in seen.queued_s)


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """What the tests have frozen is as at the start of a process."""
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_no_request_waits_for_a_collection_of_all_objects() -> None:
    num_frozen: list[int] = []

    def deliver(deliveries: Sequence[Delivery], now_s: float) -> None:
        num_frozen.append(gc.get_freeze_count())

    num_alive = len(gc.get_objects())
    for are_frozen_by_host in (False, True):
        if are_frozen_by_host:
            gc.freeze()
        server().serve(Listed([Request(0, (1, 2), 3)]), deliver, RealClock())
        assert min(num_frozen) > 0.9 * num_alive
        # a host keeps what it has frozen, but for what is freed meanwhile, and nothing else stays frozen
        assert (gc.get_freeze_count() > 0.9 * num_alive) is are_frozen_by_host
        assert are_frozen_by_host or gc.get_freeze_count() == 0
        num_frozen.clear()


def test_a_closed_loop_keeps_as_many_requests_as_it_was_told() -> None:
    trace = drawn(12, 1e-9, 1.0, (2, 6), (1, 5), seed=1)  # at this rate an open loop would take years
    requests = traffic.run(server(), trace, seed="0", concurrency=3).requests
    ends = [tokens[-1] for tokens in requests.token_s]
    for sent in requests.sent_s:
        assert sum(s <= sent and end > sent for s, end in zip(requests.sent_s, ends, strict=True)) <= 3
    assert sum(end > requests.sent_s[2] for end in ends) == 12  # the first three are sent at once


def test_a_load_generator_does_not_wait_for_a_server_that_does_not_read() -> None:
    """More than a socket holds is due at once, and the server sends tokens before it reads anything."""
    arrivals = [(0.0, 4000, 1)] * 200  # 3.2 MB
    ours, theirs = socket.socketpair()
    with ours, theirs:
        client = Client(theirs, Frames(theirs), Plan(arrivals, seed="0", vocabulary=50, concurrency=0))
        thread = threading.Thread(target=client.run, daemon=True)
        thread.start()
        send(ours, Kind.TOKENS, tokens_body([Delivery(0, (1,), True)]))
        deadline = time.monotonic() + 20
        while not client.num_finished:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(client.sent_s) == 200 and client.outgoing
        frames = Frames(ours)
        numbers_of = [numbers(frames.next()[1]) for _ in arrivals]
        send(ours, Kind.TOKENS, tokens_body([Delivery(i, (1,), True) for i in range(1, 200)]))
        thread.join(20)
    assert not thread.is_alive() and [list(n[2:]) for n in numbers_of] == [prompt_of(client.plan, i) for i in range(200)]


def test_a_load_generator_that_ends_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "module_name", lambda name: "this")
    with pytest.raises(GeneratorEnded, match="before its trace began"):
        traffic.run(server(), drawn(1, 1.0, 1.0, (1, 1), (1, 1), 0), "0", 0)


# --- Correctness ---


def checked(decoder: GPT, prepared: Server) -> tuple[bool, bool]:
    """Whether the server is seen to be correct, and whether it could be."""
    part = compared(prepared, trials(decoder, [(9, 4), (5, 3), (12, 2)], seed=0), decoder, "fp32")
    return part.is_correct, part.is_checked


def small(name: str = "orca", **options: object) -> tuple[GPT, Server]:
    decoder = made(SHAPE, "cpu", torch.float32)
    system = systems.load(name, **{"slots": NUM_SLOTS, **options})  # type: ignore[arg-type]
    assert isinstance(system, ServingSystem)
    return decoder, system.prepare_serving(decoder)


@pytest.mark.parametrize(
    "choice", ["orca", "orca_paged", "orca_chunked", "request_level", "request_level_padded", "request_level_ragged"]
)
def test_every_serving_system_is_seen_to_be_correct(choice: str) -> None:
    options = {"max_num_batched_tokens": 4} if choice == "orca_chunked" else {}
    assert checked(*small(choice, **options)) == (True, True)


MUTANTS = {
    "no mask": ("systems.serving.attention.split._mask", lambda row, device: None),
    "keys one place off": (
        "systems.serving.attention.split.store",
        lambda k, v, cache, layout, right=split.store: right(
            k, v, cache, replace(layout, slots=(layout.slots - 1).clamp(0))
        ),
    ),
    "nothing is stored": ("systems.serving.attention.split.store", lambda k, v, cache, layout: None),
    "places start at 1": ("models.gpt.GPT.hidden", None),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_execution_is_seen(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, prepared = small()
    wanted = trials(decoder, [(9, 4), (5, 3), (12, 2)], seed=0)
    target, wrong = MUTANTS[mutant]
    if wrong is None:
        original = GPT.hidden
        wrong = lambda self, tokens, places, attention: original(self, tokens, places + 1, attention)  # noqa: E731
    monkeypatch.setattr(target, wrong)
    part = compared(prepared, wanted, decoder, "fp32")
    assert not part.is_correct and part.is_checked and part.reason is not None and "from the model's" in part.reason


def test_a_model_that_does_not_look_back_cannot_be_checked() -> None:
    decoder, prepared = small()
    with torch.no_grad():
        for block in decoder.blocks:
            block.out.weight.zero_()  # type: ignore[union-attr, operator]
    assert checked(decoder, prepared) == (False, False)


# --- What is refused ---


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("orca", {"max_batch_size": 0}, "system.max_batch_size=0"),
        ("orca", {"slots": -1}, "system.slots=-1"),
        ("orca", {"attention": "fuse"}, "did you mean fused?"),
        ("orca", {"block_size": -1}, "system.block_size=-1"),
        ("orca", {"max_num_batched_tokens": -1}, "system.max_num_batched_tokens=-1"),
        ("request_level", {"batching": "pad"}, "padded"),
        ("request_level", {"microbatch_size": -1}, "system.microbatch_size=-1"),
    ],
)
def test_options_of_systems_that_cannot_be_are_refused(name: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(BadOption, match=words.replace("?", r"\?")):
        systems.load(name, **options)  # type: ignore[arg-type]


def test_blocks_larger_than_all_slots_are_refused() -> None:
    with pytest.raises(BadOption, match="block_size=500 is more than the 120 K/V slots"):
        small(block_size=500)


def test_requests_that_hold_all_positions_need_as_many_slots() -> None:
    """Of the system that is asked for them, or of the memory."""
    with pytest.raises(BadOption, match=r"^system.slots=39: .* a request holds 40 K/V slots, and 39 are there$"):
        small("request_level", slots=39)
    system = systems.load("request_level")
    assert isinstance(system, ServingSystem)
    with pytest.raises(MemoryError, match=r"a request holds 40 K/V slots, and 39 are there$"):
        system.server_of(LocalEngine(MODULE, 39), 39, SHAPE)
    for choice, slots in (("request_level", 40), ("request_level_padded", 12), ("request_level_ragged", 12)):
        _, server = small(choice, slots=slots)
        tokens: list[int] = []
        request = Request(0, (1, 2, 3), 4)
        server.serve(Listed([request]), lambda deliveries, now_s: tokens.extend(deliveries[0].tokens), RealClock())  # noqa: B023
        assert tokens == request.generated and len(tokens) == 4


def test_a_server_executes_no_module_and_a_model_may_generate_nothing() -> None:
    with pytest.raises(Unsupported, match="runner=serving"):
        systems.load("orca").prepare(MODULE, ())
    assert systems.load("orca", attention="fused").unsupported("cpu")
    with pytest.raises(BadModel, match="model resnet50 generates no tokens"):
        load_decoder("resnet50", "cpu", "fp32")
    with pytest.raises(MemoryError, match=r"take 634\.\d GiB in fp16"):
        load_decoder("gpt", "cpu", "fp16", layers=120, hidden=15360, heads=120, vocabulary=50257)


def test_a_request_that_no_slots_hold_is_refused_before_anything_is_served() -> None:
    runner = choose("runner", "serving", **OPTIONS)
    model, system = choose("model", "gpt", layers=1), choose("system", "orca", slots=10)
    session = ServingSession(Cell(model, system, runner, Conditions(1, "cpu", "fp32")), "0", lambda phase: None)
    with pytest.raises(BadOption, match="more than the 10 K/V slots"):
        session.prepare()


@pytest.mark.parametrize(
    ("model", "system", "changed"),
    [
        (choose("model", "gpt", layers=1), choose("system", "orca_paged", slots=33), ("system", "slots", 33)),
        (choose("model", "t5_small_generation", positions=60), choose("system", "orca"), ("model", "positions", 60)),
        pytest.param(
            choose("model", "t5_small_generation"),
            choose("system", "orca", slots=60),
            ("system", "slots", 60),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_a_refusal_advises_is_enough(model: Choice, system: Choice, changed: tuple[str, str, int]) -> None:
    """Slots come in blocks, and an encoder-decoder begins with a token of its own."""
    group, option, too_few = changed
    lengths = {"prompt_tokens": too_few - 4, "new_tokens": 4}

    def prepared(model: Choice, system: Choice) -> ServingSession:
        cell = Cell(model, system, choose("runner", "serving", **OPTIONS | lengths), Conditions(1, "cpu", "fp32"))
        session = ServingSession(cell, "0", lambda phase: None)
        session.prepare()
        return session

    with pytest.raises(BadOption, match=rf"{group}\.{option} has to be (\d+) or more") as caught:
        prepared(model, system)
    least = int(re.search(r"has to be (\d+)", str(caught.value))[1])  # type: ignore[index]
    more = {option: least}
    is_model = group == "model"
    of_model = choose("model", model.choice, **{k: model.options[k] for k in model.changed} | (more if is_model else {}))
    prepared(of_model, system if is_model else choose("system", system.choice, **more))


@pytest.mark.parametrize(
    ("model", "runner", "advice"),
    [
        (choose("model", "gpt", positions=9, sequence=9), "serving", "model.positions has to be 10 or more, or "),
        (choose("model", "gpt", positions=9, sequence=9), "engine", "model.positions has to be 10 or more, or "),
        (choose("model", "hf", path="FOLDER"), "serving", "the 9 positions: "),
    ],
)
def test_a_model_of_few_positions_is_told_before_anything_is_made(
    tmp_path: Path, model: Choice, runner: str, advice: str
) -> None:
    """With what can be set: a folder's model has its positions."""
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 9, "vocab_size": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if model.name == "hf":
        model = choose("model", "hf", path=str(tmp_path))
    lengths = {"prompt_tokens": 7, "new_tokens": 3}
    options = {"serving": OPTIONS | lengths, "engine": lengths}[runner]
    cell = Cell(model, choose("system", "orca"), choose("runner", runner, **options), Conditions(1, "cpu", "fp32"))
    session = {"serving": ServingSession, "engine": EngineSession}[runner]
    with pytest.raises(
        BadOption, match=r"^a request has 7 prompt tokens and 3 to generate, more than the 9 positions: "
    ) as e:
        session(cell, "0", lambda phase: None)
    assert f"{advice}runner.prompt_tokens or runner.new_tokens" in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("options", [{}, {"pipeline_parallel": 2}])
def test_more_slots_than_there_is_memory_for_are_told_beside_what_fits(options: dict[str, Value]) -> None:
    model, slots = choose("model", "gpt", layers=2), 2**31 - 1
    cell = Cell(
        model,
        choose("system", "orca", slots=slots, **options),
        choose("runner", "serving", **OPTIONS),
        Conditions(1, "cpu", "fp32"),
    )
    session = ServingSession(cell, "0", lambda phase: None)
    with pytest.raises(
        BadOption, match=rf"^system.slots={slots} take 4096.0 GiB, and .* are free: there is room for (\d+)"
    ) as e:
        session.prepare()
    most = int(re.search(r"room for (\d+)", str(e.value))[1])  # type: ignore[index]
    assert most * 2048 <= psutil.virtual_memory().total  # 2 layers of 2 x 128 numbers of 4 bytes a slot


@pytest.mark.slow
def test_the_program_serves(run: Run, tmp_path: Path) -> None:
    """The real program: a cell that serves, one that cannot, and what the records hold."""
    small = ["runner.requests=6", "runner.rate=20", "runner.prompt_tokens=4-9", "runner.new_tokens=2-5", "runner.repeats=2"]
    model = ["model=gpt", "model.layers=1", "model.positions=64"]
    done = run("-m", "runner=serving", *model, *small, "system=orca,eager", f"results={tmp_path}")
    assert done.returncode == 0, done.stderr
    by_system = {record["cell"]["system"]["choice"]: record for record in records(tmp_path).values()}
    assert by_system["eager"]["status"] == "unsupported" and "system=orca does" in by_system["eager"]["reason"]
    record = by_system["orca"]
    assert record["status"] == "ok" and record["correctness"]["is_correct"], record
    served = record["serving"]
    assert served["clock"] == "real" and [trace["seed"] for trace in served["traces"]] == [0, 1]
    for trace in served["traces"]:
        of = trace["requests"]
        assert [len(tokens) for tokens in of["token_s"]] == of["max_new_tokens"]
    made = {quantity["name"]: quantity for quantity in served["quantities"]}
    assert made["request_throughput"]["value"] > 0 and made["request_throughput"]["low"] is not None
    assert "req/s" in done.stdout and "in vain" in done.stdout


# --- The engine alone ---


def of_cell(
    runner: str, session: type[ServingSession], batch: int = 1, choice: str = "orca", **options: object
) -> ServingSession:
    """A session of a small cell, prepared. options: of the runner, and "system_options"."""
    small = {"prompt_tokens": 6, "new_tokens": 3, "samples": 2} if runner == "engine" else OPTIONS
    model = choose("model", "gpt", layers=1, positions=256)
    system_options = {"slots": options.pop("slots", 400), "max_batch_size": 4, **options.pop("system_options", {})}  # type: ignore[dict-item]
    system = choose("system", choice, **system_options)  # type: ignore[arg-type]
    made = Cell(model, system, choose("runner", runner, **small | options), Conditions(batch, "cpu", "fp32"))  # type: ignore[arg-type]
    prepared = session(made, "0", lambda phase: None)
    prepared.before_preparing()
    prepared.prepare()
    return prepared


def test_a_batch_of_equal_requests_takes_as_many_iterations_as_they_have_tokens() -> None:
    session = of_cell("engine", EngineSession, batch=3)
    assert isinstance(session, EngineSession)
    rows = [[len(row.tokens) for row in i.batch.rows] for i in session._serve().iterations]
    assert rows == [[6, 6, 6], [1, 1, 1], [1, 1, 1]] and session.compare().is_correct
    (measurement,) = (m for m in plan(session.cell.runner).measurements if m.name == "engine")
    part = measurement.measure(session)
    assert isinstance(part, Measured) and {name: len(part.samples[name]) for name in part.samples} == {
        "batch_ms": 2,
        "prompts_ms": 2,
        "increment_ms": 4,  # two batches, each with two iterations after that of its prompts
    }
    batch_ms, prompts_ms, tflops, increment_ms, *by_graph = part.quantities
    assert batch_ms.value and prompts_ms.value and increment_ms.value
    assert prompts_ms.value + 2 * increment_ms.value <= 1.5 * batch_ms.value
    weights = sum(
        weight.numel() for name, weight in session.decoder.named_parameters() if weight.dim() == 2 and "blocks" in name
    )  # type: ignore[union-attr]
    assert session.prompt_flops() == 2 * 18 * weights and tflops.value
    assert [quantity.value for quantity in by_graph] == [None, None] and all(quantity.reason for quantity in by_graph)
    with pytest.raises(MemoryError, match="of 3 requests do not fit at once"):
        of_cell("engine", EngineSession, batch=3, slots=20)
    with pytest.raises(BadOption, match="batch=5 is more"):
        of_cell("engine", EngineSession, batch=5)


@pytest.mark.parametrize(
    ("choice", "system_options"),
    [
        ("orca_chunked", {"max_num_batched_tokens": 6}),
        pytest.param("orca_preempting", {"block_size": 4}, marks=pytest.mark.slow),
        pytest.param("orca", {"prefetch": True}, marks=pytest.mark.slow),
        ("request_level_ragged", {"microbatch_size": 1}),
    ],
)
def test_a_batch_fits_unless_a_request_waits_for_slots(choice: str, system_options: dict[str, object]) -> None:
    """However many iterations it takes, and whoever ends before another begins."""
    for new_tokens in (1, 3):
        assert of_cell("engine", EngineSession, 4, choice, slots=48, new_tokens=new_tokens, system_options=system_options)
    with pytest.raises(MemoryError, match="of 4 requests do not fit at once"):
        of_cell("engine", EngineSession, 4, choice, slots=20, system_options=system_options)


def test_the_device_idles_where_no_replay_is() -> None:
    class Ran:
        """What a GPU's session would say."""

        def batch_times(self) -> BatchTimes:
            return BatchTimes(10.0, 4.0, (2.0, 2.0, 2.0))

        def replay_ms(self) -> float:
            return 1.5

        def prompt_flops(self) -> float:
            return 8e12

    (measurement,) = (m for m in plan(choose("runner", "engine", samples=2)).measurements if m.name == "engine")
    part = measurement.measure(Ran())  # type: ignore[arg-type]
    assert isinstance(part, Measured)
    assert {quantity.name: quantity.value for quantity in part.quantities} == {
        **{"batch_ms": 10.0, "prompts_ms": 4.0, "prompt_tflops": 2000.0, "increment_ms": 2.0, "replay_ms": 1.5},
        "idle_share": 0.25,
    }


def test_a_simulated_trace_is_seen_as_arithmetic_says() -> None:
    trace = [Arrival(0.0, 5, 3), Arrival(1.5, 4, 1)]
    seen = simulated(IterationLevel(ContiguousSlots.all_free(40), 4), LinearCost(1.0), trace)
    assert seen.requests.token_s == ((1.0, 2.0, 3.0), (3.0,)) and seen.queued_s == (0.0, 0.5)
    assert seen.iterations.rows == (1, 1, 2) and seen.iterations.reserved_slots == (8, 8, 13)


def test_prompts_of_a_seed_are_known_to_a_cache_and_no_others() -> None:
    """Of 6 prompts of 20 tokens; blocks of 4 are shared, but for the one with a prompt's last token."""
    trace = [Arrival(float(i), 20, 2) for i in range(6)]
    scheduler = IterationLevel(CachedSlots.all_free(4096, 4), 4)

    def computed(seed: str, shared_tokens: int = 0) -> int:
        return sum(simulated(scheduler, LinearCost(0.1), trace, 1, seed, shared_tokens).iterations.tokens)

    whole = 6 * (20 + 1)  # the last token of each is computed for nobody
    assert [computed("a"), computed("b"), computed("a")] == [whole, whole, whole - 6 * 16]
    assert computed("c", shared_tokens=8) == whole - 5 * 8


RATES = {"capacity": {"steps": 1}, "simulation": {"rates": "20"}}


@pytest.mark.parametrize("runner", RATES)
def test_every_rate_has_prompts_that_no_cache_knows(runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By either clock, and of a request alone."""
    monkeypatch.setattr(costs, "of_server", lambda *_: LinearCost(0.001))
    monkeypatch.setattr(LinearCost, "samples", lambda self: {}, raising=False)
    of_prompts: list[tuple[int, int]] = []

    def noting(serve: Callable[..., Seen]) -> Callable[..., Seen]:
        def noted(server: object, *arguments: Any) -> Seen:
            seen = serve(server, *arguments)
            of_prompts.append((sum(seen.requests.prompt_tokens), sum(seen.iterations.tokens)))
            return seen

        return noted

    monkeypatch.setattr(traffic, "run", noting(traffic.run))
    monkeypatch.setattr(serving_session, "simulated", noting(simulated))
    session = of_cell(runner, ServingSession, choice="orca_prefixes", prompt_tokens="24-30", rate=40.0, **RATES[runner])
    if runner == "simulation":
        session.both_clocks()
    else:
        for rate in (20.0, 40.0):
            session.try_rate(rate)
    assert len(of_prompts) == (4 if runner == "simulation" else 2)
    assert all(computed >= prompts for prompts, computed in of_prompts)


LATE = """
import sys, time
from runners.serving import client

send = client.Client._send

def late(self, number, now_s):
    time.sleep(0.02 * self.plan.seed.startswith("0"))
    send(self, number, now_s)

client.Client._send = late
client.main(int(sys.argv[1]))
"""
LOADS = {"serving": {}, "capacity": {"steps": 1, "slo_ms": 1e6}, "simulation": {"rates": "50"}}


@pytest.mark.parametrize("runner", ["serving", "simulation", pytest.param("capacity", marks=pytest.mark.slow)])
def test_a_record_says_that_its_load_was_sent_late(runner: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In one of three traces, by a load generator whose process is held up."""
    (tmp_path / "late_client.py").write_text(LATE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.setattr(traffic, "module_name", lambda name: "late_client")
    monkeypatch.setattr(capacity, "largest_rate", lambda try_rate, *_: (None, [try_rate(50.0)]))
    monkeypatch.setattr(costs, "of_server", lambda *_: LinearCost(0.001))
    monkeypatch.setattr(LinearCost, "samples", lambda self: {}, raising=False)
    session = of_cell(runner, ServingSession, requests=4, rate=50.0, repeats=3, **LOADS[runner])
    (measurement,) = (m for m in plan(session.cell.runner).measurements if m.name == runner)
    (warning,) = measuring._with(made_record(of=session.cell), measurement, session).warnings
    assert warning.kind == "late_load" and warning.values["lag_ms"] > 20
    assert warning.sentence.startswith("the load generator sent late, at p99 by ")


def test_both_clocks_serve_the_same_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """With costs that are measured after a load."""
    loads_s: list[float] = []
    monkeypatch.setattr(costs, "_load", lambda engine, batch, load_s: loads_s.append(load_s))
    monkeypatch.setitem(costs.LOAD_S, "cpu", 7.0)
    session = of_cell("simulation", ServingSession, repeats=2, rate=30.0, rates="20")
    (measurement,) = (m for m in plan(session.cell.runner).measurements if m.name == "simulation")
    part = measurement.measure(session)
    assert isinstance(part, Measured) and part.samples["rate"] == (20.0, 20.0, 30.0, 30.0)
    assert len(part.samples["throughput_real"]) == len(part.samples["throughput_simulated"]) == 4
    assert part.samples["cost_tokens"][0] == 1.0 and len(part.samples["cost_tokens"]) == len(part.samples["cost_ms"]) > 3
    assert all(quantity.source for quantity in part.quantities if "real_at" not in quantity.name)
    assert loads_s == [7.0]


@dataclass(frozen=True)
class Clocked:
    rate: float
    real_throughput: float
    virtual_throughput: float
    real_ms: float | None
    virtual_ms: float | None
    lag_ms: float = 0.0


def test_a_simulation_is_as_near_as_its_farthest_ratio() -> None:
    """Of medians at each rate; a latency that one clock does not have is compared with nothing."""

    class Session:
        def both_clocks(self) -> tuple[list[Clocked], dict[str, tuple[float, ...]]]:
            slow = [Clocked(5.0, 4.0, 4.4, 10.0, 9.0), Clocked(5.0, 2.0, 2.2, 10.0, 9.0)]
            return [*slow, Clocked(9.0, 8.0, 7.9, None, 3.0)], {"cost_ms": (1.0,)}

    (measurement,) = (m for m in plan(choose("runner", "simulation")).measurements if m.name == "simulation")
    part = measurement.measure(Session())  # type: ignore[arg-type]
    assert isinstance(part, Measured)
    values = {quantity.name: quantity.value for quantity in part.quantities}
    assert values["throughput_ratio"] == pytest.approx(1.1) and values["normalized_ratio"] == pytest.approx(0.9)
    assert values["throughput_real_at_5"] == 3.0 and values["throughput_simulated_at_9"] == 7.9
    assert part.samples["cost_ms"] == (1.0,)
    assert values["normalized_real_at_9"] is None and len(part.samples["normalized_real"]) == 2


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"concurrency": 2}, r"takes no runner\.concurrency"),
        ({"rates": "5 none"}, "none is not a positive number"),
        ({"rates": "0"}, "0 is not a positive number"),
        ({"rates": "5", "trace": "FILE", "requests": 1}, r"takes no runner\.rates"),
    ],
)
def test_a_simulation_knows_when_requests_come(changed: dict[str, Value], says: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,3,4\n")
    options = {key: str(file) if value == "FILE" else value for key, value in changed.items()}
    with pytest.raises(BadRequest, match=says):
        plan(choose("runner", "simulation", **OPTIONS | options))


def test_prompts_begin_alike_where_that_is_asked_for() -> None:
    plan = Plan([(0.0, 9, 1), (0.0, 3, 1), (0.0, 9, 1)], seed="1", vocabulary=1000, concurrency=0, shared_tokens=5)
    first, short, second = (prompt_of(plan, number) for number in range(3))
    assert (len(first), len(short), len(second)) == (9, 3, 9)
    assert first[:5] == second[:5] and short == first[:3] and first[5:] != second[5:]
    assert prompt_of(replace(plan, shared_tokens=0), 0)[:5] != first[:5]
