"""A model in several processes: its tokens and logits are those of one process, however it is split."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import ROOT
from parallel_engines import MODULE, NUM_SLOTS, check_end, check_logits, check_tokens, started, telling
from serving_parts import LONG, SHAPE
from test_serving_engine import alone, requests_of, served

from systems.serving.batch import Batch
from systems.serving.engine import PROMPT_SIZES
from systems.serving.iteration_level import IterationLevel
from systems.serving.parallel import ParallelEngine
from systems.serving.parts import Parts
from systems.serving.prefix_cache import CachedSlots
from systems.serving.request import Request as ServedRequest
from systems.serving.slots import ContiguousSlots
from systems.serving.worker import Spec


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(str(ROOT / "tests"))


@pytest.mark.slow
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
def test_three_stages_are_one_process() -> None:
    """Three batches are in flight."""
    engine = started(Parts(3, 1), arguments="3")
    try:
        check_tokens(engine, telling(replace(SHAPE, layers=3)))
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "tensor"), [(1, 2), (2, 1)])
def test_chunks_of_prompts_that_begin_alike_in_blocks_are_one_process(pipeline: int, tensor: int) -> None:
    """Paged K/V with prefixes, of which later requests find two blocks there, in chunks of 3, 5 and 8 tokens."""

    def requests() -> list[ServedRequest]:
        first, *others = requests_of([(12, 4), (12, 3), (9, 5)])
        return [first, *(replace(r, prompt=first.prompt[:8] + r.prompt[8:]) for r in others)]

    engine = started(Parts(pipeline, tensor), block_size=4)
    try:
        for chunk in (3, 5, 8):
            scheduler = IterationLevel(
                CachedSlots.all_free(NUM_SLOTS, 4), 2, num_workers=engine.num_workers, max_num_batched_tokens=chunk
            )
            tokens = served(scheduler, engine, requests(), 1)
            assert tokens == {r.id: alone(MODULE, r) for r in requests()}
            assert scheduler.num_reserved == 0
    finally:
        engine.close()


TWO_GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


@pytest.mark.parametrize(
    ("pipeline", "tensor", "control", "reductions"),
    [
        pytest.param(*split, marks=TWO_GPUS)
        for split in (
            (1, 2, "pipe", "direct"),
            (1, 2, "pipe", "nccl"),
            (1, 2, "nccl", "direct"),
            (2, 1, "pipe", "direct"),
            (2, 1, "nccl", "direct"),
        )
    ],
)
def test_two_gpus_are_one_process(pipeline: int, tensor: int, control: str, reductions: str) -> None:
    """With CUDA graphs of increments and of prompts, of whose sizes both agree."""
    parts, maker = Parts(pipeline, tensor), "serving_parts:telling_part_of_32_bits"
    specs = [
        Spec(parts, rank, "cuda", "", maker, "", NUM_SLOTS, 0, 0, "fused", True, 4, control, reductions)
        for rank in range(parts.num_ranks)
    ]
    engine = ParallelEngine(specs, SHAPE.vocabulary)
    try:
        module = telling(device="cuda")
        check_tokens(engine, module)
        check_logits(engine, module, tolerance=1e-3)
    finally:
        engine.close()
    assert not any(psutil.pid_exists(worker.process.pid) for worker in engine.workers)


def check_long(
    parts: Parts, device: str, precision: str, attention: str, control: str = "pipe", is_prefetching: bool = False
) -> None:
    """Prompts of more tokens than any graph has come while others have increments, and as many batches fly as may."""
    options = "serving_parts:long_part", precision, 4000, 0, 0, attention, attention == "fused", 4, control
    specs = [Spec(parts, rank, device, "", *options) for rank in range(parts.num_ranks)]
    engine = ParallelEngine(specs, LONG.vocabulary, is_prefetching)
    requests = requests_of([(900, 5), (20, 30), (900, 3), (3, 30), (20, 30), (9, 4), (850, 4)])
    batches: list[Batch] = []
    most_in_flight = 0

    class Noted(SimpleNamespace):
        """The engine, whose batches are noted."""

        num_in_flight = property(lambda self: engine.num_in_flight)
        collect = staticmethod(engine.collect)

        def submit(self, batch: Batch) -> None:
            nonlocal most_in_flight
            engine.submit(batch)
            batches.append(batch)
            most_in_flight = max(most_in_flight, engine.num_in_flight)

    try:
        scheduler = IterationLevel(ContiguousSlots.all_free(4000), 2, parts.pipeline, is_prefetching)
        tokens = served(scheduler, Noted(), requests, 0)  # type: ignore[arg-type]
    finally:
        engine.close()
    mixed = [[len(row.tokens) for row in batch.rows] for batch in batches if batch.num_tokens > PROMPT_SIZES[-1]]
    assert len(mixed) == 3 and any(1 in sizes for sizes in mixed) and most_in_flight == parts.pipeline + is_prefetching
    module = telling(LONG, device)
    tolerance = 1e-5 if precision == "float32" else 3e-2
    for request in requests:
        new = torch.tensor(tokens[request.id])
        stream = torch.tensor([[*request.prompt, *tokens[request.id][:-1]]])
        with torch.inference_mode():
            logits = module(stream)[0, -len(new) :]
        below = logits.max(-1).values - logits.gather(-1, new[:, None])[:, 0]
        assert len(new) == request.max_new_tokens and float(below.max()) <= tolerance * float(logits.abs().max())


@pytest.mark.parametrize(
    ("pipeline", "tensor", "is_prefetching"),
    [(2, 1, True), *(pytest.param(*split, marks=pytest.mark.slow) for split in ((2, 1, False), (1, 2, True)))],
)
def test_long_prompts_come_between_increments_in_flight(pipeline: int, tensor: int, is_prefetching: bool) -> None:
    check_long(Parts(pipeline, tensor), "cpu", "float32", "split", is_prefetching=is_prefetching)


@pytest.mark.parametrize(
    ("pipeline", "tensor", "attention", "control", "is_prefetching"),
    [
        pytest.param(*options, marks=TWO_GPUS)
        for options in (
            (2, 1, "fused", "pipe", False),
            (2, 1, "fused", "nccl", True),
            (1, 2, "fused", "pipe", True),
            (1, 2, "split", "pipe", False),
        )
    ],
)
def test_long_prompts_come_between_increments_in_flight_on_two_gpus(
    pipeline: int, tensor: int, attention: str, control: str, is_prefetching: bool
) -> None:
    """Iterations that no graph is for are launched while graphs run."""
    check_long(Parts(pipeline, tensor), "cuda", "float16", attention, control, is_prefetching)
