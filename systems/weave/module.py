"""Weave as a library."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from systems.registry import load
from systems.scheduling.module import Axis, ScheduledModule
from systems.scheduling.scheduler import Scheduler

__all__ = ["Axis", "Weave"]


class Weave(ScheduledModule):
    """`Weave(module).prepare(example_inputs)`, as every `ScheduledModule`.

    Args:
        module: in eval form.
        axes, otherwise: those of `ScheduledModule`.
        options: as in conf/system/weave.yaml; what is not named is as there.
    """

    def __init__(self, module: nn.Module, axes: Sequence[Axis] = (), otherwise: str = "refuse", **options: Any):
        system = load("weave", **options)
        assert isinstance(system, Scheduler)
        super().__init__(module, system, axes, otherwise)
