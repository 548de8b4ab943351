"""A graph that Dynamo has traced, as a backend of torch.compile calls it: some of its arguments are bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_, itemgetter
from typing import Any, TypeAlias

from torch import Tensor, nn

from .scheduled import Scheduled

# Of a module and its inputs: the executor, and the tensors that outlive a call and that a call writes.
Prepare: TypeAlias = Callable[[nn.Module, tuple[Tensor, ...]], tuple[Scheduled, Sequence[Tensor]]]


class DynamoGraph:
    """A function of all arguments of the graph, of which a call copies only those that are not bound.

    Invariant: what is bound is in every call the tensor itself. Where a call has another in its place (the caller's own
    argument may be a parameter, and an attribute may be assigned anew), that one is bound if the graph writes it; else it is
    an input from then on.

    Args:
        graph: of tensors, with no parameter or buffer of its own.
        arguments: as the first call has them.
        bound: the numbers of those that are parameters and buffers.
        prepare: what makes an executor of a module.
    """

    def __init__(self, graph: Callable[..., Any], arguments: Sequence[Tensor], bound: Sequence[int], prepare: Prepare):
        self.graph, self.prepare = graph, prepare
        self._bind(arguments, bound)

    def __call__(self, *arguments: Tensor) -> Any:
        if not all(map(is_, self._bound_of(arguments), self.tensors)):
            before = self.prepared
            is_same = dict(zip(self.bound, map(is_, self._bound_of(arguments), self.tensors), strict=True))
            self._bind(arguments, [i for i in self.bound if is_same[i] or i in self.written])
            before.close()
        return self.prepared(*self._inputs_of(arguments))

    def _bind(self, arguments: Sequence[Tensor], bound: Sequence[int]) -> None:
        bound_of = _taking(bound)
        inputs_of = _taking([i for i in range(len(arguments)) if i not in set(bound)])
        tensors = bound_of(arguments)
        module = Bound(self.graph, dict(zip(bound, tensors, strict=True)))
        self.prepared, changed = self.prepare(module, inputs_of(arguments))
        self.bound, self.tensors, self._bound_of, self._inputs_of = bound, tensors, bound_of, inputs_of
        self.written = {i for i, x in zip(bound, tensors, strict=True) if any(x is each for each in changed)}


class Bound(nn.Module):
    """A function with some of its arguments fixed.

    Args:
        function: of tensors.
        tensors: in the place of its arguments of these numbers; they are parameters and buffers, which it may write.
    """

    def __init__(self, function: Callable[..., Any], tensors: Mapping[int, Tensor]):
        super().__init__()
        self.function, self.names = function, {i: f"argument_{i}" for i in tensors}
        for i, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(self.names[i], tensor)
            else:
                self.register_buffer(self.names[i], tensor, persistent=False)

    def forward(self, *inputs: Tensor) -> Any:
        rest = iter(inputs)
        count = len(self.names) + len(inputs)
        return self.function(*(getattr(self, self.names[i]) if i in self.names else next(rest) for i in range(count)))


def _taking(places: Sequence[int]) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]]:
    """What takes the arguments of these numbers: of many in a third of the time that a loop takes."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda arguments: tuple(arguments[i] for i in places)
