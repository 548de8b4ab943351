"""Buffers that a module writes in a forward pass, such as a static K/V cache: the new values go where the old ones lie.

Invariant: the operator that writes a buffer depends on every operator that reads the old value (WAR), and what reads the new
value depends on it (RAW). Both are data dependencies, so any schedule that keeps those is right about the buffer too.

1. A new value, or an output of the module, that lies in a written buffer is a copy of what lies there: one more reader.
2. An operator that alone reads the buffer, and makes the new value, writes in place: a cache is not copied in each step.
3. Else the new value is copied at the end. The outputs of the old value's readers are further arguments of the copy.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from .effects import copy_back, is_view
from .operator_graph import Operator, OperatorGraph
from .program import Call, Output, Program

CLONE = torch.ops.aten.clone.default


def write_back(program: Program, buffers: Sequence[Tensor]) -> Program:
    """The program that leaves the new values of buffers in them.

    Args:
        program: functional; its first outputs are the new values, in the order of the buffers.
        buffers: of the module. None shares memory with another: torch.export refuses such a module.
    """
    program = _copied(program, buffers)
    operators, calls = list(program.graph.operators), list(program.calls)
    values, outputs = program.outputs[: len(buffers)], program.outputs[len(buffers) :]
    for buffer, value in zip(buffers, values, strict=True):
        readers = _readers(program, buffer)
        writer = value.operator if isinstance(value, Output) else None
        in_place = _in_place(program.calls[writer], buffer) if writer is not None and readers == [writer] else None
        if writer is not None and in_place is not None and not _returns(program, writer, outputs):
            calls[writer] = replace(calls[writer], function=in_place)
            operators[writer] = Operator(writer, in_place._schema.name.split("::")[1], str(in_place))
        else:
            name = copy_back.__name__
            operators.append(Operator(len(calls), name, f"opweave.{name}"))
            produces = torch.empty_strided(buffer.shape, buffer.stride(), dtype=buffer.dtype, device="meta")
            calls.append(Call(copy_back, (buffer, value, *_outputs_of(program, readers)), {}, produces))
    graph = OperatorGraph(operators, [[o.operator for o in call.references()] for call in calls])
    return Program(graph, calls, outputs, program.output_spec, program.examples, program.derived)


def _copied(program: Program, buffers: Sequence[Tensor]) -> Program:
    """The program with copies in the place of outputs that lie in the buffers' memory."""
    memories = {_memory(buffer) for buffer in buffers}
    readers = {v for buffer in buffers for v in _readers(program, buffer)}

    def lies_there(output: Any) -> bool:
        if isinstance(output, Tensor):
            return _memory(output) in memories
        return isinstance(output, Output) and output.operator in readers and is_view(program.calls[output.operator].function)

    operators, calls, outputs = list(program.graph.operators), list(program.calls), list(program.outputs)
    for i, output in enumerate(program.outputs):
        if lies_there(output):
            outputs[i] = Output(len(calls))
            operators.append(Operator(len(calls), "clone", str(CLONE)))
            calls.append(Call(CLONE, (output,), {}, torch.empty_like(program.value(output), device="meta")))
    graph = OperatorGraph(operators, [[o.operator for o in call.references()] for call in calls])
    return Program(graph, calls, outputs, program.output_spec, program.examples, program.derived)


def _readers(program: Program, buffer: Tensor) -> list[int]:
    """Operators that read the buffer's memory, through views of it too, in the order of capture."""
    memory, readers, views = _memory(buffer), [], set[int]()
    for v, call in enumerate(program.calls):
        leaves = call.leaves()
        reads = any(isinstance(leaf, Tensor) and _memory(leaf) == memory for leaf in leaves)
        if reads or any(isinstance(leaf, Output) and leaf.operator in views for leaf in leaves):
            readers.append(v)
            if is_view(call.function):
                views.add(v)
    return readers


def _in_place(call: Call, buffer: Tensor) -> OpOverload | None:
    """The operator that does in place what `call` makes of the buffer, its first argument; None where there is none."""
    if not isinstance(call.function, OpOverload) or not call.args or call.args[0] is not buffer:
        return None
    namespace, _, name = call.function._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    overload = getattr(packet, call.function._overloadname, None)
    if overload is None:
        return None
    own, functional = overload._schema.arguments, call.function._schema.arguments
    is_alike = [a.name for a in own] == [a.name for a in functional] and own[0].alias_info is not None
    return overload if is_alike and own[0].alias_info.is_write else None


def _returns(program: Program, writer: int, outputs: Sequence[Any]) -> bool:
    """Would the module return the buffer itself, in which the next call writes?"""
    aliases = {writer}
    for v, call in enumerate(program.calls):
        if is_view(call.function) and any(o.operator in aliases for o in call.references()):
            aliases.add(v)
    return any(isinstance(o, Output) and o.operator in aliases for o in outputs)


def _outputs_of(program: Program, operators: Sequence[int]) -> list[Output]:
    """One output of each operator."""
    produced = [program.calls[v].produces for v in operators]
    return [Output(v, 0 if isinstance(p, list | tuple) else None) for v, p in zip(operators, produced, strict=True)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
