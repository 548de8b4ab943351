"""One published figure beside ours, and how it stands."""

from collections.abc import Sequence
from dataclasses import dataclass

HOLDS, IN_PART, DOES_NOT_HOLD, CANNOT = "holds", "holds in part", "does not hold", "cannot be run here"
NOT_RUN = "not run yet"  # of an exhibit, where nothing was asked for but to judge what is there
VERDICTS = (HOLDS, IN_PART, DOES_NOT_HOLD, CANNOT, NOT_RUN)

SHARE = 0.8  # of a published figure: what reaches it holds in size too, since GPUs and libraries differ
PART = 0.5  # of a published bound
EQUAL = 0.05  # a ratio so near to 1 says that there is no difference
NO_DIFFERENCE = 0.1
BEHIND = 0.02  # what is not slower may be by so little
COUNTED, NEARLY_COUNTED = 0.02, 0.2  # by how much a count may differ


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


RULES = {
    "ratio": f"a ratio holds where its 95 % interval lies on the paper's side of 1 and it reaches {percent(SHARE)} of the "
    f"paper's, in part where it does not reach that; one within {percent(EQUAL)} of 1 holds where ours is within "
    f"{percent(NO_DIFFERENCE)} of 1",
    "direction": "a direction holds where the 95 % interval lies beyond 1; of one measurement, which has no interval, where "
    f"that is beyond 1 by {percent(EQUAL)}, in part where it is by less",
    "not_slower": f"what is not slower holds where it has {percent(1 - BEHIND)} of the other's speed, in part where only "
    "the end of its 95 % interval has",
    "count": f"a count holds where it is the paper's within what that is printed to or {percent(COUNTED)}, in part within "
    f"{percent(NEARLY_COUNTED)}",
    "at_least": f"a lower bound holds where {percent(SHARE)} of it is reached, in part where {percent(PART)} is",
    "gain": f"a gain of AUC holds where its 95 % interval lies beyond 0 and it reaches {percent(SHARE)} of the paper's, in "
    "part where it does not reach that",
    "gain_direction": "a gain of AUC that no figure is given for holds where its 95 % interval lies beyond 0, in part where "
    "it is beyond 0 itself",
    "at_most": f"an upper bound holds where it is exceeded by no more than {percent(1 / SHARE - 1)}, in part up to "
    f"{percent(1 / PART - 1)}",
}

IN_WORDS = ("direction", "not_slower", "gain_direction")  # rules of claims that have no figure


@dataclass(frozen=True)
class Finding:
    """One figure of an exhibit.

    Args:
        what: "nasnet: nimble over eager".
        rule: a key of RULES.
        unit: of `published` and `ours`.
        published: the paper's.
        ours: what was measured here; None where nothing was.
        low, high: the ends of its 95 % interval; None where it has none.
        reason: why `ours` is None, or what a reader has to know of it.
    """

    what: str
    rule: str
    unit: str
    published: float
    ours: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""

    @property
    def verdict(self) -> str:
        """By the rules as RULES states them."""
        if self.ours is None:
            return CANNOT
        low = self.ours if self.low is None else self.low
        high = self.ours if self.high is None else self.high
        published, ours = self.published, self.ours
        if self.rule == "count":
            off = abs(ours - published)
            if off <= max(COUNTED * abs(published), half_a_digit(published)):
                return HOLDS
            return IN_PART if off <= NEARLY_COUNTED * abs(published) else DOES_NOT_HOLD
        if self.rule == "at_least":
            return HOLDS if ours >= SHARE * published else IN_PART if ours >= PART * published else DOES_NOT_HOLD
        if self.rule == "at_most":
            return HOLDS if SHARE * ours <= published else IN_PART if PART * ours <= published else DOES_NOT_HOLD
        if self.rule == "gain":
            return DOES_NOT_HOLD if low <= 0 else HOLDS if ours >= SHARE * published else IN_PART
        if self.rule == "gain_direction":
            return HOLDS if low > 0 else IN_PART if ours > 0 else DOES_NOT_HOLD
        if self.rule == "direction":
            if low <= 1:
                return DOES_NOT_HOLD
            return IN_PART if low == high and low - 1 < EQUAL else HOLDS
        if self.rule == "not_slower":
            return HOLDS if ours >= 1 - BEHIND else IN_PART if high >= 1 - BEHIND else DOES_NOT_HOLD
        if abs(published - 1) <= EQUAL:
            return HOLDS if abs(ours - 1) <= NO_DIFFERENCE else DOES_NOT_HOLD
        if published < 1:
            published, ours, low = 1 / published, 1 / ours, 1 / high
        if low <= 1:
            return DOES_NOT_HOLD
        return HOLDS if ours >= SHARE * published else IN_PART


def half_a_digit(value: float) -> float:
    """Half a unit of the last place that a number is printed to: 0.05 for 5.7; 0 for a whole number, which was counted."""
    _, _, decimals = f"{value:g}".partition(".")
    return 0.5 * 10.0 ** -len(decimals) * (1 + 1e-9) if decimals else 0.0


def overall(findings: Sequence[Finding]) -> str:
    """Of an exhibit: that of its findings where all that were measured agree, in part otherwise."""
    verdicts = {finding.verdict for finding in findings} - {CANNOT}
    if not verdicts:
        return CANNOT
    return verdicts.pop() if len(verdicts) == 1 else IN_PART
