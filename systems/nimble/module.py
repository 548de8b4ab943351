"""Nimble as a library."""

from typing import Any

from torch import nn

from systems.scheduling.module import ScheduledModule

from .system import NimbleSystem


class Nimble(ScheduledModule):
    """`Nimble(module).prepare(example_inputs)`, as every `ScheduledModule`.

    Args:
        module: in eval form for inference, in training form for steps of training.
        options: as in conf/system/nimble.yaml.
    """

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__(module, NimbleSystem(**options))
