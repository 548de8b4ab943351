"""Copies within a captured CUDA Graph: what a call reads and returns, wherever its tensors lie."""

import ctypes
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import systems
from systems.scheduling.execution import graph_copies
from systems.scheduling.execution.graph_copies import GraphCopies

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Runtime:
    """A mock of CUDA's: a graph whose nodes are copies, which a launch makes at once in the memory of the host.

    Args:
        refuses: addresses that a copy cannot be set to, as those of memory of another kind; None for all.
    """

    cudaError_t = graph_copies.cudart.cudaError_t
    OK = cudaError_t.cudaSuccess

    def __init__(self) -> None:
        self.nodes: list[list[int]] = []  # [target, source, bytes, is enabled]
        self.refuses: set[int] | None = set()

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
        if self.refuses is None or self.refuses & {target, source}:
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
        st.sampled_from(
            ["same", "elsewhere", "transposed", "expanded", "every other", "conjugate", "negative", "refused", "all refused"]
        ),
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
        answers = []
        for how in calls:
            inputs = examples if how == "same" else [_lies_otherwise(torch.randn_like(x), how) for x in examples]
            refused = {x.data_ptr() for x in inputs} if how == "refused" else set()
            graph.runtime.refuses = None if how == "all refused" else refused
            if any(x.is_conj() or x.is_neg() for x in inputs):
                with pytest.raises(ValueError, match="by a flag alone"):
                    graph(*inputs)
                continue
            *outputs, constant = graph(*inputs)
            assert constant is None
            for x, output in zip(inputs, outputs, strict=True):
                assert torch.equal(output, x + x) and output.dtype == x.dtype
            answers.append((outputs, [x + x for x in inputs]))
        for outputs, expected in answers:  # still, after later calls
            assert all(map(torch.equal, outputs, expected))


def test_only_inputs_of_the_graphs_form_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, x = Doubling([torch.ones(3), torch.ones(2)], monkeypatch), torch.ones(3)
    for _ in range(2):  # compared in Python, then by the form of the call before
        assert torch.equal(graph(x, torch.ones(2))[0], 2 * x)
        for wrong in ((x,), (x, torch.ones(3)), (x, torch.ones(2).double()), (x, torch.ones(2, device="meta")), (x, 1.0)):
            with pytest.raises(ValueError, match=r"prepare|not a tensor"):
                graph(*wrong)  # type: ignore[arg-type]
    x.resize_(2)
    with pytest.raises(ValueError, match="input 0 is float32"):
        graph(x, torch.ones(2))


def test_inputs_that_lie_otherwise_are_copied_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Doubling([torch.ones(2, 3)], monkeypatch)
    for _ in range(3):  # from the second on, their form is that of the call before
        x = torch.randn(3, 2).t()
        assert torch.equal(graph(x)[0], 2 * x)
    y = torch.randn(2, 3)
    assert torch.equal(graph(y)[0], 2 * y) and torch.equal(graph(x)[0], 2 * x)


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
    for x in (graph.static[0], torch.ones(3), graph.static[0]):  # before and after its form is known
        assert torch.equal(graph(x)[0], torch.full((3,), 2.0))


def test_a_row_of_a_longer_one_is_read_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Doubling([torch.ones(1, 3)], monkeypatch)
    row = torch.arange(5.0).view(1, 5)[:, 1:4]  # its strides are (5, 1), and the example's (3, 1)
    assert torch.equal(graph(row)[0], 2 * row)
    assert graph.runtime.nodes[0][1] == row.data_ptr()


class Wrapping(Tensor):
    """A tensor that lies in another one, and has no memory of its own."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapping":
        form = {"dtype": inner.dtype, "device": inner.device, "strides": inner.stride()}
        wrapping = Tensor._make_wrapper_subclass(cls, inner.shape, **form)
        wrapping.inner = inner
        return wrapping

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args_within, kwargs_within = tree_map_only(cls, attrgetter("inner"), (args, kwargs or {}))
        inner = function(*args_within, **kwargs_within)
        return args[0] if function is torch.ops.aten.copy_.default else cls(inner)


def test_what_has_no_memory_of_its_own_is_copied_by_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Doubling([torch.ones(3), Wrapping(torch.ones(3))], monkeypatch)
    assert len(graph.runtime.nodes) == 2, "the other input's, and its output's"
    answers = []
    for value in (2.0, 3.0):
        plain, wrapped, _ = graph(torch.full((3,), value), Wrapping(torch.full((3,), value)))
        answers.append((plain, wrapped.inner, torch.full((3,), 2 * value)))
    assert all(torch.equal(plain, x) and torch.equal(inner, x) for plain, inner, x in answers)


def test_a_lack_of_memory_leaves_the_next_call_right(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, empty_like = Doubling([torch.ones(3)], monkeypatch), torch.empty_like
    earlier, _ = graph(torch.ones(3))

    def lacking(*arguments: Any) -> Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "empty_like", lacking)
    with pytest.raises(torch.OutOfMemoryError):
        graph(torch.full((3,), 5.0))
    monkeypatch.setattr(torch, "empty_like", empty_like)
    assert torch.equal(graph(torch.full((3,), 3.0))[0], torch.full((3,), 6.0))
    assert torch.equal(earlier, torch.full((3,), 2.0))


def test_only_a_dense_tensor_of_the_graphs_device_is_copied_by_its_memory() -> None:
    x = torch.randn(4, 6)
    assert all(graph_copies.can_copy(dense, CPU) for dense in (x, x.t(), nn.Parameter(x), x[:1, :3]))
    strided = x[:, ::2], x[:, :3], x[:1].expand(4, 6), x[:0], torch.randn(3, dtype=torch.complex64).conj()
    assert not any(graph_copies.can_copy(other, CPU) for other in (*strided, x.to_sparse(), x.to("meta"), Wrapping(x)))


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
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("system", ["nimble", "cuda_graph"])
def test_a_graph_need_not_be_of_the_current_device(system: str) -> None:
    module = nn.Linear(64, 64).eval().to("cuda:1")
    prepared = systems.load(system).prepare(module, (torch.randn(16, 64, device="cuda:1"),))
    inputs = [torch.randn(16, 64, device="cuda:1") for _ in range(3)]
    answers = [prepared(x) for x in inputs]
    assert torch.cuda.current_device() == 0
    for x, answer in zip(inputs, answers, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(answer, module(x), rtol=1e-4, atol=1e-4)
    prepared.close()


class Beside(nn.Module):
    """It returns a tensor on the host beside what it computes."""

    on_host = torch.arange(3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x, self.on_host


@pytest.mark.gpu
@needs_gpu
def test_an_output_may_lie_on_the_host() -> None:
    prepared = systems.load("cuda_graph").prepare(Beside().eval(), (torch.ones(8, device="cuda"),))
    for value in (2.0, 3.0):
        x = torch.full((8,), value, device="cuda")
        doubled, on_host = prepared(x)
        assert torch.equal(doubled, 2 * x) and torch.equal(on_host, Beside.on_host)
    prepared.close()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("system", ["nimble_single_stream", "cuda_graph"])
def test_calls_may_take_memory_of_another_kind_than_the_capture(system: str) -> None:
    """Inputs and outputs in expandable segments, which are virtual memory, and the graph's own tensors outside of them."""
    prepared = systems.load(system).prepare(nn.Threshold(0.5, 2.0).eval(), (torch.zeros(4096, 4096, device="cuda"),))
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        for _ in range(3):
            x = torch.rand(4096, 4096, device="cuda")
            assert torch.equal(prepared(x), torch.where(x > 0.5, x, 2.0))
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    prepared.close()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("system", ["nimble", "cuda_graph"])
def test_memory_that_is_dropped_at_once_is_read_and_written_before_it_is_given_out_again(system: str) -> None:
    module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3))).eval().cuda()
    prepared = systems.load(system).prepare(module, (torch.zeros(64, 512, device="cuda"),))
    side = torch.cuda.Stream()
    for stream in (torch.cuda.current_stream(), side):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream), torch.no_grad():
            seeds = [torch.randn(64, 512, device="cuda") for _ in range(20)]
            answers = []
            for seed in seeds:
                torch.cuda._sleep(1_000_000)
                prepared(seed + 1)  # neither the input nor the output is held
                answers.append(prepared(seed * 2))
                torch.full((64, 512), float("nan"), device="cuda")
            for seed, answer in zip(seeds, answers, strict=True):
                torch.testing.assert_close(answer, module(seed * 2), rtol=1e-3, atol=1e-3)
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
