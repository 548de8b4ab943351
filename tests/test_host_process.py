"""A process that hosts a schedule keeps what is its own: CUDA Graphs, counts of memory, its record of allocations."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import models
import systems
from systems.base import Unsupported

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(900),
]

REPLAYS = 100
NETWORKS = ("t5", "bert", "gpt2")


Networks = dict[str, tuple[nn.Module, tuple[Tensor, ...], list[Tensor]]]


def load() -> Networks:
    """By name: the module, its inputs, and what eager answers."""
    loaded = {name: models.load(name, 1, device="cuda") for name in NETWORKS}
    with torch.no_grad():
        return {n: (m.module, tuple(m.inputs), outputs(m.module(*m.inputs))) for n, m in loaded.items()}


@pytest.fixture(scope="module")
def networks() -> Networks:
    return load()


def outputs(value: Any) -> list[Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)]


class HostGraph:
    """A CUDA Graph that the host process captures by itself."""

    def __init__(self, module: nn.Module, inputs: tuple[Tensor, ...], stream: torch.cuda.Stream | None = None):
        with torch.no_grad():
            side = stream or torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                module(*inputs)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.outputs = outputs(module(*inputs))

    def __call__(self) -> list[Tensor]:
        self.graph.replay()
        return self.outputs


class Scheduled:
    """An execution of ours."""

    def __init__(self, system: str, module: nn.Module, inputs: tuple[Tensor, ...]):
        self.prepared = systems.load(system).prepare(module, inputs)
        self.inputs = inputs

    def __call__(self) -> list[Tensor]:
        return outputs(self.prepared(*self.inputs))


def spoil_free_memory() -> None:
    """Fill what torch could give away next with NaN, so that whoever reads freed memory answers NaN."""
    torch.cuda.synchronize()
    for bytes_each in (32 << 20, 8 << 20, 1 << 20, 1 << 16):
        blocks = [torch.full((bytes_each // 4,), float("nan"), device="cuda") for _ in range(24)]
        del blocks
    torch.cuda.synchronize()


def assert_right(call: Callable[[], list[Tensor]], expected: list[Tensor], replays: int = REPLAYS) -> None:
    spoil_free_memory()
    for i in range(replays):
        answer = call()
        if i % 10 == 0 or i == replays - 1:
            for a, b in zip(answer, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("order", permutations(NETWORKS), ids="-".join)
@pytest.mark.parametrize("systems_in_turn", [("nimble", "cuda_graph", "opara"), ("cuda_graph", "nimble", "nimble_fused")])
def test_graphs_of_the_host_and_ours_answer_as_eager_in_any_order(
    networks: Networks, order: tuple[str, ...], systems_in_turn: tuple[str, ...]
) -> None:
    alive: dict[tuple[str, str], Callable[[], list[Tensor]]] = {}
    for name, system in zip(order, systems_in_turn, strict=True):
        module, inputs, _ = networks[name]
        alive["host", name] = HostGraph(module, inputs)
        alive[system, name] = Scheduled(system, module, inputs)
        for (_, of), call in alive.items():
            assert_right(call, networks[of][2], replays=20)
    while alive:  # drop the oldest, collect, and see that the rest still answers
        for (_, of), call in alive.items():
            assert_right(call, networks[of][2])
        oldest = next(iter(alive))
        del alive[oldest], call
        gc.collect()
        torch.cuda.empty_cache()


def test_what_clears_all_workspaces_of_the_process_leaves_ours_right(networks: Networks) -> None:
    """torch.compile's own CUDA Graphs do that."""
    prepared = {(s, n): Scheduled(s, *networks[n][:2]) for n in NETWORKS for s in ("nimble", "cuda_graph")}
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    for (_, name), call in prepared.items():
        assert_right(call, networks[name][2])
    again = Scheduled("nimble", *networks["bert"][:2])
    for call, name in [*((c, n) for (_, n), c in prepared.items()), (again, "bert")]:
        assert_right(call, networks[name][2])


def test_two_threads_prepare_and_run_at_once(networks: Networks) -> None:
    """Each its own modules: torch.export puts other tensors in the place of a module's parameters meanwhile."""
    failures: list[BaseException] = []

    def work(networks: Networks, names: tuple[str, ...], system: str) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(3):
                    for name in names:
                        module, inputs, expected = networks[name]
                        call = Scheduled(system, module, inputs)
                        for i in range(REPLAYS):
                            answer = call()
                            if i % 10 == 0:
                                for a, b in zip(answer, expected, strict=True):
                                    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
                        torch.cuda.current_stream().synchronize()
                        call.prepared.close()
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=work, args=(load(), NETWORKS, "nimble")),
        threading.Thread(target=work, args=(load(), NETWORKS[::-1], "cuda_graph")),
        threading.Thread(target=work, args=(load(), NETWORKS[1:], "nimble")),
    ]
    host = HostGraph(*networks["gpt2"][:2], stream=torch.cuda.Stream())
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert_right(host, networks["gpt2"][2])


def test_memory_is_bounded_whatever_number_of_modules_came_and_went(networks: Networks) -> None:
    module, inputs, _ = networks["bert"]
    gc.collect()
    memory_sizes = []
    for i in range(8):
        prepared = systems.load(("nimble", "cuda_graph")[i % 2]).prepare(module, inputs)
        prepared(*inputs)
        if i % 4 < 2:
            prepared.close()
        del prepared
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        memory_sizes.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert len(set(memory_sizes[2:])) == 1, memory_sizes
    by_thread = []
    for _ in range(4):
        thread = threading.Thread(target=lambda: systems.load("nimble").prepare(module, inputs).close())
        thread.start()
        thread.join()
        gc.collect()
        torch.cuda.empty_cache()
        by_thread.append(torch.cuda.memory_allocated())
    assert len(set(by_thread)) == 1, by_thread


def test_counts_and_records_of_memory_stay_the_hosts(networks: Networks) -> None:
    module, inputs, expected = networks["t5"]
    peak = torch.empty(6 << 30, dtype=torch.uint8, device="cuda")
    del peak
    torch.cuda.empty_cache()
    before = torch.cuda.max_memory_allocated()
    assert_right(Scheduled("nimble", module, inputs), expected, replays=2)
    assert torch.cuda.max_memory_allocated() == before
    assert not torch._C._cuda_isHistoryEnabled()
    torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    try:
        assert_right(Scheduled("nimble", module, inputs), expected, replays=2)
        assert torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(None)
    torch.cuda.memory._record_memory_history(max_entries=10)
    try:
        with pytest.raises(Unsupported, match="max_entries"):
            Scheduled("nimble", module, inputs)
    finally:
        torch.cuda.memory._record_memory_history(None)
