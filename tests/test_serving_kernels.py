"""Kernels of serving beside what PyTorch computes, in Triton's interpreter and on a GPU."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from interpreted import interpreted
from test_serving_engine import GPU, telling

from systems.serving.batch import Batch, Row
from systems.serving.layout import LayoutBuffer, Room
from systems.serving.request import Sampling
from systems.serving.slots import Region


def poisoned(*size: int, **options: Any) -> torch.Tensor:
    return torch.full(size, float("nan"), **options)


def fused_differs(device: str, dtype: torch.dtype) -> list[float]:
    """The largest difference of the fused attention from the split one, for several mixes of rows, of values near 1."""
    from systems.serving.attention import fused, split  # Triton reads TRITON_INTERPRET when it is imported

    differences = []
    kv_heads, size, num_slots = 2, 24, 400
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    mixes = [(0, 1, 0)], [(0, 70, 0), (99, 1, 0), (5, 3, 0)], [(0, 9, 4), (30, 1, 6)], [(64, 1, 0), (90, 30, 0)]
    increments = [(150, 1, 0), (2, 1, 0), (47, 1, 20)]  # one of them has a part that is padding alone
    layouts = [*((mix, size) for mix, size in zip((mixes[0], *mixes), (0, 8, 8, 0, 8), strict=True))]
    layouts += [(increments, 0), (increments, 8), ([(0, 8, 4), (3, 1, 6), (200, 1, 0)], 8)]
    cuts = fused.Cut(16, 3, 4, 2, False, 16), fused.Cut(32, 4, 4, 1, True, 32), None
    for number, (mix, block_size) in enumerate(layouts):
        group = 3 if number % 2 else 1
        begin, rows = 0, []
        for before, count, padding in mix:
            num = -(-(before + count) // 8) * 8
            blocks = range(begin, begin + num, block_size) if block_size else (begin,)
            region = Region(tuple(reversed(blocks)), block_size or num, num)
            rows.append(Row(0, region, before, (0,) * count, padding, count, 0, Sampling()))
            begin += num
        layouts_of = LayoutBuffer(torch.device(device), num_slots, 50 if block_size else 1, block_size)
        batch = Batch(0, tuple(rows))
        layout = layouts_of.of(batch)
        numbers, sizes = layouts_of.filled_up(batch, Room.of(batch.num_tokens + 9, len(rows) + 1))
        filled_up = layouts_of.layout(torch.from_numpy(numbers).to(device), sizes, has_prompts=True)
        num_tokens = sum(count for _, count, _ in mix)
        k, v = draw(num_tokens, kv_heads, 2, size).unbind(-2)
        q = draw(num_tokens, group * kv_heads, size)
        caches = [draw(2, num_slots + 1, kv_heads, size)]
        caches.append(caches[0].clone())
        for kernels, cache in zip((split, fused), caches, strict=True):
            kernels.store(k, v, cache, layout)
        assert torch.equal(*caches)
        expected = split.attend(q, caches[0].repeat_interleave(group, dim=2), layout)
        for cut in (cuts[number % 2], *cuts[2:][: number in (2, 5)]):  # the second needs the tickets that the first leaves
            differences.append(float((expected - fused.attend(q, caches[0], layout, cut)).abs().max()))
            assert not layout.tickets.any()
        q = torch.cat([q, q[:1].expand(9, -1, -1)])  # of no row
        with patch.object(torch, "empty", poisoned):
            output = fused.attend(q, caches[0], filled_up)
        differences.append(float((expected - output[:num_tokens]).abs().max()))
        assert output[num_tokens:].isnan().all()  # written by nobody
    return differences


def product_differs(device: str, dtype: torch.dtype, is_early: bool = False) -> list[float]:
    """The largest difference of products of one token from PyTorch's, of values near 1, of widths that no strip divides."""
    from systems.serving import gemv

    torch.manual_seed(0)
    differences = []
    for width, num_rows, has_norm, strip in (
        (48, 50, True, (4, 32, 4)),
        (20, 7, False, (2, 64, 1)),
        (64, 9, True, (1, 16, 2)),
    ):
        linear, norm = torch.nn.Linear(width, num_rows, has_norm), torch.nn.LayerNorm(width)
        torch.nn.init.normal_(norm.weight)
        linear, norm = (module.to(device, dtype).requires_grad_(False) for module in (linear, norm))
        x, addend = torch.randn(1, width).to(device, dtype) * 3 + 1, torch.randn(1, num_rows).to(device, dtype)
        expected = linear.double()(norm.double()(x.double()) if has_norm else x.double())
        if has_norm:
            expected = torch.nn.functional.gelu(expected, approximate="tanh")
        linear, norm = linear.to(dtype), norm.to(dtype)
        output = gemv.product(x, linear, norm if has_norm else None, addend, has_norm, is_early, gemv.Strip(*strip))
        differences.append(float((output - expected - addend).abs().max()))
    return differences


def as_two_parts(x: torch.Tensor, addend: torch.Tensor | None) -> None:
    """The sum of two parts that are alike."""
    x.mul_(2)
    if addend is not None:
        x.add_(addend)


def operators_differ(device: str, dtype: torch.dtype, is_early: bool = False) -> list[float]:
    """The largest difference of a model's hidden state by our kernels from that by PyTorch, of values near 1."""
    from systems.serving.operators import KernelOperators

    module = telling(dtype, device)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.linspace(-0.5, 0.5, len(parameter), device=device, dtype=dtype))
    differences = []
    for count, sum_parts in ((1, None), (3, None), (1, as_two_parts), (3, as_two_parts)):
        for block in module.blocks:
            block.sum_parts = sum_parts
        tokens, places = torch.arange(count, device=device), torch.arange(count, device=device)
        plain, own = (
            module.hidden(tokens, places, lambda layer, q, k, v: q * 0.5 + v, *operators)
            for operators in ((), (KernelOperators(is_early),))
        )
        differences.append(float((plain - own).abs().max()))
    return differences


@pytest.mark.slow
def test_kernels_are_what_pytorch_computes_in_tritons_interpreter() -> None:
    of_float32 = "('cpu', torch.float32)"
    calls = f"test.fused_differs{of_float32}, test.product_differs{of_float32}, test.operators_differ{of_float32}"
    attention, products, operators = interpreted("test_serving_kernels", f"[{calls}]")
    assert len(attention) == 18 and all(d < 1e-5 for d in attention), attention  # and none is NaN
    assert len(products) == 3 and all(d < 1e-5 for d in products), products
    assert len(operators) == 4 and all(0 < d < 1e-4 for d in operators), operators


@pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=GPU) for d in (torch.float32, torch.float16, torch.bfloat16)], ids=str
)
def test_fused_attention_is_the_split_one(dtype: torch.dtype) -> None:
    differences = fused_differs("cuda", dtype)
    most = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert all(d < most for d in differences), differences


@pytest.mark.parametrize("is_early", [pytest.param(value, marks=GPU) for value in (False, True)])
def test_products_of_one_token_are_pytorchs(is_early: bool) -> None:
    differences = product_differs("cuda", torch.float16, is_early)
    assert all(d < 1e-2 for d in differences), differences
    differences = operators_differ("cuda", torch.float32, is_early)
    assert all(d < 1e-3 for d in differences), differences
