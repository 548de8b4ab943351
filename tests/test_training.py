"""Scheduled training against eager's: losses, weights, statistics, the optimizer's state, random numbers, and the proof."""

import copy
import dataclasses
import random
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import networkx as nx
import pytest
import torch
from dags import as_networkx, dags
from hypothesis import given
from hypothesis import strategies as st
from test_verify import ordering
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_leaves

import models
import systems
from runners.training import loss
from systems.base import Unsupported
from systems.nimble import Nimble
from systems.nimble.stream_assignment import assign_streams, single_stream
from systems.nimble.training import prepare_training
from systems.scheduling import cpu_executor
from systems.scheduling.cpu_executor import CpuExecutor, MissingDependency
from systems.scheduling.joint_graph import capture_step
from systems.scheduling.operator_graph import Operator, OperatorGraph, State
from systems.scheduling.program import Call, Input, Output
from systems.scheduling.schedule import Schedule, sequential
from systems.scheduling.stateful_program import StatefulProgram
from systems.scheduling.verify import InvalidSchedule, verify

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
SMALL_BERT = {"sequence": 16, "layers": 2, "hidden": 64, "heads": 2}
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    """Branches, batch norm, dropout, in-place operators, tied weights, a buffer assigned anew, a parameter without use, one
    that is still to be read when its gradient is there (`gate`).
    """

    def __init__(self, counts: bool = True) -> None:
        super().__init__()
        self.counts = counts
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        # Without biases, whose gradient before a batch norm is nothing but rounding, which AdamW makes steps of.
        self.left, self.right = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 1, bias=False)
        self.shared = nn.BatchNorm2d(8)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight
        self.unused, self.gate = nn.Parameter(torch.ones(3)), nn.Parameter(torch.rand(4, 8))
        self.drop, self.act = nn.Dropout(0.3), nn.ReLU(inplace=True)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls = self.calls + 1
        x = self.act(self.norm(self.stem(x)))
        x = self.shared(self.left(x)) + self.shared(self.drop(self.right(x)))
        x = self.drop(x.mean((2, 3))) * self.gate
        return self.b(self.act(self.a(x)))


def sgd(module: nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), **{"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3} | more)


def adamw(module: nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), **{"lr": 1e-3} | more)


def groups(module: nn.Module) -> torch.optim.Optimizer:
    """Two groups with rates and decays of their own, Nesterov's momentum."""
    matrices = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    settings = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.2}]
    return torch.optim.SGD(settings, lr=0.02, momentum=0.8, nesterov=True)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """More threads sum in another order, and training makes much of a little."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(cpu_executor.os, "cpu_count", lambda: 1)
    yield
    torch.set_num_threads(before)


def batch(seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, target = torch.randn(4, 3, 8, 8, generator=generator), torch.randint(8, (4,), generator=generator)
    return x.to(device), target.to(device)


def net(device: str = "cpu", counts: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return Net(counts).to(device)


def eager_step(module: nn.Module, optimizer: torch.optim.Optimizer, *data: Tensor) -> Tensor:
    optimizer.zero_grad()
    value = loss(module(*data[:-1]), data[-1])
    value.backward()
    optimizer.step()
    return value.detach()


def equal(a: Any, b: Any) -> bool:
    """Two state_dicts, bit by bit."""
    pairs = zip(tree_leaves(a), tree_leaves(b), strict=True)
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)


@pytest.mark.parametrize(
    ("model", "options", "steps", "make"),
    [
        ("resnet50_cifar10", {}, 2, sgd),
        ("mobilenet_v2_cifar10", {}, 4, sgd),
        ("efficientnet_b0_cifar10", {}, 4, adamw),
        ("bert", SMALL_BERT, 100, adamw),
        ("bert", SMALL_BERT, 100, sgd),
        *(pytest.param(m, {}, 100, sgd, marks=pytest.mark.slow) for m in ("resnet50_cifar10", "mobilenet_v2_cifar10")),
        pytest.param("efficientnet_b0_cifar10", {}, 100, adamw, marks=pytest.mark.slow),
        pytest.param("bert", {"sequence": 64}, 100, adamw, marks=pytest.mark.slow),
    ],
)
def test_losses_and_weights_are_eagers_to_the_bit(model: str, options: dict, steps: int, make: Optimizers) -> None:
    loaded = models.load(model, 2, training=True, **options)
    module, reference = loaded.module, copy.deepcopy(loaded.module)
    optimizer, eager = make(module), make(reference)
    classes, shape = (64, (2, options.get("sequence", 1))) if model == "bert" else (10, (2,))
    data = [(*loaded.fresh_inputs(i), torch.randint(classes, shape)) for i in range(steps)]
    step = prepare_training(module, optimizer, loss, loaded.inputs, data[0][-1])
    torch.manual_seed(1)
    expected = [eager_step(reference, eager, *d).item() for d in data]
    torch.manual_seed(1)
    got = [step(*d).item() for d in data]
    step.close()
    assert got == expected and len(set(got)) == steps
    assert equal(module.state_dict(), reference.state_dict())
    assert equal(optimizer.state_dict(), eager.state_dict())


@pytest.mark.parametrize("scheduler", [assign_streams, single_stream])
@pytest.mark.parametrize("make", [sgd, adamw, groups, lambda m: sgd(m, momentum=0.0), lambda m: adamw(m, amsgrad=True)])
def test_scheduled_and_eager_steps_take_turns(make: Optimizers, scheduler: Callable[[OperatorGraph], Schedule]) -> None:
    """Learning rates change, eager steps and loaded checkpoints come in between, and all is as if eager alone trained."""
    module, reference = net(), net()
    optimizer, eager = make(module), make(reference)
    step = prepare_training(module, optimizer, loss, *batch(0), assign=scheduler)
    state = torch.get_rng_state()
    for i in range(60):
        if i in (20, 40):
            for group in (*optimizer.param_groups, *eager.param_groups):
                group["lr"] *= 0.3
        if i == 30:  # load_state_dict puts new tensors into the optimizer
            checkpoint, of_optimizer = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
            step(*batch(99))
            module.load_state_dict(checkpoint)
            optimizer.load_state_dict(of_optimizer)
        torch.set_rng_state(state)
        got = eager_step(module, optimizer, *batch(i)) if i in (7, 8, 31) else step(*batch(i))
        torch.set_rng_state(state)
        assert torch.equal(got, eager_step(reference, eager, *batch(i)))
        state = torch.get_rng_state()
    step.close()
    assert equal(module.state_dict(), reference.state_dict()) and module.calls == 60
    assert equal(optimizer.state_dict(), eager.state_dict())


@pytest.mark.parametrize("device", DEVICES)
def test_preparing_changes_nothing(device: str) -> None:
    module = net(device)
    optimizer = sgd(module)
    eager_step(module, optimizer, *batch(0, device))
    before = copy.deepcopy((module.state_dict(), optimizer.state_dict(), [p.grad for p in module.parameters()]))
    addresses = [t.data_ptr() for t in module.state_dict().values()]
    generator = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    step = prepare_training(module, optimizer, loss, *batch(0, device))
    assert equal((module.state_dict(), optimizer.state_dict(), [p.grad for p in module.parameters()]), before)
    assert torch.equal(generator, torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state())
    momentum = optimizer.state[module.stem.weight]["momentum_buffer"]
    step(*batch(1, device))
    assert [t.data_ptr() for t in module.state_dict().values()] == addresses
    assert optimizer.state[module.stem.weight]["momentum_buffer"] is momentum
    step.close()


def test_a_run_that_fails_changes_nothing_either() -> None:
    module = net()
    program, static = capture_step(module, sgd(module), loss, batch(0)[:1], batch(0)[1])
    static.refresh()
    before, drawn = copy.deepcopy(module.state_dict()), torch.get_rng_state()

    def fail(operator: int, _: Any) -> None:
        if operator == len(program.graph) - 1:
            raise RuntimeError("at the end")

    with pytest.raises(RuntimeError, match="at the end"), program.undone():
        program.run(batch(0), fail)
    assert equal(module.state_dict(), before) and torch.equal(torch.get_rng_state(), drawn)
    with pytest.raises(RuntimeError, match="at the end"):
        program.run(batch(0), fail)
    assert not equal(module.state_dict(), before)  # it does change something


def test_random_delays_give_the_same_weights() -> None:
    chance = random.Random(0)
    pauses = [0.0, 0.0, 0.0, 1e-4, 1e-3]
    ends = []
    for delay in (None, *[lambda _: time.sleep(chance.choice(pauses))] * 4):
        module = net()
        program, static = capture_step(module, sgd(module), loss, batch(0)[:1], batch(0)[1])
        executor = CpuExecutor(program, assign_streams(program.graph), delay=delay)
        torch.manual_seed(3)
        for i in range(10):
            static.refresh()
            executor(*batch(i))
        executor.close()
        ends.append(copy.deepcopy(module.state_dict()))
    assert all(equal(end, ends[0]) for end in ends)


def joint(make: Optimizers = sgd) -> StatefulProgram:
    module = net()
    return capture_step(module, make(module), loss, batch(0)[:1], batch(0)[1])[0]


@pytest.mark.parametrize("make", [sgd, adamw, groups])
def test_operators_touch_what_the_graph_declares_and_nothing_else(make: Optimizers) -> None:
    """Every operator alone, and the memory of all others and the random state compared before and after it."""
    module = net()
    optimizer = make(module)
    program, static = capture_step(module, optimizer, loss, batch(0)[:1], batch(0)[1])
    static.refresh()
    graph, values = program.graph, [None] * len(program.graph)
    names = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
    lasting = {name: t for t in program.changed if (name := names.get(id(t)))}
    for p, moments in static.moments.items():
        lasting |= {f"{moment} of {names[id(p)]}": t for moment, t in moments.items()}
    unchanging = {names[id(t)]: t for t in (*module.parameters(), *module.buffers()) if names[id(t)] not in lasting}
    assert set(unchanging) == {"unused"}
    for v in range(len(graph)):
        kept = {name: t.detach().clone() for name, t in (lasting | unchanging).items()}
        outputs = {u: [t.clone() for t in tree_leaves(values[u]) if isinstance(t, Tensor)] for u in range(v)}
        state = torch.get_rng_state()
        with torch.no_grad():
            values[v] = program.execute(v, values, batch(0))  # type: ignore[call-overload]
        written = {piece.name for piece in graph.state if piece.writers >> v & 1}
        for name, t in (lasting | unchanging).items():
            assert torch.equal(t, kept[name]) or name in written, f"{graph.label(v)} writes {name}"
        for u, before in outputs.items():
            after = [t for t in tree_leaves(values[u]) if isinstance(t, Tensor)]
            if not all(torch.equal(a, b) or a.isnan().any() for a, b in zip(after, before, strict=True)):
                pieces = [piece for piece in graph.state if piece.writers >> v & 1]
                assert any((piece.readers | piece.writers) >> u & 1 for piece in pieces) or written & set(lasting)
        assert torch.equal(state, torch.get_rng_state()) or "the random generator" in written


def test_every_reader_of_a_parameter_is_declared() -> None:
    program = joint()
    state = {piece.name: piece for piece in program.graph.state}
    weight = next(t for t in program.changed if t.shape == (8, 8, 3, 3))
    for v, call in enumerate(program.calls):
        if any(isinstance(a, Tensor) and a.data_ptr() == weight.data_ptr() for a in call.leaves()):
            assert (state["left.weight"].readers | state["left.weight"].writers) >> v & 1
    assert state["left.weight"].readers.bit_count() == 3  # forward, and the gradients of input and weight
    assert state["left.weight"].writers.bit_count() == 1
    assert state["shared.running_mean"].writers.bit_count() == 2  # it is used twice
    assert state["the random generator"].writers.bit_count() == 2


def test_each_missing_wait_is_refused_by_name_and_unverified_caught() -> None:
    program = joint()
    schedule = assign_streams(program.graph)
    assert len(schedule.waits) > 20
    for u, v in schedule.waits:
        without = dataclasses.replace(schedule, waits=tuple(w for w in schedule.waits if w != (u, v)))
        with pytest.raises(InvalidSchedule, match=r"operator \d+ \(.*\).* \d+ \(.*\)"):
            verify(program.graph, without)
    writers = sum(piece.writers for piece in program.graph.state)
    ordered = [w for w in schedule.waits if w[0] not in program.graph.producers[w[1]]]
    assert ordered and writers
    for u, v in ordered:  # waits that carry no data: nothing but the state asks for them
        without = dataclasses.replace(schedule, waits=tuple(w for w in schedule.waits if w != (u, v)))
        executor = CpuExecutor(
            program,
            without,
            unverified=True,
            delay=lambda w, u=u: time.sleep(0.3) if w == u else None,  # type: ignore[misc]
        )
        with pytest.raises(MissingDependency, match=rf"operator {v} .* before {u} .*, which touches the same state"):
            executor(*batch(0))
        executor.close()


def test_each_missing_edge_of_the_state_is_refused_by_name() -> None:
    """The graph itself lacks the dependency, so that every scheduler goes wrong; the declared state shows it."""
    graph = joint().graph
    edges = [(u, v) for v, before in enumerate(graph.predecessors) for u in before if u not in graph.producers[v]]
    assert edges
    for u, v in edges:
        before = [[w for w in p if (w, x) != (u, v)] for x, p in enumerate(graph.predecessors)]
        without = OperatorGraph(graph.operators, before, graph.producers, graph.state)
        with pytest.raises(
            InvalidSchedule, match=rf"operator {v} \(.*\) writes .* after {u} \(.*\), which (reads|writes) it"
        ):
            verify(without, assign_streams(without))
        verify(without, sequential(without))  # one stream has the order of capture by itself


def test_an_output_is_not_kept_for_those_that_only_come_after_it() -> None:
    state, alive = torch.ones(4), []

    def read(x: Tensor) -> Tensor:
        alive.append(weakref.ref(out := x + state))
        return out

    def write(x: Tensor) -> None:
        alive.append(alive[0]() is not None)
        state.copy_(x)

    functions = (read, torch.neg, torch.sin, write)
    arguments = (Input(0),), (Output(0),), (Input(0),), (Output(2),)
    calls = [Call(f, a, {}) for f, a in zip(functions, arguments, strict=True)]
    operators = [Operator(i, f.__name__, f.__name__) for i, f in enumerate(functions)]
    producers = [[o.operator for o in call.references()] for call in calls]
    graph = OperatorGraph.with_state(operators, producers, [State("state", 0b0001, 0b1000)])
    assert graph.edges == ((0, 1), (2, 3), (0, 3)) and graph.consumers[0] == (1,)
    x = torch.randn(4)
    program = StatefulProgram(graph, calls, [Output(1)], tree_flatten(0)[1], (x,), [state], False)
    executor = CpuExecutor(program, sequential(graph))
    assert torch.equal(executor(x), -(x + 1)) and torch.equal(state, x.sin())
    assert alive[1] is False


@st.composite
def stateful(draw: st.DrawFn) -> tuple[OperatorGraph, list[State]]:
    graph = draw(dags(max_nodes=15))
    masks = st.integers(0, (1 << len(graph)) - 1)
    pieces = draw(st.lists(st.tuples(masks, masks), max_size=3))
    return graph, [State(f"piece {i}", r & ~w, w) for i, (r, w) in enumerate(pieces)]


def conflicts(state: list[State]) -> set[tuple[int, int]]:
    """Pairs of which the second has to come after the first, straight from the definition."""
    out = set()
    for piece in state:
        for v in range(15):
            for u in range(v):
                touch = all((piece.readers | piece.writers) >> w & 1 for w in (u, v))
                if touch and any(piece.writers >> w & 1 for w in (u, v)):
                    out.add((u, v))
    return out


@given(stateful())
def test_state_orders_all_conflicts_with_no_edge_too_many(case: tuple[OperatorGraph, list[State]]) -> None:
    graph, state = case
    ordered = OperatorGraph.with_state(graph.operators, graph.predecessors, state)
    closure = nx.transitive_closure_dag(as_networkx(ordered))
    needed = nx.transitive_closure_dag(nx.DiGraph([*graph.edges, *conflicts(state)]))
    assert set(closure.edges) == set(needed.edges)
    assert ordered.producers == graph.predecessors and set(graph.edges) <= set(ordered.edges)
    for edge in set(ordered.edges) - set(graph.edges):
        rest = nx.DiGraph([e for e in ordered.edges if e != edge])
        assert not (edge[0] in rest and edge[1] in rest and nx.has_path(rest, *edge))
    for scheduler in (assign_streams, sequential):
        verify(ordered, scheduler(ordered))


@given(stateful())
def test_verification_accepts_exactly_what_orders_all_conflicts(case: tuple[OperatorGraph, list[State]]) -> None:
    graph, state = case
    declared = OperatorGraph(graph.operators, graph.predecessors, state=state)  # without the edges that state asks for
    schedule = assign_streams(declared)
    order = ordering(schedule)
    if all(order.has_edge(u, v) for u, v in conflicts(state)):
        verify(declared, schedule)
    else:
        with pytest.raises(InvalidSchedule, match=r"(reads|writes) piece \d after \d+ "):
            verify(declared, schedule)


def test_the_update_of_early_layers_alone_waits_for_the_end_of_backward() -> None:
    """Updates are operators of their own, beside the rest of backward, and so is each convolution's gradient of weights."""
    module = models.load("mobilenet_v2_cifar10", 2, training=True).module
    x, target = torch.randn(2, 3, 32, 32), torch.tensor([0, 1])
    graph = capture_step(module, sgd(module), loss, (x,), target)[0].graph
    updates = [v for v, o in enumerate(graph.operators) if o.name == "SGD"]
    backward = [v for v, o in enumerate(graph.operators) if o.name == "convolution_backward"]
    assert 5 <= len(updates) <= 9 and len(backward) == 2 * 52 - 1  # the image has no gradient
    behind = [sum(not graph.ancestors[v] >> b & 1 for b in backward) for v in updates]
    assert behind[0] > len(backward) / 2 and behind[-1] < len(backward) / 4


def wrong(change: Callable[[Any], None], make: Optimizers = sgd) -> Callable[[], Any]:
    """A step after which something was changed behind its back."""

    def call() -> Any:
        module = net()
        optimizer = make(module)
        step = prepare_training(module, optimizer, loss, *batch(0))
        try:
            change((module, optimizer, step))
            return step(*batch(0))
        finally:
            step.close()

    return call


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (wrong(lambda c: c[2](batch(0)[0][:2], batch(0)[1])), ValueError, r"input 0 is float32\[2, 3, 8, 8\]"),
        (wrong(lambda c: c[2](batch(0)[0].double(), batch(0)[1])), ValueError, "input 0 is float64"),
        (wrong(lambda c: c[2](batch(0)[0], batch(0)[1].float())), ValueError, r"input 1 is float32\[4\]"),
        (wrong(lambda c: c[2](batch(0)[0])), ValueError, "prepared for 2 inputs, called with 1"),
        (wrong(lambda c: c[0].norm.eval()), RuntimeError, "BatchNorm2d was in training form"),
        (wrong(lambda c: c[0].double()), RuntimeError, "has been replaced"),
        (
            wrong(lambda c: setattr(c[0].stem.weight, "data", torch.zeros(8, 3, 3, 3))),
            RuntimeError,
            "a parameter or buffer of the module has moved",
        ),
        (wrong(lambda c: setattr(c[0], "a", nn.Linear(8, 8))), RuntimeError, "has been replaced"),
        (wrong(lambda c: setattr(c[0], "calls", torch.zeros(2))), RuntimeError, "calls of the module has been replaced"),
        (
            wrong(lambda c: c[1].param_groups[0].update(momentum=0.5)),
            ValueError,
            "momentum of parameter group 0 has changed",
        ),
        (wrong(lambda c: c[1].param_groups[0].update(betas=(0.5, 0.9)), adamw), ValueError, "betas of parameter group 0"),
        (
            wrong(lambda c: c[1].add_param_group({"params": [torch.ones(1)]})),
            ValueError,
            "1 parameter groups, now there are 2",
        ),
    ],
)
def test_what_was_changed_since_is_told(call: Callable[[], Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("module", "make", "criterion", "reason"),
    [
        (
            net,
            lambda m: torch.optim.RMSprop(m.parameters()),
            loss,
            "RMSprop steps cannot be scheduled: SGD's and AdamW's can",
        ),
        (net, lambda m: torch.optim.Adam(m.parameters()), loss, "Adam steps cannot be scheduled"),
        (net, lambda m: sgd(m, dampening=0.5), loss, "first step differs"),
        (net, lambda m: sgd(m, differentiable=True), loss, "differentiable"),
        (net, lambda m: torch.optim.SGD([torch.ones(2, requires_grad=True)]), loss, "not the module's"),
        (net, lambda m: torch.optim.SGD([m.unused]), loss, "depends on no parameter"),
        (net, sgd, functional.mse_loss, "cannot be traced"),
        (
            net,
            sgd,
            lambda y, t: functional.cross_entropy(y, t, reduction="none"),
            r"shape \[4\], and must be a single number",
        ),
    ],
)
def test_what_cannot_be_scheduled_says_why_in_one_line(module: Any, make: Any, criterion: Any, reason: str) -> None:
    made = module()
    with pytest.raises(Unsupported, match=reason) as caught:
        prepare_training(made, make(made), criterion, *batch(0))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda self, x: self.linear(x if x.sum() > 0 else -x), "cannot be traced"),
        (lambda self, x: self.linear(x.mul_(2)), "changes input 0 in place"),
    ],
)
def test_a_forward_that_cannot_be_scheduled_says_why(forward: Any, reason: str) -> None:
    module = type("Model", (nn.Module,), {"forward": forward})()
    module.linear = nn.Linear(4, 4)
    with pytest.raises(Unsupported, match=reason):
        prepare_training(module, sgd(module), loss, torch.randn(2, 4), torch.tensor([0, 1]))


def test_a_hook_on_a_gradient_or_a_step_is_not_passed_over() -> None:
    module = net()
    with pytest.raises(Unsupported, match="hook on its gradient"):
        module.stem.weight.register_hook(lambda g: g * 2)
        prepare_training(module, sgd(module), loss, *batch(0))
    module = net()
    optimizer = sgd(module)
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(Unsupported, match="step hooks"):
        prepare_training(module, optimizer, loss, *batch(0))


def test_dampening_goes_on_from_an_eager_step() -> None:
    module, reference = net(), net()
    optimizer, eager = sgd(module, dampening=0.5), sgd(reference, dampening=0.5)
    for m, o in ((module, optimizer), (reference, eager)):
        torch.manual_seed(0)
        eager_step(m, o, *batch(0))
    step = prepare_training(module, optimizer, loss, *batch(0))
    torch.manual_seed(1)
    step(*batch(1))
    torch.manual_seed(1)
    eager_step(reference, eager, *batch(1))
    assert equal(module.state_dict(), reference.state_dict())
    optimizer.state.clear()
    with pytest.raises(ValueError, match="first step differs"):
        step(*batch(1))
    step.close()


def test_frozen_layers_eval_form_and_a_learning_rate_schedule() -> None:
    def train(scheduled: bool) -> tuple[dict, list[float]]:
        module = net()
        module.norm.eval()
        module.stem.weight.requires_grad_(False)
        optimizer = adamw(module)
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        step = prepare_training(module, optimizer, loss, *batch(0)) if scheduled else None
        losses = []
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the schedule warns of a step that it has not seen
            for i in range(20):
                value = step(*batch(i)) if step else eager_step(module, optimizer, *batch(i))
                rates.step()
                losses.append(value.item())
        if step:
            step.close()
        return module.state_dict(), losses

    assert equal(train(True), train(False))


def test_as_a_library() -> None:
    module, reference = net(), net()
    optimizer, eager = sgd(module), sgd(reference)
    x, target = batch(0)
    step = Nimble(module).prepare(x, training=True, optimizer=optimizer, loss=loss, example_target=target)
    torch.manual_seed(0)
    got = step(x, target)
    torch.manual_seed(0)
    assert torch.equal(got, eager_step(reference, eager, x, target)) and not got.requires_grad
    assert equal(module.state_dict(), reference.state_dict())
    step.close()


@pytest.mark.parametrize(
    ("system", "options", "device"),
    [
        *(
            (s, o, "cpu")
            for s, o in (("eager", {}), ("torchscript", {}), ("nimble", {}), ("nimble", {"multi_stream": False}))
        ),
        pytest.param("torch_compile", {"mode": "default"}, "cpu", marks=pytest.mark.slow),
        *(pytest.param(s, {}, "cuda", marks=GPU) for s in ("torchscript", "torch_compile", "cuda_graph", "nimble")),
    ],
)
@pytest.mark.parametrize("make", [sgd, adamw])
def test_every_system_trains_as_eager_does(system: str, options: dict, device: str, make: Optimizers) -> None:
    module, reference = (net(device, counts=False) for _ in range(2))  # a traced forward assigns no buffer
    for m in (module, reference):
        m.drop.p = 0.0
    optimizer, eager = make(module), make(reference)
    before = copy.deepcopy(module.state_dict())
    step = systems.load(system, **options).prepare_training(
        module, optimizer, loss, batch(0, device)[:1], batch(0, device)[1]
    )
    assert equal(before, module.state_dict()) and not optimizer.state
    for i in range(5):
        got = step(*batch(i, device)).item()
        assert got == pytest.approx(eager_step(reference, eager, *batch(i, device)).item(), rel=1e-3)
    for a, b in zip(module.state_dict().values(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
    step.close()


def test_systems_that_do_not_train_say_so() -> None:
    module = net()
    with pytest.raises(Unsupported, match="opara runs inference only"):
        systems.load("opara").prepare_training(module, sgd(module), loss, batch(0)[:1], batch(0)[1])
    with pytest.raises(Unsupported, match="rewriting passes are for inference"):
        fused = systems.load("nimble", fold_batch_norm=True)
        fused.prepare_training(module, sgd(module), loss, batch(0)[:1], batch(0)[1])


class TestOnGpu:
    pytestmark = GPU

    def test_dropout_draws_eagers_numbers_and_other_ones_each_step(self) -> None:
        module = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.2)).cuda()
        reference = copy.deepcopy(module)
        optimizer, eager = sgd(module, lr=0.0), sgd(reference, lr=0.0)
        x, target = torch.randn(32, 64, device="cuda"), torch.randint(64, (32,), device="cuda")
        step = prepare_training(module, optimizer, loss, x, target)
        torch.cuda.manual_seed(5)
        expected = [eager_step(reference, eager, x, target).item() for _ in range(5)]
        state = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(5)
        got = [step(x, target).item() for _ in range(5)]
        assert len(set(got)) == 5 and got == pytest.approx(expected, rel=1e-6)
        assert torch.equal(torch.cuda.get_rng_state(), state)
        step.close()

    @pytest.mark.parametrize("model", ["resnet50_cifar10", "mobilenet_v2_cifar10", "efficientnet_b0_cifar10", "bert"])
    def test_the_loss_curve_is_eagers(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """With algorithms that sum in one order: a loss curve magnifies what another order rounds differently."""
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
        loaded = models.load(model, 32, training=True, device="cuda")
        module, reference = loaded.module, copy.deepcopy(loaded.module)
        optimizer, eager = sgd(module, lr=0.01), sgd(reference, lr=0.01)
        target = torch.randint(10, (32, 128) if model == "bert" else (32,), device="cuda")
        step = prepare_training(module, optimizer, loss, loaded.inputs, target)
        torch.cuda.manual_seed(1)
        expected = [eager_step(reference, eager, *loaded.fresh_inputs(i), target).item() for i in range(100)]
        torch.cuda.manual_seed(1)
        got = [step(*loaded.fresh_inputs(i), target).item() for i in range(100)]
        step.close()
        assert got[:10] == pytest.approx(expected[:10], rel=1e-3)
        assert sum(got[-20:]) == pytest.approx(sum(expected[-20:]), rel=0.05)
