"""Text that other programs wrote, cut to what one line of a message holds."""

import os
import traceback
from pathlib import Path

LONGEST = 300  # characters of a line
ROOT = Path(__file__).resolve().parents[1]
ROOMS = {"conf", "hydra_plugins", "models", "opweave.py", "results", "run.py", "runners", "scripts", "systems"}
INSTALLED = {"site-packages", "dist-packages", Path(os.__file__).parent.name}  # the last is the standard library's


def words_of(text: object) -> str:
    """A text, or an error's message; "" of an error whose message cannot be had."""
    try:
        return str(text)
    except Exception:
        return ""


def first_line(text: object) -> str:
    """The first line of a text or of an error's message that is not blank, stripped and cut to LONGEST characters.

    Args:
        text: A string, or an error, whose type stands for a message without such a line.
    """
    lines = [line.strip() for line in words_of(text).splitlines() if line.strip()]
    return (lines[0] if lines else type(text).__name__ if isinstance(text, BaseException) else "")[:LONGEST]


def named_line(error: BaseException) -> str:
    """An error's type and message in one line."""
    message = " ".join(words_of(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def place_of(error: BaseException) -> str:
    """Where a person's own code raised an error or what led to it, as " (mypkg/mymodel.py:12)"; "" where it did not.

    Own is what is neither Opweave's nor installed.
    """
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen:
        for frame in reversed(traceback.extract_tb(at.__traceback__)):
            if _is_own(frame.filename):
                return f" ({os.path.relpath(frame.filename)}:{frame.lineno})"
        seen.append(at)
        at = at.__cause__ or at.__context__
    return ""


def _is_own(name: str) -> bool:
    file = Path(name)
    if not file.is_file() or INSTALLED & set(file.parts):
        return False
    file = file.resolve()
    return not (file.is_relative_to(ROOT) and file.relative_to(ROOT).parts[0] in ROOMS)
