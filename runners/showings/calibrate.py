"""runner=calibrate: what launches, edges, blocks and bytes cost on this machine's GPU, as a file of measured probes."""

import sys
from collections.abc import Callable
from typing import ClassVar

from results.cell import Cell
from results.words import counted
from runners.cell.messages import Failed
from runners.request.request import Request

from .asking import ask, check_output, write
from .base import Showing


class Calibrate(Showing):
    """Writes the times of every probe; neither the model nor the system of the request matters."""

    name: ClassVar[str] = "calibrate"
    writes_output: ClassVar[bool] = True

    def run(self, request: Request) -> int:
        output = request.options.output
        check_output(output)
        answer = ask(request.cells[0], request.options)
        if isinstance(answer, Failed):
            print(f"opweave: {answer.status}: {answer.reason}", file=sys.stderr)
            return 0 if answer.status == "unsupported" else 1
        document = answer.document
        assert isinstance(document, dict)
        if write(output, document):
            print(f"{output}: {counted(len(document['probes']), 'probe')} of {document['conditions']['device']}")
        return 0

    def show(self, cell: Cell, visible_device: str, report: Callable[[str], None]) -> object:
        """The probes as data. Raises Unsupported on a CPU."""
        import torch

        from systems.base import Unsupported
        from systems.profiling.calibration import calibrate
        from systems.profiling.measurements import conditions

        if cell.device != "cuda":
            raise Unsupported("a GPU is calibrated: the probes are its kernels")
        device = torch.device("cuda")
        probes = calibrate(device, report)
        return {"conditions": conditions(device), "probes": [probe.to_json() for probe in probes]}
