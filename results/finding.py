"""One published figure beside ours, and how it stands.

Invariants:
    A ratio is judged by its share of the paper's gain: log(ours) / log(published). Which of two systems is named first, and
    how large the gain is, change nothing.
    What noise alone could give is never a gain: an end of an interval has to lie beyond 1. What the interval leaves open is
    undecided.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, log
from statistics import NormalDist

from .published.value import BY_EYE, WHOSE

HOLDS, EXCEEDS, IN_PART, DIRECTION = "holds", "exceeds", "holds in part", "direction only"
DOES_NOT_HOLD, NOT_COMPARABLE, CANNOT = "does not hold", "not comparable", "cannot be run here"
UNDECIDED = "undecided"  # of a figure whose interval allows the paper's and its opposite
UNJUDGED = "not judged"  # of an exhibit of which less than half is judged
NOT_SHOWN = "not shown"  # of an exhibit that is simulated, where simulations are not near enough to real engines
NOT_RUN = "not run yet"  # of an exhibit, where nothing was asked for but to judge what is there
JUDGED = (HOLDS, EXCEEDS, IN_PART, DIRECTION, DOES_NOT_HOLD)  # those that say how a figure stands, the best first
VERDICTS = (*JUDGED, UNDECIDED, NOT_COMPARABLE, CANNOT, UNJUDGED, NOT_RUN, NOT_SHOWN)

SHARE, PART = 0.7, 0.3  # of the paper's gain: what holds, and what holds in part
HALF = 0.5  # of an exhibit's figures: with fewer there is no verdict on it
ONE_PROCESS = 0.1  # by how much two processes of the same kernels may differ: 9 of 10 A/A margins measured here are less
EQUAL = 0.05  # a published ratio so near to 1 says that there is no difference
NO_DIFFERENCE = 0.1
BEHIND = 0.02  # what is not slower may be by so little
LEVEL, HALF_LEVEL = 0.8, 0.5  # of a published bound that is no ratio
COUNTED, NEARLY_COUNTED = 0.02, 0.2  # by how much a count may differ
CONFIDENCE = 0.95


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


_SHARES = (
    f"holds from {percent(SHARE)} of the paper's gain (of its logarithm), in part from {percent(PART)}, and is the "
    f"direction only below; it exceeds where its whole interval lies beyond {percent(1 / SHARE)}; one whose interval "
    "reaches 1 does not hold, and is undecided where the paper's ratio lies in that interval too"
)
RULES = {
    "ratio": f"a ratio {_SHARES}. A published ratio within {percent(EQUAL)} "
    f"of 1 says that there is no difference: it holds where our whole interval is within {percent(NO_DIFFERENCE)} of 1, is "
    "undecided where ours alone is, and else stands as any other",
    "direction": "a direction holds where the whole interval lies beyond 1, and is undecided where 1 lies in it",
    "fastest": "what is the fastest holds where the whole interval lies beyond 1, and is undecided where 1 lies in it",
    "not_slower": f"what is not slower holds where the whole interval has {percent(1 - BEHIND)} of the other's speed, and "
    "is undecided where its upper end alone has",
    "alike": "what is told as alike, or as hardly faster, holds where the whole interval is within "
    f"{percent(NO_DIFFERENCE)} of 1, and is undecided where a part of it is",
    "count": f"a count holds where it is the paper's within what that is printed to or {percent(COUNTED)}, in part within "
    f"{percent(NEARLY_COUNTED)}",
    "at_least": f"a lower bound that is a ratio {_SHARES}; an idle share is taken as a call over its busy time. "
    f"Another holds where {percent(LEVEL)} of it is reached, in part where {percent(HALF_LEVEL)} is",
    "gain": f"a gain of AUC holds from {percent(SHARE)} of the paper's, in part from {percent(PART)}, and is the direction "
    f"only below; it exceeds where its whole interval lies beyond {percent(1 / SHARE)}; one whose interval reaches 0 does "
    "not hold, and is undecided where the paper's gain lies in that interval too",
    "gain_direction": "a gain of AUC that no figure is given for holds where its 95 % interval lies beyond 0, and is "
    "undecided where 0 lies in it",
    "trend": "a trend is Kendall's rank correlation, with the ends that it has over every order that the intervals of the "
    "speedups leave open: it holds where its lower end lies beyond 0, and is undecided where 0 lies between its ends",
    "at_most": f"an upper bound holds where it is exceeded by no more than {percent(1 / LEVEL - 1)}, in part up to "
    f"{percent(1 / HALF_LEVEL - 1)}",
}
INTERVALS = (
    f"an interval of one process a system, or of one measurement, is {percent(ONE_PROCESS)} wider at both ends, by which "
    "two processes of the same kernels may differ; that of the largest of several is as wide as all of them need together; "
    "and where a host slowed one side in the rounds, an end reaches to what the two took alone"
)

IN_WORDS = ("direction", "fastest", "not_slower", "alike", "gain_direction")  # rules of claims that have no figure
OF_RATIOS = ("ratio", "direction", "fastest", "not_slower", "alike")  # rules that see an interval of ratios


@dataclass(frozen=True)
class Finding:
    """One figure of an exhibit.

    Args:
        what: "nasnet: nimble over eager".
        rule: a key of RULES.
        unit: of `published` and `ours`.
        published: the paper's.
        ours: what was measured here; None where nothing was.
        low, high: the ends of its 95 % interval, as measured; None where it has none.
        reason: why `ours` is None, or what a reader has to know of it.
        processes: of each system that the interval is over.
        chosen_from: how many it is the largest or the smallest of.
        is_comparable: whether ours is over what the paper's is over; `reason` says why not.
        source: of `published`, a key of results.published.value.SOURCES.
        words: the paper's, where it prints no number; "" where it prints one.
    """

    what: str
    rule: str
    unit: str
    published: float
    ours: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""
    processes: int = 1
    chosen_from: int = 1
    is_comparable: bool = True
    source: str = "text"
    words: str = ""

    @property
    def is_by_eye(self) -> bool:
        """Whether `published` was read off a figure that prints no number."""
        return self.source == BY_EYE

    @property
    def is_released(self) -> bool:
        """Whether `published` is of what the authors released, and of no page of the paper."""
        return self.source in WHOSE

    @property
    def bounds(self) -> tuple[float, float]:
        """The ends of the interval that the rules see: with what differs between processes, and between those chosen from.

        Raises ValueError where nothing was measured.
        """
        if self.ours is None:
            raise ValueError(f"{self.what} was not measured")
        low = self.ours if self.low is None else self.low
        high = self.ours if self.high is None else self.high
        if self.rule not in OF_RATIOS and not (self.rule == "at_least" and self.unit == "x"):
            return low, high
        if self.ours <= 0:
            return low, high
        if self.processes == 1 or low == high:
            low, high = low / (1 + ONE_PROCESS), high * (1 + ONE_PROCESS)
        wider = _normal(self.chosen_from) / _normal(1)
        return self.ours * (low / self.ours) ** wider, self.ours * (high / self.ours) ** wider

    @property
    def is_judged(self) -> bool:
        """Whether it says how the paper's figure stands."""
        return self.verdict in JUDGED

    @property
    def verdict(self) -> str:
        """By the rules as RULES states them."""
        if not self.is_comparable:
            return NOT_COMPARABLE
        if self.ours is None:
            return CANNOT
        published, ours, (low, high) = self.published, self.ours, self.bounds
        if self.rule == "count":
            off = abs(ours - published)
            if off <= max(COUNTED * abs(published), half_a_digit(published)):
                return HOLDS
            return IN_PART if off <= NEARLY_COUNTED * abs(published) else DOES_NOT_HOLD
        if self.rule == "at_most":
            return HOLDS if LEVEL * ours <= published else IN_PART if HALF_LEVEL * ours <= published else DOES_NOT_HOLD
        if self.rule == "at_least" and self.unit == "%":
            return _by_share(*(_log_of_call_over_busy(share) for share in (published, ours, low, high)))
        if self.rule == "at_least" and self.unit != "x":
            return HOLDS if ours >= LEVEL * published else IN_PART if ours >= HALF_LEVEL * published else DOES_NOT_HOLD
        if self.rule == "gain":
            return _by_share(published, ours, low, high)
        if self.rule in ("gain_direction", "trend"):
            return _beyond(0, low, high)
        if ours <= 0:
            return DOES_NOT_HOLD
        if self.rule in ("direction", "fastest"):
            return _beyond(1, low, high)
        if self.rule == "not_slower":
            return HOLDS if low >= 1 - BEHIND else UNDECIDED if high >= 1 - BEHIND else DOES_NOT_HOLD
        is_within = low >= 1 / (1 + NO_DIFFERENCE) and high <= 1 + NO_DIFFERENCE
        if self.rule == "alike":
            is_beside = high < 1 / (1 + NO_DIFFERENCE) or low > 1 + NO_DIFFERENCE
            return HOLDS if is_within else DOES_NOT_HOLD if is_beside else UNDECIDED
        if abs(log(published)) <= log(1 + EQUAL) and abs(log(ours)) <= log(1 + NO_DIFFERENCE):
            return HOLDS if is_within else UNDECIDED
        return _by_share(log(published), *(log(value) for value in (ours, low, high)))


def _beyond(nothing: float, low: float, high: float) -> str:
    """Of what is told without a figure. nothing: the value that says neither that nor its opposite."""
    return HOLDS if low > nothing else UNDECIDED if high > nothing else DOES_NOT_HOLD


def _by_share(published: float, ours: float, low: float, high: float) -> str:
    """Of a gain, 0 for none: by the share of the paper's that ours is. A loss of the paper's is a gain of the other side."""
    if published < 0:
        published, ours, low, high = -published, -ours, -high, -low
    if low <= 0 or published == 0:
        return UNDECIDED if low <= 0 < published <= high else DOES_NOT_HOLD
    if low / published > 1 / SHARE:
        return EXCEEDS
    share = ours / published
    return HOLDS if share >= SHARE else IN_PART if share >= PART else DIRECTION


def _log_of_call_over_busy(idle: float) -> float:
    """How many times as long a call is as its busy time, as a logarithm. idle: percent of the call."""
    return -log(1 - idle / 100) if idle < 100 else inf


def _normal(several: int) -> float:
    """How many standard deviations from the middle hold CONFIDENCE of all of several normal variables at once, at least."""
    return NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / several)


def half_a_digit(value: float) -> float:
    """Half a unit of the last place that a number is printed to: 0.05 for 5.7; 0 for a whole number, which was counted."""
    _, _, decimals = f"{value:g}".partition(".")
    return 0.5 * 10.0 ** -len(decimals) * (1 + 1e-9) if decimals else 0.0


def overall(findings: Sequence[Finding]) -> str:
    """Of an exhibit: the best verdict that at least HALF of its judged findings reach, and "holds" only where all do that
    were measured.

    There is none where less than HALF of the findings are judged.
    """
    judged = [finding.verdict for finding in findings if finding.is_judged]
    are_some_open = any(finding.verdict == UNDECIDED for finding in findings)
    if not judged:
        if are_some_open:
            return UNJUDGED
        return NOT_COMPARABLE if any(finding.ours is not None for finding in findings) else CANNOT
    if len(judged) < HALF * len(findings):
        return UNJUDGED
    reached = sorted(judged, key=JUDGED.index)[ceil(HALF * len(judged)) - 1]
    if reached not in (HOLDS, EXCEEDS):
        return reached
    if are_some_open or not set(judged) <= {HOLDS, EXCEEDS}:
        return IN_PART
    return EXCEEDS if set(judged) == {EXCEEDS} else HOLDS
