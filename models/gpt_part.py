"""A part of a GPT: some of its layers (a stage of a pipeline), of each some of its heads (tensor parallelism).

Chapter 4 of the dissertation calls them inter-layer and intra-layer parallelism (section 4.3.1). The weights are those of
the whole model, whatever the parts are.

Invariant: between two blocks every part of a stage has the same hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from conf.text import counted
from models.gpt import NUM_DRAWS, PADDED_TO, PLAIN, Attention, Block, Operators, Shape, causal, draw
from models.registry import BadModel
from models.shapes import allocated, on_no_device


@dataclass(frozen=True)
class Part:
    """Which part of a model.

    Args:
        stage, num_stages: of the pipeline, each of as many layers.
        rank, degree: of the split of each layer.
    """

    stage: int = 0
    num_stages: int = 1
    rank: int = 0
    degree: int = 1

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def layers(self, num_layers: int) -> range:
        """The layers of its stage."""
        count = num_layers // self.num_stages
        return range(self.stage * count, (self.stage + 1) * count)


def check_parts(shape: Shape, num_stages: int, degree: int) -> None:
    """Raises BadModel for a model that cannot be split so."""
    if shape.layers % num_stages:
        raise BadModel(
            f"{counted(shape.layers, 'layer')} cannot make {num_stages} stages of as many each (system.pipeline_parallel)"
        )
    if shape.heads % degree:
        raise BadModel(f"{counted(shape.heads, 'head')} cannot make {degree} parts of as many each (system.tensor_parallel)")
    if degree > 1 and (NUM_DRAWS % degree or shape.hidden % NUM_DRAWS):
        raise BadModel(f"a width of {shape.hidden} is split into 1, 2, 4 or 8 parts, by 8 (system.tensor_parallel={degree})")


class Link(Protocol):
    """How a part reaches the others. A sum changes its first argument, to which it adds the second once."""

    def sum(self, x: Tensor, addend: Tensor | None = None) -> None: ...
    def gathered(self, x: Tensor) -> Tensor: ...
    def send(self, x: Tensor) -> None: ...
    def receive(self, x: Tensor) -> None: ...


class GPTPart(nn.Module):
    """A part, as a serving engine takes a decoder. Only the last stage's logits are logits.

    Args:
        shape: of the whole model.
        part: which it is.
    """

    takes_operators = True
    start_token = None  # as GPT's
    link: Link

    def __init__(self, shape: Shape, part: Part):
        super().__init__()
        self.whole, self.part = shape, part
        rows = -(-shape.vocabulary // PADDED_TO) * PADDED_TO
        if part.is_first or part.is_last:
            self.tokens = nn.Embedding(rows, shape.hidden)
        if part.is_first:
            self.places = nn.Embedding(shape.positions, shape.hidden)
        layers = part.layers(shape.layers)
        self.blocks = nn.ModuleDict({str(layer): Block(shape, part.degree) for layer in layers})  # named as the whole's
        if part.is_last:
            self.norm = nn.LayerNorm(shape.hidden)
        # What an engine holds keys and values for.
        self.shape = replace(shape, layers=len(layers), heads=shape.heads // part.degree, hidden=shape.hidden // part.degree)

    def join(self, link: Link) -> None:
        """Reach the other parts. Summands have the bias of one part alone."""
        self.link = link
        if self.part.degree == 1:
            return
        for block in self.blocks.values():
            assert isinstance(block, Block)
            for linear in (block.out, block.down):
                if self.part.rank:
                    linear.bias.data.zero_()
            block.sum_parts = link.sum

    def hidden(self, tokens: Tensor, places: Tensor, attention: Attention, operators: Operators = PLAIN) -> Tensor:
        """As GPT's, through the layers of its stage; [N, hidden] of the whole."""
        if self.part.is_first:
            x = self.tokens(tokens) + self.places(places)
        else:
            weight = next(self.blocks.parameters())
            x = torch.empty(len(tokens), self.whole.hidden, device=weight.device, dtype=weight.dtype)
            self.link.receive(x)
        addend = None
        for layer, block in enumerate(self.blocks.values()):
            x, addend = block(x, addend, layer, attention, operators)
        if self.part.is_last:
            return operators.norm(x, addend, self.norm)[1]
        x = x if addend is None else x + addend
        self.link.send(x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocabulary], each part computing its share of it. Earlier stages give back what they take."""
        if not self.part.is_last:
            return hidden
        rows = self.tokens.weight.chunk(self.part.degree)[self.part.rank]
        share = functional.linear(hidden, rows)  # [R, vocabulary / degree]
        whole = self.link.gathered(share) if self.part.degree > 1 else share
        return whole[..., : self.whole.vocabulary]


@dataclass(frozen=True)
class PartedGPT:
    """A GPT that no process has as a whole. What it computes itself, it computes a layer at a time.

    Args:
        shape: of the whole.
        device: where the parts are made, and where it computes.
        dtype: of the weights.
        seed: of the weights.
    """

    shape: Shape
    device: torch.device
    dtype: torch.dtype
    seed: int = 0

    @property
    def start_token(self) -> None:
        """As GPT's."""

    def weights(self, num_stages: int, degree: int) -> list[int]:
        """Bytes of each part, those of a stage one after another. Raises BadModel as `check_parts` does."""
        check_parts(self.shape, num_stages, degree)
        sizes = []
        for stage in range(num_stages):
            with on_no_device():
                module = GPTPart(self.shape, Part(stage, num_stages, 0, degree))
            sizes += [sum(parameter.numel() for parameter in module.parameters()) * self.dtype.itemsize] * degree
        return sizes

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits [1, S, vocabulary] of ids [1, S]."""
        return self.forward_in(tokens[0], self.dtype)[None]

    def forward_in(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Logits [S, vocabulary] of ids [S] in another precision."""
        x, addend = torch.empty(0), None
        for layer in range(self.shape.layers):
            part = made_part(self.shape, Part(layer, self.shape.layers), self.device, self.dtype, self.seed).to(dtype)
            if part.part.is_first:
                x = part.tokens(tokens)[None] + part.places.weight[: len(tokens)]
            (block,) = part.blocks.values()
            x, addend = block(x, addend, 0, causal)
        return part.logits(PLAIN.norm(x, addend, part.norm)[1])[0]


def made_part(shape: Shape, part: Part, device: str | torch.device, dtype: torch.dtype, seed: int = 0) -> GPTPart:
    """A part with the weights that `made` gives the whole, on its device; no host holds them."""
    with on_no_device():
        module = GPTPart(shape, part)
    module = allocated(module, device, dtype).eval()
    draw(module, shape, seed, part.rank, part.degree)
    return module
