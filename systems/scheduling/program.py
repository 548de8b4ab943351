"""A captured model that can be run one operator at a time: an OperatorGraph with its callables and arguments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from .operator_graph import OperatorGraph


@dataclass(frozen=True)
class Output:
    """An argument that operator `operator` computes; `index` selects one of several outputs."""

    operator: int
    index: int | None = None


@dataclass(frozen=True)
class Input:
    """An argument that is the model's input number `index`."""

    index: int


@dataclass(frozen=True)
class Call:
    """How one operator is executed: `function(*args, **kwargs)`, with Output and Input in place of tensors."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Program:
    """A model as operators. Parameters, buffers and constants are the module's own tensors, not copies.

    Holds no state of a run: the executors pass `inputs` and `values` (one slot an operator), so that several runs of one
    program can go on side by side.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        calls: Sequence[Call],
        outputs: Sequence[Any],
        output_spec: TreeSpec,
        examples: tuple[Tensor, ...],
    ):
        self.graph = graph
        self.calls = tuple(calls)
        self.outputs = tuple(outputs)  # Output, Input, or a constant
        self.output_spec = output_spec
        self.examples = examples

    def bind(self, tensors: dict[int, Tensor]) -> "Program":
        """This program with some inputs fixed: input i becomes the tensor `tensors[i]` itself, the others move up."""
        free = [i for i in range(len(self.examples)) if i not in tensors]
        references: list[Any] = [tensors.get(i) for i in range(len(self.examples))]
        for place, i in enumerate(free):
            references[i] = Input(place)
        calls = [
            Call(c.function, _resolve(c.args, None, references), _resolve(c.kwargs, None, references)) for c in self.calls
        ]
        outputs = [_resolve(o, None, references) for o in self.outputs]
        return Program(self.graph, calls, outputs, self.output_spec, tuple(self.examples[i] for i in free))

    def execute(self, operator: int, values: Sequence[Any], inputs: Sequence[Tensor]) -> Any:
        """Run one operator on what its producers left in `values`; returns its output."""
        call = self.calls[operator]
        return call.function(*_resolve(call.args, values, inputs), **_resolve(call.kwargs, values, inputs))

    def result(self, values: Sequence[Any], inputs: Sequence[Tensor]) -> list[Any]:
        """The model's outputs, flat."""
        return [_resolve(o, values, inputs) for o in self.outputs]

    def unflatten(self, outputs: Sequence[Any]) -> Any:
        """The model's outputs in the structure that its module returns them in."""
        return tree_unflatten(list(outputs), self.output_spec)

    def check(self, inputs: Sequence[Any]) -> None:
        """Raise ValueError unless `inputs` have the shapes, dtypes and device that this program was captured for."""
        check_inputs(inputs, self.examples)

    @torch.no_grad()
    def run(self, inputs: Sequence[Tensor], each: Callable[[int, Any], None] | None = None) -> list[Any]:
        """Run all operators in the order of capture, on the caller's thread and stream; `each(id, output)` after each."""
        values: list[Any] = [None] * len(self.graph)
        last = self.last_consumers()
        for v in range(len(self.graph)):
            values[v] = self.execute(v, values, inputs)
            if each is not None:
                each(v, values[v])
            for u in last[v]:
                values[u] = None
        return self.result(values, inputs)

    def last_consumers(self) -> list[list[int]]:
        """For each operator the operators whose output nobody needs after it, in the order of capture."""
        kept = self.kept_operators()
        last = list(range(len(self.graph)))
        for u, v in self.graph.edges:
            last[u] = max(last[u], v)
        out: list[list[int]] = [[] for _ in last]
        for u, v in enumerate(last):
            if u not in kept:
                out[v].append(u)
        return out

    def kept_operators(self) -> set[int]:
        """Operators whose output is an output of the model."""
        return {o.operator for o in self.outputs if isinstance(o, Output)}


def check_inputs(inputs: Sequence[Any], examples: Sequence[Tensor]) -> None:
    """Raise ValueError unless `inputs` have the shapes, dtypes and device of `examples`: a copy would broadcast or cast."""
    if len(inputs) != len(examples):
        raise ValueError(f"prepared for {len(examples)} inputs, called with {len(inputs)}")
    for i, (x, example) in enumerate(zip(inputs, examples, strict=True)):
        if not isinstance(x, Tensor):
            raise ValueError(f"input {i} is a {type(x).__name__}, not a tensor")
        if (x.shape, x.dtype, x.device) != (example.shape, example.dtype, example.device):
            raise ValueError(
                f"input {i} is {_describe(x)}, but this was prepared for {_describe(example)}: prepare it again"
            )


def _describe(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)} on {x.device}"


def _resolve(argument: Any, values: Sequence[Any] | None, inputs: Sequence[Any]) -> Any:
    """`argument` with every Output (unless `values` is None) and Input in it replaced by what it stands for."""
    if isinstance(argument, Output):
        if values is None:
            return argument
        value = values[argument.operator]
        return value if argument.index is None else value[argument.index]
    if isinstance(argument, Input):
        return inputs[argument.index]
    if isinstance(argument, tuple):
        return tuple(_resolve(a, values, inputs) for a in argument)
    if isinstance(argument, list):
        return [_resolve(a, values, inputs) for a in argument]
    if isinstance(argument, dict):
        return {key: _resolve(a, values, inputs) for key, a in argument.items()}
    return argument
