"""A cell's model as far as a schedule asks for it: its shapes, on a device, with weights that mean nothing."""

from dataclasses import replace

import torch
from torch import nn

import models
from results.cell import Choice, Conditions

from .loading import load


def shape_of(model: Choice, conditions: Conditions, runs: bool = True) -> models.Model:
    """The model on its device, of which nothing of the zoo is computed.

    A custom model is as its factory makes it, since capture may read its buffers.

    Args:
        runs: Something will run it. Else its parameters stay unwritten, and take no memory of a CPU.

    Raises:
        BadModel: There is no such model.
    """
    is_custom, device = model.name == "custom", conditions.device
    where = device if is_custom else "meta"
    loaded = load(model, conditions.batch, device=where)
    loaded = models.place(loaded, device=where, precision=conditions.precision, layout=conditions.layout)
    if is_custom:
        return loaded
    inputs = tuple(torch.zeros_like(x, device=device) for x in loaded.inputs)
    return replace(loaded, module=_filled(_to_empty(loaded.module, device), runs), inputs=inputs)


def counts_of(model: Choice, batch: int) -> models.Counts | None:
    """The size of a model; None for a custom one, whose operators may not run without data. Raises BadModel."""
    if model.name == "custom":
        return None
    shape = load(model, batch, device="meta")
    return models.count(shape.module, shape.inputs)


def _to_empty(module: nn.Module, device: str) -> nn.Module:
    """`Module.to_empty`, after which parameters that were one are one still, as an embedding and the head that reads it."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    module.to_empty(device=device)
    for first, *others in names.values():
        for name in others:
            owner, _, own = name.rpartition(".")
            setattr(module.get_submodule(owner), own, module.get_parameter(first))
    return module


@torch.no_grad()
def _filled(module: nn.Module, with_parameters: bool) -> nn.Module:
    """With numbers of ordinary size: what lay in memory may be denormal. A CPU computes with those much more slowly, and
    some schedulers measure.
    """
    for parameter in module.parameters() if with_parameters else ():
        parameter.fill_(0.01)
    for buffer in module.buffers():
        buffer.fill_(1)
    return module
