"""What a search knows, as data, so that it can go on in another process."""

from dataclasses import astuple, dataclass, field
from typing import Any

from systems.cache import JSON

from .candidate import Candidate


@dataclass(frozen=True)
class Gain:
    """A change that was kept.

    Args:
        change: in words.
        before_ms, after_ms: of a call, measured in turn.
    """

    change: str
    before_ms: float
    after_ms: float


@dataclass
class State:
    """What a search knows, so that it can go on in another process.

    Args:
        best: the best so far of those without a stream plan that is searched for.
        first: where the search began, which is what the other schedulers execute; None before it began.
        ratios: by `Candidate.key`, over the best at that time; None where it failed.
        simulated: as `ratios`, of those that were simulated alone, since they looked slow.
        gains: the changes that led to the best, in order.
        last: one with such a plan that is faster than the best at that time; None where there is none.
        last_gain: of that.
        total: of what is chosen over the first, both captured anew in the end; None where that was not measured.
        dropped: decisions of the passes that cost more precision than a cell may lose, in words.
        weights: a digest of those with which it was held to the reference; empty before that.
        seconds: spent so far.
        is_complete: nothing is left to try, and what is chosen was held against the first.
    """

    best: Candidate = field(default_factory=Candidate)
    first: Candidate | None = None
    ratios: dict[str, float | None] = field(default_factory=dict)
    simulated: dict[str, float] = field(default_factory=dict)
    gains: list[Gain] = field(default_factory=list)
    last: Candidate | None = None
    last_gain: Gain | None = None
    total: Gain | None = None
    dropped: list[str] = field(default_factory=list)
    weights: str = ""
    seconds: float = 0.0
    is_complete: bool = False

    @property
    def chosen(self) -> Candidate:
        """What is executed."""
        return self.last or self.best

    @property
    def all_gains(self) -> list[Gain]:
        """Those that led to it, and that of all of them together where it was measured."""
        return [gain for gain in (*self.gains, self.last_gain, self.total) if gain is not None]

    def to_json(self) -> dict[str, JSON]:
        return {
            "best": self.best.to_json(),
            "first": self.first.to_json() if self.first else None,
            "ratios": {**self.ratios},
            "simulated": {**self.simulated},
            "gains": [[*astuple(gain)] for gain in self.gains],
            "last": self.last.to_json() if self.last else None,
            "last_gain": [*astuple(self.last_gain)] if self.last_gain else None,
            "total": [*astuple(self.total)] if self.total else None,
            "dropped": [*self.dropped],
            "weights": self.weights,
            "seconds": self.seconds,
            "is_complete": self.is_complete,
        }

    @classmethod
    def from_json(cls, document: Any) -> "State":
        """Raises KeyError, TypeError or ValueError where `document` is not of `to_json`."""
        first, last, last_gain, total = (document[name] for name in ("first", "last", "last_gain", "total"))
        return cls(
            Candidate.from_json(document["best"]),
            None if first is None else Candidate.from_json(first),
            {str(key): ratio for key, ratio in document["ratios"].items()},
            {str(key): float(ratio) for key, ratio in document["simulated"].items()},
            [_gain(*entry) for entry in document["gains"]],
            None if last is None else Candidate.from_json(last),
            None if last_gain is None else _gain(*last_gain),
            None if total is None else _gain(*total),
            [str(words) for words in document["dropped"]],
            str(document["weights"]),
            float(document["seconds"]),
            document["is_complete"],
        )


def _gain(change: object, before_ms: float, after_ms: float) -> Gain:
    return Gain(str(change), float(before_ms), float(after_ms))
