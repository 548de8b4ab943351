"""The configuration files as data: which choices a group has, and the options of each.

Reads YAML alone: neither Hydra nor torch is imported. Every room may ask here.
"""

from functools import cache
from pathlib import Path
from typing import TypeAlias

import yaml

from conf.names import nearest

__all__ = ["FOLDER", "GROUPS", "Options", "Value", "choices", "nearest", "options"]

FOLDER = Path(__file__).resolve().parent
GROUPS = ("model", "system", "runner", "experiment")

Value: TypeAlias = "str | int | float | bool | None"  # of an option
Options: TypeAlias = "dict[str, Value]"


@cache
def choices(group: str) -> tuple[str, ...]:
    """The names that `group=` takes, sorted; "ios/figure6" for a file in a folder of its own."""
    folder = FOLDER / group
    return tuple(sorted(file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.yaml")))


def options(group: str, choice: str) -> Options:
    """The options of `group=choice`, its `name` among them, with the file's own `defaults` list applied as Hydra does.

    Args:
        group: a folder of conf/ whose files hold options: model, system, runner, rewriting.
        choice: a file of it, without its ending.

    Raises:
        KeyError: no file has that name.
        ValueError: the defaults list has an entry of a form that is not in use here.
    """
    return dict(_options(group, choice))


@cache
def _options(group: str, choice: str) -> tuple[tuple[str, Value], ...]:
    file = FOLDER / group / f"{choice}.yaml"
    if not file.is_file():
        raise KeyError(f"conf/{group} has no {choice}")
    document = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    merged: Options = {}
    entries = document.pop("defaults", [])
    if "_self_" not in entries:  # Hydra puts the file itself last
        entries = [*entries, "_self_"]
    for entry in entries:
        if entry == "_self_":
            merged |= document
        elif isinstance(entry, str):  # another choice of the same group
            merged |= dict(_options(group, entry))
        else:
            ((key, value),) = entry.items()
            other, at, package = str(key).removeprefix("override ").strip().partition("@")
            if not other.startswith("/") or (at and package != "_here_"):
                raise ValueError(f"{file}: the defaults list holds {key!r}, which is not of the form /group@_here_")
            merged |= dict(_options(other.removeprefix("/"), str(value)))
    return tuple(merged.items())
