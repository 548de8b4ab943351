"""A group of operators as one operator, compiled into as few kernels as TorchInductor makes of it."""

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from systems.preparing import TRITONS_FOLDER, variable_kept

from .patterns import ADDITION, BATCH_NORM, VIEW
from .program import Call, Input, Output, Program
from .rewrite import Replacement

Strides: TypeAlias = tuple[tuple[int, ...], ...]
MAX_INPUTS = 16  # tensors that a fused operator reads; with more it gains little and compiles slowly


@dataclass(frozen=True)
class Compiled:
    """A group for tensors that lie in one way.

    Attributes:
        strides: of its inputs.
        kernel: the inputs -> the outputs.
        copied: of each output the strides of its copy; None where it is none.
    """

    strides: Strides
    kernel: Callable[..., Any]
    copied: tuple[tuple[int, ...] | None, ...]


class FusedKernel:
    """A group of operators as a function of tensors; a call compiles it for tensors that lie as no call's did before.

    A part of a program that is measured alone can read what lies otherwise in memory than in the whole. A call returns the
    one output, or a tuple of several. None lies in the memory of an argument: where nothing is to be computed,
    TorchInductor returns an argument itself, and that is copied. So is a view of what it computed, where the group's last
    operator changes nothing: outputs lie as was planned for inputs that do.

    Args:
        module: the group; it returns a tuple.
        target: what the operator is called in signatures.
        planned: the strides of the inputs, and of the outputs for those; None where nothing was planned.
        options: TorchInductor's.

    Raises:
        Exception: whatever TorchInductor raises, by the first call.
    """

    compiled: dict[str, Callable[..., Any]] = {}  # equal groups share a kernel
    lock = threading.Lock()

    def __init__(
        self,
        module: fx.GraphModule,
        target: str,
        planned: tuple[Strides, Strides] | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ):
        self.module, self.target, self.planned, self.options = module, target, planned, {**options}
        self.latest: Compiled | None = None  # one reference, which streams of a CPU may replace at once

    def __call__(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        latest, strides = self.latest, tuple(x.stride() for x in inputs)
        if latest is not None and latest.strides == strides:
            outputs = tuple(latest.kernel(*inputs))
        else:
            kernel = self._compile(inputs)
            outputs = tuple(kernel(*inputs))
            addresses = {x.untyped_storage().data_ptr() for x in inputs}
            inputs_as_planned, wanted = self.planned or (None, ())
            if inputs_as_planned != strides:  # nothing is known of the outputs
                wanted = tuple(x.stride() for x in outputs)
            copied = tuple(
                stride if x.untyped_storage().data_ptr() in addresses or _lies_otherwise(x, stride) else None
                for x, stride in zip(outputs, wanted, strict=True)
            )
            latest = Compiled(strides, kernel, copied)
            self.latest = latest
        if any(stride is not None for stride in latest.copied):
            outputs = tuple(
                x if stride is None else torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)
                for x, stride in zip(outputs, latest.copied, strict=True)
            )
        return outputs if len(outputs) > 1 else outputs[0]

    def _compile(self, inputs: tuple[Tensor, ...]) -> Callable[..., Any]:
        tensors = [(str(x.dtype), tuple(x.shape), x.stride(), str(x.device), x.data_ptr() % 16) for x in inputs]
        key = f"{self.target} {tensors}"
        with self.lock:  # streams of a CPU may come to equal groups at once
            if key not in self.compiled:
                # Kernels of this project that other processes have compiled would be compiled again elsewhere.
                with torch.no_grad(), variable_kept(TRITONS_FOLDER):
                    self.compiled[key] = torch._inductor.compile(self.module, list(inputs), self.options)
        return self.compiled[key]


def _lies_otherwise(x: Tensor, strides: tuple[int, ...]) -> bool:
    """Is an element of it elsewhere than by these strides?"""
    places = zip(x.shape, x.stride(), strides, strict=True)
    return x.numel() > 0 and any(size > 1 and own != other for size, own, other in places)


def fuse(
    program: Program,
    members: Sequence[int],
    kind: str,
    outputs: Sequence[int] = (),
    biased: Sequence[int] = (),
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Replacement:
    """One operator in the place of `members`.

    Args:
        members: ids, in the order of capture.
        kind: the beginning of the new operator's target.
        outputs: the members that others read; by default the last alone.
        biased: convolutions before the members that lose their bias, which is added here.
        options: TorchInductor's.
    """
    outputs = outputs or members[-1:]
    graph = fx.Graph()
    arguments: list[Any] = inputs_of(program, members)
    biases = [program.calls[u].args[2] for u in biased]
    for bias in biases:
        if not any(_is_same(bias, a) for a in arguments):
            arguments.append(bias)
    placeholders = [graph.placeholder(f"x{i}") for i in range(len(arguments))]

    def placeholder(argument: Any) -> fx.Node:
        return next(p for a, p in zip(arguments, placeholders, strict=True) if _is_same(a, argument))

    nodes: dict[int, fx.Node] = {}
    for u, bias in zip(biased, biases, strict=True):
        num_trailing = program.calls[u].produces.dim() - 2
        shaped = graph.call_function(VIEW, (placeholder(bias), [-1, *[1] * num_trailing]))  # [K, 1, 1]
        nodes[u] = graph.call_function(ADDITION, (placeholder(Output(u)), shaped))

    def node(argument: Any) -> Any:
        if isinstance(argument, Output) and argument.operator in nodes:
            return nodes[argument.operator]
        return placeholder(argument) if isinstance(argument, (Output, Input, Tensor)) else argument

    for v in members:
        call = program.calls[v].map(node)
        if call.function is BATCH_NORM:
            x, weight, bias, mean, variance, _, momentum, epsilon, _ = call.args
            norm = torch.ops.aten._native_batch_norm_legit_no_training.default
            normed = graph.call_function(norm, (x, weight, bias, mean, variance, momentum, epsilon))
            nodes[v] = graph.call_function(getitem, (normed, 0))
        else:
            nodes[v] = graph.call_function(call.function, call.args, call.kwargs)
    graph.output(tuple(nodes[v] for v in outputs))
    module = fx.GraphModule({}, graph)
    produced = tuple(program.calls[v].produces for v in outputs)
    planned = tuple(program.value(a).stride() for a in arguments), tuple(x.stride() for x in produced)
    code = f"{module.code}{dict(options) or ''}"
    kernel = FusedKernel(module, f"{kind}_{hashlib.sha256(code.encode()).hexdigest()[:8]}", planned, options)
    call = Call(kernel, tuple(arguments), {}, produced if len(outputs) > 1 else produced[0])
    name = "_".join(program.graph.operators[v].name for v in members if program.calls[v].function is not VIEW)
    results = {v: i if len(outputs) > 1 else None for i, v in enumerate(outputs)}
    return Replacement(tuple(members), name, f"opweave.{kernel.target}", call, results)


def inputs_of(program: Program, members: Sequence[int]) -> list[Any]:
    """What the group reads from outside, each once: outputs of other operators, the model's inputs, and tensors."""
    arguments: list[Any] = []
    own = set(members)

    def note(argument: Any) -> Any:
        is_inside = isinstance(argument, Output) and argument.operator in own
        is_read = isinstance(argument, (Output, Input, Tensor)) and not is_inside
        if is_read and not any(_is_same(argument, a) for a in arguments):
            arguments.append(argument)
        return argument

    for v in members:
        program.calls[v].map(note)
    return arguments


def _is_same(a: Any, b: Any) -> bool:
    return a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else bool(a == b)
