"""One figure that a paper reports, and where it stands there."""

from dataclasses import dataclass

from ..cell import Choice, named
from .names import MODELS, NO_MODEL, SYSTEMS, TRAINED

# What a number is, by the word that a row's `source` has.
BY_EYE = "figure by eye"
RELEASED, RELEASED_CODE = "released output", "released code"
FOR_WORDS = "words"
SOURCES = {
    "text": "a sentence of the paper",
    "table": "a table of the paper",
    "figure label": "a number that a figure of the paper prints",
    BY_EYE: "read off a figure of the paper that prints no number",
    RELEASED: "printed in the authors' repository, of a figure of the paper that prints none",
    RELEASED_CODE: "measured by this project with the authors' code",
    FOR_WORDS: "what stands for the words of the paper's that the note has",
}

WHOSE = {RELEASED: "authors' output", RELEASED_CODE: "authors' code"}  # of what no paper prints


@dataclass(frozen=True)
class Value:
    """A row of the CSV files, in the paper's own words.

    Args:
        paper, exhibit: where it stands ("nimble", "figure7").
        model, system: the paper's names.
        baseline: the system that a ratio is over; "" for other metrics.
        task: "inference", "training" and others.
        batch: a number or, where the paper says no more, a range or a word ("1-8", "several").
        device: the paper's GPU.
        metric: what the number is ("speedup", "latency").
        value: the number, in `unit`.
        unit: x, ms, %, s and others.
        note: what else the paper says of it.
        source: a key of SOURCES.
        place: section and table or figure.
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
    source: str
    place: str

    @property
    def zoo_model(self) -> str | None:
        """The entry of the zoo that stands for the paper's network; None where the value is of no single network."""
        if self.model in NO_MODEL:
            return None
        trained = TRAINED if self.task == "training" else {}
        return trained.get(self.model) or MODELS.get(self.model, self.model)

    @property
    def our_system(self) -> Choice | None:
        """The key of the system here that stands for the paper's; None where the value is of none."""
        return _system(self.system)

    @property
    def our_baseline(self) -> Choice | None:
        return _system(self.baseline)

    @property
    def name(self) -> str:
        """ "nimble/figure7" """
        return f"{self.paper}/{self.exhibit}"

    @property
    def whose(self) -> str:
        """Who has the number, for a legend: "ios paper", or, where that prints none, "ios authors' output"."""
        return f"{self.paper} {WHOSE.get(self.source, 'paper')}"


def _system(name: str) -> Choice | None:
    return named("system", SYSTEMS.get(name, name)) if name else None
