"""A softmax over keys that a thread block reads a few at a time: what is known before the first, and after each few.

Scores are powers of two, so that shares are `exp2` of them; of a key that a query does not see the score is -inf.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def empty(QUERIES: tl.constexpr, PADDED: tl.constexpr):
    """Largest scores and totals of shares, each [QUERIES], and sums of values by shares, [QUERIES, PADDED]."""
    mosts = tl.full([QUERIES], float("-inf"), tl.float32)
    totals = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, PADDED], tl.float32)
    return mosts, totals, sums


@triton.jit
def accumulated(mosts, totals, sums, scores, value, BY_PRODUCTS: tl.constexpr, PRECISION: tl.constexpr):
    """The three after more keys, of scores [QUERIES, keys] and values [keys, PADDED]. Without products QUERIES is 1."""
    highers = tl.maximum(mosts, tl.max(scores, axis=1))
    bases = tl.where(highers == float("-inf"), 0.0, highers)  # of a query that has seen no key
    shares = tl.exp2(scores - bases[:, None])
    shrinks = tl.exp2(mosts - bases)
    if BY_PRODUCTS:
        added = tl.dot(shares.to(value.dtype), value, input_precision=PRECISION)
    else:
        added = tl.sum(tl.trans(shares) * value.to(tl.float32), axis=0)[None, :]
    sums = sums * shrinks[:, None] + added
    totals = totals * shrinks + tl.sum(shares, axis=1)
    return highers, totals, sums
