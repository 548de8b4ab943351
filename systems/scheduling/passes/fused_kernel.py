"""A group of operators as one operator, compiled into as few kernels as TorchInductor makes of it."""

import hashlib
import threading
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from systems.scheduling.graph.program import Call, Input, Output, Program
from systems.scheduling.graph.rewrite import Replacement

aten = torch.ops.aten
# A fused operator that reads more tensors than this gains little and compiles slowly.
MOST_INPUTS = 16
VIEW = aten.view.default


class FusedKernel:
    """A group of operators as a function of tensors; compiled by the first call, for the tensors it is given.

    module: returns a tuple. A call returns its one output, or the tuple of several, none in the memory of an argument, which
    TorchInductor returns itself where nothing is to be computed. Raises whatever TorchInductor raises.
    """

    compiled: dict[str, Callable[..., Any]] = {}  # equal groups share a kernel
    lock = threading.Lock()

    def __init__(self, module: fx.GraphModule, target: str):
        self.module, self.target = module, target
        self.kernel: Callable[..., Any] | None = None
        self.lent: list[bool] | None = None  # which outputs lie in the memory of an argument

    def __call__(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        kernel = self.kernel or self._compile(inputs)
        outputs = tuple(kernel(*inputs))
        if self.lent is None:
            given = {x.untyped_storage().data_ptr() for x in inputs}
            self.lent = [x.untyped_storage().data_ptr() in given for x in outputs]
        if any(self.lent):
            outputs = tuple(x.clone() if lent else x for x, lent in zip(outputs, self.lent, strict=True))
        return outputs if len(outputs) > 1 else outputs[0]

    def _compile(self, inputs: tuple[Tensor, ...]) -> Callable[..., Any]:
        described = [(str(x.dtype), tuple(x.shape), x.stride(), str(x.device), x.data_ptr() % 16) for x in inputs]
        key = f"{self.target} {described}"
        with self.lock:  # streams of a CPU may come to equal groups at once
            if key not in self.compiled:
                with torch.no_grad():
                    self.compiled[key] = torch._inductor.compile(self.module, list(inputs))
        self.kernel = self.compiled[key]
        return self.kernel


def replacement(
    program: Program, members: Sequence[int], kind: str, kept: Sequence[int] = (), biased: Sequence[int] = ()
) -> Replacement:
    """One operator for `members` (ids, in the order of capture).

    kind: begins its target's name. kept: those of the members that others read, if not the last alone. biased: convolutions
    before them, which are to lose their bias, and which it is added to here.
    """
    kept = kept or members[-1:]
    graph = fx.Graph()
    arguments: list[Any] = inputs_of(program, members)
    biases = [program.calls[u].args[2] for u in biased]
    for bias in biases:
        if not any(same(bias, a) for a in arguments):
            arguments.append(bias)
    placeholders = [graph.placeholder(f"x{i}") for i in range(len(arguments))]

    def placeholder(argument: Any) -> fx.Node:
        return next(p for a, p in zip(arguments, placeholders, strict=True) if same(a, argument))

    nodes: dict[int, fx.Node] = {}
    for u, bias in zip(biased, biases, strict=True):
        trailing = program.calls[u].produces.dim() - 2
        shaped = graph.call_function(aten.view.default, (placeholder(bias), [-1, *[1] * trailing]))
        nodes[u] = graph.call_function(aten.add.Tensor, (placeholder(Output(u)), shaped))

    def node(argument: Any) -> Any:
        if isinstance(argument, Output) and argument.operator in nodes:
            return nodes[argument.operator]
        return placeholder(argument) if isinstance(argument, (Output, Input, Tensor)) else argument

    for v in members:
        call = program.calls[v].map(node)
        if call.function is aten.batch_norm.default:
            x, weight, bias, mean, variance, _, momentum, epsilon, _ = call.args
            normed = aten._native_batch_norm_legit_no_training.default
            outputs = graph.call_function(normed, (x, weight, bias, mean, variance, momentum, epsilon))
            nodes[v] = graph.call_function(getitem, (outputs, 0))
        else:
            nodes[v] = graph.call_function(call.function, call.args, call.kwargs)
    graph.output(tuple(nodes[v] for v in kept))
    module = fx.GraphModule({}, graph)
    fused = FusedKernel(module, f"{kind}_{hashlib.sha256(module.code.encode()).hexdigest()[:8]}")
    produced = tuple(program.calls[v].produces for v in kept)
    call = Call(fused, tuple(arguments), {}, produced if len(kept) > 1 else produced[0])
    label = "_".join(program.graph.operators[v].name for v in members if program.calls[v].function is not VIEW)
    results = {v: i if len(kept) > 1 else None for i, v in enumerate(kept)}
    return Replacement(tuple(members), label, f"opweave.{fused.target}", call, results)


def inputs_of(program: Program, members: Sequence[int]) -> list[Any]:
    """What the group reads from outside: outputs of other operators, the model's inputs, and tensors; each once."""
    found: list[Any] = []
    own = set(members)

    def note(argument: Any) -> Any:
        inside = isinstance(argument, Output) and argument.operator in own
        if isinstance(argument, (Output, Input, Tensor)) and not inside and not any(same(argument, f) for f in found):
            found.append(argument)
        return argument

    for v in members:
        program.calls[v].map(note)
    return found


def reads_tensors(program: Program, v: int) -> bool:
    """Is nothing that the operator reads from others a number, as `.item()` computes?"""
    return all(isinstance(program.value(a), Tensor) for a in program.calls[v].leaves() if isinstance(a, Output | Input))


def same(a: Any, b: Any) -> bool:
    return a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else bool(a == b)
