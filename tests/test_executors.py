"""The executors on real models and on schedules that are wrong on purpose."""

import dataclasses
import multiprocessing
import random
import sys
import time
from collections.abc import Callable

import pytest
import torch
from modules import Lambda
from torch import Tensor, nn
from torchvision.models import squeezenet1_1

import systems
from systems.base import Unsupported
from systems.preparing import uncapturable
from systems.scheduling.execution.cpu_executor import CpuExecutor, MissingDependency
from systems.scheduling.execution.execute import execute
from systems.scheduling.graph.capture import capture
from systems.scheduling.plans.schedule import sequential
from systems.scheduling.plans.stream_assignment import assign_streams
from systems.scheduling.plans.verify import InvalidSchedule, verify

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


class Branches(nn.Module):
    """Two branches of unequal length, views, an operator with several outputs, an input used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        first, second = x.chunk(2, dim=1)
        left = torch.relu(self.a(first)).flatten(1)
        right = torch.tanh(self.b(torch.tanh(self.b(second)))) * scale
        values, indices = left.topk(3, dim=1)
        return {"sum": left + right.reshape(left.shape), "top": values, "which": indices, "view": left[:, ::2]}


def example(device: str = "cpu") -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Branches().eval().to(device), (torch.randn(4, 64, device=device), torch.randn((), device=device))


@pytest.fixture(scope="module")
def squeezenet() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return squeezenet1_1(weights=None).eval(), torch.randn(1, 3, 64, 64)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_fork_is_told_that_the_threads_stayed_behind() -> None:
    """It would wait for them for ever."""
    module, inputs = example()
    prepared = systems.load("nimble").prepare(module, inputs)
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)

    def call() -> None:
        try:
            prepared(*inputs)
        except RuntimeError as error:
            writer.send(str(error))

    child = context.Process(target=call, daemon=True)
    child.start()
    is_told = reader.poll(20)
    child.kill()
    child.join()
    assert is_told and "a fork left the threads of this executor behind" in reader.recv()
    prepared.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheduler", [assign_streams, sequential])
def test_agrees_with_the_module_on_new_inputs(scheduler, device: str) -> None:
    module, inputs = example(device)
    program = capture(module, inputs)
    prepared = execute(program, scheduler(program.graph))
    results = []
    for _ in range(3):
        inputs = tuple(torch.randn_like(x) for x in inputs)
        with torch.no_grad():
            expected = module(*inputs)
        results.append((prepared(*inputs), expected))
    for got, expected in results:  # compared after all calls: a result must outlive the next call
        assert got.keys() == expected.keys()
        for key in got:
            torch.testing.assert_close(got[key], expected[key])
    prepared.close()


def test_a_copy_that_nothing_needs_is_no_operator() -> None:
    copies: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
        "the same": (lambda x: torch.tanh(x.relu().clone()), 0),
        "of a dropout": (lambda x: torch.tanh(nn.functional.dropout(x.relu(), training=False)), 0),
        "another layout": (lambda x: x.relu().t().clone(memory_format=torch.contiguous_format).view(-1), 1),
        "of few values to many": (lambda x: x.relu()[:, :1].expand(4, 4).clone().view(-1), 1),
        "of an input": (lambda x: x.clone(), 1),
    }
    for name, (function, count) in copies.items():
        x = torch.randn(4, 4)
        program = capture(Lambda(function), (x,))
        assert sum("clone" in o.target for o in program.graph.operators) == count, name
        (got,) = program.run((x,))
        assert torch.equal(got, function(x)) and got.data_ptr() != x.data_ptr(), name


@pytest.mark.parametrize("device", DEVICES)
def test_a_matrix_product_comes_first(device: str) -> None:
    """Its workspace is memory that it asks for, and that the warm-up must not have left behind."""
    module, x = (
        nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).eval().to(device),
        torch.randn(512, 512, device=device),
    )
    program = capture(module, (x,))
    prepared = execute(program, assign_streams(program.graph))
    torch.testing.assert_close(prepared(x), module(x))
    prepared.close()


@pytest.mark.parametrize("device", DEVICES)
def test_new_weights_are_used_and_the_module_is_left_alone(device: str) -> None:
    module, inputs = example(device)
    state = {k: v.clone() for k, v in module.state_dict().items()}
    random_state = torch.get_rng_state()
    prepared = execute(program := capture(module, inputs), assign_streams(program.graph))
    assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    with torch.no_grad():
        module.a.weight.mul_(3)
        torch.testing.assert_close(prepared(*inputs)["sum"], module(*inputs)["sum"])
    prepared.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, s: (x[:2], s), r"input 0 is float32\[2, 64\]"),
        (lambda x, s: (x.double(), s), "input 0 is float64"),
        (lambda x, s: (x.to("meta"), s), "on meta"),
        (lambda x, s: (x,), "2 inputs, called with 1"),
        (lambda x, s: (x, 1.0), "input 1 is a float"),
    ],
)
def test_other_inputs_than_prepared_for_are_refused(change, message: str, device: str) -> None:
    module, inputs = example(device)
    prepared = execute(program := capture(module, inputs), assign_streams(program.graph))
    with pytest.raises(ValueError, match=message):
        prepared(*change(*inputs))
    prepared.close()


@pytest.mark.parametrize("device", DEVICES)
def test_an_input_that_wants_a_gradient_leaves_no_trace(device: str) -> None:
    module, (x, scale) = example(device)
    prepared = execute(program := capture(module, (x, scale)), assign_streams(program.graph))
    first = prepared(x.clone().requires_grad_(), scale)["sum"]
    assert not first.requires_grad
    assert torch.equal(prepared(x, scale)["sum"], first)
    prepared.close()


def test_bit_equal_under_random_delays(squeezenet: tuple[nn.Module, Tensor]) -> None:
    module, x = squeezenet
    program = capture(module, (x,))
    chance = random.Random(0)
    pauses = [0.0, 0.0, 0.0, 1e-4, 1e-3]
    executor = CpuExecutor(program, assign_streams(program.graph), delay=lambda _: time.sleep(chance.choice(pauses)))
    first = executor(x)
    with torch.no_grad():
        torch.testing.assert_close(first, module(x))
    assert all(torch.equal(executor(x), first) for _ in range(100))
    executor.close()


def test_each_missing_wait_is_refused_and_unverified_caught(squeezenet: tuple[nn.Module, Tensor]) -> None:
    module, x = squeezenet
    program = capture(module, (x,))
    schedule = assign_streams(program.graph)
    assert schedule.waits
    for wait in schedule.waits:
        without = dataclasses.replace(schedule, waits=tuple(w for w in schedule.waits if w != wait))
        with pytest.raises(InvalidSchedule):
            CpuExecutor(program, without)
        late = wait[0]
        executor = CpuExecutor(
            program, without, unverified=True, delay=lambda v, late=late: time.sleep(0.3) if v == late else None
        )
        with pytest.raises(MissingDependency, match=rf"operator {wait[1]} .* the output of {wait[0]} "):
            executor(x)
        executor.close()


def test_an_operators_error_reaches_the_caller_and_ends_the_call() -> None:
    class Strict(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.cholesky(x) + torch.relu(x)

    positive = torch.eye(3)
    program = capture(Strict(), (positive,))
    executor = CpuExecutor(program, assign_streams(program.graph))
    with pytest.raises(torch.linalg.LinAlgError):
        executor(-positive)
    torch.testing.assert_close(executor(positive), torch.linalg.cholesky(positive) + positive)
    executor.close()


class Choosing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))  # type: ignore[no-any-return]


class Sized(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0].sum()


HERE = r"\(.*test_executors\.py:\d+\)$"


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda self, x: x * (1 if x.sum() > 0 else 2), rf"torch.export cannot capture it: .*{HERE}"),
        (Choosing.forward, rf"chooses by its data .*{HERE}"),
        (Sized.forward, rf"a size or a number .* from its data.*{HERE}"),
        (lambda self, x: x.add_(1), "changes its input"),
    ],
)
def test_what_cannot_be_captured_says_why_in_one_line(forward, reason: str) -> None:
    module = type("Uncapturable", (nn.Module,), {"forward": forward})()
    with pytest.raises(Unsupported, match=reason) as caught:
        capture(module, (torch.randn(3),))
    assert "\n" not in str(caught.value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_arena_is_verified_and_far_below_keeping_everything() -> None:
    from torchvision.models import googlenet

    from systems.scheduling.execution.cuda_executor import CudaExecutor

    torch.manual_seed(0)
    module = googlenet(weights=None, aux_logits=False, init_weights=False).eval().cuda()
    x = torch.randn(1, 3, 224, 224, device="cuda")
    program = capture(module, (x,))
    executor = CudaExecutor(program, assign_streams(program.graph))
    verify(program.graph, executor.schedule, executor.plan.buffers)
    assert executor.memory["arena"] < executor.memory["keep_all"] / 2
    executor.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_switching_contexts_leaves_everything_as_it_was() -> None:
    from cuda.bindings import driver

    from systems.scheduling.execution.context_switch import switch_contexts

    x = torch.arange(1024.0, device="cuda")
    before = driver.cuCtxGetCurrent()[1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
    assert switch_contexts(x.device)
    assert int(driver.cuCtxGetCurrent()[1]) == int(before)
    graph.replay()
    assert torch.equal(y.cpu(), torch.arange(1024.0) * 2)


@torch.library.custom_op("opweave_tests::add_from_host", mutates_args=())
def add_from_host(x: Tensor) -> Tensor:
    """It copies from ordinary memory of the host, which no capture can hold."""
    return x + torch.ones(x.shape[-1]).to(x.device)


@add_from_host.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("system", ["nimble", "ios", "cuda_graph"])
def test_what_copies_from_the_host_is_unsupported_by_name(system: str) -> None:
    module = Lambda(lambda x: add_from_host(x.relu()))
    with pytest.raises(Unsupported, match="cannot be captured into a CUDA Graph"):
        systems.load(system).prepare(module.eval(), (torch.randn(2, 8, device="cuda"),))
    torch.testing.assert_close(torch.ones(3, device="cuda").relu().sum().item(), 3.0)  # the process goes on


def test_a_lack_of_memory_is_no_reason_against_a_capture() -> None:
    lacking = torch.cuda.OutOfMemoryError("CUDA out of memory")
    assert uncapturable(lacking) is lacking
    other = uncapturable(RuntimeError("cannot copy\nmore"), "operator 3")
    assert isinstance(other, Unsupported) and str(other) == "operator 3 cannot be captured into a CUDA Graph: cannot copy"
