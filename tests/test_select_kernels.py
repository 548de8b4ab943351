"""Kernel and layout selection: what is measured, and every assignment of layouts."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from drawing import examples
from hypothesis import example, given
from hypothesis import strategies as st
from rewriting import DEVICES, Function, agrees, batch_norm, image, measuring, names
from torch import Tensor, nn

from runners.measurements.correctness import relative_error
from systems.scheduling.decision import rows
from systems.scheduling.execution.execute import execute
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.scheduling.passes import patterns
from systems.scheduling.passes.layouts import cheapest_layouts
from systems.scheduling.passes.select_kernels import _apply, select_kernels
from systems.scheduling.plans.schedule import sequential

aten = torch.ops.aten


@st.composite
def layout_problems(draw: st.DrawFn) -> tuple[list, list, list]:
    n = draw(st.integers(1, 8))
    scale = draw(st.sampled_from([1.0, 1e4, 1e9]))  # of the smallest model, of one that takes minutes, and of none
    milliseconds = st.integers(0, 20).map(lambda n: n * scale)
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

    best_layouts = cheapest_layouts(costs, reads, conversions)
    assert total(tuple(best_layouts)) == min(total(x) for x in itertools.product((0, 1), repeat=len(costs)))


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
    program, choices = select_kernels(captured, measuring(prefers(kind)))
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
    assert [v for c in choices for v in c.operators] == [v for v, n in enumerate(names(captured)) if n == "conv2d"]


@given(
    n=st.integers(1, 3),
    sizes=st.tuples(*[st.integers(1, 5)] * 2, *[st.integers(2, 9)] * 2),
    has_bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_a_pointwise_convolution_is_a_product_of_pixels(
    n: int, sizes: tuple[int, ...], has_bias: bool, dtype: torch.dtype
) -> None:
    h, w, channels, outputs = sizes
    x = torch.randn(n, channels, h, w, dtype=dtype).to(memory_format=torch.channels_last)
    weight, bias = torch.randn(outputs, channels, 1, 1, dtype=dtype), torch.randn(outputs, dtype=dtype) if has_bias else None
    exact = [None if t is None else t.double() for t in (x, weight, bias)]
    expected = nn.functional.conv2d(*exact)
    most = nn.functional.conv2d(*[None if t is None else t.abs() for t in exact])  # that terms which cancel round to
    by_product = [patterns.product_conv2d(x, weight, bias)]
    if bias is not None:
        by_product.append(patterns.product_relu_conv2d(x, weight, bias))
    for out, reference in zip(by_product, (expected, expected.relu()), strict=False):
        assert out.is_contiguous(memory_format=torch.channels_last) and out.dtype is dtype
        assert ((out - reference).abs() <= 8 * torch.finfo(dtype).eps * most).all()


IS_PRODUCT: dict[str, tuple[nn.Conv2d, tuple[int, ...], bool]] = {
    "pointwise": (nn.Conv2d(4, 6, 1), (2, 4, 5, 5), True),
    "dilation means nothing": (nn.Conv2d(4, 6, 1, dilation=2, bias=False), (1, 4, 5, 1), True),
    "3x3": (nn.Conv2d(4, 6, 3), (2, 4, 5, 5), False),
    "1x3": (nn.Conv2d(4, 6, (1, 3)), (2, 4, 5, 5), False),
    "stride": (nn.Conv2d(4, 6, 1, stride=(1, 2)), (2, 4, 5, 5), False),
    "padding": (nn.Conv2d(4, 6, 1, padding=1), (2, 4, 5, 5), False),
    "groups": (nn.Conv2d(4, 6, 1, groups=2), (2, 4, 5, 5), False),
    "one output channel": (nn.Conv2d(4, 1, 1), (2, 4, 5, 5), False),
    "one input channel": (nn.Conv2d(1, 4, 1), (2, 1, 5, 5), False),
    "one pixel": (nn.Conv2d(4, 6, 1), (2, 4, 1, 1), False),
}


@pytest.mark.parametrize("case", IS_PRODUCT)
def test_which_convolutions_may_be_products(case: str) -> None:
    """In channels_last, and where it is the fastest."""
    convolution, shape, is_product = IS_PRODUCT[case]
    module, x = Function(lambda p, x: p["conv"](x) * 2, conv=convolution).eval(), torch.randn(shape)
    program, (decision,) = select_kernels(capture(module, (x,)), measuring(prefers("opweave.product_conv2d")))
    assert (decision.chosen == "product channels_last") is is_product
    assert ("product contiguous" in decision.milliseconds) is False
    agrees(module, program, x)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_a_resized_image_keeps_its_layout(mode: str) -> None:
    def forward(p: nn.ModuleDict, x: Tensor) -> Tensor:
        return p["b"](nn.functional.interpolate(p["a"](x), scale_factor=2, mode=mode))

    module = Function(forward, a=nn.Conv2d(4, 6, 3), b=nn.Conv2d(6, 5, 3)).eval()
    program, _ = select_kernels(capture(module, (image(),)), measuring(prefers("channels_last")))
    assert names(program).count("clone") == 2, "of the input and of the output"
    agrees(module, program, image())


@pytest.mark.parametrize("layouts", list(itertools.product((0, 1), repeat=2)))
def test_what_comes_in_channels_last_is_so_again(layouts: tuple[int, int]) -> None:
    """Whatever the layouts of two convolutions, a view finds the memory as captured, and so does who reads the output."""
    convolutions = {name: nn.Conv2d(8, 8, 3, padding=1) for name in "ab"}

    def forward(p: nn.ModuleDict, x: Tensor) -> tuple[Tensor, Tensor]:
        y = p["b"](p["a"](x))
        return y, y.permute(0, 2, 3, 1).flatten(1) * 2

    module, x = Function(forward, **convolutions).eval(), torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last)
    captured = capture(module, (x,))
    program = _apply(captured, [*layouts, *[0] * (len(captured.graph) - 2)], {})
    agrees(module, program, x)
    with torch.no_grad():
        assert program.run((x,))[0].stride() == module(x)[0].stride()


def lies(tensors: list[Tensor]) -> list[list[int]]:
    """Their strides, where a dimension has several elements: others say nothing of the memory."""
    return [[stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1] for x in tensors]


STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "transposed": lambda x: x.transpose(2, 3),
    "exchanged": lambda x: x.transpose(0, 1),
    "joined": lambda x: torch.cat([x, x.mean(1, keepdim=True), x], 1),
    "weighted": lambda x: x.mean((2, 3), keepdim=True) * x * x.mean(1, keepdim=True).sigmoid(),
    "resized": lambda x: nn.functional.interpolate(x, scale_factor=2),
}


@given(
    channels=st.lists(st.sampled_from([1, 3]), min_size=4, max_size=4),
    steps=st.lists(st.sampled_from([*STEPS][:-1]), min_size=3, max_size=3),
    kernel=st.sampled_from([1, 3]),
    size=st.sampled_from([1, 4]),
    preferred=st.sampled_from(["channels_last", "contiguous"]),
)
@example([1, 3, 3, 3], ["transposed", "none", "none"], 3, 4, "channels_last")
@example([3, 1, 3, 3], ["none", "transposed", "none"], 1, 4, "channels_last")
@example([3, 3, 3, 3], ["none", "transposed", "transposed"], 3, 4, "channels_last")
@example([3, 3, 3, 3], ["none", "exchanged", "none"], 1, 1, "channels_last")
@example([1, 3, 3, 3], ["none", "none", "none"], 3, 4, "channels_last")
@example([3, 1, 3, 3], ["none", "joined", "none"], 3, 4, "channels_last")
@example([3, 3, 3, 3], ["resized", "none", "none"], 3, 1, "channels_last")
@examples(60)
def test_what_is_selected_lies_as_planned_and_is_returned_as_in_eager_execution(
    channels: list[int], steps: list[str], kernel: int, size: int, preferred: str
) -> None:
    """Also where images have one channel or one pixel, which suits both layouts, and where they suit none."""
    parts: dict[str, nn.Module] = {}
    x = y = torch.randn(3, channels[0], size, size + (size > 1))
    for i, step in enumerate(steps):
        y = STEPS[step](y)
        parts[step + str(i)] = nn.Conv2d(y.shape[1], channels[i + 1], kernel, padding=kernel // 2)
        y = parts[step + str(i)](y)

    def forward(p: nn.ModuleDict, x: Tensor) -> list[Tensor]:
        returned = []
        for name, convolution in p.items():
            returned.append(STEPS[name[:-1]](x).relu())
            x = convolution(returned[-1])
        return [*returned, x]

    module = Function(forward, **parts).eval()
    program, _ = select_kernels(capture(module, (x,)), measuring(prefers(preferred)))
    values: list[Tensor] = []
    with torch.no_grad():
        returned, expected = program.run((x,), lambda _, value: values.append(value)), module(x)
    torch.testing.assert_close(returned, expected)
    assert lies(returned) == lies(expected)
    assert lies(values) == lies([call.produces for call in program.calls])


def test_an_image_that_lies_otherwise_is_not_the_same_in_both_layouts() -> None:
    for x, dims in ((torch.empty(2, 1, 3, 4), (2, 3)), (torch.empty(2, 3, 1, 1), (0, 1))):
        assert patterns.is_same_either_way(x) and not patterns.is_same_either_way(x.transpose(*dims))


def test_each_kind_of_kernel_is_measured_once() -> None:
    module = Function(lambda p, x: p["b"](p["a"](x)) + p["c"](x), **{k: nn.Conv2d(4, 4, 1) for k in "abc"}).eval()
    measured: list[str] = []

    def cost(program: Program) -> float:
        measured.append(program.signature(0))
        return 1.0

    _, choices = select_kernels(capture(module, (image(),)), measuring(cost))
    assert len(measured) == len(set(measured)) and [c.operators for c in choices] == [(0,), (1,), (2,)]
    assert len(rows(choices)) == 1


def test_weights_of_another_layout_are_kept_up_to_date() -> None:
    module, x = Function(lambda p, x: p["conv"](x), conv=nn.Conv2d(4, 6, 3)).eval(), image()
    program, _ = select_kernels(capture(module, (x,)), measuring(prefers("channels_last")))
    prepared = execute(program, sequential(program.graph))
    with torch.no_grad():
        module.parts["conv"].weight.mul_(3)
        assert relative_error(prepared(x), module(x)) < 1e-5
        module.parts["conv"].weight.data.mul_(3)  # which counts no version
    assert program.derived.refresh(force=True)
    with torch.no_grad():
        assert relative_error(prepared(x), module(x)) < 1e-5
    prepared.close()
