"""How a paper's claim stands: one verdict for each exhibit, and the file that keeps them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from conf.text import counted

from .files import read_json, write_json
from .finding import VERDICTS as VERDICTS

COUNTS = {"judged", "figures"}


@dataclass(frozen=True)
class Verdict:
    """How one exhibit stands.

    Args:
        exhibit: "nimble/figure7".
        claim: what the paper says, in a line.
        published, measured: the figures as a reader would write them; measured is "" where nothing was measured.
        verdict: one of VERDICTS.
        reason: why, in a line or two.
        command: what reproduces it.
        place: the GPU or CPU that it was measured on, or that any machine gives it.
        judged, figures: how many figures the verdict is of, and how many the exhibit has.
    """

    exhibit: str
    claim: str
    published: str
    measured: str
    verdict: str
    reason: str
    command: str
    place: str
    judged: int
    figures: int

    @property
    def extent(self) -> str:
        """ "2 of 10": of how many figures it is."""
        return f"{self.judged} of {self.figures}"

    @property
    def extent_in_words(self) -> str:
        return f"{self.judged} of {counted(self.figures, 'figure')}"


def read_verdicts(file: Path) -> list[Verdict]:
    """The verdicts of a JSON file, a list of objects with Verdict's fields. Raises OSError; ValueError for another form."""
    document = read_json(file)
    kinds = {field.name: int if field.name in COUNTS else str for field in fields(Verdict)}
    if not isinstance(document, list):
        raise ValueError("not a list of verdicts")
    verdicts = []
    for entry in document:
        if not isinstance(entry, dict) or {name: type(value) for name, value in entry.items()} != kinds:
            texts = ", ".join(sorted(kinds.keys() - COUNTS))
            raise ValueError(f"a verdict has the texts {texts} and the counts {', '.join(sorted(COUNTS))}: {entry}")
        if not 0 <= entry["judged"] <= entry["figures"]:
            raise ValueError(f"the verdict on {entry['exhibit']} is of {entry['judged']} of {entry['figures']} figures")
        if entry["verdict"] not in VERDICTS:
            raise ValueError(f"the verdict on {entry['exhibit']} is {entry['verdict']!r}, not one of {', '.join(VERDICTS)}")
        verdicts.append(Verdict(**entry))
    return verdicts


def write_verdicts(file: Path, verdicts: Sequence[Verdict]) -> None:
    """Write the file whole or not at all. Raises OSError."""
    write_json(file, [asdict(verdict) for verdict in verdicts])
