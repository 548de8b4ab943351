"""Which changes of weave's best so far are worth a trial."""

import pytest

from systems.scheduling.decision import Decision
from systems.weave.changes import FEW, OWN, WORTH, at_one_place, at_several_places, of_our_own

PLACES = ("p", "q", "r")


def alternatives(decisions: list[Decision]) -> list[tuple[str, str]]:
    """Places and what is taken there, in order."""
    return [next(iter(choices.items())) for _, choices in at_one_place(decisions)]


@pytest.mark.parametrize(("chosen", "others"), [("at once", ["merged"]), ("in turn", ["merged"]), ("merged", ["at once"])])
def test_what_stays_separate_is_one_alternative(chosen: str, others: list[str]) -> None:
    times: dict[str, float | None] = {"at once": 1.0, "in turn": 1.1, "merged": 1.2}
    assert [name for _, name in alternatives([Decision("kind", "p", (0,), times, chosen, {}, "p")])] == others


def test_what_no_other_scheduler_decides_is_tried_at_all_places_of_a_kind() -> None:
    """As the passes decide it, where they decide to change something."""

    def decision(kind: str, place: str, chosen: str) -> Decision:
        return Decision(kind, place, (0, 1), {"separate": 1.0, "joined": 1.0}, chosen, {}, place)

    first, second = OWN
    of_passes = [decision(first, "p", "joined"), decision("another", "q", "joined"), decision(first, "r", "joined")]
    of_passes += [decision(second, "s", "joined"), decision(first, "t", "separate")]
    assert [choices for _, choices in of_our_own(of_passes)] == [{"p": "joined", "r": "joined"}, {"s": "joined"}]
    assert not [*of_our_own([decision("another", "q", "joined"), decision(second, "t", "separate")])]


def test_of_many_alternatives_none_is_tried_everywhere() -> None:
    """Only what does without the decision: a tile suits one shape."""
    times: dict[str, float | None] = {"separate": 1.1, **{f"tile {i}": 1.0 + i / 100 for i in range(FEW)}}
    own = [Decision("kind", place, (i,), times, "tile 0", {}, place) for i, place in enumerate(PLACES)]
    assert [change for change, _ in at_several_places(own)] == ["kind: separate at 3 places"]


def test_what_a_few_places_have_in_common_is_tried_at_all_of_them() -> None:
    """At two places too, and each of FEW alternatives."""
    times: dict[str, float | None] = {"separate": 1.1, **{f"tile {i}": 1.0 + i / 100 for i in range(FEW - 1)}}
    own = [Decision("kind", place, (i,), times, "tile 0", {}, place) for i, place in enumerate(PLACES[:2])]
    composites = [choices for _, choices in at_several_places(own)]
    names = ("separate", *(f"tile {i}" for i in range(1, FEW - 1)))
    assert {*map(tuple, map(dict.items, composites))} == {tuple((place, name) for place in PLACES[:2]) for name in names}


def test_of_changes_at_many_places_those_come_first_that_lose_least_alone() -> None:
    """In all: ten operators of a place that lose 0.1 ms each lose more than one of another that loses 0.3."""

    def decision(kind: str, place: str, own_ms: float, lost_ms: float) -> Decision:
        return Decision(kind, place, (), {"chosen": own_ms, "other": own_ms + lost_ms}, "chosen", {}, place)

    many = [decision("many", place, 5.0, 0.1) for place in ("p", "q") for _ in range(10)]
    both = [*many, *(decision("few", place, 1.0, 0.3) for place in ("r", "s"))]
    words = [change for change, _ in at_several_places(both)]
    assert words == ["few: other at 2 places", "many: other at 2 places"]


def test_alternatives_come_by_what_their_places_take_in_all() -> None:
    """Of one place the faster first; up to WORTH times as slow as the one that was chosen."""

    def decision(place: str, own_ms: float) -> Decision:
        times = {"own": own_ms, "slower": 1.4 * own_ms, "faster": 1.1 * own_ms, "slow": (WORTH + 0.1) * own_ms}
        return Decision("kind", place, (), times, "own", {}, place)

    needing = Decision("later", "needing", (), {"separate": 1.0, "written": 9.0}, "separate", {}, "needing", ("heavy",))
    decisions = [decision("light", 1.0), decision("heavy", 2.5), *[decision("thrice", 0.9)] * 3, needing]
    expected = [(place, name) for place in ("thrice", "heavy", "light") for name in ("faster", "slower")]
    assert alternatives(decisions) == expected
    *_, last = at_several_places(decisions)
    assert last[1] == {"needing": "written", "heavy": "faster"}
