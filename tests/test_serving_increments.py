"""Iterations of increments, executed by systems that schedule a module's operators."""

from __future__ import annotations

import gc

import pytest
import torch
from test_serving_engine import KINDS, MODULE, NUM_SLOTS, alone, requests_of, served, telling
from test_serving_kernels import GPU

import systems
from models.gpt import GPT
from models.qwen3 import Qwen3, Qwen3Shape
from systems.base import BadOption, Prepared
from systems.scheduling.execution.scheduled import Scheduled
from systems.serving.attention import split
from systems.serving.batch import Batch, Row
from systems.serving.engine import LocalEngine
from systems.serving.increments import CACHES, Caches, attend_increments
from systems.serving.request import Sampling
from systems.serving.slots import Region
from systems.serving.system import ServingSystem

SIZES = [(5, 6), (12, 3), (2, 6), (7, 5), (3, 1)]


class Counted(Prepared):
    """Notes the rows of each call of what a system has prepared."""

    def __init__(self, prepared: Prepared, calls: list[int], rows: int):
        self.prepared, self.calls, self.rows = prepared, calls, rows

    def __call__(self, *inputs: torch.Tensor) -> object:
        self.calls.append(self.rows)
        return self.prepared(*inputs)


def tokens_by(system: str, kind: str, module: GPT, attention: str = "split") -> tuple[dict[int, list[int]], list[int]]:
    """Tokens by request, and the rows of each iteration that the system has executed."""
    scheduler, block_size = KINDS[kind][0](), KINDS[kind][1]
    calls: list[int] = []
    rows = iter((1, 4))

    def executor(increments: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Prepared:
        return Counted(systems.load(system).prepare(increments, inputs), calls, next(rows))

    engine = LocalEngine(module, NUM_SLOTS, block_size, attention, max_batch_size=4, executor=executor)
    return served(scheduler, engine, requests_of(SIZES), 1), calls


SLOW = [("sequential", "paged by 16"), ("sequential", "padded"), ("nimble", "orca, asynchronous")]


@pytest.mark.parametrize(
    ("system", "kind"),
    [
        pytest.param(system, kind, marks=[pytest.mark.slow] * ((system, kind) in SLOW))
        for system in ("eager", "sequential", "nimble")
        for kind in ("orca, asynchronous", "paged by 16", "padded")
    ],
)
def test_tokens_are_the_same_whatever_executes_increments(system: str, kind: str) -> None:
    _tokens_are_the_same(system, kind, MODULE)


@pytest.mark.slow  # it searches
def test_weave_executes_increments() -> None:
    _tokens_are_the_same("weave", "padded", MODULE)


def _tokens_are_the_same(system: str, kind: str, module: GPT) -> None:
    tokens, calls = tokens_by(system, kind, module)
    assert tokens == {request.id: alone(module, request) for request in requests_of(SIZES)}
    assert len(calls) >= 5 and set(calls) <= {1, 4} and 4 in calls


@pytest.mark.parametrize(
    "system", [pytest.param(name, marks=GPU) for name in ("cuda_graph", "sequential", "nimble", "weave")]
)
@pytest.mark.parametrize("kind", ["orca", "orca, asynchronous", "paged by 16", "padded"])
def test_a_gpu_gives_the_same_tokens_whatever_executes_increments(system: str, kind: str) -> None:
    module = telling(torch.float32, "cuda")
    tokens, calls = tokens_by(system, kind, module, "fused")
    assert tokens == {request.id: alone(module, request) for request in requests_of(SIZES)} and calls


def test_operators_of_a_block_run_at_the_same_time() -> None:
    """Qwen3's queries, keys and values are products of their own: the attention of a layer waits for all three."""
    torch.manual_seed(0)
    shape = Qwen3Shape(layers=2, hidden=32, heads=4, kv_heads=2, head_size=8, inner=48, positions=40, vocabulary=50)
    module = Qwen3(shape).double().eval().requires_grad_(False)
    engines = [
        LocalEngine(module, NUM_SLOTS, max_batch_size=3, executor=systems.load(name).prepare) for name in ("eager", "nimble")
    ]
    prepared = engines[1].prepared[0]
    assert isinstance(prepared, Scheduled) and prepared.schedule.stream_count > 2
    names = [operator.name for operator in prepared.program.graph.operators]
    assert names.count("attend_increments") == shape.layers
    results = [served(KINDS["orca"][0](), engine, requests_of(SIZES), 0) for engine in engines]
    assert results[0] == results[1] and torch.equal(*(engine.cache for engine in engines))
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("block_size", [0, 4])
def test_a_reference_attends_in_its_own_precision_and_leaves_the_cache(block_size: int) -> None:
    """Rows of other lengths, one with padding: as attention over a cache in that precision."""
    module = telling(torch.float32)
    engine = LocalEngine(module, NUM_SLOTS, block_size, executor=systems.load("eager").prepare, max_batch_size=3)
    caches = engine.caches[-1]
    engine.cache.copy_(torch.randn(engine.cache.shape, generator=torch.Generator().manual_seed(0)))
    regions = [Region((8, 24), 4, 8), Region((0,), 4, 4), Region((40, 16), 4, 8)] if block_size else [
        Region((first,), 8, 8) for first in (8, 0, 40)
    ]  # fmt: skip
    rows = tuple(
        Row(at, regions[at], begin, (1,), padding, 1, 0, Sampling())
        for at, (begin, padding) in enumerate([(6, 0), (2, 0), (5, 3)])
    )
    numbers = torch.from_numpy(caches.layouts.packed(Batch(0, rows), 3)[0])
    shape = module.shape
    q, k, v = (torch.randn(3, shape.heads, shape.head_size, dtype=torch.float64) for _ in range(3))
    before = engine.cache.clone()
    wide = Caches(before.double(), split, caches.layouts, caches.sizes)
    expected = attend_increments(q, k, v, numbers, wide.number, 1)
    torch.testing.assert_close(attend_increments(q, k, v, numbers, caches.number, 1), expected)
    assert torch.equal(engine.cache, before) and not torch.equal(wide.cache, before.double())


def test_an_engines_caches_go_with_it() -> None:
    gc.collect()
    before = len(CACHES)
    engine = LocalEngine(MODULE, NUM_SLOTS, max_batch_size=1, executor=systems.load("sequential").prepare)
    assert len(CACHES) == before + 1
    engine.close()
    del engine
    gc.collect()  # an executor is in a cycle
    assert len(CACHES) == before


def test_room_is_left_for_weights_that_are_laid_out_anew() -> None:
    """Twice by weave, whose candidate lies beside its best; the others copy none, and keep it for K/V slots."""
    num_bytes = sum(p.numel() * p.element_size() for p in MODULE.parameters())
    for name, copies in (("engine", 0), ("sequential", 0), ("nimble", 0), ("weave", 2)):
        system = systems.load("orca", increments_by=name)
        assert isinstance(system, ServingSystem) and system._copied_bytes(MODULE) == copies * num_bytes


def test_what_executes_increments_is_a_system_of_modules() -> None:
    with pytest.raises(BadOption, match=r"increments_by=nimbel.*nimble"):
        systems.load("orca", increments_by="nimbel")
    with pytest.raises(BadOption, match="of several processes there is engine"):
        systems.load("orca", increments_by="nimble", pipeline_parallel=2)
    nimble = systems.load("orca", increments_by="nimble", slots=100, max_batch_size=2)
    assert isinstance(nimble, ServingSystem)
    engine = nimble.prepare_serving(MODULE).engine
    assert isinstance(engine, LocalEngine) and [graph.num_tokens for graph in engine.graphs] == [1, 2]
    engine.close()
