"""Our decoders beside transformers' classes: which parameter is which, so that both have the same weights.

Invariant: a correspondence works both ways, and names each parameter of either side once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from models.gpt import GPT, Shape

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Pair:
    """A parameter of ours and theirs.

    Args:
        ours, theirs: names.
        give: ours as theirs.
        take: theirs as ours.
    """

    ours: str
    theirs: str
    give: Callable[[Tensor], Tensor] = lambda tensor: tensor
    take: Callable[[Tensor], Tensor] = lambda tensor: tensor


def gpt_pairs(shape: Shape) -> Iterator[Pair]:
    """Of GPT and GPT2LMHeadModel."""
    kinds = (shape.heads, 3, shape.head_size)

    def give_kinds(tensor: Tensor) -> Tensor:
        """Rows by head and kind [heads x 3 x size, ...] become columns by kind and head [..., 3 x heads x size]."""
        return tensor.unflatten(0, kinds).transpose(0, 1).flatten(0, 2).t()

    def take_kinds(tensor: Tensor) -> Tensor:
        return tensor.t().unflatten(0, (3, shape.heads, shape.head_size)).transpose(0, 1).flatten(0, 2)

    yield Pair("tokens.weight", "transformer.wte.weight", lambda tensor: tensor[: shape.vocabulary])
    yield Pair("places.weight", "transformer.wpe.weight")
    for i in range(shape.layers):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
        for name, their_name in (("norm_attention", "ln_1"), ("norm_mlp", "ln_2")):
            for kind in ("weight", "bias"):
                yield Pair(f"{ours}.{name}.{kind}", f"{theirs}.{their_name}.{kind}")
        for kind in ("weight", "bias"):
            yield Pair(f"{ours}.qkv.{kind}", f"{theirs}.attn.c_attn.{kind}", give_kinds, take_kinds)
        for name, their_name in (("out", "attn.c_proj"), ("up", "mlp.c_fc"), ("down", "mlp.c_proj")):
            yield Pair(f"{ours}.{name}.weight", f"{theirs}.{their_name}.weight", Tensor.t, Tensor.t)
            yield Pair(f"{ours}.{name}.bias", f"{theirs}.{their_name}.bias")
    for kind in ("weight", "bias"):
        yield Pair(f"norm.{kind}", f"transformer.ln_f.{kind}")


def gpt_config(shape: Shape) -> PretrainedConfig:
    """Of a GPT2LMHeadModel of that size."""
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=shape.positions,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        bos_token_id=0,
        eos_token_id=0,
        architectures=["GPT2LMHeadModel"],
    )


def config_of(decoder: nn.Module) -> PretrainedConfig:
    """The configuration of the class of transformers that a decoder is. Raises TypeError where there is none."""
    if isinstance(decoder, GPT):
        return gpt_config(decoder.shape)
    raise TypeError(f"transformers has no class for {type(decoder).__name__}")


def pairs_of(decoder: nn.Module) -> Iterator[Pair]:
    """All parameters of a decoder. Raises TypeError where transformers has no class for it."""
    if isinstance(decoder, GPT):
        return gpt_pairs(decoder.shape)
    raise TypeError(f"transformers has no class for {type(decoder).__name__}")


def as_transformers(decoder: nn.Module) -> PreTrainedModel:
    """transformers' model with a decoder's weights, on its device; those that need no copy are shared."""
    from transformers import AutoModelForCausalLM

    weight = next(decoder.parameters())
    config = config_of(decoder)
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model: PreTrainedModel = auto.from_config(config, dtype=weight.dtype)
    state = decoder.state_dict()
    given = {pair.theirs: pair.give(state[pair.ours]) for pair in pairs_of(decoder)}
    missing, unexpected = model.load_state_dict(given, strict=False, assign=True)
    model.tie_weights()
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    assert not left, f"no weight was given to {left}"
    return model.eval()
