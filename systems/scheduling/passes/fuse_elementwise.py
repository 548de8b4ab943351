"""Trees of elementwise operators, each compiled into one kernel by TorchInductor."""

import hashlib
import threading
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from systems.scheduling.program import Call, Input, Output, Program
from systems.scheduling.rewrite import Replacement, only_user, replace, users

from .fold_batch_norm import CONVOLUTIONS

aten = torch.ops.aten
# A fused operator that reads more tensors than this gains little and compiles slowly.
MOST_INPUTS = 16
NO_KERNEL = (aten.clone.default,)  # tagged pointwise, but there to change a layout


def fuse_elementwise(program: Program) -> Program:
    """Join every elementwise operator with those elementwise operators that compute its arguments for it alone.

    Nothing is lost for the scheduler: an operator with one reader could run beside nothing that its reader does not wait
    for. A batch norm in eval form counts as elementwise. On a GPU so does the bias of a convolution, since PyTorch adds it
    in a kernel of its own. The kernel is made by TorchInductor, once for each distinct group.
    """
    readers = users(program)
    groups = _groups(program, readers)
    replacements = []
    cuda = program.device.type == "cuda"
    for members in groups:
        biased = _convolutions_before(program, readers, members) if cuda else []
        if len(members) + len(biased) < 2:
            continue
        fused, arguments = _build(program, members, biased)
        label = "_".join(program.graph.operators[v].name for v in members)
        call = Call(fused, tuple(arguments), {}, program.calls[members[-1]].produces)
        replacements.append(Replacement(tuple(members), label, f"opweave.{fused.target}", call, {members[-1]: None}))
        replacements += [_without_bias(program, u) for u in biased]
    return replace(program, replacements)[0]


def _groups(program: Program, readers: list[list[int]]) -> list[list[int]]:
    """The trees, each in the order of capture: the last one is what others read."""
    group: dict[int, list[int]] = {}
    for v in range(len(program.graph)):
        if not is_elementwise(program, v):
            continue
        members = [v]
        for u in program.graph.predecessors[v]:
            if u in group and only_user(readers[u]) == v:
                joined = sorted([*group[u], *members])
                if len(_inputs(program, joined)) <= MOST_INPUTS:
                    members = joined
                    del group[u]
        group[v] = members
    return list(group.values())


def is_elementwise(program: Program, v: int) -> bool:
    """Does the operator compute each element of its one output from those that stand at the same place?"""
    function = program.calls[v].function
    if function is aten.batch_norm.default:
        return True
    tags = getattr(function, "tags", ())
    return (
        torch.Tag.pointwise in tags
        and torch.Tag.nondeterministic_seeded not in tags
        and function not in NO_KERNEL
        and isinstance(program.calls[v].produces, Tensor)
    )


def _inputs(program: Program, members: Sequence[int]) -> list[Any]:
    """What the group reads from outside: outputs of other operators, the model's inputs, and tensors; each once."""
    found: list[Any] = []

    def note(argument: Any) -> Any:
        inside = isinstance(argument, Output) and argument.operator in members
        if isinstance(argument, (Output, Input, Tensor)) and not inside and not any(_same(argument, f) for f in found):
            found.append(argument)
        return argument

    for v in members:
        program.calls[v].map(note)
    return found


def _same(a: Any, b: Any) -> bool:
    return a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else bool(a == b)


def _convolutions_before(program: Program, readers: list[list[int]], members: Sequence[int]) -> list[int]:
    """Convolutions with a bias that only this group reads."""
    found = []
    for argument in _inputs(program, members):
        if isinstance(argument, Output) and only_user(readers[argument.operator]) in members:
            call = program.calls[argument.operator]
            if call.function in CONVOLUTIONS and len(call.args) > 2 and isinstance(call.args[2], Tensor):
                found.append(argument.operator)
    return found


def _without_bias(program: Program, u: int) -> Replacement:
    operator, call = program.graph.operators[u], program.calls[u]
    new = Call(call.function, (*call.args[:2], None, *call.args[3:]), call.kwargs, call.produces)
    return Replacement((u,), operator.name, operator.target, new, {u: None})


class FusedElementwise:
    """One kernel for a group of elementwise operators; compiled by the first call, for the tensors it is given.

    Raises whatever TorchInductor raises.
    """

    compiled: dict[str, Callable[..., Any]] = {}  # equal groups share a kernel
    lock = threading.Lock()

    def __init__(self, module: fx.GraphModule, target: str):
        self.module, self.target = module, target
        self.kernel: Callable[..., Any] | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        kernel = self.kernel or self._compile(inputs)
        (output,) = kernel(*inputs)
        return output  # type: ignore[no-any-return]

    def _compile(self, inputs: tuple[Tensor, ...]) -> Callable[..., Any]:
        described = [(str(x.dtype), tuple(x.shape), x.stride(), str(x.device), x.data_ptr() % 16) for x in inputs]
        key = f"{self.target} {described}"
        with self.lock:  # streams of a CPU may come to equal groups at once
            if key not in self.compiled:
                with torch.no_grad():
                    self.compiled[key] = torch._inductor.compile(self.module, list(inputs))
        self.kernel = self.compiled[key]
        return self.kernel


def _build(program: Program, members: Sequence[int], biased: Sequence[int]) -> tuple[FusedElementwise, list[Any]]:
    """The group as a function of tensors alone, and the arguments to call it with."""
    graph = fx.Graph()
    arguments: list[Any] = _inputs(program, members)
    biases = [program.calls[u].args[2] for u in biased]
    for bias in biases:
        if not any(_same(bias, a) for a in arguments):
            arguments.append(bias)
    placeholders = [graph.placeholder(f"x{i}") for i in range(len(arguments))]

    def placeholder(argument: Any) -> fx.Node:
        return next(p for a, p in zip(arguments, placeholders, strict=True) if _same(a, argument))

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
    graph.output((nodes[members[-1]],))
    module = fx.GraphModule({}, graph)
    digest = hashlib.sha256(module.code.encode()).hexdigest()[:8]
    return FusedElementwise(module, f"elementwise_{digest}"), arguments
