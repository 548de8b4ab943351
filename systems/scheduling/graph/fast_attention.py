"""The attention of PyTorch's own modules as eager execution computes it, for a trace, which takes another way."""

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

ALIGNED = 8  # numbers of a head, of which the fast path's fused kernels take a multiple


@contextmanager
def fast_attention() -> Iterator[None]:
    """Trace `nn.MultiheadAttention` within by what its fast path runs on a GPU, where eager execution takes that.

    A trace takes the slow path, which copies what the products return, and what attention returns. The fast path is one
    call, `torch._native_multi_head_attention`. It runs two products around a fused attention, and only views between them.
    With a mask it runs others, and the trace stays as it is.

    Modules that other threads call meanwhile stay as they are. The caller holds `one_at_a_time`.
    """
    thread, slow = threading.get_ident(), nn.MultiheadAttention.forward
    signature = inspect.signature(slow)

    def forward(self: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if threading.get_ident() == thread:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            if _is_fast(**bound.arguments):
                return _attend(self, bound.arguments["query"]), None
        return slow(self, *args, **kwargs)

    nn.MultiheadAttention.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.MultiheadAttention.forward = slow  # type: ignore[method-assign]


def _is_fast(
    self: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    need_weights: bool,
    attn_mask: Tensor | None,
    **_: Any,
) -> bool:
    """Does eager execution run no more than two products and an attention? torch 2.11's and 2.15's conditions."""
    is_plain = not need_weights and key_padding_mask is None and attn_mask is None
    is_batched = self.batch_first and query is key is value and query.dim() == 3
    has_others = self.in_proj_bias is None or self.bias_k is not None or self.add_zero_attn
    return (
        is_plain
        and is_batched
        and not has_others
        and not self.training
        and self.num_heads % 2 == 0
        and self.head_dim % ALIGNED == 0
        and torch.backends.mha.get_fastpath_enabled()
        and not torch.is_autocast_enabled()
    )


def _attend(self: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """[batch, sequence, features] to the same."""
    heads = (*x.shape[:2], self.num_heads, self.head_dim)
    parts = linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
    query, key, value = (part.view(heads).transpose(1, 2) for part in parts)
    attended = scaled_dot_product_attention(query, key, value)
    return linear(attended.transpose(1, 2).reshape(x.shape), self.out_proj.weight, self.out_proj.bias)
