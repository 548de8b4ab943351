"""Kernels of convolutions: against PyTorch in fp64, and in the programs in which the pass puts them.

Without a GPU they run in Triton's interpreter.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from rewriting import Function, takes_new_weights
from torch import Tensor, nn
from torch.nn import functional

from systems.kernels import kernel as kernel_module
from systems.profiling.intensity import work
from systems.scheduling.decision import Decision
from systems.scheduling.graph.capture import capture, on_meta
from systems.scheduling.graph.program import Call, Program
from systems.scheduling.graph.rewrite import Replacement
from systems.scheduling.graph.rewrite import replace as replace_operators
from systems.scheduling.passes import (
    convolution_places,
    fuse_concatenations,
    fuse_convolution,
    fuse_in_triton,
    fuse_pools,
    fuse_sums,
    own_kernels,
    select_attention,
    select_products,
)
from systems.scheduling.passes.context import Context
from systems.scheduling.passes.rewriting import Rewriting

NAMES = ("tile", "convolution", "separable", "dense", "depthwise", "gemv", "placed", "pooled", "product", "attention")
MODULES = [f"systems.kernels.{name}" for name in NAMES]
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
LAYOUTS = {False: torch.contiguous_format, True: torch.channels_last}
ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": functional.relu,
    "relu6": functional.relu6,
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "hardswish": functional.hardswish,
    "gelu": functional.gelu,
}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A device on which the kernels run; on a CPU in an import of their modules that no other test sees."""
    if request.param == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
        for name in ("sum", "max"):  # they were imported to be compiled
            monkeypatch.setattr(triton.language, name, triton.jit(getattr(triton.language, name).fn))
        for module in MODULES:
            monkeypatch.delitem(sys.modules, module, raising=False)
    yield request.param
    if request.param == "cpu":
        for module in MODULES:
            sys.modules.pop(module, None)


def kernels() -> ModuleType:
    return import_module("systems.kernels.separable")


def dense_kernels() -> ModuleType:
    return import_module("systems.kernels.dense")


acts = st.sampled_from(sorted(ACTS))
pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


@st.composite
def places(draw: st.DrawFn, like: Tensor, dtype: torch.dtype, is_last: bool) -> list[Tensor]:
    """A part of the channels of a tensor of NaN, to write to, and the whole; or nothing."""
    if not draw(st.booleans()):
        return []
    before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    n, c, *size = like.shape
    whole = torch.full((n, before + c + after, *size), torch.nan, dtype=dtype, device=like.device)
    whole = whole.contiguous(memory_format=LAYOUTS[is_last])
    return [whole[:, before : before + c], whole]


def check_place(out: Tensor, place: list[Tensor], dtype: torch.dtype, is_last: bool) -> None:
    """A kernel has written where it was to write, and nowhere else."""
    assert out.dtype == dtype
    if place:
        part, whole = place
        assert out is part and not part.isnan().any()
        assert int(whole.isnan().sum()) == whole.numel() - part.numel()
    else:
        assert out.is_contiguous(memory_format=LAYOUTS[is_last])


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), before=acts, between=acts, after=acts, is_last=st.booleans(), reads_last=st.booleans())
def test_a_kernel_computes_what_pytorch_does(
    device: str, data: st.DataObject, before: str, between: str, after: str, is_last: bool, reads_last: bool
) -> None:
    draw = data.draw
    n, c, k, h, w = (draw(st.integers(1, most)) for most in (3, 40, 40, 9, 9))
    kernel, stride, dilation = draw(pairs), draw(pairs), draw(pairs)
    padding = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    has_biases, has_addend = draw(st.booleans()), draw(st.booleans())
    # Triton's interpreter multiplies no bf16.
    dtype = draw(st.sampled_from([torch.float32, torch.float16, *([torch.bfloat16] if device == "cuda" else [])]))
    assume(all(s + 2 * p > d * (f - 1) for s, p, d, f in zip((h, w), padding, dilation, kernel, strict=True)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(device, dtype)

    x = tensor(n, c, h, w).contiguous(memory_format=LAYOUTS[reads_last])
    weight, pointwise = tensor(c, 1, *kernel), tensor(k, c, 1, 1) / c**0.5
    biases = (tensor(c), tensor(k)) if has_biases else (None, None)
    wide = [None if t is None else t.double() for t in (x, weight, biases[0], pointwise, biases[1])]
    expected = functional.conv2d(ACTS[before](wide[0]), wide[1], wide[2], stride, padding, dilation, c)
    expected = functional.conv2d(ACTS[between](expected), wide[3], wide[4])
    addend = tensor(*expected.shape).contiguous(memory_format=LAYOUTS[draw(st.booleans())]) if has_addend else None
    expected = ACTS[after](expected if addend is None else expected + addend.double())
    num_pixels, num_cores = n * expected.shape[2] * expected.shape[3], draw(st.integers(1, 40))
    tile = draw(st.sampled_from(kernels().tiles(c, k, kernel[0] * kernel[1], num_pixels, num_cores)))
    tile = replace(
        tile, depth=draw(st.sampled_from([16, 64])), splits=draw(st.integers(1, 4)), is_unrolled=draw(st.booleans())
    )
    tickets = None
    if tile.splits > 1:
        tickets = torch.zeros(tile.num_blocks(num_pixels, k), dtype=torch.int32, device=device)
    numbers = kernel, stride, padding, dilation
    separable = kernels().Separable(*numbers, before, between, after, "ieee", is_last, tile)
    place = draw(places(expected, dtype, is_last))
    for _ in range(2):  # a ticket that is left set would spoil the second
        out = separable(x, fuse_in_triton._taps(weight), biases[0], pointwise, biases[1], addend, tickets, *place[:1])
    check_place(out, place, dtype, is_last)
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max() + 1))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), before=acts, after=acts, is_last=st.booleans(), reads_last=st.booleans())
def test_a_dense_kernel_computes_what_pytorch_does(
    device: str, data: st.DataObject, before: str, after: str, is_last: bool, reads_last: bool
) -> None:
    draw = data.draw
    n, c, k, h, w = (draw(st.integers(1, most)) for most in (3, 40, 40, 9, 9))
    ones = st.just((1, 1))  # a pixel of the input is one of the output
    kernel, stride, dilation = draw(ones | pairs), draw(ones | pairs), draw(pairs)
    padding = draw(st.just((0, 0)) | st.tuples(st.integers(0, 2), st.integers(0, 2)))
    has_bias, has_addend = draw(st.booleans()), draw(st.booleans())
    dtype = draw(st.sampled_from([torch.float32, torch.float16, *([torch.bfloat16] if device == "cuda" else [])]))
    assume(all(s + 2 * p > d * (f - 1) for s, p, d, f in zip((h, w), padding, dilation, kernel, strict=True)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(device, dtype)

    x = tensor(n, c, h, w).contiguous(memory_format=LAYOUTS[reads_last])
    weight = tensor(k, c, *kernel) / (c * kernel[0] * kernel[1]) ** 0.5
    bias = tensor(k) if has_bias else None

    def convolved(x: Tensor) -> Tensor:
        wide_bias = None if bias is None else bias.double()
        return functional.conv2d(ACTS[before](x.double()), weight.double(), wide_bias, stride, padding, dilation)

    like = convolved(x)
    addend = tensor(*like.shape).contiguous(memory_format=LAYOUTS[draw(st.booleans())]) if has_addend else None
    num_pixels, num_taps = like.numel() // k, kernel[0] * kernel[1]
    tile = draw(st.sampled_from(dense_kernels().tiles(num_pixels, k, c, num_taps, draw(st.integers(1, 40)))))
    dense = dense_kernels().Dense(kernel, stride, padding, dilation, before, after, "ieee", is_last, tile)
    tickets = torch.zeros(tile.num_blocks(num_pixels, k), dtype=torch.int32, device=device) if tile.splits > 1 else None
    tolerance = 16 * torch.finfo(dtype).eps
    place = draw(places(like, dtype, is_last))
    for scale in (1.0, -0.5):  # the tickets are ready for another call
        out = dense(x * scale, fuse_in_triton._rows(weight), bias, addend, tickets, *place[:1])
        check_place(out, place, dtype, is_last)
        expected = ACTS[after](convolved(x * scale) + (0 if addend is None else addend.double()))
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max() + 1))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), before=acts, after=acts, is_last=st.booleans(), reads_last=st.booleans())
def test_a_depthwise_kernel_computes_what_pytorch_does(
    device: str, data: st.DataObject, before: str, after: str, is_last: bool, reads_last: bool
) -> None:
    draw = data.draw
    has_bias = draw(st.booleans())
    n, c, h, w = (draw(st.integers(1, most)) for most in (3, 140, 9, 9))
    kernel, stride, dilation = draw(pairs | st.tuples(st.integers(1, 7), st.integers(1, 7))), draw(pairs), draw(pairs)
    padding = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, *([torch.bfloat16] if device == "cuda" else [])]))
    assume(all(s + 2 * p > d * (f - 1) for s, p, d, f in zip((h, w), padding, dilation, kernel, strict=True)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(device, dtype)

    x = tensor(n, c, h, w).contiguous(memory_format=LAYOUTS[reads_last])
    weight, bias = tensor(c, 1, *kernel), tensor(c) if has_bias else None
    wide_bias = None if bias is None else bias.double()
    expected = functional.conv2d(ACTS[before](x.double()), weight.double(), wide_bias, stride, padding, dilation, c)
    expected = ACTS[after](expected)
    kernels = import_module("systems.kernels.depthwise")
    numbers = kernel, stride, padding, dilation
    depthwise = kernels.Depthwise(*numbers, before, after, is_last, draw(st.sampled_from(kernels.tiles(c))))
    place = draw(places(expected, dtype, is_last))
    out = depthwise(x, fuse_in_triton._channels_apart(weight), bias, *place[:1])
    check_place(out, place, dtype, is_last)
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max() + 1))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), rows=st.lists(st.integers(1, 9), min_size=0, max_size=3), has_bias=st.booleans())
def test_a_product_computes_what_pytorch_does(device: str, data: st.DataObject, rows: list[int], has_bias: bool) -> None:
    draw = data.draw
    features, outputs = draw(st.integers(1, 150)), draw(st.integers(1, 90))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, *([torch.bfloat16] if device == "cuda" else [])]))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(device, dtype)

    x, weight, bias = tensor(*rows, features), tensor(outputs, features) / features**0.5, tensor(outputs)
    products = import_module("systems.kernels.product")
    num_rows = x.numel() // features
    precision = draw(st.sampled_from(["ieee", "tf32x3"] if dtype is torch.float32 else ["tf32"]))
    tiles = products.tiles_of(num_rows, outputs, features, precision, draw(st.sampled_from([1, 30, 140])))
    assume(tiles)
    tile = draw(st.sampled_from(tiles))
    after = draw(acts)
    product = products.Product(precision, tile, after)
    laid, rest = weight, None
    if precision == "tf32x3":
        laid, rest = select_products._rounded_rows(weight, 0), select_products._rests(weight, 0)
    tickets = None
    if tile.splits > 1:
        tickets = torch.zeros(tile.num_blocks(num_rows, outputs), dtype=torch.int32, device=device)
    tolerance = 16 * torch.finfo(dtype).eps
    for scale in (1.0, -0.5):  # the tickets are ready for another call
        expected = functional.linear(x.double() * scale, weight.double(), bias.double() if has_bias else None)
        expected = ACTS[after](expected)
        place = [torch.full_like(expected, torch.nan, dtype=dtype)] if draw(st.booleans()) else []
        out = product(x * scale, laid, bias if has_bias else None, tickets, rest, *place)
        assert out.shape == expected.shape and out.is_contiguous() and (not place or out is place[0])
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max() + 1))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), rows=st.lists(st.just(1), max_size=3), has_bias=st.booleans())
def test_a_rows_product_computes_what_pytorch_does(
    device: str, data: st.DataObject, rows: list[int], has_bias: bool
) -> None:
    """Of widths that no strip divides, too; weights whose mean is not zero would show a part that is read twice."""
    draw = data.draw
    features, outputs = draw(st.integers(1, 2500)), draw(st.integers(1, 30))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, *([torch.bfloat16] if device == "cuda" else [])]))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).add(0.5).to(device, dtype)

    x, weight, bias = tensor(*rows, features), tensor(outputs, features) / features**0.5, tensor(outputs)
    rows_products = import_module("systems.kernels.gemv")
    gemv = rows_products.Gemv(draw(st.sampled_from(rows_products.strips_of(features))))
    expected = functional.linear(x.double(), weight.double(), bias.double() if has_bias else None)
    place = [torch.full_like(expected, torch.nan, dtype=dtype)] if draw(st.booleans()) else []
    out = gemv(x, weight, bias if has_bias else None, *place)
    assert out.shape == expected.shape and out.is_contiguous() and (not place or out is place[0])
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max() + 1))


def test_a_rows_product_takes_one_row(device: str) -> None:
    kernels = import_module("systems.kernels.gemv")
    x, weight = torch.ones(2, 8, device=device), torch.ones(3, 8, device=device)
    with pytest.raises(ValueError, match=r"a row of 8 .* \[2, 8\]"):
        kernels.Gemv(kernels.strips_of(8)[0])(x, weight, None)


@pytest.mark.parametrize("num_rows", [1, 6])
def test_a_bias_with_holes_is_left_to_the_library(device: str, num_rows: int) -> None:
    linear = nn.Linear(40, 10).eval()
    linear.bias = nn.Parameter(torch.randn(20)[::2])
    linear, x = linear.to(device), torch.randn(num_rows, 40, device=device)
    linear.bias.data = torch.randn(20, device=device)[::2]
    with torch.no_grad():
        captured = capture(linear, (x,))
    cost = favour("opweave")
    program, (decision,) = select_products.select_products(captured, Context(cost, cost))
    assert set(decision.milliseconds) <= set(select_products.WAYS)
    with torch.no_grad():
        torch.testing.assert_close(program.run((x,))[0], linear(x), rtol=1e-4, atol=1e-4)


def test_every_width_has_a_strip_that_ends(device: str) -> None:
    kernels = import_module("systems.kernels.gemv")
    for features in (1, 511, 768, 5120, 20480, 120000):
        strips = kernels.strips_of(features)
        assert strips and all(features <= kernels.MOST_STEPS * strip.columns for strip in strips)
        assert len(set(map(str, strips))) == len(strips)


class Products(nn.Module):
    """Linears with and without a bias, one whose weight lies the other way, and one of an input that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(20, 30), nn.Linear(30, 24, bias=False)
        self.other = nn.Parameter(torch.randn(24, 18) / 5)
        self.last = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.two(self.one(x)) @ self.other).transpose(1, 2))


@pytest.mark.parametrize("shape", [(2, 7, 20), (1, 1, 20)])
def test_a_products_kernel_takes_the_librarys_place(device: str, shape: tuple[int, ...]) -> None:
    module = Products().eval().to(device)
    if shape[1] == 1:
        module.last = nn.Linear(1, 5, device=device)
    x = torch.randn(shape, device=device)
    with torch.no_grad():
        captured = capture(module, (x,))
    cost = favour("opweave.gemv" if shape[1] == 1 else "opweave")
    program, decisions = select_products.select_products(captured, Context(cost, cost))
    own = [d for d in decisions if d.chosen not in select_products.WAYS]
    assert len(decisions) == 4 and len(own) >= 3
    kernel = "opweave.gemv" if shape[1] == 1 else "opweave.product"
    assert sum(o.target.startswith(kernel) for o in program.graph.operators) >= 3
    assert sum(o.target.startswith("opweave") for o in program.graph.operators) == len(own)
    now, before = ([work(p, v) for v in range(len(p.graph))] for p in (program, captured))
    assert [operations for operations, _ in now] == [operations for operations, _ in before]
    assert all(moved >= less for (_, moved), (_, less) in zip(now, before, strict=True))  # a weight has rests beside it
    with torch.no_grad():
        torch.testing.assert_close(program.run((x,))[0], module(x), rtol=1e-4, atol=1e-4)
        for parameter in module.parameters():
            parameter.mul_(2)
        program.derived.refresh()
        torch.testing.assert_close(program.run((x,))[0], module(x), rtol=1e-4, atol=1e-3)


def test_a_precision_that_there_is_not_is_refused(device: str) -> None:
    dense = dense_kernels()
    with pytest.raises(ValueError, match="no precision fp8"):
        dense.Dense((1, 1), (1, 1), (0, 0), (1, 1), "none", "none", "fp8", False, dense.DenseTile(16, 16, 16, 4, 3))


def test_a_library_that_is_as_fast_keeps_its_product(device: str) -> None:
    module, x = Products().eval().to(device), torch.randn(2, 7, 20, device=device)
    with torch.no_grad():
        captured = capture(module, (x,))
    nearly = 1 / (1 + 0.9 * (select_products.MIN_GAIN - 1))

    def cost(program: Program) -> float:
        return nearly if "opweave" in program.graph.operators[0].target else 1.0

    program, decisions = select_products.select_products(captured, Context(cost, cost))
    assert {d.chosen for d in decisions} == {"library"} and program.graph == captured.graph
    assert any(name not in select_products.WAYS for d in decisions for name in d.milliseconds)


def thrice(x: Tensor, weight: Tensor, tile: Any) -> Tensor:
    laid, rest = select_products._rounded_rows(weight, 0), select_products._rests(weight, 0)
    product = import_module("systems.kernels.product").Product("tf32x3", tile)
    return product(x, laid, None, None, rest)  # type: ignore[no-any-return]


@pytest.mark.parametrize("tile", [(16, 16, 32), (64, 64, 32), (128, 64, 32)])
@pytest.mark.parametrize("features", [40, 700, 3000])
def test_three_products_of_tf32_are_as_precise_as_fp32(device: str, features: int, tile: tuple[int, int, int]) -> None:
    """Also where numbers lie far apart. TF32 alone is 50 times as far off at least."""
    random = torch.Generator().manual_seed(features)
    x, weight = (torch.randn(30, features, generator=random).to(device) for _ in range(2))
    x *= 10.0 ** torch.randint(-3, 4, (30, 1), generator=random).to(device)
    exact = functional.linear(x.double(), weight.double())
    shape = dense_kernels().DenseTile(*tile, 8 if tile[0] > 64 else 4, 3)
    one_product = import_module("systems.kernels.product").Product("tf32", shape)
    near, far = thrice(x, weight, shape), one_product(x, select_products._rounded_rows(weight, 0), None, None)
    of_thrice, of_one, of_library = (float((y - exact).norm()) for y in (near, far, functional.linear(x, weight)))
    assert of_thrice < 4 * of_library and of_one > 50 * of_thrice


def test_three_products_of_tf32_keep_what_is_not_finite(device: str) -> None:
    """Infinity less what it is rounded to is no number; an input, a weight or both are not finite."""
    numbers = torch.inf, -torch.inf, torch.nan
    x, weight = torch.ones(4, 20, device=device), torch.full((7, 20), 1.0 + 2.0**-12, device=device)
    for row, number in enumerate(numbers):
        x[row, row] = weight[row, 10 + row] = weight[row + 3, row] = number
    out = thrice(x, weight, dense_kernels().DenseTile(16, 16, 16, 4, 3))
    torch.testing.assert_close(out, functional.linear(x, weight), equal_nan=True)


def test_three_products_of_tf32_take_the_rest_of_a_weight_and_others_none(device: str) -> None:
    """With the rounded weight alone a product would be no more precise than TF32."""
    product, tile = import_module("systems.kernels.product").Product, dense_kernels().DenseTile(16, 16, 16, 4, 3)
    x, weight = torch.ones(4, 20, device=device), torch.ones(7, 20, device=device)
    for precision, rest in (("tf32x3", None), ("tf32", weight), ("ieee", weight)):
        with pytest.raises(ValueError, match=f"^{precision} takes "):
            product(precision, tile)(x, weight, None, None, rest)


def test_a_product_that_fills_the_gpu_is_left_to_the_library(device: str) -> None:
    tiles_of = import_module("systems.kernels.product").tiles_of
    for precision in ("tf32", "tf32x3"):
        assert tiles_of(128, 512, 512, precision, 132) and tiles_of(1, 1, 1, precision, 132)
    assert not tiles_of(4096, 3072, 768, "tf32", 132)
    assert tiles_of(4096, 3072, 768, "tf32x3", 132)  # a library takes no tensor cores for it


@given(
    num_pixels=st.integers(1, 10**6),
    channels=st.tuples(st.integers(1, 4096), st.integers(1, 4096)),
    num_taps=st.integers(1, 49),
    num_cores=st.integers(1, 200),
)
def test_tiles_cover_the_output_and_every_part_of_a_sum(
    num_pixels: int, channels: tuple[int, int], num_taps: int, num_cores: int
) -> None:
    tiles = dense_kernels().tiles(num_pixels, *channels, num_taps, num_cores)
    assert tiles and len(set(map(str, tiles))) == len(tiles)
    for tile in tiles:
        blocks = len(range(0, num_pixels, tile.pixels)) * len(range(0, channels[0], tile.channels))
        assert tile.num_blocks(num_pixels, channels[0]) == blocks
        assert tile.splits == 1 or tile.splits * tile.depth <= max(channels[1], tile.depth) * num_taps


@given(
    channels=st.tuples(st.integers(1, 2048), st.integers(1, 2048)),
    num_taps=st.integers(1, 49),
    num_pixels=st.integers(1, 10**6),
    num_cores=st.integers(1, 200),
)
def test_separable_tiles_take_all_channels(
    channels: tuple[int, int], num_taps: int, num_pixels: int, num_cores: int
) -> None:
    """Shared sums have blocks for every channel, and no more blocks than the cores hold at once."""
    tiles = kernels().tiles(*channels, num_taps, num_pixels, num_cores)
    assert 1 <= len(tiles) <= 3 and len(set(map(str, tiles))) == len(tiles)
    for tile in tiles:
        assert tile.splits == 1 or (tile.splits - 1) * tile.depth < channels[0] <= tile.splits * tile.depth
        assert tile.splits == 1 or tile.splits * tile.num_blocks(num_pixels, channels[1]) <= 8 * num_cores


def test_tf32_is_rounded_to_the_nearest(device: str) -> None:
    """What a tensor core would cut off: without rounding a product of ones just below 2 is off by twice as much."""
    values = torch.full((1, 16, 1, 1), 2.0 - 2.0**-12, device=device)
    ones = torch.ones(16, 1, 3, 3, device=device).flatten(1).t().contiguous()
    tile = kernels().Tile(16, 16, 16, 1, 1)
    separable = kernels().Separable((3, 3), (1, 1), (1, 1), (1, 1), "none", "none", "none", "tf32", False, tile)
    assert (separable(values, ones, None, torch.ones(16, 16, 1, 1, device=device), None, None) == 32.0).all()
    tile = dense_kernels().DenseTile(16, 16, 16, 1, 1)
    dense = dense_kernels().Dense((1, 1), (1, 1), (0, 0), (1, 1), "none", "none", "tf32", False, tile)
    assert (dense(values, torch.ones(16, 16, device=device), None, None, None) == 32.0).all()


def test_a_weight_is_rounded_to_the_nearest_and_keeps_what_is_no_number() -> None:
    weight = torch.tensor([2.0 - 2.0**-12, 1.0 + 2.0**-12, torch.inf, -torch.inf, -1.0 - 3 * 2.0**-12])
    all_ones = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # as a GPU writes it
    rows = fuse_in_triton._rounded_rows(torch.cat([weight, all_ones]).view(1, 6, 1, 1))
    assert rows[0, :5].tolist() == [2.0, 1.0, torch.inf, -torch.inf, -1.0 - 2.0**-10] and rows[0, 5].isnan()


class Block(nn.Module):
    """Two separable branches of one activation, their sum, a residual block, and a strided pointwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.ModuleList(nn.Conv2d(12, 12, s, padding=s // 2, groups=12, bias=False) for s in (3, 5, 3))
        self.pointwise = nn.ModuleList(nn.Conv2d(12, 12, 1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(12) for _ in range(3))
        self.last = nn.Conv2d(12, 20, 1, stride=2)

    def separable(self, i: int, x: Tensor) -> Tensor:
        return self.norms[i](self.pointwise[i](self.depthwise[i](x)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = x.relu()
        y = self.separable(0, x) + self.separable(1, x)
        z = (self.separable(2, y.sigmoid()) + y).relu()
        return self.last(z)  # type: ignore[no-any-return]


def rewritten(module: nn.Module, x: Tensor, cost: Callable[[Program], float]) -> tuple[Program, list[str], Tensor]:
    """The program after the pass, what was chosen at each place, and eager's output."""
    from systems.profiling.timing import Timer

    with torch.no_grad():
        expected = module(x)
    program = capture(module, (x,))
    folded, _ = Rewriting(fold_batch_norm=True).apply(program, Timer(torch.device(x.device.type)))
    program, decisions = fuse_in_triton.fuse_in_triton(folded, Context(cost, cost))
    return program, [d.chosen for d in decisions], expected


def favour(*names: str) -> Callable[[Program], float]:
    """The first takes no time, the next one second, and so on; what has none of these names takes longest."""

    def cost(program: Program) -> float:
        target = program.graph.operators[0].target
        return float(next((i for i, name in enumerate(names) if name in target), len(names)))

    return cost


def favour_the_library(program: Program) -> float:
    return 2.0 if "opweave" in program.graph.operators[0].target else 1.0


def test_the_pass_leaves_what_the_model_computes(device: str) -> None:
    torch.manual_seed(0)
    module = Block().eval().to(device)
    x = torch.randn(1, 12, 7, 7, device=device)
    program, chosen, expected = rewritten(module, x, favour("opweave.separable", "opweave"))
    (out,) = program.run((x,))
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
    targets = [o.target for o in program.graph.operators]
    assert len(chosen) == 4 and "separate" not in chosen
    # The relu that both branches read is gone; their sum stays, since neither branch is to wait for the other.
    assert [t for t in targets if "opweave" not in t] == ["aten.add.Tensor"]
    assert [t.split("[")[0] for t in targets if "opweave" in t] == ["opweave.separable"] * 3 + ["opweave.dense"]
    assert sum("before relu" in t for t in targets) == 2 and sum("before sigmoid, after relu" in t for t in targets) == 1
    with torch.no_grad():
        module.depthwise[0].weight.mul_(2)
    assert program.derived.refresh()
    torch.testing.assert_close(program.run((x,))[0], module(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("names", "others"),
    [
        (["opweave.dense", "aten"], ["aten.conv2d.default"] * 3),
        (["opweave.depthwise", "aten"], ["aten.conv2d.default"] * 4),
        (["opweave.dense", "opweave.depthwise", "aten"], []),
    ],
)
def test_parts_of_what_stays_separate_have_kernels_of_their_own(device: str, names: list[str], others: list[str]) -> None:
    """The kernel of either takes in the activation before it, also the one between them."""
    module, x = Block().eval().to(device), torch.randn(1, 12, 9, 9, device=device)
    program, chosen, expected = rewritten(module, x, favour(*names))
    assert len(chosen) == 10 and [chosen[i] for i in (0, 3, 6)] == ["separate"] * 3
    torch.testing.assert_close(program.run((x,))[0], expected, rtol=1e-3, atol=1e-3)
    targets = [o.target for o in program.graph.operators]
    assert [t for t in targets if t == "aten.conv2d.default"] == others
    for name, count in (("opweave.dense", 4), ("opweave.depthwise", 3)):
        assert sum(t.startswith(name) for t in targets) == (count if name in names else 0)
    with torch.no_grad():
        module.depthwise[0].weight.mul_(2)
        module.pointwise[1].weight.mul_(2)
    program.derived.refresh()
    torch.testing.assert_close(program.run((x,))[0], module(x), rtol=1e-3, atol=1e-3)


def test_what_is_not_faster_stays(device: str) -> None:
    x = torch.randn(1, 12, 9, 9, device=device)
    program, chosen, expected = rewritten(Block().eval().to(device), x, favour_the_library)
    assert chosen == ["separate"] * 10  # three places of two parts, and a convolution alone
    torch.testing.assert_close(program.run((x,))[0], expected, rtol=1e-3, atol=1e-3)


def test_a_tile_that_fails_has_a_reason(device: str) -> None:
    def cost(program: Program) -> float:
        if "16x16x16" in program.graph.operators[0].target:
            raise RuntimeError("out of resource: shared memory")
        return 1.0

    module, x = Block().eval().to(device), torch.randn(1, 12, 9, 9, device=device)
    with torch.no_grad():
        program = capture(module, (x,))
    _, decisions = fuse_in_triton.fuse_in_triton(program, Context(cost, cost))
    failed = [d for d in decisions if "out of resource: shared memory" in d.reasons.values()]
    assert failed and all(d.milliseconds[name] is None for d in failed for name in d.reasons)


class Shared(nn.Module):
    """What a fusion would take from others: the depthwise output and the activation after are read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.pointwise = nn.Conv2d(8, 8, 1)
        self.grouped = nn.Conv2d(8, 8, 1, groups=2)
        self.wide = nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        d = self.depthwise(x)
        p = self.pointwise(d)
        return d, p, p.relu(), self.wide(self.grouped(p))


def test_what_others_read_is_not_fused(device: str) -> None:
    module, x = Shared().eval().to(device), torch.randn(1, 8, 6, 6, device=device)
    program, chosen, expected = rewritten(module, x, favour("opweave"))
    assert len(chosen) == 3
    targets = [o.target for o in program.graph.operators if "opweave" in o.target]
    assert [t.split(",")[0] for t in targets] == ["opweave.depthwise[3x3", "opweave.dense[1x1", "opweave.dense[3x3"]
    assert not any("after" in t for t in targets)
    torch.testing.assert_close(tuple(program.run((x,))), expected, rtol=1e-3, atol=1e-3)


def test_what_was_measured_of_other_code_is_not_taken(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's name has a digest of its source, and of what that imports."""
    tile = dense_kernels().DenseTile(16, 16, 16, 1, 1)
    kernel = dense_kernels().Dense((1, 1), (1, 1), (0, 0), (1, 1), "none", "none", "ieee", False, tile)
    call = Call(kernel, (), {}, None)
    before = own_kernels.target_of(call)
    source = inspect.getsource
    for module in ("dense", "tile", "placed"):
        changed = sys.modules.get(f"systems.kernels.{module}")
        monkeypatch.setattr(inspect, "getsource", lambda of, it=changed: source(of) + "#" * (of is it))
        kernel_module._digest.cache_clear()
        assert (own_kernels.target_of(call) == before) == (module == "placed")
    kernel_module._digest.cache_clear()


def test_without_a_gpu_nothing_changes() -> None:
    program = capture(Block().eval(), (torch.randn(1, 12, 9, 9),))
    assert fuse_in_triton.fuse_in_triton(program, Context(favour("opweave"), favour("opweave"))) == (program, [])


@pytest.mark.parametrize("act", sorted(ACTS.keys() - {"none"}))
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_what_is_no_number_stays_none(device: str, act: str, precision: str) -> None:
    x = torch.randn(1, 16, 2, 2, device=device)
    x.view(torch.int32)[0, 3, 1, 0] = 0x7FFFFFFF  # the NaN that a GPU writes
    expected = ACTS[act](x).isnan().any(1, keepdim=True).expand(1, 16, 2, 2)
    taps, ones = torch.ones(1, 16, device=device), torch.ones(16, 16, device=device)
    numbers = (1, 1), (1, 1), (0, 0), (1, 1)
    tile = kernels().Tile(16, 16, 16, 1, 1)
    separable = kernels().Separable(*numbers, act, "none", act, precision, False, tile)
    assert separable(x, taps, None, ones.view(16, 16, 1, 1), None, None).isnan().equal(expected)
    dense = dense_kernels().Dense(*numbers, act, act, precision, False, dense_kernels().DenseTile(16, 16, 16, 1, 1))
    assert dense(x, ones, None, None, None).isnan().equal(expected)


def test_an_activation_that_there_is_not_is_refused(device: str) -> None:
    numbers = (1, 1), (1, 1), (0, 0), (1, 1)
    with pytest.raises(ValueError, match="no activation tanh"):
        kernels().Separable(*numbers, "tanh", "none", "none", "ieee", False, kernels().Tile(16, 16, 16, 1, 1))
    with pytest.raises(ValueError, match="no activation tanh"):
        dense_kernels().Dense(*numbers, "none", "tanh", "ieee", False, dense_kernels().DenseTile(16, 16, 16, 1, 1))


class Sums(nn.Module):
    """Two separable convolutions, each with a sum and an activation: one adds its input, one another branch's output."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise, self.pointwise = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 1)
        self.other, self.branch = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = (self.pointwise(self.depthwise(x)) + x).relu()
        side = self.branch(y)  # captured first: the sum is then of the pointwise convolution, which is the later one
        return (side + self.pointwise(self.other(y))).relu()


def test_no_branch_waits_for_what_the_vendors_kernel_adds() -> None:
    """cuDNN's convolution + sum + relu takes its depthwise convolution in only where the addend is there before that begins.

    The program is a CPU's with cuDNN's kernels in it, and does not run.
    """
    program = capture(Sums().eval(), (torch.randn(1, 8, 6, 6),))
    vendors = [
        Replacement(p.operators, "fused", "fused", fuse_convolution._fused(program, p, "cuda"), {p.operators[-1]: None})
        for p in fuse_convolution._places(program, "cuda")
    ]
    assert len(vendors) == 2
    places = convolution_places.places(replace_operators(program, vendors)[0])
    assert [(p.conv.weight.shape[2], len(p.operators), p.depthwise is not None, p.after) for p in places] == [
        (1, 2, True, "relu"),
        (3, 1, False, "none"),
        (3, 1, False, "none"),
        (1, 1, False, "relu"),
    ]


class Twice(nn.Module):
    """Three equal pointwise convolutions, of which two read an activation and one its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.relu()
        return self.first(y), self.second(x), self.second(y)


def test_places_that_differ_in_what_they_compute_before_are_measured_apart(device: str) -> None:
    """Their operators are equal where the activation before has other readers."""
    module, x = Twice().eval().to(device), torch.randn(1, 8, 6, 6, device=device)
    with torch.no_grad():
        program = capture(module, (x,))
    _, decisions = fuse_in_triton.fuse_in_triton(program, Context(favour("opweave"), favour("opweave")))
    assert len(decisions) == 3 and len({d.place for d in decisions}) == 2


def test_a_kernel_that_saves_none_has_to_be_clearly_faster(device: str) -> None:
    """Of two pointwise convolutions one takes an activation in; each kernel is 3 % faster than what is there.

    Where a concatenation alone reads it, it may save that one's kernel.
    """
    module = nn.Sequential(nn.Conv2d(8, 8, 1), nn.MaxPool2d(1), nn.Conv2d(8, 8, 1), nn.Sigmoid(), nn.MaxPool2d(1))
    x = torch.randn(1, 8, 6, 6, device=device)

    def cost(faster: float) -> Callable[[Program], float]:
        return lambda program: faster if "opweave" in program.graph.operators[0].target else 1.0

    assert [name == "separate" for name in rewritten(module.eval().to(device), x, cost(0.97))[1]] == [True, False]
    assert [name == "separate" for name in rewritten(module.eval().to(device), x, cost(0.94))[1]] == [False, False]
    assert [name == "separate" for name in rewritten(module.eval().to(device), x, cost(1.0))[1]] == [True, True]
    assert [name == "separate" for name in rewritten(Returned().eval().to(device), x, cost(0.97))[1]] == [False, False]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), after=acts, is_last=st.booleans(), has_addend=st.booleans())
def test_a_tensor_or_a_sum_is_written_to_its_place(
    device: str, data: st.DataObject, after: str, is_last: bool, has_addend: bool
) -> None:
    shape = data.draw(st.tuples(*(st.integers(1, most) for most in (3, 9, 9, 9))))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    x, other = (
        torch.randn(shape, generator=random).to(device, dtype).contiguous(memory_format=LAYOUTS[data.draw(st.booleans())])
        for _ in range(2)
    )
    place = data.draw(places(x, dtype, is_last).filter(bool))
    placed = import_module("systems.kernels.placed").Placed(after, is_last)
    check_place(placed(x, other if has_addend else None, place[0]), place, dtype, is_last)
    expected = ACTS[after](x.double() + (other.double() if has_addend else 0))
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(place[0].double(), expected, rtol=tolerance, atol=tolerance)


class Inception(nn.Module):
    """A concatenation of convolutions, a sum, a pool, an activation and another concatenation; one part is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(8, 6, 1)
        self.depthwise, self.pointwise = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 4, 1)
        self.pool, self.last = nn.MaxPool2d(3, 1, 1), nn.Conv2d(46, 4, 1)
        self.alone = nn.Conv2d(8, 8, 5, padding=2, groups=8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.first(x).relu()
        inner = torch.cat([self.second(x), self.pointwise(self.depthwise(x)), self.alone(x.sigmoid()).relu()], 1)
        third = self.third(x)
        y = torch.cat([first, inner, (self.pool(x) + x).relu(), self.pool(first), third], 1)
        return self.last(y), torch.cat([third, first], 1)


def joined(module: nn.Module, x: Tensor, cost: Callable[[Program], float]) -> tuple[Program, list[Decision]]:
    """The program after both passes; every convolution is a kernel."""
    with torch.no_grad():
        program = capture(module, (x,))
    program, _ = fuse_in_triton.fuse_in_triton(program, Context(favour("opweave"), favour("opweave")))
    return fuse_concatenations.fuse_concatenations(program, Context(cost, cost))


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_parts_are_written_where_a_concatenation_is_read(device: str, is_last: bool, batch: int) -> None:
    torch.manual_seed(0)
    layout = LAYOUTS[is_last]
    module = Inception().eval().to(device, memory_format=layout)
    x = torch.randn(batch, 8, 5, 5, device=device).contiguous(memory_format=layout)
    program, (decision,) = joined(module, x, lambda program: float("aten.cat" in program.graph.operators[-1].target))
    targets = [o.target for o in program.graph.operators]
    assert decision.chosen == "written by its parts" and len(decision.operators) == 2
    # The other concatenation is an output of the model. The pool is copied, the sum with its activation is not.
    assert targets.count("opweave.joined") == 1 and targets.count("aten.cat.default") == 1
    assert "aten.add.Tensor" not in targets and "aten.relu.default" not in targets
    # What others read beside is copied where its strides would be others.
    num_copies = 2 if (batch, is_last) == (1, False) else 4
    assert sum(t.startswith("opweave.placed") for t in targets) == num_copies
    assert f"{num_copies - 1} of them copied" in decision.pattern
    for scale in (1.0, -3.0):
        with torch.no_grad():
            expected = module(x * scale)
        tolerance = 1e-2 if device == "cuda" else 1e-3  # TF32, in two convolutions one after the other
        torch.testing.assert_close(tuple(program.run((x * scale,))), expected, rtol=tolerance, atol=tolerance)


def test_a_concatenation_names_the_places_that_would_let_it_gain(device: str) -> None:
    """Without kernels of this project its parts are copied; at the places that it names they become such kernels."""
    module, x = Inception().eval().to(device), torch.randn(1, 8, 5, 5, device=device)
    with torch.no_grad():
        program = capture(module, (x,))

    def both(choices: dict[str, str]) -> tuple[Program, list[Decision], Decision]:
        own = Context(favour_the_library, favour_the_library, choices=choices)
        rewritten, kernels = fuse_in_triton.fuse_in_triton(program, own)
        joined, (decision, *_) = fuse_concatenations.fuse_concatenations(rewritten, own)
        return joined, kernels, decision

    _, kernels, before = both({})
    assert {d.chosen for d in kernels} == {"separate"} and len(before.needs) >= 3
    alternatives = {d.place: next(name for name in d.milliseconds if name != "separate") for d in kernels}
    assert set(before.needs) <= set(alternatives)
    rewritten, _, after = both(
        {place: alternatives[place] for place in before.needs} | {before.place: "written by its parts"}
    )
    assert (
        after.place == before.place and after.chosen == "written by its parts" and not set(after.needs) & set(before.needs)
    )
    with torch.no_grad():
        torch.testing.assert_close(tuple(rewritten.run((x,))), module(x), rtol=1e-3, atol=1e-3)


class Doubled(nn.Module):
    """A concatenation of a convolution, an activation and a sum, each twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.first(x), x.cos().relu(), x.cos() + x.sin()
        return torch.cat([*parts, *parts], 1).exp()


def test_what_is_concatenated_twice_is_written_once_and_copied(device: str) -> None:
    module, x = Doubled().eval().to(device), torch.randn(1, 8, 5, 5, device=device)
    program, (decision,) = joined(module, x, lambda program: float("aten.cat" in program.graph.operators[-1].target))
    assert decision.chosen == "written by its parts" and "3 of them copied" in decision.pattern
    targets = [o.target for o in program.graph.operators]
    assert "aten.relu.default" not in targets and "aten.add.Tensor" not in targets
    with torch.no_grad():
        torch.testing.assert_close(program.run((x,))[0], module(x), rtol=1e-3, atol=1e-3)


class Returned(nn.Module):
    """Concatenations that a caller sees: one as a vector, one as it is, and one that is of no channels."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one, other = self.one(x), self.other(x)
        return torch.cat([one, other], 1).flatten(1), torch.cat([other, one], 1), torch.cat([one, other], 2).relu()


def test_what_a_caller_sees_is_copied(device: str) -> None:
    """A later run would write it again."""
    module, x = Returned().eval().to(device), torch.randn(1, 8, 5, 5, device=device)
    program, decisions = joined(module, x, lambda program: float("aten.cat" in program.graph.operators[-1].target))
    assert decisions == [] and sum(o.target == "aten.cat.default" for o in program.graph.operators) == 3


def test_a_concatenation_that_is_not_slower_stays(device: str) -> None:
    """Of the outer one two parts are copied. The inner one is a place of its own where the outer stays; it copies none."""
    module, x = Inception().eval().to(device), torch.randn(1, 8, 5, 5, device=device)
    program, (outer, inner) = joined(module, x, lambda _: 1.0)
    assert outer.chosen == "separate" and outer.milliseconds == {"separate": 1.0, "written by its parts": 1.0}
    assert inner.chosen == "written by its parts" and inner.milliseconds == {"separate": 1.0, "written by its parts": 0.0}
    assert sum(o.target == "aten.cat.default" for o in program.graph.operators) == 2


@st.composite
def windows(draw: st.DrawFn, height: int, width: int) -> tuple[Any, Callable[[Tensor], Tensor], bool]:
    """A window that fits, what PyTorch computes by it, and whether the last windows may pass the end."""
    kind, ceil = draw(st.sampled_from(["average", "max"])), draw(st.booleans())
    kernel = draw(st.tuples(st.integers(1, min(4, height)), st.integers(1, min(4, width))))
    stride = draw(pairs)
    padding = draw(st.tuples(*(st.integers(0, k // 2) for k in kernel)))
    counts = kind == "average" and draw(st.booleans())
    window = import_module("systems.kernels.pooled").Window(kind, kernel, stride, padding, counts)
    if kind == "average":
        return window, lambda x: functional.avg_pool2d(x, kernel, stride, padding, ceil, counts), ceil
    return window, lambda x: functional.max_pool2d(x, kernel, stride, padding, 1, ceil), ceil


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), after=acts, is_last=st.booleans(), second=st.sampled_from(["none", "same", "pool"]))
def test_a_sum_of_pools_is_what_pytorch_computes(
    device: str, data: st.DataObject, after: str, is_last: bool, second: str
) -> None:
    n, c, h, w = (data.draw(st.integers(1, most)) for most in (3, 9, 9, 9))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    window, pool, _ = data.draw(windows(h, w))

    def tensor(*shape: int) -> Tensor:
        made = torch.randn(*shape, generator=random).to(device, dtype)
        return made.contiguous(memory_format=LAYOUTS[data.draw(st.booleans())])

    x = tensor(n, c, h, w)
    if data.draw(st.booleans()):
        x[0, 0, h // 2, w // 2] = torch.nan
    expected, y, other = pool(x.double()), None, None
    if second == "same":
        y, other = tensor(*expected.shape), import_module("systems.kernels.pooled").Window()
        expected = expected + y.double()
    elif second == "pool":  # the same window of another tensor
        y, other = tensor(n, c, h, w), window
        expected = expected + pool(y.double())
    expected = ACTS[after](expected)
    pooled = import_module("systems.kernels.pooled").Pooled(window, other, after, *expected.shape[2:], is_last)
    place = [] if x.isnan().any() else data.draw(places(expected, dtype, is_last))
    out = pooled(x, y, *place[:1])
    check_place(out, place, dtype, is_last)
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


class Cell(nn.Module):
    """Sums of pools as in NASNet's cells: with another tensor, with another pool, with itself, and with an activation after;
    a pool that others read too, one that is a part of a concatenation, and pools that no kernel takes."""

    def __init__(self) -> None:
        super().__init__()
        self.average, self.max = nn.AvgPool2d(3, 1, 1, count_include_pad=False), nn.MaxPool2d(3, 2, 1)
        self.dilated = nn.MaxPool2d(3, 1, 1, dilation=2)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        twice = self.average(y)
        pooled = self.max(x)
        joined = torch.cat(
            [self.average(x) + y, twice + twice, (self.average(x) + self.average(y)).relu(), self.average(x)], 1
        )
        divided = functional.avg_pool2d(x, 3, 1, 1, divisor_override=2) + y
        others = self.dilated(x) + self.dilated(y), torch.add(self.average(x), y, alpha=2), divided
        # By default windows stand one after the other, and an average counts the padding.
        halves = functional.avg_pool2d(x, 2, padding=1) + functional.avg_pool2d(y, 2, padding=1)
        return joined, pooled + pooled.cos(), *others, halves


@pytest.mark.parametrize("is_last", [False, True])
def test_sums_take_in_the_pools_that_they_alone_read(device: str, is_last: bool) -> None:
    x, y = (torch.randn(2, 3, 6, 5, device=device).contiguous(memory_format=LAYOUTS[is_last]) for _ in range(2))
    module = Cell().eval()
    captured = capture(module, (x, y))
    program, decisions = fuse_pools.fuse_pools(captured, Context(favour("opweave"), favour("opweave")))
    kept, others = fuse_pools.fuse_pools(captured, Context(favour("aten"), favour("aten")))
    assert kept.graph == captured.graph and {d.chosen for d in others} == {"separate"}
    assert sorted(len(d.operators) for d in decisions) == [1, 2, 2, 3, 4] and {d.chosen for d in decisions} == {"one kernel"}
    library_names = [o.name for o in program.graph.operators if not o.target.startswith("opweave")]
    assert sorted(library_names) == ["add"] * 4 + ["avg_pool2d"] * 2 + ["cat", "cos"] + ["max_pool2d"] * 3
    for out, expected in zip(program.run((x, y)), module(x, y), strict=True):
        assert out.stride() == expected.stride()
        torch.testing.assert_close(out, expected)


class Addends(nn.Module):
    """Sums of two convolutions, of which one is deeper; of one with a pool; of one that others read; of one that adds
    already; of one that an activation follows before; and one that is broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(8))
        self.average = nn.AvgPool2d(3, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        convolutions = iter(self.convolutions)
        deeper = (next(convolutions)(next(convolutions)(x).cos()) + next(convolutions)(x)).relu()
        pooled = self.average(x) + next(convolutions)(x)
        shared = next(convolutions)(x)
        twice = (next(convolutions)(x) + x) + self.average(shared)
        rectified = next(convolutions)(x).relu() + x.cos()
        broadcast = next(convolutions)(x) + x.mean((2, 3), keepdim=True)
        return deeper, pooled, shared + shared.cos(), twice, rectified, broadcast


@pytest.mark.parametrize("is_last", [False, True])
def test_a_sum_becomes_part_of_the_kernel_of_its_deeper_addend(device: str, is_last: bool) -> None:
    x = torch.randn(2, 4, 6, 5, device=device).contiguous(memory_format=LAYOUTS[is_last])
    module = Addends().eval().to(device, memory_format=LAYOUTS[is_last])
    with torch.no_grad():
        captured = capture(module, (x,))
    ours = Context(favour("opweave"), favour("opweave"))
    program, _ = fuse_in_triton.fuse_in_triton(captured, ours)
    fused, decisions = fuse_sums.fuse_sums(program, Context(lambda p: float(len(p.graph)), favour("opweave")))
    assert [(d.chosen, d.is_change) for d in decisions] == [(fuse_sums.FUSED, True)] * 2
    # The deeper of the first two adds, and is the last of them; the other reads the model's input.
    (first,) = (i for i, o in enumerate(fused.graph.operators) if o.name.endswith("add_relu"))
    assert "cos" in [fused.graph.operators[u].name for u in fused.graph.predecessors[first]]
    assert len(fused.graph) == len(program.graph) - 3
    left, others = fuse_sums.fuse_sums(program, Context(lambda p: -float(len(p.graph)), favour("opweave")))
    assert left.graph == program.graph and not any(d.is_change for d in others)
    tolerance = 1e-2 if device == "cuda" else 1e-4  # TF32
    with torch.no_grad():
        for out, expected in zip(fused.run((x,)), module(x), strict=True):
            assert out.stride() == expected.stride()
            torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_sum_in_a_kernel_lies_as_pytorchs_does(device: str, is_last: bool, size: int) -> None:
    """Of channels_last tensors of one pixel a convolution returns other strides than a sum."""
    parts = (nn.Conv2d(4, 4, 1).eval().to(device, memory_format=LAYOUTS[is_last]) for _ in range(2))
    module = Function(lambda p, x: p["a"](x) + p["b"](x), **dict(zip("ab", parts, strict=True)))
    x = torch.randn(2, 4, size, size, device=device).contiguous(memory_format=LAYOUTS[is_last])
    with torch.no_grad():
        expected, captured = module(x), capture(module, (x,))
    values: dict[int, Tensor] = {}  # as they are returned, which capture looks at on a GPU alone
    captured.run((x,), lambda v, out: values.update({v: on_meta(out)}))
    calls = [replace(call, produces=values[v]) for v, call in enumerate(captured.calls)]
    observed = Program(captured.graph, calls, captured.outputs, captured.output_spec, captured.examples)
    program, _ = fuse_in_triton.fuse_in_triton(observed, Context(favour("opweave"), favour("opweave")))
    fused, _ = fuse_sums.fuse_sums(program, Context(lambda p: float(len(p.graph)), favour("opweave")))
    (out,) = fused.run((x,))
    assert len(fused.graph) == 2 and out.stride() == fused.calls[-1].produces.stride() == expected.stride()
    tolerance = 1e-2 if device == "cuda" else 1e-4  # TF32
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


class Squeezed(nn.Module):
    """A depthwise convolution whose output a pointwise one and another operator read, as where channels are weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise, self.pointwise = nn.Conv2d(8, 8, 5, padding=2, stride=2, groups=8), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.silu(self.depthwise(functional.relu6(x)))
        return self.pointwise(y * y.mean((2, 3), keepdim=True))  # type: ignore[no-any-return]


def test_a_depthwise_convolution_alone_takes_in_its_activations(device: str) -> None:
    module, x = Squeezed().eval().to(device), torch.randn(1, 8, 9, 9, device=device)
    program, chosen, expected = rewritten(module, x, favour("opweave"))
    targets = [o.target for o in program.graph.operators]
    assert len(chosen) == 2 and targets[0].startswith("opweave.depthwise[5x5, before relu6, after silu")
    torch.testing.assert_close(program.run((x,))[0], expected, rtol=1e-3, atol=1e-3)


class Weighed(nn.Module):
    """A depthwise convolution whose activation several read, one of them a convolution that could compute it itself."""

    def __init__(self, way: int) -> None:
        super().__init__()
        self.depthwise, self.other = (nn.Conv2d(8, 8, 3, padding=1, groups=8) for _ in range(2))
        self.dense, self.pointwise = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(x).relu()
        if self.way == 0:
            return self.dense(y) + y  # type: ignore[no-any-return]
        if self.way == 1:
            return self.pointwise(self.other(y)) + self.dense(y)  # type: ignore[no-any-return]
        if self.way == 2:
            return torch.cat([y, self.pointwise(y)], 1).exp()
        return self.pointwise(y * self.dense(y).sigmoid())  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", range(4))
def test_an_activation_that_several_read_is_of_one_kernel(device: str, way: int) -> None:
    module, x = Weighed(way).eval().to(device), torch.randn(1, 8, 6, 6, device=device)
    program, _, expected = rewritten(module, x, favour("opweave"))
    torch.testing.assert_close(program.run((x,))[0], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("is_part_first", [False, True])
def test_equal_places_are_weighed_by_who_reads_them(device: str, is_part_first: bool) -> None:
    """A kernel that is a little faster is taken where a concatenation alone reads it, whichever comes first."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            if is_part_first:
                return torch.cat([self.one(x), x], 1).exp(), self.two(x).exp()
            other = self.two(x).exp()
            return torch.cat([self.one(x), x], 1).exp(), other

    x = torch.randn(1, 8, 6, 6, device=device)

    def cost(program: Program) -> float:
        return 0.97 if "opweave" in program.graph.operators[0].target else 1.0

    with torch.no_grad():
        program = capture(Both().eval().to(device), (x,))
    _, decisions = fuse_in_triton.fuse_in_triton(program, Context(cost, cost))
    readers = {d.operators[0]: d.chosen for d in decisions}
    first, second = (readers[v] for v in sorted(readers))
    assert (first == "separate", second == "separate") == (not is_part_first, is_part_first)


def test_a_weight_that_several_products_read_is_laid_out_once(device: str) -> None:
    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(4):
                x = self.linear(x)
            return x

    module, x = Looped().eval().to(device), torch.randn(1, 5, 32, device=device)
    with torch.no_grad():
        program = capture(module, (x,))
    cost = favour("opweave")
    program, decisions = select_products.select_products(program, Context(cost, cost))
    assert len(decisions) == 4 and len(program.derived.derived) == 2  # the weight rounded, and its rests
    with torch.no_grad():
        module.linear.weight.mul_(2)
        program.derived.refresh()
        torch.testing.assert_close(program.run((x,))[0], module(x), rtol=1e-4, atol=1e-4)


class Perceptron(nn.Module):
    """Products with an activation after each, the second of which is read twice; and one whose activation has an option."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(functional.gelu(self.first(x)))
        z = self.third(y.relu() + y).sigmoid()
        return functional.gelu(self.fourth(z), approximate="tanh")


def test_a_product_takes_in_the_activation_that_alone_reads_it(device: str) -> None:
    module, x = Perceptron().eval().to(device), torch.randn(1, 5, 32, device=device)
    with torch.no_grad():
        program = capture(module, (x,))
    cost = favour("opweave")
    program, _ = select_products.select_products(program, Context(cost, cost))
    targets = [o.target.split(", ")[0].split("[")[-1] for o in program.graph.operators]
    own = [name for o, name in zip(program.graph.operators, targets, strict=True) if o.target.startswith("opweave.product")]
    assert own == ["after gelu", "tf32x3", "after sigmoid", "tf32x3"]
    assert sum(work(program, v)[0] for v in range(len(program.graph)) if "opweave" in program.graph.operators[v].target) == (
        4 * 2 * 5 * 32 * 32
    )
    with torch.no_grad():
        torch.testing.assert_close(program.run((x,))[0], module(x), rtol=1e-4, atol=1e-4)


def test_a_view_whose_last_element_lies_far_away_is_left_to_the_library() -> None:
    near = torch.empty(1, device="meta").as_strided((4, 8, 64, 64), (2**20, 4096, 64, 1))
    far = torch.empty(1, device="meta").as_strided((4, 8, 64, 64), (2**30, 4096, 64, 1))
    assert own_kernels.is_plain(near) and not own_kernels.is_plain(far)


@given(
    dtype=st.sampled_from([torch.float32, torch.float16]),
    shape=st.tuples(st.integers(1, 2), st.integers(1, 40), st.integers(1, 4), st.integers(1, 4)),
    wider=st.integers(0, 40),
    is_channels_last=st.booleans(),
)
def test_numbers_over_a_unit_times_it_are_what_they_were(
    dtype: torch.dtype, shape: tuple[int, ...], wider: int, is_channels_last: bool
) -> None:
    """Of a part of a wider tensor too, whose strides are not the channels'. Of no neighbours the unit is 1."""
    n, c, h, w = shape
    layout = LAYOUTS[is_channels_last]
    x = torch.empty(n, c + wider, h, w, dtype=dtype, device="meta").to(memory_format=layout)[:, :c]
    unit, over = import_module("systems.kernels.tile").split_by_unit(x, c, None)
    expected = [c, x.stride(0), x.stride(2), x.stride(3), 0, 0, 0]
    assert [number * unit for number in over] == expected
    longest = next(u for u in (8, 4, 2, 1) if all(number % u == 0 for number in expected) and u * x.element_size() <= 16)
    assert unit == (longest if x.stride(1) == 1 else 1)


@pytest.mark.parametrize("kind", ["plain", "causal", "added", "bool"])
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), is_token_major=st.booleans())
def test_an_attention_computes_what_pytorch_does(device: str, data: st.DataObject, kind: str, is_token_major: bool) -> None:
    """Of fewer keys than queries and of more, with masks that are broadcast, and of a query that sees nothing."""
    draw = data.draw
    n, kv_heads, group, size, value_size = (draw(st.integers(1, most)) for most in (2, 2, 3, 40, 40))
    heads = kv_heads * group
    num_queries, num_keys = draw(st.integers(1, 90)), draw(st.integers(1, 150))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, *([torch.bfloat16] if device == "cuda" else [])]))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def tensor(heads: int, tokens: int, numbers: int) -> Tensor:
        """Of heads beside each other, or of tokens."""
        if draw(st.booleans()):
            return torch.randn(n, tokens, heads, numbers, generator=random).transpose(1, 2).to(device, dtype)
        return torch.randn(n, heads, tokens, numbers, generator=random).to(device, dtype)

    query = tensor(heads, num_queries, size)
    key, value = tensor(kv_heads, num_keys, size), tensor(kv_heads, num_keys, value_size)
    mask: Tensor | None = None
    if kind in ("added", "bool"):
        shape = draw(st.sampled_from([(num_queries, num_keys), (1, heads, 1, num_keys), (n, 1, num_queries, num_keys)]))
        mask = torch.randn(*shape, generator=random).to(device, dtype)
        if kind == "bool":
            mask = mask > 0.3
            mask[..., -1, :] = False
    attention = import_module("systems.kernels.attention")
    tile = draw(st.sampled_from(attention.tiles(num_queries, num_keys, n * heads, draw(st.sampled_from([1, 140])))))
    scale = draw(st.sampled_from([0.2, 1.0]))
    precision = draw(st.sampled_from(["ieee", "tf32x3"] if dtype is torch.float32 else ["tf32"]))
    kernel = attention.Attention(scale, kind == "causal", precision, is_token_major, tile)
    wide = (each.double() for each in (query, *(each.repeat_interleave(group, 1) for each in (key, value))))
    seen = mask.double() if mask is not None and kind == "added" else mask
    expected = functional.scaled_dot_product_attention(*wide, attn_mask=seen, is_causal=kind == "causal", scale=scale)
    out = kernel(query, key, value, mask)
    assert out.shape == expected.shape and (out.transpose(1, 2) if is_token_major else out).is_contiguous()
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=4 * tolerance)


class Attending(nn.Module):
    """Two equal attentions, and one of a head that no kernel of ours takes."""

    def forward(self, x: Tensor, wide: Tensor) -> tuple[Tensor, ...]:
        heads = x.view(2, 20, 3, 16).transpose(1, 2)
        attend = functional.scaled_dot_product_attention
        first = attend(heads, heads, heads, is_causal=True)
        return first, attend(first, first, first, is_causal=True), attend(wide, wide, wide)


def test_attentions_take_the_kernel_that_is_faster(device: str) -> None:
    x, wide = torch.randn(2, 20, 48, device=device), torch.randn(1, 1, 4, 300, device=device)
    with torch.no_grad():
        captured = capture(Attending().eval(), (x, wide))
    cost = favour("opweave.attention")
    program, decisions = select_attention.select_attention(captured, Context(cost, cost))
    assert [d.chosen != select_attention.LIBRARY for d in decisions] == [True, True]
    assert sum("opweave.attention" in operator.target for operator in program.graph.operators) == 2
    for got, expected in zip(program.run([x, wide]), captured.run([x, wide]), strict=True):
        torch.testing.assert_close(got, expected)
        assert got.stride() == expected.stride()
    assert [work(program, v)[0] for v in decisions[0].operators] == [work(captured, v)[0] for v in decisions[0].operators]
    cost = favour("aten")
    kept, decisions = select_attention.select_attention(captured, Context(cost, cost))
    assert kept.calls == captured.calls and {d.chosen for d in decisions} == {select_attention.LIBRARY}


def test_an_attention_with_dropout_stays(device: str) -> None:
    x = torch.randn(1, 2, 8, 16, device=device)
    with torch.no_grad():
        captured = capture(Function(lambda _, x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)), (x,))
    program, decisions = select_attention.select_attention(captured, Context(favour("opweave"), favour("opweave")))
    assert program.calls == captured.calls and not decisions


def test_an_attention_of_fewer_keys_heads_has_a_kernel(device: str) -> None:
    x, few = torch.randn(1, 4, 8, 16, device=device), torch.randn(1, 2, 8, 16, device=device)
    attend = functional.scaled_dot_product_attention
    with torch.no_grad():
        captured = capture(Function(lambda _, x, few: attend(x, few, few, enable_gqa=True)), (x, few))
    program, (decision,) = select_attention.select_attention(captured, Context(favour("opweave"), favour("opweave")))
    assert decision.chosen != select_attention.LIBRARY
    torch.testing.assert_close(program.run([x, few]), captured.run([x, few]))


class Windows(nn.Module):
    """Attention step by step, as of windows: a bias of its own, and a mask that each window has another row of."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, 2, 6, 6))
        self.mask = nn.Parameter(torch.randn(1, 4, 1, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = x.view(8, 6, 3, 2, 16).permute(2, 0, 3, 1, 4)
        scores = ((query * 0.5) @ key.transpose(-2, -1) * 0.5 + self.bias) * 2
        scores = (scores.view(2, 4, 2, 6, 6) + self.mask).view(8, 2, 6, 6)
        return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("which", ["a.bias", "a.mask"])
def test_attention_step_by_step_becomes_one_kernel(device: str, which: str) -> None:
    torch.manual_seed(0)
    module = Function(lambda p, x: p["a"](x), a=Windows()).eval().to(device)
    x = torch.randn(8, 6, 96, device=device)
    with torch.no_grad():
        captured = capture(module, (x,))
    program, (decision,) = select_attention.select_attention(captured, Context(favour("opweave"), favour("opweave")))
    names = [operator.name for operator in program.graph.operators]
    assert not {"matmul", "softmax", "add", "mul"} & set(names) and decision.chosen != own_kernels.SEPARATE
    torch.testing.assert_close(program.run([x]), captured.run([x]), rtol=1e-4, atol=1e-4)
    takes_new_weights(program, module, x, which)
    kept, (decision,) = select_attention.select_attention(captured, Context(favour("aten"), favour("aten")))
    assert kept.calls == captured.calls and decision.chosen == own_kernels.SEPARATE


@pytest.mark.parametrize(
    "forward",
    [
        lambda q, k, v, m: (q @ k.transpose(-2, -1)).softmax(-2) @ v,
        lambda q, k, v, m: (q @ k.transpose(-2, -1) + m).softmax(-1) @ v,  # which changes from call to call
        lambda q, k, v, m: ((scores := q @ k.transpose(-2, -1)).softmax(-1) @ v, scores),
        lambda q, k, v, m: ((shares := (q @ k.transpose(-2, -1)).softmax(-1)) @ v, shares),
        lambda q, k, v, m: (q @ k).softmax(-1) @ v,
        lambda q, k, v, m: (q @ k.transpose(0, 1)).softmax(-1) @ v,
        lambda q, k, v, m: v @ (q @ k.transpose(-2, -1)).softmax(-1),
        lambda q, k, v, m: (q @ k.transpose(-2, -1)).relu().softmax(-1) @ v,
    ],
)
def test_what_is_no_attention_step_by_step_stays(device: str, forward: Callable[..., object]) -> None:
    q, k, v, m = (torch.randn(2, 2, 16, 16, device=device) for _ in range(4))
    with torch.no_grad():
        captured = capture(Function(lambda _, *tensors: forward(*tensors)), (q, k, v, m))
    program, decisions = select_attention.select_attention(captured, Context(favour("opweave"), favour("opweave")))
    assert program.calls == captured.calls and not decisions
