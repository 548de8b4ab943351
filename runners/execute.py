"""From a request to its end: a sweep, or what a runner without records shows."""

from collections.abc import Iterable

from runners.checks import BadRequest, check_cache
from runners.request.request import Request
from runners.showings import registry as showings


def is_recorded(requests: Iterable[Request]) -> bool:
    """Does every cell get a record, which spares the same command to measure it again?"""
    return all(cell.runner.name not in showings.showings() for request in requests for cell in request.cells)


def execute(request: Request) -> int:
    """Run a request whose devices are decided; returns the exit status.

    Raises BadRequest before anything has run or been written.
    """
    check_cache()
    names = sorted({cell.runner.name for cell in request.cells})
    shown = [name for name in names if name in showings.showings()]
    if shown and len(names) > 1:
        raise BadRequest(f"runner={shown[0]} keeps no record and shares no sweep with others: run it alone")
    output, writers = request.options.output, [n for n, s in showings.showings().items() if s.writes_output]
    if output is not None and names[0] not in writers:
        where = f"runner={names[0]} writes none" if shown else "records go to the folder results=..."
        raise BadRequest(f"output={output} is of runner={' and runner='.join(writers)}: {where}")
    if shown:
        return showings.showing(request.cells[0].runner).run(request)
    from runners.sweep.sweep import Sweep  # its libraries take a second, which a wrong request has no use for

    return Sweep(request).run()
