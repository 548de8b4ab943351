"""runner=advise: whether scheduling operators over streams can pay for a model, and what to run next.

On a GPU each kernel is measured alone, and one stream; without one, committed profiles and a roofline rule stand in.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import conf
from results.advice import Advice, Forecast
from results.cell import Cell
from results.document import part_from_json, part_to_json
from runners.cell.messages import Failed
from runners.checks import one_of
from runners.request.request import Request

from .asking import ask, check_output, exit_status, write
from .base import Showing

if TYPE_CHECKING:
    import torch

    from systems.scheduling.graph.program import Program
    from systems.scheduling.simulate.gpu import Gpu
    from systems.scheduling.simulate.measured_set import MeasuredSet

AUTO = "auto"
COMMITTED_GPU = "h200"
ONE_STREAM = "nimble_single_stream"


@dataclass(frozen=True)
class AdviseOptions:
    """Args:
    gpu: Of conf/gpu, or AUTO.
    profile: A file; "" for the committed ones, or for measuring now.
    """

    gpu: str
    profile: str

    def __post_init__(self) -> None:
        one_of("runner.gpu", self.gpu, (AUTO, *conf.choices("gpu")))


class Advise(Showing):
    """Prints the advice for each cell's model, and writes it to the file output=... if there is one."""

    name: ClassVar[str] = "advise"
    Options: ClassVar[type] = AdviseOptions
    writes_output: ClassVar[bool] = True
    options: AdviseOptions

    def run(self, request: Request) -> int:
        output = request.options.output
        check_output(output)
        documents = []
        failures = []
        for cell in {cell.group: cell for cell in request.cells}.values():  # whatever the system
            answer = ask(cell, request.options)
            if isinstance(answer, Failed):
                print(f"opweave: {cell.model.label} b{cell.batch}: {answer.status}: {answer.reason}", file=sys.stderr)
                failures.append(answer)
            else:
                print("\n".join(part_from_json(answer.document, Advice).lines), flush=True)
                documents.append(answer.document)
        if documents and output is not None:
            write(output, documents)
        return exit_status(failures, output is not None and not documents)

    def show(self, cell: Cell, visible_device: str, report: Callable[[str], None]) -> object:
        """The advice as data. Raises Unsupported, BadOption, BadModel, and what the model itself raises."""
        import torch

        from runners.cell.arithmetic import set_arithmetic
        from runners.cell.behaviour import refused_by_the_system
        from runners.cell.shape import shape_of
        from systems.advice import outlook
        from systems.scheduling.scheduler import captured
        from systems.scheduling.simulate.stored import are_of_other_algorithms

        report("loading the model")
        set_arithmetic(cell.conditions.precision, cell.conditions.algorithms)
        measures = cell.device == "cuda" and not self.options.profile and self.options.gpu == AUTO
        model = shape_of(cell.model, cell.conditions, runs=measures)
        report("capturing")
        with torch.no_grad(), refused_by_the_system(lambda: model.module(*model.inputs)):
            program = captured(model.module, model.inputs)
        if measures:
            sets, source = [_measured_here(cell, program, report)], "measured here"
        else:
            report("reading profiles")
            sets = known_sets(cell.model.choice, cell.batch, program, self.options.profile)
            source = f"measured on {sets[0].device}" if sets else "unmeasured"
        gpu = self._gpu(sets, program.device if measures else None)
        predicted = outlook(program, sets, gpu, report)
        if are_of_other_algorithms(sets):
            source += ", by other algorithms"
            unmeasured = tuple(replace(forecast, measured_gain=None) for forecast in predicted.forecasts)
            predicted = replace(predicted, measured_ms=None, forecasts=unmeasured)
        parts = {**asdict(predicted), "forecasts": tuple(Forecast(**asdict(f)) for f in predicted.forecasts)}
        return part_to_json(Advice(cell, gpu.name, source, **parts))

    def _gpu(self, sets: "list[MeasuredSet]", device: "torch.device | None") -> "Gpu":
        """That the advice is for.

        Args:
            device: Of this machine, where its kernels were measured now.
        """
        from systems.scheduling.simulate.gpu import find, load, of_device

        if self.options.gpu != AUTO:
            return load(self.options.gpu)
        if device is not None:
            return of_device(device)
        return find(sets[0].device if sets else "") or load(COMMITTED_GPU)


def _measured_here(cell: Cell, program: "Program", report: Callable[[str], None]) -> "MeasuredSet":
    """Each operator alone and one stream, on this machine's GPU."""
    import systems
    from runners.cell.measured_schedules import PreparedSchedules
    from systems.scheduling.scheduler import Scheduler

    one_stream = systems.load(ONE_STREAM)
    assert isinstance(one_stream, Scheduler)
    schedules = PreparedSchedules(cell.model.choice, cell.batch, program, {ONE_STREAM: one_stream}, report=report)
    try:
        schedules.profile()
        schedules.measure()
        return schedules.result()
    finally:
        schedules.close()


def known_sets(model: str, batch: int, program: "Program", file: str = "") -> "list[MeasuredSet]":
    """The set of a file; or the committed ones of torch's arithmetic: of this model and batch alone where those suffice.

    Raises:
        BadOption: The file cannot be read.
        Unsupported: The file was measured in another arithmetic.
    """
    from systems.base import Unsupported
    from systems.scheduling.simulate.stored import COMMITTED, StoredOperators, files_of, read_sets

    if file:
        return read_sets(files_of(file))
    own = [f"{model}-b{batch}{part}.json.gz" for part in ("-ios", "-fp16", "-bf16", "")]
    others = sorted(path for path in COMMITTED.glob("*.json.gz") if path.name not in own)

    def readable(files: "list[Path]") -> "list[MeasuredSet]":
        """Those of this arithmetic; where there is none a roofline rule stands in."""
        try:
            return read_sets(files)
        except Unsupported:
            return []

    sets = readable([path for name in own if (path := COMMITTED / name).is_file()])
    if sets and None not in StoredOperators(sets).operators(program):
        return sets
    return [*readable(others), *sets]  # of two that know an operator the last one counts
