"""What workers of tests make. They import this file, and nothing of pytest."""

import sys
from dataclasses import replace

import torch

from models.gpt import Shape
from models.gpt_part import GPTPart, Part, made_part
from systems.serving.parts import Parts
from systems.serving.slots import Region

SHAPE = Shape(layers=4, hidden=64, heads=8, positions=40, vocabulary=50)
LONG = replace(SHAPE, positions=1024)  # an iteration may have more tokens than any graph


def slot_of(region: Region, position: int) -> int:
    """The slot of the token at a position, from 0."""
    return region.blocks[position // region.block_size] + position % region.block_size


def telling_part(arguments: str, rank: int, parts: Parts, device: torch.device) -> GPTPart:
    """A part of `telling()`. arguments: the number of its layers; SHAPE's where empty."""
    stage, part = parts.place(rank)
    shape = replace(SHAPE, layers=int(arguments or SHAPE.layers))
    module = made_part(shape, Part(stage, parts.pipeline, part, parts.tensor), device, torch.float64)
    amplify(module)
    return module


def telling_part_of_32_bits(arguments: str, rank: int, parts: Parts, device: torch.device) -> GPTPart:
    """The same in fp32, which kernels take."""
    return telling_part(arguments, rank, parts, device).to(torch.float32)


def long_part(arguments: str, rank: int, parts: Parts, device: torch.device) -> GPTPart:
    """A part of LONG. arguments: its precision."""
    stage, part = parts.place(rank)
    module = made_part(LONG, Part(stage, parts.pipeline, part, parts.tensor), device, torch.float64)
    amplify(module)
    return module.to(getattr(torch, arguments))


def no_part(arguments: str, rank: int, parts: Parts, device: torch.device) -> GPTPart:
    if rank == 1:
        raise MemoryError("too large")
    return telling_part(arguments, rank, parts, device)


def failing_part(arguments: str, rank: int, parts: Parts, device: torch.device) -> GPTPart:
    """Its device fails where its tokens are waited for."""

    def to_bytes(answer: object) -> bytes:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nof which there is more to say")

    sys.modules["__main__"].Answer.to_bytes = to_bytes
    return telling_part(arguments, rank, parts, device)


@torch.no_grad()
def amplify(module: torch.nn.Module) -> None:
    """Larger weights, and biases that would be seen if each part added them."""
    for name, parameter in module.named_parameters():
        if name == "tokens.weight":
            parameter.mul_(2)
        elif "norm" not in name and parameter.dim() > 1:
            parameter.mul_(12)
        elif name.endswith(("out.bias", "down.bias")):
            parameter.copy_(torch.linspace(-0.2, 0.3, len(parameter)))
