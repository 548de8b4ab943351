"""Attention by each kernel that the library has for it: its own choice among them goes by a fixed order."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from systems.scheduling.graph.program import Call, Program

from .attention_places import AttentionPlace

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
ALIGNED = 8  # numbers of a head are a multiple of it: 16 bytes


def _flash(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> Tensor:
    out: Tensor = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, False, scale=scale)[0]
    return out


def _efficient(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> Tensor:
    out: Tensor = aten._scaled_dot_product_efficient_attention(query, key, value, None, False, 0.0, is_causal, scale=scale)[
        0
    ]
    return out


def _cudnn(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> Tensor:
    out: Tensor = aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, False, 0.0, is_causal, False, scale=scale
    )[0]
    return out


KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor, bool, float], Tensor]] = {
    "flash": _flash,
    "efficient": _efficient,
    "cudnn": _cudnn,
}


@dataclass(frozen=True)
class LibraryAttention:
    """softmax(scale * query @ key.T) @ value, of each head, in half precision.

    Args:
        name: of KERNELS.
        scale: of the scores.
        is_causal: query i sees keys 0 to i alone.
        is_moved: the output is returned as [N, queries, heads, D].
    """

    name: str
    scale: float
    is_causal: bool
    is_moved: bool

    @property
    def target(self) -> str:
        """Its name as an operator of a program."""
        words = ["causal"] * self.is_causal + ["moved"] * self.is_moved
        return f"opweave.{self.name}_attention[{', '.join([f'scale {self.scale:.9g}', *words])}]"

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Args:
        query, key, value: [N, heads, tokens, D].
        """
        out = KERNELS[self.name](query, key, value, self.is_causal, self.scale)
        return out.transpose(1, 2) if self.is_moved else out


def library_attentions(program: Program, place: AttentionPlace) -> dict[str, Call]:
    """The library's kernels for a place, by their names; none where one of them might not take it."""
    query, key, value = (program.value(a) for a in (place.query, place.key, place.value))
    is_taken = (
        program.device.type == "cuda"
        and query.dtype in HALF
        and place.mask is None
        and query.shape[:2] == key.shape[:2]
        and key.shape == value.shape
        and key.shape[3] % ALIGNED == 0
        and (not place.is_causal or query.shape == key.shape)  # of other lengths, each starts the diagonal elsewhere
    )
    calls = dict[str, Call]()
    for name in KERNELS if is_taken else ():
        function = LibraryAttention(name, place.scale, place.is_causal, place.is_moved)
        if function(query, key, value).stride() == place.produces.stride():
            calls[name] = Call(function, (place.query, place.key, place.value), {}, place.produces)
    return calls
