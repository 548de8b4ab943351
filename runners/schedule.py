"""runner=schedule: what a scheduler decides for a model, without executing the model."""

from collections.abc import Callable
from typing import Any

import models
import systems


def run(cell: dict[str, Any], report: Callable[[str], None]) -> dict[str, Any]:
    """The schedule file of a cell, as data. Raises Unsupported for a system without schedules, and BadModel."""
    report("loading the model")
    model_options = {k: v for k, v in cell["model"].items() if k != "name"}
    loaded = models.load(cell["model"]["name"], cell["batch"], device=cell["device"], **model_options)
    model = models.place(loaded, device=cell["device"], precision=cell["precision"], layout=cell["layout"])
    system_options = {k: v for k, v in cell["system"].items() if k != "name"}
    report("scheduling")
    schedule = systems.load(cell["system"]["name"], **system_options).schedule(model.module, model.inputs)
    return {"schedule": schedule.to_json(model=cell["model"]["name"], batch=cell["batch"], device=cell["device"])}
