"""Where a person's own code, a model or a scheduler, raised an error."""

import os
import re
import traceback
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {"conf", "hydra_plugins", "models", "opweave.py", "results", "run.py", "runners", "scripts", "systems"}
FRAME = re.compile(r'File "([^"]+)", line (\d+)')  # of a traceback as text
INSTALLED = {"site-packages", "dist-packages", Path(os.__file__).parent.name}  # the last is the standard library's


def module_hint(path: str, attribute: str) -> str:
    """What to write in the place of a file's path, where a module was to be named: "" where it is a module's name."""
    if not ("/" in path or os.sep in path or path.endswith(".py")):
        return ""
    file = Path(path).with_suffix("")
    module = file.name if file.is_absolute() or ".." in file.parts else ".".join(file.parts)
    return f"{path} is a file's path: write {module}:{attribute}, from the folder that holds {module.partition('.')[0]}"


def with_own_line(message: str, error: BaseException) -> str:
    """A message, and behind it the line that raised its error, unless it ends so: "... (mypkg/mymodel.py:12)".

    The line is the last of a person's own in the error, or in what led to it. Own code is neither Opweave's nor installed.
    """
    line = _own_line(error)
    return message if message.endswith(line) else message + line


def with_own_frame(message: str, told: str) -> str:
    """As `with_own_line`, by the text of a traceback."""
    return message + _place((file, int(line)) for file, line in FRAME.findall(told))


def _own_line(error: BaseException) -> str:
    """ "" where no code of a person's own raised it."""
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen:
        if place := _place((frame.filename, frame.lineno) for frame in traceback.extract_tb(at.__traceback__)):
            return place
        seen.append(at)
        at = at.__cause__ or at.__context__
    return ""


def _place(frames: Iterable[tuple[str, int | None]]) -> str:
    """The last line of a person's own, as the end of a message; "" for none.

    frames: file and line, the outermost first.
    """
    own = [(file, line) for file, line in frames if _is_own(file)]
    return f" ({os.path.relpath(own[-1][0])}:{own[-1][1]})" if own else ""


def _is_own(name: str) -> bool:
    file = Path(name)
    if not file.is_file() or INSTALLED & set(file.parts):
        return False
    file = file.resolve()
    return not (file.is_relative_to(ROOT) and file.relative_to(ROOT).parts[0] in ROOMS)
