"""The rewriting passes: each pattern, and what must not match; whole models; every assignment of layouts."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from dags import dags
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_structure

import models
from runners.correctness import relative_error
from systems.nimble.stream_assignment import assign_streams
from systems.scheduling.capture import capture
from systems.scheduling.execute import execute
from systems.scheduling.operator_graph import OperatorGraph
from systems.scheduling.part import part
from systems.scheduling.passes.fold_batch_norm import fold_batch_norm
from systems.scheduling.passes.fuse_convolution import fuse_convolution
from systems.scheduling.passes.fuse_elementwise import FusedElementwise, fuse_elementwise
from systems.scheduling.passes.layouts import cheapest_layouts
from systems.scheduling.passes.select_kernels import select_kernels
from systems.scheduling.program import Call, Input, Output, Program
from systems.scheduling.rewrite import Replacement, replace
from systems.scheduling.schedule import sequential

aten = torch.ops.aten
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


class Function(nn.Module):
    """A forward over parts that are modules."""

    def __init__(self, forward: Callable[..., object], **parts: nn.Module):
        super().__init__()
        self.act = forward
        self.parts = nn.ModuleDict(parts)

    def forward(self, *inputs: Tensor) -> object:
        return self.act(self.parts, *inputs)


def batch_norm(channels: int, **options: bool) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, **options)
    norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
    norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    if norm.affine:
        nn.init.uniform_(norm.weight, 0.5, 2)
        nn.init.uniform_(norm.bias, -1, 1)
    return norm


def image(device: str = "cpu") -> Tensor:
    return torch.randn(2, 4, 10, 10, device=device)


def names(program: Program) -> list[str]:
    return [o.name for o in program.graph.operators]


def agrees(module: nn.Module, program: Program, *shape: Tensor, tolerance: float = 1e-5) -> None:
    """The program, sequential and on the executor with Nimble's streams, against the module, on inputs of its own."""
    tolerance = 1e-2 if shape[0].is_cuda else tolerance  # TF32
    inputs = tuple(torch.randn_like(x) for x in shape)
    with torch.no_grad():
        expected = tree_leaves(module(*inputs))
    prepared = execute(program, assign_streams(program.graph))
    for outputs in (program.run(inputs), tree_leaves(prepared(*inputs))):
        assert len(outputs) == len(expected)
        for got, reference in zip(outputs, expected, strict=True):
            assert got.shape == reference.shape and got.stride() == reference.stride()
            assert relative_error(got, reference) < tolerance
    prepared.close()


# Folding


def norm_after(convolution: nn.Module, **options: bool) -> Function:
    channels = convolution.out_channels
    return Function(lambda p, x: p["norm"](p["conv"](x)), conv=convolution, norm=batch_norm(channels, **options)).eval()  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"affine": False}])
@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv2d(4, 6, 3),
        nn.Conv2d(4, 6, (1, 7), padding=(0, 3), bias=False),
        nn.Conv2d(4, 8, 3, groups=4, stride=2),
        nn.Conv2d(4, 6, 3, dilation=2, bias=False).to(memory_format=torch.channels_last),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_norm_goes_into_the_convolution_before_it(convolution: nn.Conv2d, options: dict, device: str) -> None:
    module = norm_after(convolution, **options).to(device)
    program = fold_batch_norm(capture(module, (image(device),)))
    assert names(program) == ["conv2d"]
    agrees(module, program, image(device))


def joined(*outputs: int) -> Function:
    parts = {f"conv{i}": nn.Conv2d(4, n, 3, bias=i == 0) for i, n in enumerate(outputs)}

    def forward(p: nn.ModuleDict, x: Tensor) -> Tensor:
        return p["norm"](torch.cat([p[f"conv{i}"](x) for i in range(len(outputs))], dim=1)).relu()

    return Function(forward, **parts, norm=batch_norm(sum(outputs))).eval()


def test_a_batch_norm_goes_through_a_concatenation() -> None:
    module = joined(3, 5, 1)
    program = fold_batch_norm(capture(module, (image(),)))
    assert names(program) == ["conv2d", "conv2d", "conv2d", "cat", "relu"]
    agrees(module, program, image())


NOT_FOLDED = {
    "the convolution is read elsewhere": Function(
        lambda p, x: (p["norm"](y := p["conv"](x)), y.relu()), conv=nn.Conv2d(4, 6, 3), norm=batch_norm(6)
    ),
    "the convolution is an output": Function(
        lambda p, x: (p["norm"](y := p["conv"](x)), y), conv=nn.Conv2d(4, 6, 3), norm=batch_norm(6)
    ),
    "a nonlinear operator between": Function(
        lambda p, x: p["norm"](p["conv"](x).relu()), conv=nn.Conv2d(4, 6, 3), norm=batch_norm(6)
    ),
    "the input is normalised": Function(lambda p, x: p["conv"](p["norm"](x)), conv=nn.Conv2d(4, 6, 3), norm=batch_norm(4)),
    "not all that is joined is a convolution": Function(
        lambda p, x: p["norm"](torch.cat([p["conv"](x), x.relu()], dim=1)),
        conv=nn.Conv2d(4, 6, 1),
        norm=batch_norm(10),
    ),
    "joined along the height": Function(
        lambda p, x: p["norm"](torch.cat([p["conv"](x), p["conv"](x)], dim=2)), conv=nn.Conv2d(4, 6, 3), norm=batch_norm(6)
    ),
    "what is joined is read elsewhere": Function(
        lambda p, x: (p["norm"](torch.cat([y := p["conv"](x), p["conv"](-x)], dim=1)), y.relu()),
        conv=nn.Conv2d(4, 3, 3),
        norm=batch_norm(6),
    ),
}


@pytest.mark.parametrize("why", NOT_FOLDED)
def test_a_batch_norm_stays_where(why: str) -> None:
    module = NOT_FOLDED[why].eval()
    program = fold_batch_norm(capture(module, (image(),)))
    assert "batch_norm" in names(program)
    agrees(module, program, image())


@pytest.mark.parametrize(
    "which", ["conv.weight", "conv.bias", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"]
)
def test_weights_loaded_in_place_are_folded_anew(which: str) -> None:
    module, x = norm_after(nn.Conv2d(4, 6, 3)), image()
    program = fold_batch_norm(capture(module, (x,)))
    prepared = execute(program, sequential(program.graph))
    before = prepared(x)
    module.load_state_dict(module.state_dict() | {f"parts.{which}": torch.rand_like(module.state_dict()[f"parts.{which}"])})
    with torch.no_grad():
        assert relative_error(prepared(x), module(x)) < 1e-5
    assert relative_error(prepared(x), before) > 1e-3
    prepared.close()


# Elementwise


def elementwise(program: Program) -> Program:
    return fuse_elementwise(program)


ELEMENTWISE = {
    "a chain": (lambda p, x: p["conv"](x).relu().mul(2).sigmoid(), ["conv2d", "relu_mul_sigmoid"]),
    "a tree": (lambda p, x: (p["conv"](x).relu() + p["conv"](-x).tanh()).relu(), None),
    "a batch norm": (lambda p, x: p["norm"](p["conv"](x)).relu(), ["conv2d", "batch_norm_relu"]),
    "a residual": (lambda p, x: (p["norm"](y := p["conv"](x)) + y).relu(), ["conv2d", "batch_norm_add_relu"]),
    "read twice": (lambda p, x: (y := p["conv"](x).relu()).sigmoid() * y, ["conv2d", "relu", "sigmoid_mul"]),
    "an output": (lambda p, x: ((y := p["conv"](x).relu()), y.sigmoid().exp()), ["conv2d", "relu", "sigmoid_exp"]),
    "a gate": (lambda p, x: p["conv"](x).relu() * p["conv"](x).mean((2, 3), keepdim=True).sigmoid(), None),
    "alone": (lambda p, x: p["conv"](x).relu(), ["conv2d", "relu"]),
    "dtypes": (lambda p, x: torch.logical_and(p["conv"](x) > 0, p["conv"](x) < 1).logical_not(), None),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pattern", ELEMENTWISE)
def test_elementwise_operators_become_one(pattern: str, device: str) -> None:
    forward, expected = ELEMENTWISE[pattern]
    module = Function(forward, conv=nn.Conv2d(4, 6, 3), norm=batch_norm(6)).eval().to(device)
    captured = capture(module, (image(device),))
    program = fuse_elementwise(captured)
    if expected is not None:
        assert names(program) == expected
    else:
        assert len(program.graph) < len(captured.graph)
    agrees(module, program, image(device))


def test_equal_groups_share_a_kernel() -> None:
    module = Function(
        lambda p, x: p["a"](p["b"](x).relu().neg()).relu().neg(), a=nn.Conv2d(4, 4, 1), b=nn.Conv2d(4, 4, 1)
    ).eval()
    program = fuse_elementwise(capture(module, (image(),)))
    fused = [c.function for c in program.calls if isinstance(c.function, FusedElementwise)]
    agrees(module, program, image())
    assert len(fused) == 2 and fused[0].kernel is fused[1].kernel and fused[0].kernel is not None
    assert program.signature(1) == program.signature(3) != program.signature(0)


# Vendor kernels


def always(chosen: bool) -> Callable[[Program], float]:
    """A cost by which the fused kernel is always chosen, or never: it is the program of one operator."""
    return lambda program: float((len(program.calls) == 1) != chosen)


VENDOR = {
    "relu": lambda p, x: p["conv"](x).relu(),
    "silu": lambda p, x: nn.functional.silu(p["conv"](x)),
    "relu6": lambda p, x: nn.functional.relu6(p["conv"](x)),
    "hardtanh": lambda p, x: nn.functional.hardtanh(p["conv"](x)),
    "hardswish": lambda p, x: nn.functional.hardswish(p["conv"](x)),
    "sigmoid": lambda p, x: p["conv"](x).sigmoid(),
    "residual": lambda p, x: (p["conv"](x) + x).relu(),
    "residual first": lambda p, x: (x + p["conv"](x)).relu(),
    "two convolutions": lambda p, x: (p["conv"](x) + p["other"](x)).relu(),
}
CUDNN = ("relu", "residual", "residual first", "two convolutions")


@pytest.mark.parametrize("pattern", VENDOR)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_the_vendors_fused_convolutions(pattern: str, channels_last: bool, device: str) -> None:
    parts = {"conv": nn.Conv2d(4, 4, 3, padding=1), "other": nn.Conv2d(4, 4, 1, bias=False)}
    module = Function(VENDOR[pattern], **parts).eval().to(device)
    x = image(device).contiguous(memory_format=torch.channels_last) if channels_last else image(device)
    captured = capture(module, (x,))
    program, fusions = fuse_convolution(captured, always(True))
    if device == "cuda" and pattern not in CUDNN:
        assert fusions == []
        return
    assert (
        len(fusions) == 1 and fusions[0].chosen and len(program.graph) == len(captured.graph) - len(fusions[0].operators) + 1
    )
    agrees(module, program, x)
    program, fusions = fuse_convolution(captured, always(False))
    assert len(fusions) == 1 and not fusions[0].chosen and program.graph == captured.graph


@pytest.mark.parametrize(
    "forward",
    [
        lambda p, x: (y := p["conv"](x)).relu() + y,
        lambda p, x: (p["conv"](x) + x.mean((2, 3), keepdim=True)).relu(),
        lambda p, x: torch.add(p["conv"](x), x, alpha=2).relu(),
        lambda p, x: p["conv"](x).exp(),
    ],
)
def test_the_vendors_kernels_stay_away(forward: Callable[..., Tensor]) -> None:
    module = Function(forward, conv=nn.Conv2d(4, 4, 3, padding=1)).eval()
    assert fuse_convolution(capture(module, (image(),)), always(True))[1] == []


# Kernels and layouts


@st.composite
def layout_problems(draw: st.DrawFn) -> tuple[list, list, list]:
    n = draw(st.integers(1, 8))
    milliseconds = st.integers(0, 20).map(float)
    limited = st.one_of(
        st.tuples(milliseconds, milliseconds),
        st.tuples(milliseconds, st.just(math.inf)),
        st.tuples(st.just(math.inf), milliseconds),
    )
    costs = [draw(limited) for _ in range(n)]
    reads = [draw(st.lists(st.integers(0, v - 1), unique=True, max_size=3)) if v else [] for v in range(n)]
    return costs, reads, [draw(st.tuples(milliseconds, milliseconds)) for _ in range(n)]


@given(layout_problems())
def test_no_assignment_of_layouts_is_cheaper(problem: tuple[list, list, list]) -> None:
    costs, reads, conversions = problem

    def total(layouts: tuple[int, ...]) -> float:
        time = sum(cost[layout] for cost, layout in zip(costs, layouts, strict=True))
        for u, layout in enumerate(layouts):
            wanted = {layouts[v] for v, producers in enumerate(reads) if u in producers} - {layout}
            time += sum(conversions[u][other] for other in wanted)
        return time

    found = cheapest_layouts(costs, reads, conversions)
    assert total(tuple(found)) == min(total(x) for x in itertools.product((0, 1), repeat=len(costs)))


def prefers(word: str) -> Callable[[Program], float]:
    """A cost by which one kind of kernel is the fastest, and converting costs next to nothing."""

    def cost(program: Program) -> float:
        operator, call = program.graph.operators[0], program.calls[0]
        if call.function is aten.clone.default:
            return 0.001
        nhwc = program.examples[0].is_contiguous(memory_format=torch.channels_last)
        return 1.0 if word in (operator.target, "channels_last" if nhwc else "contiguous") else 2.0

    return cost


def network() -> nn.Module:
    """A little of everything: branches, pools, a concatenation, a view that needs contiguous memory."""

    def forward(p: nn.ModuleDict, x: Tensor) -> tuple[Tensor, Tensor]:
        y = p["norm"](p["stem"](x)).relu()
        y = torch.cat([p["a"](y), p["b"](nn.functional.max_pool2d(y, 3, 1, 1)), nn.functional.avg_pool2d(y, 3, 1, 1)], dim=1)
        return p["head"](y.flatten(1)), y.mean((2, 3))

    parts = {"stem": nn.Conv2d(4, 6, 3), "a": nn.Conv2d(6, 5, 1), "b": nn.Conv2d(6, 6, 3, padding=1, groups=6)}
    return Function(forward, **parts, norm=batch_norm(6), head=nn.Linear(17 * 64, 3)).eval()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["opweave.native_conv2d", "channels_last", "contiguous"])
def test_kernels_and_layouts_are_those_that_were_faster(kind: str, device: str) -> None:
    module = network().to(device)
    captured = capture(module, (image(device),))
    program, choices = select_kernels(captured, prefers(kind))
    agrees(module, program, image(device))
    clones = names(program).count("clone")
    if kind == "channels_last":
        # In at the input, out before the view; the mean needs no copy of its own beside the view's.
        assert clones == 2 and all(c.chosen == "library channels_last" and c.gain == 2 for c in choices)
    elif kind == "contiguous":
        assert clones == 0 and all(c.chosen == "library contiguous" and c.gain == 1 for c in choices)
    else:
        depthwise = "native" if device == "cuda" else "library"
        assert [c.chosen for c in choices] == ["native contiguous"] * 2 + [f"{depthwise} contiguous"]
    assert sorted(v for c in choices for v in c.operators) == [v for v, n in enumerate(names(captured)) if n == "conv2d"]


def test_each_kind_of_kernel_is_measured_once() -> None:
    module = Function(lambda p, x: p["b"](p["a"](x)) + p["c"](x), **{k: nn.Conv2d(4, 4, 1) for k in "abc"}).eval()
    measured: list[str] = []

    def cost(program: Program) -> float:
        measured.append(program.signature(0))
        return 1.0

    _, choices = select_kernels(capture(module, (image(),)), cost)
    assert len(measured) == len(set(measured)) and len(choices) == 1 and choices[0].operators == (0, 1, 2)


def test_weights_of_another_layout_are_kept_up_to_date() -> None:
    module, x = Function(lambda p, x: p["conv"](x), conv=nn.Conv2d(4, 6, 3)).eval(), image()
    program, _ = select_kernels(capture(module, (x,)), prefers("channels_last"))
    prepared = execute(program, sequential(program.graph))
    with torch.no_grad():
        module.parts["conv"].weight.mul_(3)
        assert relative_error(prepared(x), module(x)) < 1e-5
        module.parts["conv"].weight.data.mul_(3)  # which counts no version
    assert program.derived.refresh(force=True)
    with torch.no_grad():
        assert relative_error(prepared(x), module(x)) < 1e-5
    prepared.close()


# Replacing


@settings(max_examples=50)
@given(dags(max_nodes=12, max_edges=24), st.data())
def test_chains_replaced_by_one_operator_compute_the_same(graph: OperatorGraph, data: st.DataObject) -> None:
    """Operators that add up what they read; some chains of an operator and its only reader become one."""
    calls = [
        Call(lambda x, *rest, v=v: x + v + sum(rest), (Input(0), *map(Output, producers)), {})
        for v, producers in enumerate(graph.predecessors)
    ]
    ends = [v for v, readers in enumerate(graph.successors) if not readers]
    program = Program(graph, calls, [Output(v) for v in ends], tree_structure([0] * len(ends)), (torch.zeros(2),))
    replacements, taken = [], set()
    for u, readers in enumerate(graph.successors):
        if len(readers) == 1 and not taken & {u, readers[0]} and data.draw(st.booleans()):
            taken |= {u, v := readers[0]}
            before = [Output(w) for w in graph.predecessors[u]]
            others = [Output(w) for w in graph.predecessors[v] if w != u]

            def both(x: Tensor, n: int, *rest: Tensor, u: int = u, v: int = v) -> Tensor:
                return x + v + (x + u + sum(rest[:n])) + sum(rest[n:])

            call = Call(both, (Input(0), len(before), *before, *others), {})
            replacements.append(Replacement((u, v), "both", "both", call, {v: None}))
    rewritten, place = replace(program, replacements)
    assert len(rewritten.graph) == len(graph) - len(replacements)
    x = torch.tensor([1.0, 2.0])
    for got, expected in zip(rewritten.run((x,)), program.run((x,)), strict=True):
        assert torch.equal(got, expected)
    for r in replacements:
        assert (
            place[r.operators[0]] == place[r.operators[1]]
            and rewritten.graph.operators[place[r.operators[0]]].name == "both"
        )


def three() -> Program:
    module = Function(lambda p, x: x.relu().sigmoid() + x.relu().tanh())
    return capture(module.eval(), (image(),))


def test_what_cannot_be_replaced_is_told() -> None:
    program = three()  # relu, sigmoid, relu, tanh, add
    call = program.calls[1]
    with pytest.raises(ValueError, match="takes"):
        replace(program, [Replacement((0, 1), "a", "a", call, {1: None}), Replacement((1,), "b", "b", call, {1: None})])
    with pytest.raises(ValueError, match=r"computes the output of operator 1 \(sigmoid\) no more"):
        replace(program, [Replacement((0, 1), "a", "a", Call(torch.relu, (Input(0),), {}), {})])
    with pytest.raises(ValueError, match="cycle"):
        around = Call(torch.add, (Output(1), Output(3)), {})
        replace(program, [Replacement((0, 4), "a", "a", around, {0: None, 4: None})])


def test_a_part_computes_what_the_whole_does() -> None:
    program = three()
    alone = part(program, [1, 3, 4])
    a, b = image(), image()
    assert [len(alone.examples), len(alone.graph.edges), names(alone)] == [2, 2, ["sigmoid", "tanh", "add"]]
    assert torch.equal(alone.run((a, b))[0], a.sigmoid() + b.tanh())
    assert [program.signature(0), program.signature(1)] == [
        program.signature(2),
        "aten.sigmoid.default(float32[2, 4, 10, 10])",
    ]


# Whole models


@pytest.mark.parametrize(
    "model", ["googlenet", "squeezenet", "nasnet", "efficientnet_b0_cifar10", "bert", "resnet50_cifar10"]
)
def test_folding_and_vendor_kernels_on_whole_models(model: str) -> None:
    loaded = models.load(model, 1, **({"sequence": 16} if model == "bert" else {}))
    program = capture(loaded.module, loaded.inputs)
    fused, _ = fuse_convolution(fold_batch_norm(program), always(True))
    inputs = loaded.fresh_inputs(3)
    with torch.no_grad():
        expected = tree_leaves(loaded.module(*inputs))
    for got, reference in zip(fused.run(inputs), expected, strict=True):
        assert relative_error(got, reference) < 1e-4
    if model in ("googlenet", "nasnet", "resnet50_cifar10"):
        assert len(fused.graph) < 0.85 * len(program.graph)
