"""A choice of conf/model as the model it stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import models
from results.cell import Choice

if TYPE_CHECKING:
    import torch


def load(model: Choice, batch: int, *, is_training: bool = False, device: str | torch.device = "cpu") -> models.Model:
    """The model with inputs of that batch, on a device ("meta": its shapes alone). Raises BadModel."""
    options: dict[str, Any] = model.options
    return models.load(model.name, batch, training=is_training, device=device, **options)
