"""Engines of several processes, and what their tokens and logits are beside those of one."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
import torch
from serving_parts import SHAPE, amplify
from test_serving_engine import alone, requests_of, served

from models.gpt import GPT, Shape, made
from systems.serving.batch import Batch, Row
from systems.serving.iteration_level import IterationLevel
from systems.serving.parallel import EngineEnded, ParallelEngine
from systems.serving.parts import Parts
from systems.serving.request import Sampling
from systems.serving.slots import ContiguousSlots, Region
from systems.serving.worker import Spec

NUM_SLOTS = 120


def telling(shape: Shape = SHAPE, device: str = "cpu") -> GPT:
    """A GPT whose next token depends on all before it, on the host. Weights of a seed differ between a GPU and a host."""
    module = made(shape, device, torch.float64)
    amplify(module)
    return module.cpu()


MODULE = telling()


def started(
    parts: Parts,
    control: str = "pipe",
    maker: str = "serving_parts:telling_part",
    arguments: str = "",
    block_size: int = 0,
) -> ParallelEngine:
    specs = [
        Spec(parts, rank, "cpu", "", maker, arguments, NUM_SLOTS, 0, block_size, "split", False, 4, control)
        for rank in range(parts.num_ranks)
    ]
    return ParallelEngine(specs, SHAPE.vocabulary)


SIZES = [(5, 6), (12, 3), (2, 6), (7, 5), (1, 1)]


def check_tokens(engine: ParallelEngine, module: GPT = MODULE) -> None:
    """They are those of one process, also where stop tokens end requests."""
    for sizes, apart, num_stops in ((SIZES, 1, 0), (SIZES[::-1], 0, 12)):
        scheduler = IterationLevel(ContiguousSlots.all_free(NUM_SLOTS), 2, num_workers=engine.num_workers)
        requests = requests_of(sizes, num_stops=num_stops)
        tokens = served(scheduler, engine, requests, apart)
        assert tokens == {request.id: alone(module, request) for request in requests}
        assert scheduler.num_reserved == 0 and any(len(tokens[r.id]) < r.max_new_tokens for r in requests) == (num_stops > 0)


def check_logits(engine: ParallelEngine, module: GPT = MODULE, tolerance: float = 1e-7) -> None:
    """They come where they are kept. tolerance: of their error, relative and absolute."""
    engine.keeps_logits = True
    request = requests_of([(6, 1)])[0]
    row = Row(0, Region((3,), 10, 10), 0, request.prompt, 0, 6, 0, Sampling())
    engine.submit(Batch(0, (row,)))
    expected = module(torch.tensor([request.prompt]))[0, -1:]
    torch.testing.assert_close(engine.logits, expected, rtol=tolerance, atol=tolerance)
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


ONE_ROW = Batch(0, (Row(0, Region((3,), 10, 10), 0, (1, 2), 0, 2, 0, Sampling()),))
