"""A program whose operators change tensors in place, or draw random numbers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from .operator_graph import OperatorGraph
from .program import Call, Program


class StatefulProgram(Program):
    """A Program with effects; the state of its graph says in which order they have to come.

    changed: the tensors that outlive a run and that it writes: parameters, buffers, an optimizer's moments. random: it draws
    from the default generator of its device.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        calls: Sequence[Call],
        outputs: Sequence[Any],
        output_spec: TreeSpec,
        examples: tuple[Tensor, ...],
        changed: Sequence[Tensor],
        random: bool,
    ):
        super().__init__(graph, calls, outputs, output_spec, examples)
        self.changed, self.random = tuple(changed), random

    @contextmanager
    def undone(self) -> Iterator[None]:
        """What runs of the program change within, the random state among it, is as before afterwards."""
        device = self.device
        kept = [t.detach().clone() for t in self.changed]
        try:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                yield
        finally:
            with torch.no_grad():
                for t, value in zip(self.changed, kept, strict=True):
                    t.copy_(value)
