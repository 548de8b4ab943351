"""Kernels of matrix products: against PyTorch in fp64, and in the programs in which their pass puts them."""

from importlib import import_module
from typing import Any

import pytest
import torch
from drawing import examples
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D
from triton_cases import ACTS, acts, dense_kernels, device_with_kernels, favour

from systems.profiling.intensity import work
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.scheduling.passes import own_kernels, select_products
from systems.scheduling.passes.context import Context

device = device_with_kernels


@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    after = draw(acts)
    num_cores = draw(st.sampled_from([1, 30, 140]))
    is_half, has_activation = dtype is not torch.float32, after != "none"
    tiles = products.tiles_of(num_rows, outputs, features, precision, num_cores, is_half, has_activation)
    assume(tiles)
    tile = draw(st.sampled_from(tiles))
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


@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    after = draw(acts)
    gemv = rows_products.Gemv(draw(st.sampled_from(rows_products.strips_of(features))), after)
    expected = ACTS[after](functional.linear(x.double(), weight.double(), bias.double() if has_bias else None))
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


@pytest.mark.parametrize("tile", [pytest.param((16, 16, 32), marks=pytest.mark.slow), (64, 64, 32), (128, 64, 32)])
@pytest.mark.parametrize("features", [40, pytest.param(700, marks=pytest.mark.slow), 3000])
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


def test_a_gelu_in_half_precision_is_the_nearest_number_or_its_neighbour(device: str) -> None:
    """The kernel's formula is coarser than fp32, and no coarser than what 16 bits hold, in the tails too."""
    x = torch.linspace(-12, 12, 4096, device=device).to(torch.float16).view(256, 16)
    product, tile = import_module("systems.kernels.product").Product, dense_kernels().DenseTile(16, 16, 16, 4, 3)
    out = product("tf32", tile, "gelu")(x, torch.eye(16, device=device, dtype=torch.float16), None, None)
    torch.testing.assert_close(out.double(), functional.gelu(x.double()), rtol=2.0**-10, atol=2.0**-24)


def test_a_product_that_fills_the_gpu_is_left_to_the_library(device: str) -> None:
    tiles_of = import_module("systems.kernels.product").tiles_of
    for precision in ("tf32", "tf32x3"):
        assert tiles_of(128, 512, 512, precision, 132) and tiles_of(1, 1, 1, precision, 132)
    assert not tiles_of(4096, 3072, 768, "tf32", 132) and not tiles_of(4096, 3072, 768, "tf32", 132, True)
    assert not tiles_of(128, 28672, 4096, "tf32", 132)
    assert tiles_of(128, 28672, 4096, "tf32", 132, True)  # few rows of half precision, for which it reads a large weight
    assert tiles_of(4096, 3072, 768, "tf32x3", 132)  # a library takes no tensor cores for it
    assert tiles_of(4096, 3072, 768, "tf32", 132, True, True)  # and leaves an activation to another kernel


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


@pytest.mark.parametrize("num_rows", [1, 5])
def test_a_product_takes_in_the_activation_that_alone_reads_it(device: str, num_rows: int) -> None:
    module, x = Perceptron().eval().to(device), torch.randn(1, num_rows, 32, device=device)
    with torch.no_grad():
        program = capture(module, (x,))
    cost = favour("opweave.gemv" if num_rows == 1 else "opweave.product")
    program, _ = select_products.select_products(program, Context(cost, cost))
    own = [operator.target for operator in program.graph.operators if operator.target.startswith("opweave")]
    afters = [
        next((after for after in ("gelu", "sigmoid", "gelu_tanh") if f"[after {after}, " in target), "none")
        for target in own
    ]
    assert afters == ["gelu", "none", "sigmoid", "gelu_tanh"]
    assert sum(work(program, v)[0] for v in range(len(program.graph)) if "opweave" in program.graph.operators[v].target) == (
        4 * 2 * num_rows * 32 * 32
    )
    with torch.no_grad():
        torch.testing.assert_close(program.run((x,))[0], module(x), rtol=1e-4, atol=1e-4)


class Transposed(nn.Module):
    """GPT-2's perceptron: products of matrices with views around them, and GELU written in eight operators."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Conv1D(64, 32), Conv1D(32, 64)
        self.activation = NewGELUActivation()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.activation(self.first(x)))
        return y


@pytest.mark.parametrize("num_rows", [1, 5])
def test_a_product_takes_in_an_activation_of_several_operators(device: str, num_rows: int) -> None:
    torch.manual_seed(0)
    module, x = Transposed().eval().to(device), torch.randn(1, num_rows, 32, device=device)
    with torch.no_grad():
        program = capture(module, (x,))
    cost = favour("opweave.gemv" if num_rows == 1 else "opweave.product")
    program, decisions = select_products.select_products(program, Context(cost, cost))
    names = [operator.name for operator in program.graph.operators]
    assert names == ["view", "addmm", "view", "addmm", "view"] and decisions[0].pattern.endswith("then gelu_tanh")
    with torch.no_grad():
        torch.testing.assert_close(program.run((x,))[0], module(x), rtol=1e-3, atol=1e-3)


class Followed(nn.Module):
    """Products with an activation that products alone read, one of them as a view; that a sum reads; that a caller sees."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b, c, d, e = self.parts
        y = b(a(x).relu()).relu()
        z = c(y.flatten(0, 1)).relu() + 1.0
        return d(z).relu(), e(z)


def test_an_activation_counts_where_it_would_be_a_kernel_of_its_own(device: str) -> None:
    module, x = Followed().eval().to(device), torch.randn(2, 5, 32, device=device)
    with torch.no_grad():
        captured = capture(module, (x,))

    def cost(program: Program) -> float:
        """An activation as long as a product, and our own kernels a little longer than a product."""
        return sum(1.5 if operator.target.startswith("opweave") else 1.0 for operator in program.graph.operators)

    program, decisions = select_products.select_products(captured, Context(cost, cost))
    are_apart = [d.pattern.endswith("then relu") for d in decisions]
    assert are_apart == [True, True, False, False, False]
    assert [d.chosen not in select_products.WAYS for d in decisions] == are_apart
    assert [len(d.operators) for d in decisions] == [2, 2, 1, 1, 1]
    with torch.no_grad():
        for got, expected in zip(program.run((x,)), module(x), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_view_whose_last_element_lies_far_away_is_left_to_the_library() -> None:
    near = torch.empty(1, device="meta").as_strided((4, 8, 64, 64), (2**20, 4096, 64, 1))
    far = torch.empty(1, device="meta").as_strided((4, 8, 64, 64), (2**30, 4096, 64, 1))
    assert own_kernels.is_plain(near) and not own_kernels.is_plain(far)
