"""runner=schedule: what a scheduler decides for a model, without executing the model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import models
import systems
from results.record import asked
from runners.cell.arithmetic import set_arithmetic


def run(cell: dict[str, Any], report: Callable[[str], None]) -> dict[str, Any]:
    """The schedule file of a cell, as data. Raises Unsupported for a system without schedules, and BadModel."""
    report("loading the model")
    set_arithmetic(cell["precision"], asked(cell, "algorithms"))  # some schedulers measure
    model = shape_of(cell, cell["device"])
    options = {k: v for k, v in cell["system"].items() if k != "name"}
    report("scheduling")
    system = systems.load(cell["system"]["name"], **options)
    system.report = report
    schedule = system.schedule(model.module, model.inputs)
    return {"schedule": schedule.to_json(model=cell["model"]["name"], batch=cell["batch"], device=cell["device"])}


def shape_of(cell: dict[str, Any], device: str) -> models.Model:
    """The cell's model as far as a schedule asks for it: on `device`, but with weights that mean nothing.

    Nothing of the zoo is computed for it. A custom model is as its factory makes it, since capture may read its buffers.
    Raises BadModel.
    """
    name, options = cell["model"]["name"], {k: v for k, v in cell["model"].items() if k != "name"}
    model = models.load(name, cell["batch"], device=device if name == "custom" else "meta", **options)
    if name != "custom":
        inputs = tuple(torch.zeros_like(x, device=device) for x in model.inputs)
        model = replace(model, module=_filled(model.module.to_empty(device=device)), inputs=inputs)
    return models.place(model, device=device, precision=cell["precision"], layout=cell["layout"])


@torch.no_grad()
def _filled(module: nn.Module) -> nn.Module:
    """With numbers of ordinary size: what lay in memory may be denormal, which a CPU computes with much more slowly, and
    some schedulers measure.
    """
    for parameter in module.parameters():
        parameter.fill_(0.01)
    for buffer in module.buffers():
        buffer.fill_(1)
    return module
