"""From a request to its end: a sweep, or what a runner without records shows."""

from collections.abc import Collection, Iterable

from runners.checks import BadRequest, check_cache
from runners.request.request import Request
from runners.showings import registry as showings


def is_recorded(requests: Iterable[Request]) -> bool:
    """Does every cell get a record, which spares the same command to measure it again?"""
    return all(cell.runner.name not in showings.showings() for request in requests for cell in request.cells)


def execute(request: Request, keys: Collection[str] = ()) -> int:
    """Run a request whose devices are decided; returns the exit status.

    Args:
        request: of cells that all keep a record, or whose runner shows something.
        keys: of conf/config.yaml, those that the command line gives a value.

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
        showing = showings.showing(request.cells[0].runner)
        # A container gives results= to whatever it runs.
        if showing.takes is not None and (idle := sorted({*keys} - {"runner", "results", *showing.takes})):
            taken = f"the keys {', '.join(showing.takes)}" if showing.takes else "its own options"
            raise BadRequest(f"{idle[0]}= changes nothing of what runner={showing.name} shows: it takes {taken} alone")
        return showing.run(request)
    from runners.sweep.sweep import Sweep  # its libraries take a second, which a wrong request has no use for

    return Sweep(request).run()
