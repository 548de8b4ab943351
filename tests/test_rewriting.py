"""The rewriting passes: each pattern, and what must not match; whole models."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rewriting import COUNTING, DEVICES, Function, agrees, batch_norm, image, measuring, names, takes_new_weights
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import models
from runners.measurements.correctness import relative_error
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.fused_kernel import FusedKernel
from systems.scheduling.graph.program import Program
from systems.scheduling.passes import patterns
from systems.scheduling.passes.convolution_places import places
from systems.scheduling.passes.fold_batch_norm import fold_batch_norm
from systems.scheduling.passes.fuse_convolution import fuse_convolution
from systems.scheduling.passes.fuse_elementwise import fuse_elementwise

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
    program, decisions = fold_batch_norm(capture(module, (image(device),)), COUNTING)
    assert [(d.chosen, d.operators) for d in decisions] == [("folded", (0, 1))]
    assert names(program) == ["conv2d"]
    agrees(module, program, image(device))


def joined(*outputs: int) -> Function:
    parts = {f"conv{i}": nn.Conv2d(4, n, 3, bias=i == 0) for i, n in enumerate(outputs)}

    def forward(p: nn.ModuleDict, x: Tensor) -> Tensor:
        return p["norm"](torch.cat([p[f"conv{i}"](x) for i in range(len(outputs))], dim=1)).relu()

    return Function(forward, **parts, norm=batch_norm(sum(outputs))).eval()


def test_a_batch_norm_goes_through_a_concatenation() -> None:
    module = joined(3, 5, 1)
    program, decisions = fold_batch_norm(capture(module, (image(),)), COUNTING)
    assert names(program) == ["conv2d", "conv2d", "conv2d", "cat", "relu"]
    assert [d.pattern for d in decisions] == ["conv2d + conv2d + conv2d + cat + batch_norm"]
    agrees(module, program, image())


def statistics(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    return norm.running_mean, norm.running_var  # type: ignore[return-value]


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
    "one convolution is joined twice": Function(
        lambda p, x: p["norm"](torch.cat([y := p["conv"](x), y], dim=1)), conv=nn.Conv2d(4, 3, 3), norm=batch_norm(6)
    ),
    "the bias is computed": Function(
        lambda p, x: p["norm"](nn.functional.conv2d(x, p["conv"].weight, p["conv"].bias.exp())),
        conv=nn.Conv2d(4, 6, 3),
        norm=batch_norm(6),
    ),
    "the bias is of the input": Function(
        lambda p, x: p["norm"](nn.functional.conv2d(x, p["conv"].weight, x[0, 0, 0, :6])),
        conv=nn.Conv2d(4, 6, 3),
        norm=batch_norm(6),
    ),
    "the scale is computed": Function(
        lambda p, x: nn.functional.batch_norm(p["conv"](x), *statistics(p["norm"]), p["norm"].weight.exp()),
        conv=nn.Conv2d(4, 6, 3),
        norm=batch_norm(6),
    ),
    "the shift is of the input": Function(
        lambda p, x: nn.functional.batch_norm(p["conv"](x), *statistics(p["norm"]), p["norm"].weight, x[0, 0, 0, :6]),
        conv=nn.Conv2d(4, 6, 3),
        norm=batch_norm(6),
    ),
    "no batch is convolved": Function(
        lambda p, x: nn.functional.batch_norm(p["conv"](x[0]), *statistics(p["norm"])),  # its channels are the rows
        conv=nn.Conv2d(4, 6, 3),
        norm=batch_norm(8),
    ),
}


@pytest.mark.parametrize("why", NOT_FOLDED)
def test_a_batch_norm_stays_where(why: str) -> None:
    module = NOT_FOLDED[why].eval()
    program, decisions = fold_batch_norm(capture(module, (image(),)), COUNTING)
    assert "batch_norm" in names(program) and decisions == []
    agrees(module, program, image())


@pytest.mark.parametrize(
    "which", ["conv.weight", "conv.bias", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"]
)
def test_weights_loaded_in_place_are_folded_anew(which: str) -> None:
    module, x = norm_after(nn.Conv2d(4, 6, 3)), image()
    program, _ = fold_batch_norm(capture(module, (x,)), COUNTING)
    takes_new_weights(program, module, x, which)


# Elementwise


ELEMENTWISE = {
    "a chain": (lambda p, x: p["conv"](x).relu().mul(2).sigmoid(), ["conv2d", "relu_mul_sigmoid"]),
    "a tree": (lambda p, x: (p["conv"](x).relu() + p["conv"](-x).tanh()).relu(), None),
    "a batch norm": (lambda p, x: p["norm"](p["conv"](x)).relu(), ["conv2d", "batch_norm_relu"]),
    "a residual": (lambda p, x: (p["norm"](y := p["conv"](x)) + y).relu(), ["conv2d", "batch_norm_add_relu"]),
    "read twice": (lambda p, x: (y := p["conv"](x).relu()).sigmoid() * y, ["conv2d", "relu_sigmoid_mul"]),
    "read elsewhere too": (
        lambda p, x: ((y := p["conv"](x).relu()).sigmoid() * y) + p["norm"](y.roll(1, 1)),
        ["conv2d", "relu", "roll", "sigmoid_mul_batch_norm_add"],
    ),
    "in another shape": (lambda p, x: p["conv"](x).relu().view(2, -1).exp().view(2, 6, 64), ["conv2d", "relu_exp", "view"]),
    "a view of what is not contiguous": (
        lambda p, x: p["conv"](x).relu().transpose(2, 3).view(2, 6, 8, 2, 4).exp(),
        ["conv2d", "relu", "transpose", "view", "exp"],
    ),
    "a view of a convolution": (lambda p, x: p["conv"](x).view(2, -1).exp().neg(), ["conv2d", "view", "exp_neg"]),
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
    program, decisions = fuse_elementwise(captured, COUNTING)
    assert len(captured.graph) - len(program.graph) == sum(len(d.operators) - 1 for d in decisions)
    if expected is not None:
        assert names(program) == expected
    else:
        assert len(program.graph) < len(captured.graph)
    agrees(module, program, image(device))


def test_what_reads_a_number_stays_as_it_is() -> None:
    module = Function(lambda p, x: (p["conv"](x) * x.max().item()).relu().tanh(), conv=nn.Conv2d(4, 6, 3)).eval()
    program, _ = fuse_elementwise(capture(module, (image(),)), COUNTING)
    assert names(program)[-2:] == ["mul", "relu_tanh"]
    agrees(module, program, image())


def test_equal_groups_share_a_kernel() -> None:
    module = Function(
        lambda p, x: p["a"](p["b"](x).relu().neg()).relu().neg(), a=nn.Conv2d(4, 4, 1), b=nn.Conv2d(4, 4, 1)
    ).eval()
    program, _ = fuse_elementwise(capture(module, (image(),)), COUNTING)
    fused = [c.function for c in program.calls if isinstance(c.function, FusedKernel)]
    agrees(module, program, image())
    first, second = (function.latest for function in fused)
    assert first is not None and second is not None and first.kernel is second.kernel
    assert program.signature(1) == program.signature(3) != program.signature(0)


def test_a_kernel_takes_what_lies_otherwise_in_memory() -> None:
    """As a part that is measured alone may read, and then the whole."""
    x = torch.randn(2, 4, 8, 8)
    module = Function(lambda p, x: p["conv"](x).relu().neg(), conv=nn.Conv2d(4, 4, 1)).eval()
    program, _ = fuse_elementwise(capture(module, (x,)), COUNTING)
    (kernel,) = (c.function for c in program.calls if isinstance(c.function, FusedKernel))
    for layout in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
        laid = x.contiguous(memory_format=layout)
        torch.testing.assert_close(kernel(laid), x.relu().neg())


@pytest.mark.parametrize(
    ("device", "is_chosen"), [("cpu", False), ("cpu", True), pytest.param("cuda", False, marks=DEVICES[1].marks)]
)
def test_tritons_cache_stays_where_it_is(
    device: str, is_chosen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TorchInductor moves it where it makes a kernel of Triton; without a GPU it makes none, and a stand-in moves it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    if not is_chosen:
        monkeypatch.delenv("TRITON_CACHE_DIR")
    # Else another process compiles, and sets the variable there.
    monkeypatch.setattr("torch._inductor.async_compile.AsyncCompile.use_process_pool", lambda *_: False)
    compiled, folders = torch._inductor.compile, []

    def compile_elsewhere(*args: Any) -> Any:
        kernel = compiled(*args)
        if device == "cpu":
            os.environ.setdefault("TRITON_CACHE_DIR", "moved")
        folders.append(os.environ.get("TRITON_CACHE_DIR"))
        return kernel

    monkeypatch.setattr(torch._inductor, "compile", compile_elsewhere)
    monkeypatch.setattr(FusedKernel, "compiled", {})
    module = Function(lambda p, x: p["conv"](x).relu().sin(), conv=nn.Conv2d(4, 4, 1)).eval().to(device)
    program, _ = fuse_elementwise(capture(module, (image().to(device),)), COUNTING)
    agrees(module, program, image().to(device))
    assert folders and folders[0] is not None  # it was set meanwhile
    assert os.environ.get("TRITON_CACHE_DIR") == (str(tmp_path) if is_chosen else None)


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
    program, fusions = fuse_convolution(captured, measuring(always(True)))
    if device == "cuda" and pattern not in CUDNN:
        assert fusions == []
        return
    assert [f.chosen for f in fusions] == ["fused"]
    assert len(program.graph) == len(captured.graph) - len(fusions[0].operators) + 1
    agrees(module, program, x)
    program, fusions = fuse_convolution(captured, measuring(always(False)))
    assert [f.chosen for f in fusions] == ["separate"] and program.graph == captured.graph


@pytest.mark.parametrize(
    "forward",
    [
        lambda p, x: (y := p["conv"](x)).relu() + y,
        lambda p, x: (p["conv"](x) + x.mean((2, 3), keepdim=True)).relu(),
        lambda p, x: torch.add(p["conv"](x), x, alpha=2).relu(),
        lambda p, x: p["conv"](x).exp(),
        lambda p, x: p["conv"](x[0]).relu(),
    ],
)
def test_the_vendors_kernels_stay_away(forward: Callable[..., Tensor]) -> None:
    module = Function(forward, conv=nn.Conv2d(4, 4, 3, padding=1)).eval()
    assert fuse_convolution(capture(module, (image(),)), measuring(always(True)))[1] == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("pattern", "is_last", "is_product"), [("relu", True, True), ("relu", False, False), ("residual", True, False)]
)
def test_a_pointwise_convolution_and_its_relu_may_be_one_product(
    pattern: str, is_last: bool, is_product: bool, device: str
) -> None:
    """In channels_last alone; a kernel of our own still takes it as a convolution with a ReLU."""
    module = Function(VENDOR[pattern], conv=nn.Conv2d(4, 4, 1)).eval().to(device)
    x = image(device).contiguous(memory_format=torch.channels_last) if is_last else image(device)

    def cost(program: Program) -> float:
        return 1.0 - (program.calls[0].function is patterns.product_relu_conv2d)

    program, (decision,) = fuse_convolution(capture(module, (x,)), measuring(cost))
    assert (decision.chosen == "fused product") is is_product
    agrees(module, program, x)
    if is_product:
        (place,) = places(program)
        assert (place.after, place.before, tuple(place.conv.weight.shape)) == ("relu", "none", (4, 4, 1, 1))


def test_a_product_does_not_change_the_layout_of_what_is_returned() -> None:
    """A library may return another layout than it reads."""
    module, x = (
        Function(VENDOR["relu"], conv=nn.Conv2d(4, 4, 1)).eval(),
        image().contiguous(memory_format=torch.channels_last),
    )
    captured = capture(module, (x,))
    calls = [replace(call, produces=call.produces.contiguous()) for call in captured.calls]
    changing = Program(captured.graph, calls, captured.outputs, captured.output_spec, captured.examples)
    _, (decision,) = fuse_convolution(changing, measuring(always(True)))
    assert "fused product" not in decision.milliseconds


# Whole models


@pytest.mark.parametrize(
    "model",
    [
        "squeezenet",
        *(
            pytest.param(model, marks=pytest.mark.slow)
            for model in ("resnet50_cifar10", "googlenet", "nasnet", "bert", "efficientnet_b0_cifar10")
        ),
    ],
)
def test_folding_and_vendor_kernels_on_whole_models(model: str) -> None:
    loaded = models.load(model, 1, **({"sequence": 16} if model == "bert" else {}))
    program = capture(loaded.module, loaded.inputs)
    folded, _ = fold_batch_norm(program, COUNTING)
    fused, _ = fuse_convolution(folded, measuring(always(True)))
    inputs = loaded.fresh_inputs(3)
    with torch.no_grad():
        expected = tree_leaves(loaded.module(*inputs))
    for got, reference in zip(fused.run(inputs), expected, strict=True):
        assert relative_error(got, reference) < 1e-4
    if model in ("googlenet", "nasnet", "resnet50_cifar10"):
        assert len(fused.graph) < 0.85 * len(program.graph)
