"""Models in parts: what a cell asks for, and how a worker makes its own."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

import torch

from models.decoders import DTYPES
from models.gpt import Shape
from models.gpt_part import GPTPart, Part, PartedGPT, check_parts, made_part
from models.registry import BadModel, find
from results.cell import Cell
from runners.cell.arithmetic import set_arithmetic
from runners.machine.installation import module_name
from systems.serving.parts import Parts

SIZES = ("layers", "hidden", "heads", "positions", "vocabulary")  # options of the model


@dataclass(frozen=True)
class Parted(PartedGPT):
    """The model of a cell. arguments: as `part_of` takes them."""

    arguments: str = ""

    @property
    def maker(self) -> str:
        return f"{module_name('runners.serving.parted')}:part_of"


def parted(cell: Cell, parts: Parts) -> Parted:
    """The model of a cell, in parts. Raises BadModel where it has none."""
    if cell.model.name != "gpt":
        raise BadModel(f"model {cell.model.choice} has no parts: model=gpt has, or another size of it as gpt_13b")
    options = find("gpt").options(cell.model.options)
    shape = Shape(*(int(str(options[key])) for key in SIZES))
    check_parts(shape, parts.pipeline, parts.tensor)
    conditions = cell.conditions
    arguments = {"shape": asdict(shape), "precision": conditions.precision, "algorithms": conditions.algorithms}
    return Parted(shape, torch.device(cell.device), DTYPES[conditions.precision], arguments=json.dumps(arguments))


def shallow(model: Parted, parts: Parts, few_parts: Parts, num_layers: int) -> Parted:
    """The same model with few layers in each stage, and a part of the logits as large.

    Args:
        parts: how the model is split.
        few_parts: how this one is to be.
        num_layers: of each stage.
    """
    vocabulary = -(-model.shape.vocabulary * few_parts.tensor // parts.tensor)
    shape = replace(model.shape, layers=num_layers * few_parts.pipeline, vocabulary=vocabulary)
    arguments = json.loads(model.arguments) | {"shape": asdict(shape)}
    return replace(model, shape=shape, arguments=json.dumps(arguments))


def part_of(arguments: str, rank: int, parts: Parts, device: torch.device) -> GPTPart:
    """The part of a rank, with the cell's arithmetic set."""
    fields = json.loads(arguments)
    set_arithmetic(fields["precision"], fields["algorithms"])
    stage, part = parts.place(rank)
    return made_part(
        Shape(**fields["shape"]), Part(stage, parts.pipeline, part, parts.tensor), device, DTYPES[fields["precision"]]
    )
