"""What an iteration costs a stage of a model in parts, from the measured costs of one part and of what goes between parts.

Nothing of it is a measurement of the whole: a simulation with it is labelled as such.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from .batch import Batch
from .costs import CostTable
from .parts import Parts
from .reductions import Reductions

SUMS = 2  # of a layer: of attention's output, and of the MLP's


@dataclass(frozen=True)
class StageCosts:
    """Of one model under one split.

    Args:
        device: that the part was measured on.
        gpu_bytes: of its memory.
        precision: of the weights.
        shape: of the whole model: layers, hidden, heads, positions, vocabulary.
        parts: how it is split.
        token_bytes: of a token's hidden state.
        table: seconds of the last stage's first part alone, its logits included; nothing is summed or sent in them. Each
            stage is taken to cost as much, and delays are shorter by the logits of another.
        reductions: None where they were not measured, as on a single GPU.
        delay_parts: split of the model of few layers that says how much later tokens are back from processes than from one.
            None: the table's delays are those of the part alone.
        commit: of the code that measured them; None where nothing names it, or the code differed from it.
    """

    device: str
    gpu_bytes: int
    precision: str
    shape: tuple[int, ...]
    parts: Parts
    token_bytes: int
    table: CostTable
    reductions: Reductions | None
    delay_parts: Parts | None = None
    commit: str | None = None

    def __call__(self, batch: Batch) -> float:
        """Seconds of one stage for an iteration: its part, and the sums of its layers."""
        seconds = self.table(batch)
        if self.parts.tensor > 1:
            assert self.reductions is not None, "a split of layers needs them"
            num_layers = self.shape[0] // self.parts.pipeline
            seconds += SUMS * num_layers * self.reductions(batch.num_tokens * self.token_bytes, self.parts.tensor)
        return seconds

    def delay(self, batch: Batch) -> float:
        """As the table's."""
        return self.table.delay(batch)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


class Alone:
    """A link of a part without others: what it would take from them is there at once.

    It takes random numbers, as large as a layer's: products of zeros take less power, and so less time.

    degree: parts that there would be.
    """

    def __init__(self, degree: int):
        self.degree = degree

    def sum(self, x: Tensor, addend: Tensor | None = None) -> None:
        """Nothing is added: what a sum adds takes its own time."""

    def gathered(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.degree, -1)

    def send(self, x: Tensor) -> None:
        """To nobody."""

    def receive(self, x: Tensor) -> None:
        x.normal_()
