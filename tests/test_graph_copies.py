"""Copies within a captured CUDA Graph: what a call reads and returns, wherever its tensors lie."""

import ctypes
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import systems
from systems.scheduling.execution import graph_copies
from systems.scheduling.execution.graph_copies import GraphCopies

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Runtime:
    """A mock of CUDA's: a graph whose nodes are copies, which a launch makes at once in the memory of the host.

    Args:
        refuses: addresses that a copy cannot be set to, as those of memory of another kind.
    """

    cudaError_t = graph_copies.cudart.cudaError_t
    OK = cudaError_t.cudaSuccess

    def __init__(self) -> None:
        self.nodes: list[list[int]] = []  # [target, source, bytes, is enabled]
        self.refuses: set[int] = set()

    def cudaMemcpyAsync(self, target: int, source: int, count: int, kind: object, stream: object) -> tuple[Any]:
        self.nodes.append([target, source, count, True])
        return (self.OK,)

    def cudaGraphGetNodes(self, graph: object, count: int) -> tuple[Any, ...]:
        return self.OK, list(range(count)), count

    def cudaGraphNodeSetEnabled(self, graph_exec: object, node: int, is_enabled: int) -> tuple[Any]:
        self.nodes[node][3] = is_enabled
        return (self.OK,)

    def cudaGraphExecMemcpyNodeSetParams1D(
        self, graph_exec: object, node: int, target: int, source: int, count: int, kind: object
    ) -> tuple[Any]:
        if self.refuses & {target, source}:
            return (self.cudaError_t.cudaErrorInvalidValue,)
        assert count == self.nodes[node][2]
        self.nodes[node][:2] = target, source
        return (self.OK,)

    def copy(self, nodes: range) -> None:
        for target, source, count, is_enabled in self.nodes[nodes.start : nodes.stop]:
            if is_enabled:
                assert target != source
                ctypes.memmove(target, source, count)


class Doubling:
    """A captured graph that doubles each of its inputs."""

    def __init__(self, examples: list[Tensor], monkeypatch: pytest.MonkeyPatch):
        self.runtime = Runtime()
        monkeypatch.setattr(graph_copies, "cudart", self.runtime)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(graph_copies, "num_captured", lambda stream: len(self.runtime.nodes))
        self.static = [torch.empty_like(x).copy_(x) for x in examples]
        self.results = [torch.empty_like(x) for x in self.static]
        self.copies = GraphCopies(CPU)
        self.copies.capture_inputs(self.static, None)
        self.first = range(len(self.runtime.nodes))
        self.copies.capture_outputs([*self.results, None], lambda x: True, None)
        self.copies.bind(None, None)

    def launch(self) -> None:
        self.runtime.copy(self.first)
        for result, static in zip(self.results, self.static, strict=True):
            torch.add(static, static, out=result)
        self.runtime.copy(range(self.first.stop, len(self.runtime.nodes)))

    def __call__(self, *inputs: Tensor) -> list[Any]:
        return self.copies.run(inputs, self.launch)


SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.complex64])


def _lies_otherwise(x: Tensor, how: str) -> Tensor:
    """The same values elsewhere in memory, or in another layout."""
    if how == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() else x.clone()
    if how == "expanded":
        return x.new_zeros(()).expand(x.shape)
    if how == "every other":
        return x.new_zeros(*x.shape, 2)[..., 0].copy_(x)
    if how == "conjugate":
        return x.conj().resolve_conj().conj() if x.is_complex() else x.clone()
    if how == "negative":
        return torch.complex(x.float(), -x.float()).conj().imag.to(x.dtype) if x.is_floating_point() else x.clone()
    return x.clone()


@given(
    st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=3),
    st.lists(
        st.sampled_from(["same", "elsewhere", "transposed", "expanded", "every other", "conjugate", "negative", "refused"]),
        min_size=1,
        max_size=5,
    ),
)
def test_a_call_returns_what_its_inputs_say_however_they_lie(
    forms: list[tuple[tuple[int, ...], torch.dtype]], calls: list[str]
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        examples = [torch.randn(shape).to(dtype) for shape, dtype in forms]
        graph = Doubling(examples, monkeypatch)
        kept = []
        for how in calls:
            inputs = examples if how == "same" else [_lies_otherwise(torch.randn_like(x), how) for x in examples]
            graph.runtime.refuses = {x.data_ptr() for x in inputs} if how == "refused" else set()
            *outputs, constant = graph(*inputs)
            assert constant is None
            for x, output in zip(inputs, outputs, strict=True):
                assert torch.equal(output, x + x) and output.dtype == x.dtype
            kept.append((outputs, [x + x for x in inputs]))
        for outputs, expected in kept:  # still, after later calls
            assert all(map(torch.equal, outputs, expected))


def test_turned_off_it_writes_to_no_tensor_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Doubling([torch.ones(3)], monkeypatch)
    graph.copies.turn_off()
    graph.launch()  # before any call: the copies have nowhere to go
    assert torch.equal(graph.results[0], torch.full((3,), 2.0))
    x = torch.full((3,), 5.0)
    output, _ = graph(x)
    x.fill_(7.0)
    graph.static[0].fill_(1.0)
    graph.copies.turn_off()
    graph.launch()
    assert torch.equal(output, torch.full((3,), 10.0)) and torch.equal(graph.results[0], torch.full((3,), 2.0))
    assert torch.equal(graph(x)[0], torch.full((3,), 14.0)), "and on again"


def test_a_static_input_may_be_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Doubling([torch.ones(3)], monkeypatch)
    assert torch.equal(graph(graph.static[0])[0], torch.full((3,), 2.0))


def test_only_a_dense_tensor_is_copied_by_its_memory() -> None:
    x = torch.randn(4, 6)
    assert graph_copies.can_copy(x) and graph_copies.can_copy(x.t())
    others = x[:, ::2], x[:, :3], x[:1].expand(4, 6), x[:0], x.to_sparse(), torch.randn(3, dtype=torch.complex64).conj()
    assert not any(map(graph_copies.can_copy, others))


class Returning(nn.Module):
    """It returns a computed tensor, a part of one, its input, a parameter and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        y = self.linear(x)
        return y, y[:, ::2], y.t(), x, self.linear.weight, y.relu()[:0], 3


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("system", ["nimble", "nimble_single_stream", "cuda_graph"])
def test_outputs_outlive_later_calls_on_inputs_that_lie_anywhere(system: str) -> None:
    torch.manual_seed(0)
    module = Returning().eval().cuda()
    example = torch.randn(4, 8, device="cuda")
    prepared = systems.load(system).prepare(module, (example,))
    inputs = [
        example,
        torch.randn(4, 8, device="cuda"),
        torch.randn(8, 4, device="cuda").t(),
        torch.randn(1, 8, device="cuda").expand(4, 8),
        torch.randn(4, 8, device="cuda", requires_grad=True),
        torch.randn(4 * 8 + 1, device="cuda")[1:].view(4, 8),
        *(torch.randn(4, 8, device="cuda") for _ in range(50)),
    ]
    answers = [prepared(x) for x in inputs]  # all launched before the first is looked at
    for _ in range(3):
        prepared.without_copies(example)()
    for x, answer in zip(inputs, answers, strict=True):
        with torch.no_grad():
            expected = module(x)
        assert answer[-1] == 3 and not any(output.requires_grad for output in answer[:-1])
        for output, wanted in zip(answer[:-1], expected[:-1], strict=True):
            torch.testing.assert_close(output, wanted.detach(), rtol=1e-4, atol=1e-4)
    prepared.close()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", ["managed", "asynchronous"])
def test_an_input_may_lie_in_memory_of_another_kind(kind: str) -> None:
    cupy = pytest.importorskip("cupy")
    allocate = {"managed": cupy.cuda.malloc_managed, "asynchronous": cupy.cuda.malloc_async}[kind]
    module = nn.Linear(64, 64).eval().cuda()
    with cupy.cuda.using_allocator(allocate):
        x = torch.as_tensor(cupy.random.rand(16, 64, dtype=cupy.float32), device="cuda")
    torch.cuda.synchronize()
    prepared = systems.load("nimble_single_stream").prepare(module, (torch.randn(16, 64, device="cuda"),))
    with torch.no_grad():
        torch.testing.assert_close(prepared(x), module(x), rtol=1e-4, atol=1e-4)
    prepared.close()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("system", ["nimble_single_stream", "cuda_graph"])
def test_a_timeline_has_no_copies_of_inputs_and_outputs(system: str) -> None:
    from systems.profiling.trace import KernelEvent, of_one_call

    x = torch.randn(16, 64, device="cuda")
    prepared = systems.load(system).prepare(nn.Linear(64, 64).eval().cuda(), (x,))
    events = of_one_call(prepared.without_copies(x))
    assert events and all(isinstance(event, KernelEvent) for event in events)
    prepared.close()
