"""Backends of torch.compile: `torch.compile(module, backend="opweave_opara", dynamic=False)`, one for every scheduler.

Each choice of conf/system that schedules has one. A module may write its buffers, as one with a static K/V cache does. Where
Opweave is not installed, or for a choice of your own, it is `torch.compile(module, backend=backend("mine"), dynamic=False)`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import conf

from .base import BadOption, Unsupported
from .registry import load
from .scheduling.scheduler import Scheduler

PREFIX = "opweave_"

Backend = Callable[..., Callable[..., Any]]


def backend(choice: str) -> Backend:
    """The backend that runs Dynamo's graphs under a scheduler. `options` of torch.compile are the scheduler's.

    Raises:
        ValueError: there is no such choice.
    """
    if choice not in conf.choices("system"):
        raise ValueError(f"no system is named {choice}: {conf.nearest(choice, conf.choices('system'))}")

    def compile_graph(
        module: Any, inputs: Sequence[object], *, mode: str | None = None, options: dict[str, conf.Value] | None = None
    ) -> Callable[..., Any]:
        if mode is not None:
            raise BadOption(f"mode={mode} is of torch.compile's own backend: {PREFIX}{choice} takes options={{...}}")
        system = load(choice, **(options or {}))
        if not isinstance(system, Scheduler):
            raise Unsupported(f"{choice} schedules no operators, so it is no backend of torch.compile")
        return system.compile_graph(module, inputs, PREFIX + choice)

    compile_graph.__name__ = PREFIX + choice
    return compile_graph


def __getattr__(name: str) -> Backend:
    """opweave_nimble and the others, as the entry points of the distribution name them."""
    choice = name.removeprefix(PREFIX)
    if choice == name or choice not in conf.choices("system"):
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return backend(choice)
