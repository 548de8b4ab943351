"""One figure that a paper reports."""

from dataclasses import dataclass

from .names import MODELS, NO_MODEL, SYSTEMS, TRAINED


@dataclass(frozen=True)
class Value:
    """A row of the CSV files, in the paper's own words.

    paper and exhibit: where it stands ("nimble", "figure7"). baseline: of a ratio, what it is to; "" otherwise. batch: a
    number or, where the paper says no more, words ("1-8"). unit: x, ms, %, s, ... note: what else the paper says of it.
    """

    paper: str
    exhibit: str
    model: str
    system: str
    baseline: str
    task: str
    batch: str
    device: str
    metric: str
    value: float
    unit: str
    note: str

    @property
    def zoo_model(self) -> str | None:
        """The entry of the zoo that stands for the paper's network; None where the value is of no single network."""
        if self.model in NO_MODEL:
            return None
        trained = TRAINED if self.task == "training" else {}
        return trained.get(self.model) or MODELS.get(self.model, self.model)

    @property
    def our_system(self) -> str:
        return SYSTEMS.get(self.system, self.system)

    @property
    def our_baseline(self) -> str:
        return SYSTEMS.get(self.baseline, self.baseline)

    @property
    def source(self) -> str:
        """ "nimble/figure7" """
        return f"{self.paper}/{self.exhibit}"
