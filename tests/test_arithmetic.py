"""Precisions: what PyTorch's switches say under each, and what a GPU makes of them."""

from collections.abc import Iterator

import pytest
import torch
from torch.backends import cudnn
from torch.nn import functional

from models.model import PRECISIONS, TF32
from runners.cell.arithmetic import set_arithmetic
from systems.arithmetic import without_tf32

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
products = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    before = cudnn.allow_tf32, products.allow_tf32, cudnn.benchmark
    yield
    cudnn.allow_tf32, products.allow_tf32, cudnn.benchmark = before


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_precision_sets_both_switches(precision: str) -> None:
    for algorithms in ("timed", "heuristic"):
        set_arithmetic(precision, algorithms)
        assert cudnn.allow_tf32 == (precision != "fp32") and products.allow_tf32 == (precision == "tf32_products")
        assert cudnn.benchmark == (algorithms == "timed")


def test_an_exact_comparison_leaves_the_switches_as_they_were() -> None:
    set_arithmetic("tf32_products", "timed")
    with pytest.raises(ZeroDivisionError), without_tf32():
        assert not (cudnn.allow_tf32 or products.allow_tf32 or cudnn.benchmark)
        raise ZeroDivisionError
    assert cudnn.allow_tf32 and products.allow_tf32 and cudnn.benchmark


@pytest.mark.parametrize("precision", [pytest.param(p, marks=GPU) for p in ("fp32", *TF32)])
def test_a_gpu_rounds_what_the_precision_says(precision: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(64, 512, device="cuda"), torch.randn(512, 512, device="cuda")
    image, kernel = x.view(2, 512, 4, 8), weight[:, :, None, None]
    set_arithmetic(precision, "heuristic")

    def error(out: torch.Tensor, exact: torch.Tensor) -> float:
        return ((out - exact).norm() / exact.norm()).item()

    of_product = error(x @ weight, x.double() @ weight.double())
    of_convolution = error(functional.conv2d(image, kernel), functional.conv2d(image.double(), kernel.double()))
    assert (of_product > 1e-5) == (precision == "tf32_products")
    assert (of_convolution > 1e-5) == (precision != "fp32")
    with without_tf32():
        assert error(x @ weight, x.double() @ weight.double()) < 1e-5
