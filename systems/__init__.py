"""The systems under test: `systems.load("nimble").prepare(module, inputs)` returns a callable in the module's place."""

from systems.registry import load, names

__all__ = ["load", "names"]
