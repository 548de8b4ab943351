"""What passes cost in fp16 and bf16: against the module in fp64, no more than a small multiple of eager's own error."""

import copy
from functools import cache

import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from rewriting import COUNTING, Function, batch_norm, image, tokens
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from runners.measurements.correctness import relative_error
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.scheduling.graph.rewrite import replace
from systems.scheduling.passes.fold_batch_norm import fold_batch_norm
from systems.scheduling.passes.fuse_convolution import fuse_convolution
from systems.scheduling.passes.fuse_elementwise import fuse_elementwise
from systems.scheduling.passes.fuse_reductions import fuse_reductions
from systems.scheduling.passes.merge_linears import merge_linears
from systems.scheduling.passes.select_kernels import select_kernels
from systems.scheduling.passes.select_products import select_products
from systems.scheduling.plans.merge import merge

HALVES = [torch.float16, torch.bfloat16]
MULTIPLE = 2.0  # one rounding in the place of another costs as much; a third one costs 1.3 times two


@torch.no_grad()
def costs_little(module: nn.Module, program: Program, x: Tensor) -> bool:
    """Is the program as near to fp64 as eager in the program's precision is, but for the multiple?"""
    exact = tree_leaves(copy.deepcopy(module).double()(x.double()))
    eager, rewritten = tree_leaves(module(x)), program.run((x,))
    errors = [(relative_error(r, e), relative_error(o, e)) for r, o, e in zip(rewritten, eager, exact, strict=True)]
    return all(of_program <= MULTIPLE * max(of_eager, torch.finfo(x.dtype).eps / 4) for of_program, of_eager in errors)


@cache
def normed(dtype: torch.dtype) -> tuple[Function, Program]:
    """A convolution with a batch norm, captured once: a program reads the module's weights where they lie."""
    module = Function(lambda p, x: p["norm"](p["conv"](x)), conv=nn.Conv2d(4, 16, 3), norm=batch_norm(16)).eval().to(dtype)
    return module, capture(module, (image().to(dtype),))


@examples(60)
@given(dtype=st.sampled_from(HALVES), exponent=st.floats(-7, 3), seed=st.integers(0, 1000))
def test_folding_costs_what_eager_does_or_is_left_out_and_told(dtype: torch.dtype, exponent: float, seed: int) -> None:
    """Whatever the size of gamma, with which folded weights become denormal or leave the range of fp16."""
    torch.manual_seed(seed)
    module, captured = normed(dtype)
    module.parts["conv"].reset_parameters()  # type: ignore[operator]
    with torch.no_grad():
        for vector in module.parts["norm"].parameters():
            vector.uniform_(0.5, 2).mul_(10**exponent)
    program, (decision,) = fold_batch_norm(captured, COUNTING)
    assert costs_little(module, program, image().to(dtype))
    assert decision.chosen == "folded" or not -2 < exponent < 3
    assert (decision.chosen == "separate") == ("folded" in decision.reasons)


@pytest.mark.parametrize("dtype", HALVES)
def test_what_the_other_passes_make_costs_what_eager_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads = {name: nn.Linear(8, 8) for name in "qkv"}
    attention = Function(lambda p, x: [p[name](x) for name in "qkv"], **heads).eval().to(dtype)
    branches = {f"conv{k}": nn.Conv2d(4, 6, k, padding=k // 2) for k in (1, 3, 5)}
    convolutions = Function(lambda p, x: [p[name](x) for name in branches], **branches).eval().to(dtype)
    x, image_ = tokens().to(dtype), image().to(dtype)
    for run in (merge_linears, select_products):
        assert costs_little(attention, run(capture(attention, (x,)), COUNTING)[0], x)
    captured = capture(convolutions, (image_,))
    merged = merge(captured, [(0,), (1,), (2,)])
    assert merged is not None
    for program in (select_kernels(captured, COUNTING)[0], replace(captured, [merged])[0]):
        assert costs_little(convolutions, program, image_)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_cpu_has_no_fused_convolution_in_half_precision(dtype: torch.dtype) -> None:
    """PyTorch has no such operator with a residual in bf16, and on many CPUs none in fp16."""
    torch.manual_seed(0)
    convs = {name: nn.Conv2d(4, 4, 3, padding=1) for name in "ab"}
    module = Function(lambda p, x: p["b"](p["a"](x).relu()).add(x).relu(), **convs).eval()
    image_ = image()
    assert [d.chosen for d in fuse_convolution(capture(module, (image_,)), COUNTING)[1]] == ["fused"] * 2
    module, image_ = module.to(dtype), image_.to(dtype)
    assert costs_little(module, fuse_convolution(capture(module, (image_,)), COUNTING)[0], image_)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_fused_costs_no_more_than_eager(dtype: torch.dtype) -> None:
    """A fused kernel computes in fp32 and rounds once, where eager rounds after each operator."""
    torch.manual_seed(0)
    module = Function(
        lambda p, x: p["norm"](x.sigmoid() * x + 3 * x).softmax(-1).log() + x.tanh() * 0.3, norm=nn.LayerNorm(8)
    )
    module, x = module.eval().to(dtype), tokens().to(dtype)
    for run in (fuse_elementwise, fuse_reductions):
        assert costs_little(module, run(capture(module, (x,)), COUNTING)[0], x)
