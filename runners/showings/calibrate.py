"""runner=calibrate: what launches, edges, blocks and bytes cost on this machine's GPU, as a file of measured probes."""

from collections.abc import Callable
from typing import ClassVar

from conf.text import counted
from results.cell import Cell
from runners.machine.manifest import code_state
from runners.request.request import Request

from .asking import write_answer
from .base import Showing


class Calibrate(Showing):
    """Writes the times of every probe and the code's commit; neither the model nor the system of the request matters."""

    name: ClassVar[str] = "calibrate"
    writes_output: ClassVar[bool] = True
    takes: ClassVar[tuple[str, ...] | None] = ("device", "gpus", "memory_gib", "output", "timeout")

    def run(self, request: Request) -> int:
        return write_answer(
            request, lambda document: f"{counted(len(document['probes']), 'probe')} of {document['conditions']['device']}"
        )

    def show(self, cell: Cell, visible_device: str, report: Callable[[str], None]) -> object:
        """The probes as data."""
        import torch

        from systems.profiling.calibration import calibrate
        from systems.profiling.measurements import conditions

        device = torch.device("cuda")
        probes = calibrate(device, report)
        code = code_state()
        about = {"conditions": conditions(device), "commit": code.commit, "modified": code.modified}
        return {**about, "probes": [probe.to_json() for probe in probes]}
