"""Iterations of increments, executed by systems that schedule a module's operators."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from test_serving_engine import GPU, KINDS, MODULE, NUM_SLOTS, alone, requests_of, served, telling

import systems
from models.gpt import GPT
from models.qwen3 import Qwen3, Qwen3Shape
from systems.base import BadOption, Prepared
from systems.scheduling.execution.scheduled import Scheduled
from systems.serving.engine import LocalEngine
from systems.serving.increments import CACHES
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


WEAVE = pytest.param("weave", "padded", marks=pytest.mark.slow)  # it searches


@pytest.mark.parametrize(
    ("system", "kind"),
    [*product(("eager", "sequential", "nimble"), ("orca, asynchronous", "paged by 16", "padded")), WEAVE],
)
def test_tokens_are_the_same_whatever_executes_increments(system: str, kind: str) -> None:
    tokens, calls = tokens_by(system, kind, MODULE)
    assert tokens == {request.id: alone(MODULE, request) for request in requests_of(SIZES)}
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


def test_an_engines_caches_go_with_it() -> None:
    before = len(CACHES)
    engine = LocalEngine(MODULE, NUM_SLOTS, max_batch_size=1, executor=systems.load("sequential").prepare)
    assert len(CACHES) == before + 1
    engine.close()
    del engine
    assert len(CACHES) == before


def test_what_executes_increments_is_a_system_of_modules() -> None:
    with pytest.raises(BadOption, match=r"increments_by=nimbel.*nimble"):
        systems.load("orca", increments_by="nimbel")
    with pytest.raises(BadOption, match="of several processes there is engine"):
        systems.load("orca", increments_by="nimble", pipeline_parallel=2)
    nimble = systems.load("orca", increments_by="nimble", slots=100, max_batch_size=2)
    assert isinstance(nimble, ServingSystem)
    engine = nimble.prepare_serving(MODULE).engine
    assert isinstance(engine, LocalEngine) and sorted(engine.graphs) == [1, 2]
    engine.close()
