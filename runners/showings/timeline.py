"""runner=timeline: when each operator of one call ran, and on which stream, as one trace of all cells."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from conf.text import counted
from results.cell import Cell
from results.timeline import Timeline as CellTimeline
from results.timeline import to_trace
from runners.cell.messages import Failed
from runners.checks import one_of
from runners.request.request import Request

from .asking import ask, check_output, exit_status, tell, write
from .base import Showing

METHODS = ("measured", "table")


@dataclass(frozen=True)
class TimelineOptions:
    """classify: colours by arithmetic intensity, as measured or as Opara's table has it."""

    classify: str

    def __post_init__(self) -> None:
        one_of("runner.classify", self.classify, METHODS)


class Timeline(Showing):
    """Writes a trace for Perfetto, a process a cell."""

    name: ClassVar[str] = "timeline"
    Options: ClassVar[type] = TimelineOptions
    writes_output: ClassVar[bool] = True
    options: TimelineOptions

    def run(self, request: Request) -> int:
        output = request.options.output
        check_output(output)
        timelines, failures = [], []
        for cell in request.cells:
            answer = ask(cell, request.options)
            if isinstance(answer, Failed):
                tell(answer, cell)
                failures.append(answer)
            else:
                timelines.append(CellTimeline.from_json(answer.document))
        if timelines and write(output, to_trace(timelines)):
            for timeline in timelines:
                operators, streams = counted(len(timeline.bars), "operator"), counted(len(timeline.streams), "stream")
                end_ms = max((bar.end for bar in timeline.bars), default=0.0)
                bounds = timeline.limits.bounds if timeline.limits else {}
                limits = "".join(f", {name} {ms:.3f} ms" for name, ms in bounds.items())
                print(f"{output}: {timeline.title}: {operators} on {streams} in {end_ms:.3f} ms{limits}")
        return exit_status(failures, output is not None and not timelines)

    def show(self, cell: Cell, visible_device: str, report: Callable[[str], None]) -> object:
        """The timeline as data; Failed where the system's output is not eager's. Raises as runners.cell.timeline does."""
        from runners.cell import timeline
        from systems import registry
        from systems.serving.system import AnyServingSystem

        if issubclass(registry.system_class(cell.system.name), AnyServingSystem):
            from runners.serving import timeline as of_requests

            return of_requests.of_cell(cell).to_json()
        try:
            return timeline.of_cell(cell, visible_device, report, self.options.classify).to_json()
        except timeline.Incorrect as error:
            return Failed("incorrect", str(error))
