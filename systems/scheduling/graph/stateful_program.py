"""A program whose operators change tensors in place, or draw random numbers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec

from systems.training.restore import restored

from .operator_graph import OperatorGraph
from .program import Call, Program


class StatefulProgram(Program):
    """A Program with effects: operators write tensors in place, or draw random numbers.

    Invariant: any two operators with a hazard between them (RAW, WAR, WAW) on the graph's state are ordered by a path of the
    graph, as `OperatorGraph.with_state` makes it. A run in any order of the graph then has the effects of the order of
    capture.

    Args:
        changed: The tensors that outlive a run and that it writes: parameters, buffers, an optimizer's moments.
        random: It draws from the default generator of its device.
        num_forward: Of a step of training, the operators up to the loss, the first ones in the order of capture.
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
        num_forward: int = 0,
    ):
        super().__init__(graph, calls, outputs, output_spec, examples)
        self.__dict__["changed"] = tuple(changed)  # in the place of what the calls show: an optimizer's are its own
        self.random, self.num_forward = random, num_forward

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Restore on exit what runs of the program within have changed, the random state included."""
        device = self.device
        with restored(self.changed, [device] if device.type == "cuda" else []):
            yield
