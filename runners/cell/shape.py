"""A cell's model as far as a schedule asks for it: its shapes, on a device, with weights that mean nothing."""

from dataclasses import replace

import torch
from torch import nn

import models
from results.cell import Choice, Conditions

from .loading import load


def shape_of(model: Choice, conditions: Conditions) -> models.Model:
    """The model on its device, of which nothing of the zoo is computed.

    A custom model is as its factory makes it, since capture may read its buffers. Raises BadModel.
    """
    is_custom, device = model.name == "custom", conditions.device
    loaded = load(model, conditions.batch, device=device if is_custom else "meta")
    if not is_custom:
        inputs = tuple(torch.zeros_like(x, device=device) for x in loaded.inputs)
        loaded = replace(loaded, module=_filled(loaded.module.to_empty(device=device)), inputs=inputs)
    return models.place(loaded, device=device, precision=conditions.precision, layout=conditions.layout)


@torch.no_grad()
def _filled(module: nn.Module) -> nn.Module:
    """With numbers of ordinary size: what lay in memory may be denormal. A CPU computes with those much more slowly, and
    some schedulers measure.
    """
    for parameter in module.parameters():
        parameter.fill_(0.01)
    for buffer in module.buffers():
        buffer.fill_(1)
    return module
