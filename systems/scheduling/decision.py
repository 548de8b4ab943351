"""A decision among measured alternatives: the one type in which passes, schedulers and searches say what they chose.

A `Decision` is of one place in a program. Files and tables hold `DecisionRow`s: equal decisions as one row with a count.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256

DIGITS = 5  # of a millisecond in a row: 10 ns


@dataclass(frozen=True)
class Decision:
    """What was matched, what each alternative took, and which was taken.

    Args:
        kind: what decided, such as "merge_linears" or "torch_compile".
        pattern: what matched, in words for people.
        operators: ids of the matched operators, in the program that was matched.
        milliseconds: of each alternative by name, None where it failed; empty where nothing was measured. The first is what
            is done without the decision.
        chosen: the alternative that was taken; one of `milliseconds` unless nothing was measured.
        reasons: why an alternative has no time, by its name.
        place: equal for equal places of any program (`place_of`); empty where nothing was measured.
        needs: places of earlier decisions that, taken otherwise, would let this one gain more.
    """

    kind: str
    pattern: str
    operators: tuple[int, ...]
    milliseconds: dict[str, float | None]
    chosen: str
    reasons: dict[str, str] = field(default_factory=dict)
    place: str = ""
    needs: tuple[str, ...] = ()

    @property
    def without(self) -> str:
        """What is done without the decision; as chosen where nothing was measured."""
        return next(iter(self.milliseconds), self.chosen)

    @property
    def is_change(self) -> bool:
        return self.chosen != self.without

    @property
    def gain(self) -> float | None:
        """How many times as fast the chosen alternative is as the first; None where either has no time."""
        return _gain(self.milliseconds, self.chosen)


@dataclass(frozen=True)
class DecisionRow:
    """Equal decisions, as a schedule file and a record hold them.

    Args:
        count: how many decisions.
        num_operators: how many operators they matched, all together.
        milliseconds: rounded to `DIGITS`.
    """

    kind: str
    pattern: str
    count: int
    num_operators: int
    chosen: str
    milliseconds: dict[str, float | None]
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def gain(self) -> float | None:
        """As `Decision.gain`, of the rounded times."""
        return _gain(self.milliseconds, self.chosen)

    def to_json(self) -> dict[str, object]:
        """Data for `json.dump`."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, object]) -> "DecisionRow":
        """Read `to_json` back. Raises ValueError where `document` is no row."""
        try:
            return cls(**document)  # type: ignore[arg-type]
        except TypeError as error:
            raise ValueError(f"not a decision: {error}") from error


def place_of(kind: str, signature: str) -> str:
    """The name of a place that is matched.

    Args:
        kind: of the decision.
        signature: what is there, `Program.signature` of each operator.
    """
    return f"{kind} {sha256(signature.encode()).hexdigest()[:16]}"


def kind_of(place: str) -> str:
    """The kind of the decisions at a place, of its name."""
    return place.split(" ")[0]


def rows(decisions: Iterable[Decision]) -> list[DecisionRow]:
    """Decisions of equal kind, pattern, milliseconds and choice as one row each, in the order of their first."""
    members_by_row: dict[tuple[object, ...], list[Decision]] = {}
    for d in decisions:
        members_by_row.setdefault((d.kind, d.pattern, d.chosen, *d.milliseconds.items()), []).append(d)
    return [_row(members) for members in members_by_row.values()]


def _row(members: list[Decision]) -> DecisionRow:
    first = members[0]
    milliseconds = {name: None if t is None else round(t, DIGITS) for name, t in first.milliseconds.items()}
    num_operators = sum(len(d.operators) for d in members)
    return DecisionRow(
        first.kind, first.pattern, len(members), num_operators, first.chosen, milliseconds, dict(first.reasons)
    )


def _gain(milliseconds: Mapping[str, float | None], chosen: str) -> float | None:
    first, taken = next(iter(milliseconds.values()), None), milliseconds.get(chosen)
    return first / taken if first is not None and taken else None
