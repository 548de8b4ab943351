"""Has models and systems try the options that they were given, so that a wrong one ends a sweep before it measures."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import conf
from conf import Value
from results.cell import Cell, Choice
from runners.cell.messages import Check, Checked, Failed, Refused
from runners.checks import BadRequest
from runners.request.request import Request

from .cell_process import CellProcess

FILES = ("path", "file", "trace", "costs", "schedule", "profile", "plan")  # options that may name a user's file
OUTSIDE = ("custom", "checkout")  # names of models and systems whose code is the user's
DIGITS = 12


@dataclass(frozen=True)
class Tried:
    """What trying the options has left.

    Args:
        sources: digests of the files of custom models, custom schedulers and other checkouts.
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
        if choice.name in OUTSIDE or not is_as_in_conf(group, choice)
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
    """The digests of a cell's custom model and custom scheduler, and of the user's files that its options name, if any."""
    digests = [sources.get(choice) for choice in (cell.model, cell.system)]
    digests += [digest_of_file(choice.get(key)) for choice in (cell.model, cell.system, cell.runner) for key in FILES]
    return "+".join(filter(None, digests)) or None


def digest_of_file(name: Value) -> str | None:
    """A digest of a file's content, or of the names, sizes and times of a folder's files; None where there is neither.

    Raises BadRequest where it cannot be read.
    """
    text = str(name or "")
    if not {".", "/"} & set(text):  # a word that an option takes, or a committed file's name
        return None
    try:
        path = Path(text).expanduser()
        if not path.exists():
            return None
        if path.is_file():
            state = path.stat()
            return _digest_of_content(path, state.st_size, state.st_mtime_ns)
        states = [(file.relative_to(path), file.lstat()) for file in sorted(path.rglob("*"))]
    except OSError as error:
        raise BadRequest(f"{text} cannot be read: {error.strerror or error}") from error
    about = "".join(f"{file} {state.st_size} {state.st_mtime_ns}\n" for file, state in states)
    return hashlib.sha256(about.encode()).hexdigest()[:DIGITS]


@cache
def _digest_of_content(path: Path, size: int, time_ns: int) -> str:
    """The digest of a file, read once while it is of this size and time."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]


def is_as_in_conf(group: str, choice: Choice) -> bool:
    """Has the choice no option but its file's own?"""
    return conf.options(group, choice.choice) == {"name": choice.name, **choice.options}


def _words(command: Check) -> str:
    options = {"name": command.choice.name, **command.choice.options}
    return ", ".join(f"{command.group}.{key}={value}" for key, value in options.items())
