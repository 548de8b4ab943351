"""runner=serving: the process that sends a trace, what comes back to it, and what a record says of both."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Run, records
from hypothesis import given
from hypothesis import strategies as st
from made_records import record as made_record
from serving_cells import of_cell, server
from test_serving_engine import NUM_SLOTS

from runners.cell import measuring
from runners.measurements import capacity
from runners.measurements.registry import plan
from runners.serving import session as serving_session
from runners.serving import traffic
from runners.serving.client import Client, prompt_of
from runners.serving.session import ServingSession
from runners.serving.simulation import simulated
from runners.serving.traffic import GeneratorEnded, Seen
from runners.serving.wire import HEADER, Frames, Kind, Plan, numbers, send, tokens_body
from runners.serving.workload import drawn
from systems.serving import costs
from systems.serving.loop import Listed, RealClock
from systems.serving.request import Delivery, Request
from systems.serving.simulated import LinearCost


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


def test_prompts_begin_alike_where_that_is_asked_for() -> None:
    plan = Plan([(0.0, 9, 1), (0.0, 3, 1), (0.0, 9, 1)], seed="1", vocabulary=1000, concurrency=0, shared_tokens=5)
    first, short, second = (prompt_of(plan, number) for number in range(3))
    assert (len(first), len(short), len(second)) == (9, 3, 9)
    assert first[:5] == second[:5] and short == first[:3] and first[5:] != second[5:]
    assert prompt_of(replace(plan, shared_tokens=0), 0)[:5] != first[:5]
