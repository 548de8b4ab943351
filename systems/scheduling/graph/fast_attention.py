"""The attention of PyTorch's own modules as eager execution computes it, for a trace, which takes another way."""

import inspect
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from systems.base import Unsupported


@contextmanager
def fast_attention(module: nn.Module) -> Iterator[None]:
    """Trace attention within by what the fast paths of PyTorch's modules compute, where eager execution takes them.

    A trace takes the slow paths, which put the sequence first, and so return other strides. Their masks mean something else:
    a number that is added, where a fast path leaves out a key for each number but 0. Without a mask, and without weights,
    the fast path on a GPU runs two products around a fused attention, and only views between them.

    A third fast path, of `nn.TransformerEncoder`, chooses by the mask's data, and is Unsupported.

    Modules that other threads call meanwhile stay as they are. The caller holds `one_at_a_time`.

    Args:
        module: the one that is traced, with its hooks of now.
    """
    layers = [part for part in module.modules() if isinstance(part, nn.TransformerEncoderLayer)]
    hooked = [layer for layer in layers if any(part._forward_hooks or part._forward_pre_hooks for part in layer.modules())]

    def in_layer(self: Any, x: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, **_: Any) -> Tensor | None:
        is_fast = self not in hooked and _is_fast_layer(self, x)
        return _attend(self.self_attn, x, attn_mask, key_padding_mask)[0] if is_fast else None

    with (
        _in_place_of(nn.MultiheadAttention, "forward", _fast),
        _in_place_of(nn.TransformerEncoderLayer, "_sa_block", in_layer),
        _in_place_of(nn.TransformerEncoder, "forward", _check),
    ):
        yield


@contextmanager
def _in_place_of(kind: type[nn.Module], name: str, own: Callable[..., Any]) -> Iterator[None]:
    """Have this thread call `own` first, with the arguments by name, and the method itself where that returns None."""
    thread, slow = threading.get_ident(), getattr(kind, name)
    signature = inspect.signature(slow)

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            if (returned := own(**bound.arguments)) is not None:
                return returned
        return slow(self, *args, **kwargs)

    setattr(kind, name, method)
    try:
        yield
    finally:
        setattr(kind, name, slow)


def _is_switched_on() -> bool:
    return torch.backends.mha.get_fastpath_enabled() and not torch.is_autocast_enabled()


def _fast(
    self: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    need_weights: bool,
    attn_mask: Tensor | None,
    average_attn_weights: bool,
    **_: Any,
) -> tuple[Tensor, Tensor | None] | None:
    """What the fast path returns; None where eager execution does not take it, by torch 2.11's and 2.15's conditions."""
    is_batched = self.batch_first and query is key is value and query.dim() == 3
    has_others = self.in_proj_bias is None or self.bias_k is not None or self.add_zero_attn
    is_logical = all(mask is None or mask.dtype is torch.bool for mask in (attn_mask, key_padding_mask))
    is_eval = not self.training and _is_switched_on()
    if not (is_batched and is_logical and is_eval) or has_others or self.num_heads % 2:
        return None
    return _attend(self, query, attn_mask, key_padding_mask, need_weights, average_attn_weights)


def _is_fast_layer(self: nn.TransformerEncoderLayer, x: Tensor) -> bool:
    """Does eager execution take this layer's fast path, unless it has hooks? By torch 2.11's and 2.15's conditions."""
    attention = self.self_attn
    is_eval = x.dim() == 3 and not self.training and _is_switched_on()
    is_alike = self.norm1.eps == self.norm2.eps and attention._qkv_same_embed_dim and attention.in_proj_bias is not None
    return bool(
        is_eval and is_alike and attention.batch_first and attention.num_heads % 2 == 0 and self.activation_relu_or_gelu
    )


def _check(
    self: nn.TransformerEncoder, src: Tensor, mask: Tensor | None, src_key_padding_mask: Tensor | None, **_: Any
) -> None:
    """Raise Unsupported where eager execution packs what its mask leaves, and returns zeros elsewhere."""
    is_packed = getattr(self, "use_nested_tensor", False) and src.dim() == 3 and _is_switched_on()
    if is_packed and mask is None and src_key_padding_mask is not None and not self.layers[0].training:
        reason = "its nn.TransformerEncoder chooses by the data of src_key_padding_mask what to run"
        raise Unsupported(f"{reason}: set use_nested_tensor = False there")


def _attend(
    self: nn.MultiheadAttention,
    x: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    need_weights: bool = False,
    is_averaged: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The attention of [batch, sequence, features], of the same shape, and the weights; a mask leaves out what is not 0."""
    if not x.numel():
        return torch.empty_like(x), None
    heads = (*x.shape[:2], self.num_heads, self.head_dim)
    parts = linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
    query, key, value = (part.view(heads).transpose(1, 2) for part in parts)
    mask, kind = self.merge_masks(attn_mask, key_padding_mask, x)
    weights = None
    if mask is None and not need_weights:
        attended = scaled_dot_product_attention(query, key, value)
    else:
        scores = (query * (1 / math.sqrt(self.head_dim))) @ key.transpose(2, 3)  # [batch, heads, sequence, sequence]
        if mask is not None:
            left_out = mask if kind == 2 else mask[:, None, None]
            scores = scores.masked_fill(left_out.bool(), -math.inf)
        weights = scores.softmax(-1)
        attended = weights @ value
    out = linear(attended.transpose(1, 2).reshape(x.shape), self.out_proj.weight, self.out_proj.bias)
    if weights is not None and is_averaged:
        weights = weights.mean(1)
    return out, weights if need_weights else None
