"""A captured model that runs one operator at a time: an OperatorGraph with its callables and arguments."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from conf.text import counted
from systems.training.restore import restored

from .derived import Derivations
from .effects import tensors_written
from .operator_graph import OperatorGraph


@dataclass(frozen=True)
class Output:
    """An argument that another operator computes.

    Args:
        operator: Its id.
        index: Among several outputs; None for the only one.
    """

    operator: int
    index: int | None = None


@dataclass(frozen=True)
class Input:
    """An argument that is an input of the model, by its number."""

    index: int


@dataclass(frozen=True)
class Call:
    """How one operator is executed: `function(*args, **kwargs)`.

    Args:
        args, kwargs: With Output and Input in the place of tensors.
        produces: What it returns, with tensors on the meta device in the place of real ones (shape, dtype, strides).
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    produces: Any = None

    @cached_property
    def launch(self) -> Callable[[Sequence[Any], Sequence[Tensor]], Any]:
        """The call as a function of `values` (the outputs so far, one slot an operator) and of the model's inputs.

        It is compiled once from Python source: a search for Outputs and Inputs in the arguments of every call would take as
        long as launching a kernel.
        """
        names: dict[str, object] = {"function": self.function}
        arguments = [_source(a, names) for a in self.args]
        arguments += [_keyword(name, _source(a, names)) for name, a in self.kwargs.items()]
        function: Callable[..., Any] = eval(f"lambda values, inputs: function({', '.join(arguments)})", names)
        return function

    def leaves(self) -> list[Any]:
        """Its arguments in order, with the elements of lists, tuples and dicts in their places."""
        return list(self._flat)

    @cached_property
    def _flat(self) -> tuple[Any, ...]:
        return tuple(_leaves((self.args, self.kwargs)))  # once: passes ask for them again and again

    def references(self) -> list["Output"]:
        """The Outputs among its arguments, in order."""
        return [a for a in self._flat if isinstance(a, Output)]

    def map(self, change: Callable[[Any], Any]) -> "Call":
        """This call with `change` applied to every leaf of its arguments: all but lists, tuples and dicts."""
        return Call(self.function, _map(change, self.args), _map(change, self.kwargs), self.produces)


class Program:
    """A model as operators.

    Invariant: a program holds no state of a run. The executors pass `inputs` and `values` (one slot an operator), so that
    several runs of one program can go on side by side.

    Args:
        graph: The operators and their dependencies.
        calls: One for each operator. Parameters, buffers and constants among the arguments are the module's own tensors.
        outputs: Of the model, flat: Output, Input or constant.
        output_spec: Their structure.
        examples: The inputs that it was captured with.
        derived: The tensors that a rewriting pass has computed from the module's.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        calls: Sequence[Call],
        outputs: Sequence[Any],
        output_spec: TreeSpec,
        examples: tuple[Tensor, ...],
        derived: Derivations | None = None,
    ):
        self.graph = graph
        self.calls = tuple(calls)
        self.outputs = tuple(outputs)
        self.returns = Call(lambda *values: values, self.outputs, {})
        self.output_spec = output_spec
        self.examples = examples
        self.derived = derived or Derivations()
        self._signatures: dict[int, str] = {}  # that were asked for

    @cached_property
    def changed(self) -> tuple[Tensor, ...]:
        """The tensors that outlive a run and that it writes: buffers of the module, such as a static cache."""
        tensors = (t for call in self.calls for t in tensors_written(call.function, call.args, call.kwargs))
        return tuple({id(t): t for t in tensors}.values())

    def rewinding(self) -> Callable[[], None]:
        """What sets the integers that runs change back to their values of now: places in a cache, and counters.

        Measuring takes many runs in a row, which would lead beyond the end of a cache.
        """
        integers = [(t, t.detach().clone()) for t in self.changed if not (t.is_floating_point() or t.is_complex())]

        @torch.no_grad()
        def rewind() -> None:
            for tensor, value in integers:
                tensor.copy_(value)

        return rewind

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Restore on exit what runs of the program within have changed; nothing where it changes nothing."""
        if not self.changed:
            yield
            return
        device = self.device
        with restored(self.changed, [device] if device.type == "cuda" else []):
            yield

    @cached_property
    def device(self) -> torch.device:
        """The device of its inputs; without inputs, of the tensors that it is bound to or, without those, makes."""
        if self.examples:
            return self.examples[0].device
        leaves = [leaf for call in self.calls for leaf in call.leaves()]
        tensors = (leaf.device for leaf in leaves if isinstance(leaf, Tensor))
        makes = (leaf for leaf in leaves if isinstance(leaf, torch.device))
        return next(itertools.chain(tensors, makes), torch.device("cpu"))

    def value(self, reference: Any) -> Any:
        """What is known of an argument before a run.

        Returns:
            For an Output, the tensor on the meta device that its operator returns; for an Input, its example; else the
            argument itself.
        """
        if isinstance(reference, Output):
            produced = self.calls[reference.operator].produces
            return produced if reference.index is None or produced is None else produced[reference.index]
        return self.examples[reference.index] if isinstance(reference, Input) else reference

    def signature(self, operator: int) -> str:
        """What the operator does, in whichever program: target, constants, and shapes, dtypes and strides of its tensors."""
        if (known := self._signatures.get(operator)) is None:
            known = self._signatures[operator] = self._signed(operator)
        return known

    def _signed(self, operator: int) -> str:
        call = self.calls[operator]
        arguments = [_sign(self.value(a)) for a in _leaves(call.args)]
        keywords = [f"{name}={_sign(self.value(a))}" for name, value in call.kwargs.items() for a in _leaves(value)]
        return f"{self.graph.operators[operator].target}({', '.join(arguments + keywords)})"

    def execute(self, operator: int, values: Sequence[Any], inputs: Sequence[Tensor]) -> Any:
        """Run one operator on the outputs of its producers in `values`; returns its output."""
        return self.calls[operator].launch(values, inputs)

    def result(self, values: Sequence[Any], inputs: Sequence[Tensor]) -> list[Any]:
        """The model's outputs, flat."""
        return list(self.returns.launch(values, inputs))

    def unflatten(self, outputs: Sequence[Any]) -> Any:
        """The model's outputs in the structure that its module returns."""
        return tree_unflatten(list(outputs), self.output_spec)

    def check(self, inputs: Sequence[Any]) -> None:
        """Raise ValueError unless `inputs` have the captured shapes, dtypes and device, and memory of their own."""
        check_inputs(inputs, self.examples)
        if self.changed:
            written = {tensor.untyped_storage().data_ptr() for tensor in self.changed}
            for i, x in enumerate(inputs):
                if x.untyped_storage().data_ptr() in written:
                    raise ValueError(f"input {i} lies in a buffer that the module writes: pass a copy of it")

    @torch.no_grad()
    def run(self, inputs: Sequence[Tensor], each: Callable[[int, Any], None] | None = None) -> list[Any]:
        """Run all operators in the order of capture, on the caller's thread and stream.

        Invariant: `values[u]` is alive from u's run to the run of its last consumer (its live range).

        Args:
            each: Called with (id, output) after each operator.
        """
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
        """For each operator, the operators whose live range ends with it, in the order of capture."""
        outlive = self.kept_operators()
        last = list(range(len(self.graph)))
        for u, v in self.graph.edges:
            last[u] = max(last[u], v)
        out: list[list[int]] = [[] for _ in last]
        for u, v in enumerate(last):
            if u not in outlive:
                out[v].append(u)
        return out

    def kept_operators(self) -> set[int]:
        """Operators whose output is an output of the model."""
        return {o.operator for o in self.outputs if isinstance(o, Output)}


def check_inputs(inputs: Sequence[Any], examples: Sequence[Tensor]) -> None:
    """Raise ValueError unless `inputs` have the shapes, dtypes, device and layout of `examples`: a copy would broadcast."""
    if len(inputs) != len(examples):
        raise ValueError(f"prepared for {counted(len(examples), 'input')}, called with {len(inputs)}")
    for i, (x, example) in enumerate(zip(inputs, examples, strict=True)):
        if not isinstance(x, Tensor):
            raise ValueError(f"input {i} is a {type(x).__name__}, not a tensor")
        if x.shape != example.shape or x.dtype != example.dtype or x.device != example.device or x.layout != example.layout:
            raise ValueError(f"input {i} is {describe(x)}, but this was prepared for {describe(example)}: prepare it again")
        if lazy := lazily(x):
            raise ValueError(f"input {i} is {lazy}")


def lazily(x: Tensor) -> str:
    """What of a tensor is not in its memory, which kernels read as it lies, and what helps; "" for nothing."""
    if x.is_conj():
        return "conjugated by a flag alone: pass x.resolve_conj()"
    return "negated by a flag alone: pass x.resolve_neg()" if x.is_neg() else ""


def describe(x: Any) -> str:
    """The name of an input in a message."""
    if not isinstance(x, Tensor):
        return f"a {type(x).__name__}"
    layout = "" if x.layout is torch.strided else f"{str(x.layout).removeprefix('torch.')} "
    return f"{layout}{str(x.dtype).removeprefix('torch.')}{list(x.shape)} on {x.device}"


def _source(argument: object, names: dict[str, object]) -> str:
    """Python source for an argument. A leaf that is neither an Output nor an Input gets a name in `names`."""
    if isinstance(argument, Output):
        return f"values[{argument.operator}]" + ("" if argument.index is None else f"[{argument.index}]")
    if isinstance(argument, Input):
        return f"inputs[{argument.index}]"
    if isinstance(argument, tuple):
        return f"({''.join(_source(a, names) + ', ' for a in argument)})"
    if isinstance(argument, list):
        return f"[{', '.join(_source(a, names) for a in argument)}]"
    if isinstance(argument, dict):
        return f"{{{', '.join(f'{key!r}: {_source(a, names)}' for key, a in argument.items())}}}"
    names[name := f"constant_{len(names)}"] = argument
    return name


def _keyword(name: str, source: str) -> str:
    """Python source for an argument by name; some of PyTorch's operators call one `from`."""
    return f"**{{{name!r}: {source}}}" if iskeyword(name) else f"{name}={source}"


def _map(change: Callable[[Any], Any], argument: Any) -> Any:
    if isinstance(argument, (list, tuple)):
        return type(argument)([_map(change, a) for a in argument])
    if isinstance(argument, dict):
        return {key: _map(change, a) for key, a in argument.items()}
    return change(argument)


def _leaves(argument: Any) -> list[Any]:
    if isinstance(argument, dict):
        argument = tuple(argument.values())
    if isinstance(argument, (list, tuple)):
        return [leaf for a in argument for leaf in _leaves(a)]
    return [argument]


def _sign(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    strides = "" if value.is_contiguous() else f"/{list(value.stride())}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{strides}"
