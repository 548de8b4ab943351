"""runner=list: every model with its size, every system with whether it runs here."""

from collections.abc import Callable
from typing import Any

import models
import systems
from systems.base import Unsupported
from systems.scheduling.graph.capture import capture

from .schedule import shape_of


def run(cell: dict[str, Any], report: Callable[[str], None]) -> dict[str, Any]:
    """One row a model (parameters, MACs, operators and width at batch 1) and one a system (the reason it does not run)."""
    names = models.names()
    rows = []
    for number, name in enumerate(names, 1):
        report(f"{name} ({number} of {len(names)})")
        model = shape_of(cell | {"model": {"name": name}, "batch": 1}, cell["device"])
        counts = models.count(model.module, model.inputs)
        row: dict[str, Any] = {"model": name, "parameters": counts.parameters, "macs": counts.macs}
        row["inputs"] = [list(x.shape) for x in model.inputs]
        try:
            graph = capture(model.module, model.inputs).graph
            row |= {"operators": len(graph), "width": graph.width}
        except Unsupported as error:
            row |= {"operators": None, "width": None, "reason": str(error)}
        rows.append(row)
    here = [{"system": s, "reason": systems.load(s).unsupported(cell["device"])} for s in systems.names()]
    return {"models": rows, "systems": here}
