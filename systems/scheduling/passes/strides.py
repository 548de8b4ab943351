"""What becomes of a program where operators return tensors that lie otherwise in memory, as views of a larger one do."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from systems.base import Unsupported
from systems.scheduling.graph.capture import on_meta
from systems.scheduling.graph.effects import READERS_AT_AN_OFFSET, READERS_OF_MEMORY, is_view
from systems.scheduling.graph.part import part
from systems.scheduling.graph.program import Call, Output, Program

RETURNED: dict[tuple[torch.device, tuple[bool, bool], str], Any] = {}  # by device, cuDNN's settings and signature
IMAGES = {4: torch.channels_last, 5: torch.channels_last_3d}


class Refusal:
    """Stands for the output of an operator that does not take the strides of its inputs."""


@torch.no_grad()
def with_strides(program: Program, outputs: dict[int, Tensor]) -> Program | None:
    """`program` where some operators return tensors with the strides of `outputs`, and their readers return accordingly.

    Each operator that reads other strides than before runs once, alone, since its kernel chooses the strides of its output.

    Returns:
        None where a reader cannot take the strides, or where an output of the model would have others.
    """
    calls, returned, changed = list(program.calls), program.kept_operators(), set[int]()
    elsewhere = {*outputs}  # what may lie at another offset of its memory
    random = [program.device] if program.device.type == "cuda" else []
    with torch.random.fork_rng(devices=random):
        for v in range(min(outputs), len(calls)):
            if not elsewhere.isdisjoint(program.graph.producers[v]):
                if calls[v].function in READERS_AT_AN_OFFSET:
                    return None
                if is_view(calls[v].function):
                    elsewhere.add(v)
            value: Any = outputs.get(v)
            if value is None:
                if changed.isdisjoint(program.graph.producers[v]):
                    continue
                if calls[v].function in READERS_OF_MEMORY:
                    return None
                value = _returned(_with_calls(program, calls), v)
                if isinstance(value, Refusal):
                    return None
            if _strides(value) == _strides(calls[v].produces):
                continue
            if v in returned:
                return None
            calls[v] = replace(calls[v], produces=value)
            changed.add(v)
    return _with_calls(program, calls)


def _returned(program: Program, v: int) -> Any:
    """What operator v returns, on the meta device, or a Refusal. It runs once in a process for each signature."""
    cudnn = torch.backends.cudnn
    key = program.device, (cudnn.enabled, cudnn.deterministic), program.signature(v)
    if key not in RETURNED:
        try:
            reader = part(program, [v])
            RETURNED[key] = on_meta(reader.execute(0, [None], reader.examples))
        except torch.OutOfMemoryError:
            return Refusal()  # another time there may be enough
        except (RuntimeError, ValueError, Unsupported):  # a view that spans two strides, or what reads a number
            RETURNED[key] = Refusal()
    return RETURNED[key]


def readers_of_changed(before: Program, after: Program, changed: Collection[int]) -> set[int]:
    """The operators that read a tensor of other strides in `after` than in `before`; `after` is by `with_strides`.

    Behind one that only views such a tensor its own readers are named too, as far as something is computed.

    Args:
        changed: operators whose outputs count as changed in any case.
    """
    reading, passed = set[int](), {*changed}
    for v, (call, other) in enumerate(zip(before.calls, after.calls, strict=True)):
        if not passed.isdisjoint(before.graph.predecessors[v]):
            reading.add(v)
            if is_uncomputed(call.function) or _strides(call.produces) != _strides(other.produces):
                passed.add(v)
    return reading


def is_uncomputed(function: object) -> bool:
    """Does it only see what lies in memory in another way? No kernel runs for it."""
    return is_view(function) or function in READERS_OF_MEMORY


def is_computed(program: Program, reference: Any) -> bool:
    """Does an operator compute it, or what it is a view of?"""
    while isinstance(reference, Output) and is_view(program.calls[reference.operator].function):
        reference = program.calls[reference.operator].args[0]
    return isinstance(reference, Output)


def is_image(tensor: Tensor) -> bool:
    """Does it lie in channels_last, and not in the order of its dimensions? `select_kernels` decides where that is so."""
    return not tensor.is_contiguous() and tensor.dim() in IMAGES and tensor.is_contiguous(memory_format=IMAGES[tensor.dim()])


def _with_calls(program: Program, calls: Sequence[Call]) -> Program:
    return Program(program.graph, calls, program.outputs, program.output_spec, program.examples, program.derived)


def _strides(value: Any) -> list[Any]:
    return [t.stride() if isinstance(t, Tensor) else t for t in tree_leaves(value)]
