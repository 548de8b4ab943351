"""runner=schedule: what a scheduler decides for a model, written to a file without executing the model."""

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.table import Table

from conf.text import counted
from results.cell import Cell
from results.document import cell_to_json, part_from_json
from results.limits import Limits
from results.schedule import AFTER, BEFORE, DecisionRow, gained_in_whole
from results.terminal import Terminal
from runners.cell.messages import Failed
from runners.checks import BadRequest
from runners.request.request import Request

from .asking import ask, check_output, exit_status, tell, write
from .base import Showing

DASH = "–"


class Schedule(Showing):
    """Writes the schedule file of each cell."""

    name: ClassVar[str] = "schedule"
    writes_output: ClassVar[bool] = True

    def run(self, request: Request) -> int:
        output = request.options.output
        if output is not None and len(request.cells) > 1:
            raise BadRequest(f"output={output} names one file, for {len(request.cells)} schedules")
        check_output(output)
        return max(self._run(cell, request) for cell in request.cells)

    def _run(self, cell: Cell, request: Request) -> int:
        answer, output = ask(cell, request.options), request.options.output
        if isinstance(answer, Failed):
            tell(answer, cell)
            return exit_status([answer], output is not None)
        document = answer.document
        assert isinstance(document, dict)
        if not write(output, document):
            return 0
        numbers = {"operator": len(document["operators"]), "stream": document["streams"], "wait": len(document["waits"])}
        operators, streams, waits = (counted(number, thing) for thing, number in numbers.items())
        milliseconds = document["search"]["seconds"] * 1e3
        print(f"{output}: {operators}, width {document['width']}, {streams}, {waits}, found in {milliseconds:.1f} ms")
        decisions: list[DecisionRow] = part_from_json(document.get("decisions", []), list[DecisionRow])
        limits = part_from_json(document["limits"], Limits) if "limits" in document else None
        for table in (decision_table(decisions), gain_table(decisions)):
            if table.row_count:
                Terminal().print(table)
        if limits is not None:
            print(bounds_text(limits))
        return 0

    def show(self, cell: Cell, visible_device: str, report: Callable[[str], None]) -> object:
        """The schedule file as data. Raises Unsupported, BadModel, and what the model itself raises."""
        import torch

        import systems
        from runners.cell.arithmetic import set_arithmetic
        from runners.cell.behaviour import refused_by_the_system
        from runners.cell.shape import counts_of, shape_of
        from systems.base import Unsupported
        from systems.profiling import limits
        from systems.scheduling.scheduler import Scheduler
        from systems.weave.system import Weave

        system = systems.load(cell.system.name, **cell.system.options)
        if not isinstance(system, Scheduler):
            raise Unsupported(f"{system.name} has no schedule of operators")
        report("loading the model")
        set_arithmetic(cell.conditions.precision, cell.conditions.algorithms)  # some schedulers measure
        model = shape_of(cell.model, cell.conditions)
        report("scheduling")
        system.report = report
        if isinstance(system, Weave):
            system.is_learning = True  # as in a process that learns: nothing is timed here once it has profiled
        with torch.no_grad(), refused_by_the_system(lambda: model.module(*model.inputs)):
            schedule = system.schedule(model.module, model.inputs)
        document = schedule.to_json(model=cell.model.name, batch=cell.batch, device=cell.device)
        if isinstance(system, Weave) and (executed := system.executed) is not None:
            report("measuring each operator alone")
            with torch.no_grad(), executed.undone():
                document["limits"] = limits.measure(model.module, model.inputs, executed).to_json()
        counts = counts_of(cell.model, cell.batch)
        macs = {"convolution_macs": counts.convolution_macs} if counts is not None else {}
        return {**document, **macs, "cell": cell_to_json(cell)}


def decision_table(decisions: Sequence[DecisionRow]) -> Table:
    """Decisions as a table; the gain is how many times as fast the chosen alternative is as the first one measured.

    A row of one alternative, such as IOS's of a stage of one operator, is left to the file, and what gained in the whole to
    `gain_table`.
    """
    table = Table(title="Decisions")
    for column in ("kind", "pattern", "count", "chosen", "gain"):
        is_text = column in ("kind", "pattern", "chosen")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=column != "pattern", overflow="fold")
    for row in decisions:
        if len(row.milliseconds) == 1 or gained_in_whole([row]):
            continue
        gain = DASH if row.gain is None else f"{row.gain:.2f}x"
        table.add_row(row.kind, row.pattern, str(row.count), row.chosen, gain)
    return table


def gain_table(decisions: Sequence[DecisionRow]) -> Table:
    """What each decision gained in the whole, in the order in which they were taken."""
    table = Table(title="Gains of the whole graph, measured in turn")
    table.add_column("change", overflow="fold")
    for column in ("before, ms", "after, ms", "gain"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in gained_in_whole(decisions):
        times = (f"{row.milliseconds[name]:.3f}" for name in (BEFORE, AFTER))
        table.add_row(row.pattern, *times, DASH if row.gain is None else f"{row.gain:.3f}x")
    return table


def bounds_text(limits: Limits) -> str:
    """What bounds every schedule of the operators, the largest first."""
    bounds = ", ".join(f"{name} {ms:.3f} ms" for name, ms in limits.bounds.items())
    return f"no schedule of these operators is faster than their {bounds}"
