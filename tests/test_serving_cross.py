"""Attention of an encoder-decoder over rows of a batch, beside a call for each row over keys that lie in a list."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.t5_generation import T5Shape, T5Stack, attend
from systems.serving.attention.cross import CrossAttention
from systems.serving.batch import Batch, Row
from systems.serving.layout import LayoutBuffer
from systems.serving.request import Sampling
from systems.serving.slots import Region

LAYERS, HEADS, SIZE = 2, 2, 4
SHAPE = T5Shape(LAYERS, 8, HEADS, SIZE, 8, positions=48, vocabulary=50, buckets=8, distance=16, start_token=3)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12), st.integers(1, 4)), min_size=1, max_size=5),
    block_size=st.sampled_from([0, 4]),
    seed=st.integers(0, 1000),
)
def test_rows_of_a_batch_attend_as_each_alone_does(rows: list[tuple[int, int, int]], block_size: int, seed: int) -> None:
    """rows: tokens of each one's prompt, what its decoder was fed, and what it is fed now, which begins with the prompt."""
    torch.manual_seed(seed)
    stack = T5Stack(SHAPE, is_decoder=True).double()
    most = 28  # slots of a region
    cache = torch.full((LAYERS, 2, most * len(rows), HEADS, SIZE), torch.nan, dtype=torch.float64)  # what nothing has filled
    batch: list[Row] = []
    keys: list[Tensor] = []  # of a row's every place, [2, places, heads, size]
    for i, (num_source, fed, count) in enumerate(rows):
        begin = num_source + fed if fed else 0
        tokens = (1,) * (count if fed else num_source + count)
        first = i * most
        region = Region(tuple(range(first, first + most, block_size)) if block_size else (first,), block_size or most, most)
        batch.append(Row(i, region, begin, tokens, 0, len(tokens), 0, Sampling(), num_source))
        keys.append(torch.randn(2, num_source + fed + count, HEADS, SIZE, dtype=torch.float64))
        cache[0, :, first : first + begin] = keys[-1][:, :begin]
    layout = LayoutBuffer(torch.device("cpu"), cache.shape[2], most // 4 if block_size else 1, block_size).of(
        Batch(0, tuple(batch))
    )
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
