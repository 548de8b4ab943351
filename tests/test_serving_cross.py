"""Attention of an encoder-decoder over rows of a batch, beside a call for each row over keys that lie in a list."""

import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from interpreted import interpreted
from torch import Tensor

from models.t5_generation import T5Shape, T5Stack, attend
from systems.serving.attention.cross import CrossAttention
from systems.serving.batch import Batch, Row
from systems.serving.layout import Layout, LayoutBuffer
from systems.serving.request import Sampling
from systems.serving.slots import Region

LAYERS, HEADS, SIZE = 2, 2, 4
MOST = 28  # slots of a region
SHAPE = T5Shape(LAYERS, 8, HEADS, SIZE, 8, positions=48, vocabulary=50, buckets=8, distance=16, start_token=3)


def laid_out(rows: list[tuple[int, int, int]], block_size: int, device: str) -> tuple[Layout, int]:
    """A layout of what rows are fed, and the slots of all regions, which follow each other.

    rows: tokens of each one's prompt, what its decoder was fed, and what it is fed now, which begins with the prompt.
    """
    batch = []
    for i, (num_source, fed, count) in enumerate(rows):
        begin = num_source + fed if fed else 0
        tokens = (1,) * (count if fed else num_source + count)
        first = i * MOST
        region = Region(tuple(range(first, first + MOST, block_size)) if block_size else (first,), block_size or MOST, MOST)
        batch.append(Row(i, region, begin, tokens, 0, len(tokens), 0, Sampling(), num_source))
    num_slots = MOST * len(rows)
    buffer = LayoutBuffer(torch.device(device), num_slots, MOST // block_size if block_size else 1, block_size)
    return buffer.of(Batch(0, tuple(batch))), num_slots


@examples(60)
@given(
    rows=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12), st.integers(1, 4)), min_size=1, max_size=5),
    block_size=st.sampled_from([0, 4]),
    seed=st.integers(0, 1000),
)
def test_rows_of_a_batch_attend_as_each_alone_does(rows: list[tuple[int, int, int]], block_size: int, seed: int) -> None:
    """rows: as `laid_out` has them."""
    torch.manual_seed(seed)
    stack = T5Stack(SHAPE, is_decoder=True).double()
    layout, num_slots = laid_out(rows, block_size, "cpu")
    cache = torch.full((LAYERS, 2, num_slots, HEADS, SIZE), torch.nan, dtype=torch.float64)  # what nothing has filled
    keys: list[Tensor] = []  # of a row's every place, [2, places, heads, size]
    for i, (num_source, fed, count) in enumerate(rows):
        keys.append(torch.randn(2, num_source + fed + count, HEADS, SIZE, dtype=torch.float64))
        begin = num_source + fed if fed else 0
        cache[0, :, i * MOST : i * MOST + begin] = keys[-1][:, :begin]
    attention = CrossAttention(cache, layout)
    encoded = [i for i, (_, fed, _) in enumerate(rows) if not fed]
    if encoded:
        attention.keep(0, *torch.cat([keys[i][:, : rows[i][0]] for i in encoded], 1))
    own = [keys[i][:, -count:] for i, (_, _, count) in enumerate(rows)]
    queries = torch.randn(sum(count for *_, count in rows), HEADS, SIZE, dtype=torch.float64)
    with torch.no_grad():
        decoded = attention.decode(0, queries, *torch.cat(own, 1), stack.bias)
        across = attention.across(0, queries)
        at = 0
        for (num_source, _, count), (k, v) in zip(rows, keys, strict=True):
            q = queries[at : at + count]
            places = torch.arange(len(k) - num_source)
            relative = places[None] - places[-count:, None]
            bias = stack.bias(relative).masked_fill(relative > 0, float("-inf"))
            torch.testing.assert_close(decoded[at : at + count], attend(q, k[num_source:], v[num_source:], bias))
            torch.testing.assert_close(across[at : at + count], attend(q, k[:num_source], v[:num_source], None))
            at += count


MIXES = (  # as `laid_out` has rows
    [(5, 3, 1)],
    [(9, 0, 1), (3, 7, 1), (1, 0, 4)],
    [(2, 9, 1), (17, 1, 1), (70, 130, 1)],
    [(150, 0, 2), (64, 0, 1), (7, 90, 1), (65, 0, 18)],
)


def fused_differs(device: str, dtype: torch.dtype) -> list[float]:
    """The largest difference of the two kernels from CrossAttention, for several mixes of rows, of values near 1."""
    from unittest.mock import patch

    from systems.serving.attention.cross_fused import FusedCrossAttention, Tables

    torch.manual_seed(0)
    heads, size, num_positions = 3, 24, 260
    shape = T5Shape(1, 8, heads, size, 8, num_positions, vocabulary=50, buckets=32, distance=128)
    encoder, decoder = (T5Stack(shape, is_decoder).to(device, dtype).requires_grad_(False) for is_decoder in (False, True))
    tables, differences = Tables(num_positions), []
    with patch(f"{__name__}.MOST", 256):
        for number, mix in enumerate(MIXES):
            layout, num_slots = laid_out(mix, 16 * (number % 2), device)
            cache = torch.randn(1, 2, num_slots + 1, heads, size).to(device, dtype)
            copied = cache.clone()
            ours, theirs = FusedCrossAttention(cache, layout, tables), CrossAttention(copied, layout)
            assert torch.equal(ours.sources, theirs.sources) and torch.equal(ours.targets, theirs.targets)
            num_sources, num_targets = len(ours.sources), len(ours.targets)
            pairs = []
            q, k, v = torch.randn(3, num_sources, heads, size).to(device, dtype)
            if num_sources:
                pairs.append([each.encode(q, k, v, encoder.bias) for each in (ours, theirs)])
                for each in (ours, theirs):
                    each.keep(0, k, v)
            q, k, v = torch.randn(3, num_targets, heads, size).to(device, dtype)
            pairs.append([each.decode(0, q, k, v, decoder.bias) for each in (ours, theirs)])
            assert torch.equal(cache, copied)
            pairs.append([each.across(0, q) for each in (ours, theirs)])
            differences += [float((mine - other).abs().max()) for mine, other in pairs]
    return differences


@pytest.mark.slow
def test_kernels_attend_as_the_calls_do_in_tritons_interpreter() -> None:
    differences = interpreted("test_serving_cross", "test.fused_differs('cpu', torch.float32)")
    assert len(differences) == 10 and all(d < 1e-5 for d in differences)  # and none is NaN


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_attend_as_the_calls_do(dtype: torch.dtype) -> None:
    most = 1e-4 if dtype is torch.float32 else 1e-2
    assert all(d < most for d in fused_differs("cuda", dtype))
