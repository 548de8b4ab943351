"""The configuration files as data: which choices a group has, and the options of each.

Reads YAML alone: neither Hydra nor torch is imported. Every room may ask here.

A user's own files lie in a folder that the environment variable OPWEAVE_CONF names: FOLDER/system/mine.yaml makes
system=mine a choice, on the command line and in Python. A file of Opweave's own goes before one of the same name there.
"""

import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from conf.meaning import comments, listed
from conf.names import nearest, not_one_of

__all__ = ["FOLDER", "GROUPS", "Options", "Value", "choices", "comments", "folders", "kind", "listed", "meanings"]
__all__ += ["mistake", "nearest", "not_one_of", "options"]

FOLDER = Path(__file__).resolve().parent
GROUPS = ("model", "system", "runner", "experiment")
KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "a name"}
SPAN = re.compile(r"\d+-\d+")  # both ends of a span of whole numbers; one number is a span too

Value: TypeAlias = str | int | float | bool | None  # of an option
Options: TypeAlias = dict[str, Value]


def folders() -> tuple[Path, ...]:
    """Where files are looked for, in this order: Opweave's own, then the user's if OPWEAVE_CONF names one."""
    own = os.environ.get("OPWEAVE_CONF")
    return (FOLDER, Path(own).expanduser().resolve()) if own else (FOLDER,)


def choices(group: str) -> tuple[str, ...]:
    """The names that `group=` takes, sorted; "ios/figure6" for a file in a folder of its own."""
    return _choices(group, folders())


def options(group: str, choice: str) -> Options:
    """The options of `group=choice`, its `name` among them, with the file's own `defaults` list applied as Hydra does.

    Args:
        group: a folder of conf/ whose files hold options: model, system, runner, rewriting.
        choice: a file of it, without its ending.

    Raises:
        KeyError: no file has that name.
        ValueError: the file holds no keys, or the defaults list an entry of a form that is not in use here.
    """
    return {key: value for key, (value, _) in _keys(group, choice, folders()).items()}


def meanings(group: str, choice: str) -> dict[str, str]:
    """The comment beside each option of `group=choice`, that of its `defaults` list where its file has none.

    Raises as `options`.
    """
    return {key: comment for key, (_, comment) in _keys(group, choice, folders()).items()}


def kind(default: object) -> str | None:
    """What the values of a key with this default are; None where any may be right."""
    return KINDS.get(type(default))


def mistake(group: str, defaults: Mapping[str, object], values: Mapping[str, object]) -> str | None:
    """The first thing that is wrong with the values of some options, in one line; None where all are right.

    Args:
        group: of the options, for the message.
        defaults: the options that there are. A value has the type of its default, and any type where that is null. A whole
            number may stand for a number, and for a span of them as "32-512".
        values: by option.
    """
    for key, value in values.items():
        if key not in defaults:
            return f"there is no key '{group}.{key}': {nearest(key, set(defaults) - {'name'})}"
        default = defaults[key]
        if not (value is None or isinstance(value, bool | int | float | str)):
            return f"{group}.{key}={value} is not a single value"
        is_span = isinstance(default, str) and SPAN.fullmatch(default) is not None
        is_number = (is_span or isinstance(default, float)) and isinstance(value, int) and not isinstance(value, bool)
        if default is not None and type(value) is not type(default) and not is_number:
            return f"{group}.{key}={value} is not {kind(default) or type(default).__name__}"
    return None


@cache
def _choices(group: str, searched: tuple[Path, ...]) -> tuple[str, ...]:
    files = ((folder / group, file) for folder in searched for file in (folder / group).rglob("*.yaml"))
    return tuple(sorted({file.relative_to(root).with_suffix("").as_posix() for root, file in files}))


@cache
def _keys(group: str, choice: str, searched: tuple[Path, ...]) -> dict[str, tuple[Value, str]]:
    """The value of each key, and the comment beside it."""
    file = next((f for folder in searched if (f := folder / group / f"{choice}.yaml").is_file()), None)
    if file is None:
        raise KeyError(f"conf/{group} has no {choice}")
    text = file.read_text(encoding="utf-8")
    document, beside = _document(file, text), comments(text)
    merged: dict[str, tuple[Value, str]] = {}
    entries = document.pop("defaults", [])
    if "_self_" not in entries:  # Hydra puts the file itself last
        entries = [*entries, "_self_"]
    for entry in entries:
        if entry == "_self_":
            own = {key: (value, beside.get(key, "")) for key, value in document.items()}
        elif isinstance(entry, str):  # another choice of the same group
            own = _keys(group, entry, searched)
        else:
            ((key, value),) = entry.items()
            other, at, package = str(key).removeprefix("override ").strip().partition("@")
            if not other.startswith("/") or (at and package != "_here_"):
                raise ValueError(f"{file}: the defaults list holds {key!r}, which is not of the form /group@_here_")
            own = _keys(other.removeprefix("/"), str(value), searched)
        merged |= {key: (value, comment or merged.get(key, (None, ""))[1]) for key, (value, comment) in own.items()}
    return merged


def _document(file: Path, text: str) -> dict[str, Any]:
    """What a file holds. Raises ValueError, in one line."""
    try:
        document = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{file}{line} is not YAML: {problem or type(error).__name__}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{file} holds no keys with values")
    if not isinstance(document.get("defaults", []), list):
        raise ValueError(f"{file}: defaults is no list")
    return document
