"""A model in several processes: the tokens are those of one process, and no worker outlives another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_parts import SHAPE, amplify
from test_serving_engine import alone, requests_of, served

from models.gpt import GPT, Shape, made
from models.gpt_part import Part, made_part
from systems.serving.batch import Batch, Row
from systems.serving.iteration_level import IterationLevel
from systems.serving.message import from_bytes, to_bytes
from systems.serving.parallel import EngineEnded, ParallelEngine
from systems.serving.parts import Parts
from systems.serving.request import Sampling
from systems.serving.slots import ContiguousSlots, Region
from systems.serving.worker import Spec

NUM_SLOTS = 120


def telling() -> GPT:
    """A GPT whose next token depends on all before it."""
    module = made(SHAPE, "cpu", torch.float64)
    amplify(module)
    return module


MODULE = telling()


def started(parts: Parts, control: str = "pipe", maker: str = "serving_parts:telling_part") -> ParallelEngine:
    specs = [
        Spec(parts, rank, "cpu", "", maker, "", NUM_SLOTS, 0, 0, "split", False, 4, control)
        for rank in range(parts.num_ranks)
    ]
    return ParallelEngine(specs, SHAPE.vocabulary)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(str(ROOT / "tests"))


SIZES = [(5, 6), (12, 3), (2, 6), (7, 5), (1, 1)]


def check_tokens(engine: ParallelEngine) -> None:
    """They are those of one process."""
    for sizes, apart in ((SIZES, 1), (SIZES[::-1], 0)):
        scheduler = IterationLevel(ContiguousSlots.all_free(NUM_SLOTS), 2, num_workers=engine.num_workers)
        tokens = served(scheduler, engine, requests_of(sizes), apart)
        assert tokens == {request.id: alone(MODULE, request) for request in requests_of(sizes)}


def check_logits(engine: ParallelEngine) -> None:
    """They come where they are kept."""
    engine.keeps_logits = True
    request = requests_of([(6, 1)])[0]
    row = Row(0, Region((3,), 10, 10), 0, request.prompt, 0, 6, 0, Sampling())
    engine.submit(Batch(0, (row,)))
    expected = MODULE(torch.tensor([request.prompt]))[0, -1:]
    torch.testing.assert_close(engine.logits, expected)
    assert engine.num_in_flight == 1 and engine.has_returned()
    assert engine.collect().tokens == [int(expected.argmax())] and engine.num_in_flight == 0


def check_end(engine: ParallelEngine, rank: int) -> None:
    """One worker is killed: all end within ten seconds, and whoever waits is told in one line."""
    row = Row(0, Region((3,), 10, 10), 0, (1, 2), 0, 2, 0, Sampling())
    os.kill(engine.workers[rank].process.pid, signal.SIGKILL)
    begin = time.monotonic()
    stage, part = divmod(rank, engine.parts.tensor)
    line = rf"^rank {rank} of \d \(stage {stage}, part {part}\) was killed by signal 9$"
    with pytest.raises(EngineEnded, match=line):
        for _ in range(1000):
            engine.submit(Batch(0, (row,)))
            engine.collect()
    assert not any(psutil.pid_exists(worker.process.pid) for worker in engine.workers)
    assert time.monotonic() - begin < 10


def test_two_stages_of_two_parts_are_one_process_until_one_is_killed() -> None:
    engine = started(Parts(2, 2))
    try:
        check_tokens(engine)
        check_logits(engine)
        check_end(engine, 3)
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "tensor", "control"),
    [(1, 2, "pipe"), (2, 1, "pipe"), (2, 4, "pipe"), (1, 8, "pipe"), (4, 1, "nccl"), (2, 2, "nccl")],
)
def test_any_split_is_one_process(pipeline: int, tensor: int, control: str) -> None:
    engine = started(Parts(pipeline, tensor), control)
    try:
        check_tokens(engine)
        check_logits(engine)
    finally:
        engine.close()
    assert not any(psutil.pid_exists(worker.process.pid) for worker in engine.workers)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_whichever_worker_is_killed_ends_all(rank: int) -> None:
    check_end(started(Parts(2, 2)), rank)


@pytest.mark.slow
def test_workers_end_with_the_process_that_started_them() -> None:
    script = (
        "import os, sys; sys.path[:0] = ['.', 'tests']; from test_serving_parallel import *; "
        "e = started(Parts(1, 2)); print(json.dumps([w.process.pid for w in e.workers]), flush=True); "
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    pids = json.loads(done.stdout)
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_a_worker_without_memory_is_told_as_such() -> None:
    with pytest.raises(MemoryError, match=r"^rank 1 of 2 .* ended with status 3: out of memory: too large$"):
        started(Parts(1, 2), maker="serving_parts:no_part")


INTEGERS = st.integers(-(2**63), 2**63 - 1)
ROWS = st.builds(
    Row,
    request_id=INTEGERS,
    region=st.builds(Region, st.lists(INTEGERS, min_size=1).map(tuple), INTEGERS, INTEGERS),
    begin=INTEGERS,
    tokens=st.lists(INTEGERS, min_size=1).map(tuple),
    num_padding=INTEGERS,
    num_useful=INTEGERS,
    draw=INTEGERS,
    sampling=st.builds(Sampling, st.floats(0, 5), st.floats(0.1, 1), INTEGERS),
    num_source=INTEGERS,
)


@settings(deadline=None)
@given(st.builds(Batch, st.integers(0, 2**40), st.lists(ROWS, max_size=5).map(tuple)), st.booleans())
def test_a_message_is_the_batch(batch: Batch, keeps_logits: bool) -> None:
    assert from_bytes(to_bytes(batch, keeps_logits)) == (batch, keeps_logits)


def test_a_message_of_increments_is_small() -> None:
    row = Row(2**40, Region((70_000,), 640, 640), 300, (50_000,), 0, 1, 100, Sampling(seed=2**62))
    assert len(to_bytes(Batch(1, (row,) * 128))) <= 2**14


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_parts_have_the_weights_of_the_whole(degree: int) -> None:
    shape = Shape(layers=2, hidden=64, heads=8, positions=16, vocabulary=50)
    whole = made(shape, "cpu", torch.float32)
    parts = [made_part(shape, Part(0, 1, rank, degree), "cpu", torch.float32) for rank in range(degree)]
    for name, weight in whole.named_parameters():
        pieces = [dict(part.named_parameters())[name] for part in parts]
        if pieces[0].shape == weight.shape:
            assert all(torch.equal(piece, weight) for piece in pieces)
        else:
            dim = next(d for d in range(weight.dim()) if pieces[0].shape[d] != weight.shape[d])
            assert torch.equal(torch.cat(pieces, dim), weight), name
