"""What the passes that put in kernels of this project have in common."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from conf.text import first_line
from systems.scheduling.graph.part import alone, example, part, spread_groups
from systems.scheduling.graph.patterns import users
from systems.scheduling.graph.program import Call, Input, Output, Program
from systems.scheduling.graph.rewrite import without

from .context import Context

if TYPE_CHECKING:  # they import Triton
    from systems.kernels.dense import DenseTile
    from systems.kernels.separable import Tile

aten = torch.ops.aten
META = torch.device("meta")
SEPARATE = "separate"  # the alternative that leaves a place as it is
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NAMES: dict[object, str] = {
    aten.relu.default: "relu",
    aten.relu6.default: "relu6",
    aten.silu.default: "silu",
    aten.sigmoid.default: "sigmoid",
    aten.hardswish.default: "hardswish",
    aten.gelu.default: "gelu",
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
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.dim() == 4 and tensor.dtype in DTYPES and tensor.numel() > 0 and last < 2**31


class Place(Protocol):
    """Operators that a kernel may stand for, in the order of capture."""

    @property
    def operators(self) -> tuple[int, ...]: ...


SomePlace = TypeVar("SomePlace", bound=Place)


def by_signature(program: Program, places: Iterable[SomePlace]) -> dict[str, list[SomePlace]]:
    """Equal places together, in the order of capture, by the signatures of their operators."""
    equal: dict[str, list[SomePlace]] = {}
    for place in places:
        separate = part(program, place.operators)
        equal.setdefault("; ".join(separate.signature(i) for i in range(len(place.operators))), []).append(place)
    return equal


def kernel_alone(program: Program, call: Call, device: torch.device) -> Program:
    """The kernel as a program, over inputs of its own."""
    references = list(dict.fromkeys(a for a in call.leaves() if isinstance(a, Output | Input)))
    examples = [example(program.value(a), device) for a in references]
    moved = call.map(lambda a: Input(references.index(a)) if isinstance(a, Output | Input) else a)
    spread_groups([moved], examples)
    return alone("triton", target_of(call), moved, examples)


def nearest_tf32(tensor: Tensor) -> Tensor:
    """Each number rounded to the nearest that TF32 holds."""
    nearest = ((tensor.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(tensor.isnan(), tensor, nearest)


def num_cores(device: torch.device) -> int:
    """Multiprocessors of the GPU; in Triton's interpreter those of a small one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def tickets(program: Program, tile: DenseTile | Tile, num_pixels: int, channels: int) -> Tensor | None:
    """By which the blocks of a sum know the last of them; None where none is shared.

    Args:
        tile: of an output [num_pixels, channels].
    """
    if tile.splits == 1:
        return None
    return torch.zeros(tile.num_blocks(num_pixels, channels), dtype=torch.int32, device=program.device)


def compile_unmeasured(program: Program, calls: Iterable[Call], context: Context) -> None:
    """Compile, many at once, the kernels that are to be measured."""
    from systems.kernels.compiling import Job, compile_ahead

    unmeasured = [call for call in calls if not context.knows(kernel_alone(program, call, META))]
    compile_ahead(Job.of(call.function, [program.value(a) for a in call.args]) for call in unmeasured)  # type: ignore[arg-type]


def milliseconds_of(
    program: Program, calls: Mapping[str, Call], context: Context
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Of kernels by the names of their tiles, and why one has none."""
    times: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    for name, call in calls.items():
        try:
            known = kernel_alone(program, call, META)
            times[name] = context.cost(known if context.knows(known) else kernel_alone(program, call, program.device))
        except Exception as error:  # whatever Triton raises of a tile that does not fit
            times[name], reasons[name] = None, first_line(error)
    return times, reasons


def target_of(call: Call) -> str:
    """The name of what a pass puts in: a kernel, or a function that says its own."""
    target: str = call.function.target  # type: ignore[attr-defined]
    return target
