"""Which other decisions are worth a trial in the whole, by the operators' own times, and in what order."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from conf.text import counted
from systems.scheduling.decision import Decision

from .candidate import Choices

FEW = 4  # alternatives of a decision, up to which each is tried at all places of its kind at once
ALIKE = ("in turn", "at once")  # ways to measure what stays separate: one alternative, as the stream plan runs it
WORTH = 1.5  # times the chosen alternative's own time, up to which another is worth a trial in the whole
OWN = ("merge_convolutions", "fuse_sums")  # kinds of decisions that no other scheduler takes

Change: TypeAlias = tuple[str, Choices]  # in words, and as alternatives by place


def at_one_place(decisions: Sequence[Decision]) -> Iterator[Change]:
    """Another alternative at one place, and those equal to it; first those of the operators that take longest in all."""
    for decision, alternative in _alternatives(decisions):
        change = f"{decision.kind} at {decision.pattern}: {alternative} in the place of {decision.chosen}"
        yield change, {decision.place: alternative}


def of_our_own(of_passes: Sequence[Decision]) -> Iterator[Change]:
    """All decisions of a kind that no other scheduler takes.

    Args:
        of_passes: the passes' own decisions, each as its operators are fastest alone.
    """
    taken_alone = [d for d in of_passes if d.kind in OWN and d.is_change]
    for kind in OWN:
        if by_place := {d.place: d.chosen for d in taken_alone if d.kind == kind}:
            yield f"{kind}: as each is fastest alone, at {counted(len(by_place), 'place')}", by_place


def at_several_places(decisions: Sequence[Decision]) -> Iterator[Change]:
    """Several decisions at once, each of which may gain only beside the others.

    They are one alternative at all places of a kind, where that does without the decision or is one of a FEW; and one with
    the fastest at the places that it needs. What loses least by the operators' own times comes first: layouts that lose
    much take long to measure anew.

    Args:
        decisions: what is chosen.
    """
    alternatives = _alternatives(decisions)
    places_by_change: dict[tuple[str, str], list[str]] = {}
    lost_ms: dict[tuple[str, str], float] = {}  # by what each operator takes alone
    counts = Counter(decision.place for decision in decisions)
    for decision, name in alternatives:
        if name == decision.without or len(decision.milliseconds) <= FEW:
            both = decision.kind, name
            places_by_change.setdefault(both, []).append(decision.place)
            lost = (decision.milliseconds[name] or 0.0) - (decision.milliseconds[decision.chosen] or 0.0)
            lost_ms[both] = lost_ms.get(both, 0.0) + lost * counts[decision.place]
    for kind, name in sorted(lost_ms, key=lost_ms.__getitem__):
        places = places_by_change[kind, name]
        if len(places) > 1:
            yield f"{kind}: {name} at {len(places)} places", dict.fromkeys(places, name)
    fastest: dict[str, str] = {}  # alternatives by place
    for decision, name in alternatives:
        fastest.setdefault(decision.place, name)
    for decision in {d.place: d for d in decisions if d.needs}.values():
        needed = {place: fastest[place] for place in decision.needs if place in fastest}
        if needed:
            own = next(reversed(decision.milliseconds))
            change = f"{decision.kind} at {decision.pattern}: {own}, and {counted(len(needed), 'place')} that it needs"
            yield change, needed | {decision.place: own}


def _alternatives(decisions: Sequence[Decision]) -> list[tuple[Decision, str]]:
    """Decisions and other alternatives worth a trial; first those of the operators that take longest in all."""
    members: dict[str, list[Decision]] = {}
    for decision in decisions:
        if decision.place:
            members.setdefault(decision.place, []).append(decision)
    weighted = []
    for equal in members.values():
        first = equal[0]
        own = first.milliseconds[first.chosen]
        for name, t in first.milliseconds.items():
            if name in ALIKE and (first.chosen in ALIKE or name != first.without):
                continue
            if own is not None and t is not None and name != first.chosen and t <= WORTH * own:
                weighted.append((-own * len(equal), t, first, name))
    weighted.sort(key=lambda entry: entry[:2])
    return [(decision, name) for _, _, decision, name in weighted]
