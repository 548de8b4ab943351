"""What the passes that put in kernels of this project have in common."""

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from systems.scheduling.graph.part import alone, example
from systems.scheduling.graph.patterns import users
from systems.scheduling.graph.program import Call, Input, Output, Program
from systems.scheduling.graph.rewrite import without

aten = torch.ops.aten
SEPARATE = "separate"  # the alternative that leaves a place as it is
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NAMES: dict[object, str] = {
    aten.relu.default: "relu",
    aten.relu6.default: "relu6",
    aten.silu.default: "silu",
    aten.sigmoid.default: "sigmoid",
    aten.hardswish.default: "hardswish",
}


def has_kernels(device: torch.device) -> bool:
    """Does Triton run on this device? Its interpreter runs anywhere."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (device.type == "cuda" or is_interpreted) and find_spec("triton") is not None


def activation(program: Program, v: int) -> str | None:
    call = program.calls[v]
    is_alone = len(call.args) == 1 and not call.kwargs and isinstance(call.args[0], Output | Input)
    return NAMES.get(call.function) if is_alone else None


def without_unread_activations(program: Program) -> Program:
    """The program without activations that nothing reads."""
    readers = users(program)
    unread = [v for v in range(len(program.graph)) if not readers[v] and activation(program, v)]
    return without_unread_activations(without(program, unread)) if unread else program


def is_plain(tensor: Tensor) -> bool:
    """Does a kernel take it? Its places are numbered in 32 bits."""
    return tensor.dim() == 4 and tensor.dtype in DTYPES and 0 < tensor.numel() < 2**31


def kernel_alone(program: Program, call: Call, device: torch.device) -> Program:
    """The kernel as a program, over inputs of its own."""
    references = list(dict.fromkeys(a for a in call.leaves() if isinstance(a, Output | Input)))
    examples = [example(program.value(a), device) for a in references]
    moved = call.map(lambda a: Input(references.index(a)) if isinstance(a, Output | Input) else a)
    return alone("triton", target_of(call), moved, examples)


def target_of(call: Call) -> str:
    return f"opweave.{type(call.function).__name__.lower()}[{call.function}]"
