"""runner=training: what is measured of whole steps of training, after a few of them have been compared with eager's."""

from dataclasses import dataclass

from runners.checks import not_negative, one_of

from .base import Composition, RunnerOptions

OPTIMIZERS = ("sgd", "adamw")


@dataclass(frozen=True)
class TrainingOptions(RunnerOptions):
    """The optimizer of the steps.

    Args:
        optimizer: one of OPTIMIZERS.
        learning_rate, weight_decay: of either.
        momentum: of sgd.
    """

    optimizer: str
    learning_rate: float
    momentum: float
    weight_decay: float

    def __post_init__(self) -> None:
        one_of("runner.optimizer", self.optimizer, OPTIMIZERS)
        for key in ("learning_rate", "momentum", "weight_decay"):
            not_negative(f"runner.{key}", getattr(self, key))


class Training(Composition):
    """A call is a step of training; what counts is throughput."""

    name = "training"
    Options = TrainingOptions
    session = "runners.cell.training:TrainingSession"
    shown_first = ("samples/s",)
    learns = False
