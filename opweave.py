"""Opweave in Python: `opweave.load("nimble").prepare(module, inputs)` returns a callable in the module's place.

In a wheel this file is the package `opweave`, which every room lies in. Importing it imports neither torch nor a system.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conf import Value
    from systems.base import System

__all__ = ["load", "names"]


def load(name: str, **options: Value) -> System:
    """A system of conf/system.

    Args:
        name: as `system=NAME` on the command line.
        options: as `system.OPTION=VALUE` on the command line.

    Raises:
        ValueError: no system has that name; the message holds the nearest one.
        systems.base.BadOption: an option or its value is wrong.
    """
    import systems

    return systems.load(name, **options)


def names() -> list[str]:
    """The name of every system that `load` takes."""
    import systems

    return systems.names()


def __getattr__(name: str) -> str:
    """`opweave.__version__`, which is looked up where it is asked for."""
    if name == "__version__":
        from importlib.metadata import version

        return version("opweave")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
