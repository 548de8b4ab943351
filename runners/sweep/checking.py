"""Has models and systems try the options that they were given, so that a wrong one ends a sweep before it measures."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import conf
from results.cell import Cell, Choice
from runners.cell.messages import Check, Checked, Failed, Refused
from runners.checks import BadRequest
from runners.request.request import Request

from .cell_process import CellProcess


@dataclass(frozen=True)
class Tried:
    """What trying the options has left.

    Args:
        sources: digests of the files of custom models and custom schedulers.
        process: one for the first cell, which has imported PyTorch; None where nothing was tried, or cells are on a GPU.
    """

    sources: dict[Choice, str] = field(default_factory=dict)
    process: CellProcess | None = None


def tried(request: Request) -> Tried:
    """Try the options that are not conf/'s own, since that needs PyTorch. Raises BadRequest."""
    commands = {
        choice: Check(group, choice, cell.batch)
        for cell in request.cells
        for group, choice in (("model", cell.model), ("system", cell.system))
        if choice.name == "custom" or not is_as_in_conf(group, choice)
    }
    if not commands:
        return Tried()
    sources = {}
    process = CellProcess("cpu", "0")
    try:
        for choice, command in commands.items():
            answer = process.ask(command, request.options.timeout, request.options.memory_gib)
            if isinstance(answer, Refused):
                raise BadRequest(answer.reason)
            if isinstance(answer, Failed):
                raise BadRequest(f"{_words(command)}: {answer.status}: {answer.reason}")
            assert isinstance(answer, Checked)
            if answer.sources is not None:
                sources[choice] = answer.sources
    except BaseException:
        process.close()
        raise
    if request.cells[0].device == "cpu":
        return Tried(sources, process)
    process.close()  # it sees no GPU
    return Tried(sources)


def sources_of(cell: Cell, sources: Mapping[Choice, str]) -> str | None:
    """The digests of a cell's custom model and custom scheduler; None where it has neither."""
    digests = (sources.get(choice) for choice in (cell.model, cell.system))
    return "+".join(filter(None, digests)) or None


def is_as_in_conf(group: str, choice: Choice) -> bool:
    """Has the choice no option but its file's own?"""
    return conf.options(group, choice.choice) == {"name": choice.name, **choice.options}


def _words(command: Check) -> str:
    options = {"name": command.choice.name, **command.choice.options}
    return ", ".join(f"{command.group}.{key}={value}" for key, value in options.items())
