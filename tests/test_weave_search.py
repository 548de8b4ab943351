"""Weave's search: against every single change, what it keeps, and what it does not measure."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from weave_space import PLACES, Branches, Prepared, Space, scaled

from systems.scheduling.decision import Decision
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.priorities import PRIORITIES
from systems.weave import candidate, changes, search, stream_plans, trials
from systems.weave.candidate import Candidate
from systems.weave.search import MARGIN, Search
from systems.weave.state import State
from systems.weave.stream_plans import SEARCHED, STREAM_PLANS
from systems.weave.trials import ROUNDS

ALTERNATIVES = ("own", "other", "third")


def test_changes_that_gain_beside_each_other_alone_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of three places loses by `other` unless all have it; one more gains where a place that it needs has another."""
    space = Space(0)
    everywhere = dict.fromkeys(PLACES, "other")
    space.cost = lambda c: 0.5 if dict(c.choices) == everywhere else 1.0 + 0.1 * len(c.choices)  # type: ignore[method-assign]
    state = space.searching(monkeypatch)[0].run()
    assert dict(state.best.choices) == everywhere and len(state.gains) == 1
    assert state.gains[0].change == "kind: other at 3 places"

    space = Space(0)
    needing = {"needing": "written", "p": "other"}
    space.cost = lambda c: 0.5 if dict(c.choices) == needing else 1.0 + 0.1 * len(c.choices)  # type: ignore[method-assign]
    decisions = space.decisions
    late = Decision(
        "later", "needing", (), {"separate": 1.0, "written": 1.1}, "separate", {}, "needing", needs=("p", "lost")
    )
    space.decisions = lambda choices: [*decisions(choices), replace(late, chosen=choices.get("needing", "separate"))]  # type: ignore[method-assign]
    state = space.searching(monkeypatch)[0].run()
    assert dict(state.best.choices) == needing and "1 place that it needs" in state.gains[0].change


@pytest.mark.parametrize(("ratio", "num_rounds"), [(0.9, 3 * ROUNDS + 3), (1.01, ROUNDS + 1), (1.2, 3)])
def test_what_is_clearly_slower_gets_few_rounds(monkeypatch: pytest.MonkeyPatch, ratio: float, num_rounds: int) -> None:
    """What looks faster is measured once more, and in the end captured anew; the first round of each warms up."""
    space = Space(0)
    space.cost = lambda c: ratio if c.stream_plan == "sequential" else 1.0  # type: ignore[method-assign]
    searching, _ = space.searching(monkeypatch)
    calls: list[Prepared] = []
    monkeypatch.setattr(trials, "milliseconds", lambda prepared, *_: calls.append(prepared) or prepared.milliseconds)
    searching.budget_s = 0.0
    monkeypatch.setattr(
        searching, "_is_over", lambda *kept_s: "sequential" in {p.candidate.stream_plan for p in space.prepared}
    )
    state = searching.run()
    assert len([p for p in calls if p.candidate.stream_plan == "sequential"]) == num_rounds
    assert state.ratios[Candidate("sequential").key] == pytest.approx(ratio)


def test_early_launches_are_a_change_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a program whose operator 1 may be launched early; without such an operator there is no such change."""
    space = Space(0)
    searching, _ = space.searching(monkeypatch)
    changes = dict(searching._changes())
    assert not any("early" in change for change in changes)
    for module in (search, candidate):
        monkeypatch.setattr(module, "early_operators", lambda program, schedule: (1,))
    early = Candidate(is_early=True)
    assert dict(searching._changes())["early launches: yes"] == early
    assert early.schedule(space.program).early == (1,) and Candidate().schedule(space.program).early == ()
    searching.state.best = early
    assert dict(searching._changes())["early launches: no"] == Candidate()


def test_what_gains_most_often_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Priorities, early launches, what weave alone decides, stream plans, and then each decision of the passes."""
    searching, _ = Space(0).searching(monkeypatch)
    for module in (search, candidate):
        monkeypatch.setattr(module, "early_operators", lambda program, schedule: (1,))
    monkeypatch.setattr(search, "has_priorities", lambda device: True)
    monkeypatch.setattr(changes, "of_our_own", lambda of_passes: iter([("of our own", {"p": "other"})]))
    kinds = [change.partition(":")[0] for change, _ in searching._changes()]
    in_order = list(dict.fromkeys(kinds))
    assert in_order[:4] == ["priorities", "early launches", "of our own", "stream plan"] and len(in_order) > 4
    assert kinds == sorted(kinds, key=in_order.index)


def test_operators_of_a_program_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    program = capture(Branches().eval(), (torch.randn(1, 4, 6, 6),))
    times = stream_plans.operator_ms(program)
    assert len(times) == len(program.graph) and max(times) > 0
    monkeypatch.setattr(stream_plans, "Timer", None)
    assert stream_plans.operator_ms(program) is times


def test_priorities_are_a_change_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that has them, and by the time of each operator alone."""
    space = Space(0)
    searching, _ = space.searching(monkeypatch)
    assert not any("priorities" in change for change, _ in searching._changes())
    monkeypatch.setattr(search, "has_priorities", lambda device: True)
    by_slack = Candidate(priorities="by slack")
    assert dict(searching._changes())["priorities: by slack"] == by_slack
    times = [1.0] * len(space.program.graph)
    monkeypatch.setattr(candidate, "operator_ms", lambda program: times)
    assert by_slack.schedule(space.program).priorities == PRIORITIES["by slack"](space.program.graph, times)
    assert Candidate().schedule(space.program).priorities == ()
    assert len({each.key for each in (Candidate(), by_slack, Candidate(priorities="critical path"))}) == 3
    searching.state.best = by_slack
    assert dict(searching._changes())["priorities: none"] == Candidate()
    searching.forecast = lambda program, schedule: 1.0
    assert searching._forecasts(Candidate()) is None and Candidate.from_json(by_slack.to_json()) == by_slack


def test_of_several_executors_the_fastest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there is memory for, and the others are closed."""
    space = Space(0)

    def executor() -> Prepared:
        return Prepared(Candidate(), 1.0, torch.zeros(1))

    made = [executor() for _ in range(3)]
    monkeypatch.setattr(trials, "milliseconds", lambda prepared, *_: float((1 + made.index(prepared)) % 3))
    coming = iter(made)
    assert trials.fastest_of(lambda: next(coming), 3, space.program) is made[2]
    assert [each.is_closed for each in made] == [True, True, False]

    def short() -> Prepared:
        if len(made) == 4:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        made.append(executor())
        return made[-1]

    assert trials.fastest_of(short, 3, space.program) is made[3] and not made[3].is_closed


def test_what_gains_less_than_scatter_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    space = Space(0)
    space.cost = lambda c: (1 + MARGIN) / 2 if c.stream_plan == "sequential" else 1.0  # type: ignore[method-assign]
    state = space.searching(monkeypatch)[0].run()
    assert state.best == Candidate() and state.ratios[Candidate("sequential").key] == pytest.approx((1 + MARGIN) / 2)


def test_in_turn_is_the_round_with_the_median_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round warms up. One round that is hopeless ends nothing, two do."""
    space = Space(0)
    searching, _ = space.searching(monkeypatch)
    best, other = (Prepared(Candidate(), 0.0, space.output) for _ in range(2))

    def measured(ratios: list[float]) -> tuple[float, float]:
        times = [ms for i, ratio in enumerate(ratios) for ms in (1.0 + i, (1.0 + i) * ratio)]
        monkeypatch.setattr(trials, "milliseconds", lambda prepared, *_: times.pop(0))
        return trials.in_turn(best, other, searching.inputs, searching.rewind)

    assert ROUNDS == 5
    assert measured([9.0, 1.2, 0.9, 1.04, 0.8, 0.7]) == pytest.approx((3.0, 2.7))
    assert measured([0.1, 1.2, 1.1]) == pytest.approx((2.0, 2.4))


def test_precision_is_looked_at_before_anything_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a search begins is without what costs precision, and what it gains is over that."""
    captured, times = scaled()

    def rewrite(choices: Mapping[str, str]) -> tuple[Program, list[Decision]]:
        chosen = choices.get("kind p", "new")
        decision = Decision("kind", "p", (), {"old": 1.0, "new": 0.5}, chosen, {}, "kind p")
        return times(1.01 if chosen == "new" else 1.0), [decision]

    searching = Search(captured, rewrite, 1e6, lambda message: None, lambda state: None)
    monkeypatch.setattr(searching, "_try_all", lambda: True)
    monkeypatch.setattr(searching, "_confirm", None)  # a call would fail
    state = searching.run()
    assert state.first == state.best and dict(state.best.choices) == {"kind p": "old"}


def neighbours(space: Space, best: Candidate) -> list[Candidate]:
    """Every single change that is worth a trial: the oracle of `Search._changes`, and of what is tried last."""
    plans = [replace(best, stream_plan=name) for name in STREAM_PLANS]
    others = [
        best.choose(place, name)
        for place in PLACES
        for name in ALTERNATIVES[:2]
        if dict(best.choices).get(place, "own") != name
    ]
    return [candidate for candidate in plans + others if candidate != best]


@pytest.mark.parametrize("seed", range(12))
def test_no_single_change_of_what_it_found_is_faster(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    space = Space(seed)
    searching, saved_states = space.searching(monkeypatch)
    state = searching.run()
    best, chosen = space.cost(state.best), space.cost(state.chosen)
    assert state.is_complete and chosen <= best <= space.cost(Candidate())
    assert state.best.stream_plan not in SEARCHED and (state.last is None or state.last.stream_plan in SEARCHED)
    # A candidate that an earlier best beat is slower than the present one too: costs of this space do not scatter.
    for other in neighbours(space, state.best):
        assert space.cost(other) >= MARGIN * (chosen if other.stream_plan in SEARCHED else best) - 1e-9
    assert state.first == Candidate() and (state.total is not None) == (state.chosen != Candidate())
    *tried, before, after = space.prepared[1:]  # the first and the best are captured anew, where they differ
    if state.total is None:
        tried += [before, after]
    else:
        assert (before.candidate, after.candidate) == (Candidate(), state.chosen)
    keys = [p.candidate.key for p in tried]
    assert len(keys) == len(set(keys)) and all(p.is_closed for p in space.prepared)
    assert [g.before_ms > g.after_ms for g in state.gains] == [True] * len(state.gains)
    assert State.from_json(saved_states[-1]) == state


@pytest.mark.parametrize("kind", ["merge_convolutions", "fuse_sums"])
@pytest.mark.parametrize("budget_s", [0.0, 1e6])
def test_it_begins_with_what_other_schedulers_take(monkeypatch: pytest.MonkeyPatch, budget_s: float, kind: str) -> None:
    """The passes merge, which no other scheduler does; all merges at once are one change. One place stays as it is."""
    space = Space(0)
    times: dict[str, float | None] = {"in turn": 1.0, "merged": 0.9}

    def decisions(choices: dict[str, str]) -> list[Decision]:
        slow: dict[str, float | None] = {"in turn": 1.0, "merged": None}
        unchanged = Decision(kind, "unchanged", (9,), slow, "in turn", {}, "unchanged")
        return [
            *(Decision(kind, p, (i,), times, choices.get(p, "merged"), {}, p) for i, p in enumerate(PLACES)),
            unchanged,
        ]

    space.decisions = decisions  # type: ignore[method-assign]
    space.cost = lambda c: 2.0 - 0.5 * ("merged" in dict(c.choices).values())  # type: ignore[method-assign]
    searching, _ = space.searching(monkeypatch)
    searching.budget_s = budget_s
    state = searching.run()
    assert state.first and dict(state.first.choices) == dict.fromkeys(PLACES, "in turn")
    if budget_s:
        assert dict(state.best.choices) == dict.fromkeys(PLACES, "merged")
        assert [gain.change for gain in state.gains] == [f"{kind}: as each is fastest alone, at 3 places"]
        assert [p.candidate for p in space.prepared[-2:]] == [state.first, state.best]  # held against each other once more
    else:
        assert state.best == state.first


def test_a_change_is_of_what_is_the_best_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a gain the changes that follow have it too."""
    space = Space(0)
    searching, _ = space.searching(monkeypatch)
    choices: list[tuple[str, str]] = []  # of the best
    for change, changed in searching._changes():
        if change.startswith("kind at"):
            assert set(choices) < set(changed.choices), change
            searching.state.best, choices = changed, [*changed.choices]
    assert len(choices) == len(PLACES)


def test_what_fails_is_no_end_of_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    space = Space(2)
    searching, _ = space.searching(monkeypatch)
    prepare = searching._prepare

    def failing(candidate: Candidate) -> Prepared:
        if candidate.stream_plan == "sequential":
            raise RuntimeError("no such kernel")
        return prepare(candidate)  # type: ignore[return-value]

    monkeypatch.setattr(searching, "_prepare", failing)
    state = searching.run()
    assert state.is_complete and None in state.ratios.values() and state.best.stream_plan != "sequential"


def test_what_fails_as_it_runs_is_no_end_of_a_search_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is closed, and known as what failed."""
    space = Space(2)
    searching, _ = space.searching(monkeypatch)
    right = space.searching(monkeypatch)[0].run().best
    space.prepared.clear()
    failing = [replace(right, stream_plan="sequential"), Candidate("sequential"), Candidate("greedy stages")]

    def milliseconds(prepared: Prepared, *_: object) -> float:
        if prepared.candidate in failing:
            raise RuntimeError("illegal instruction")
        return prepared.milliseconds

    monkeypatch.setattr(trials, "milliseconds", milliseconds)
    state = searching.run()
    tried = [p.candidate for p in space.prepared if p.candidate in failing]
    assert state.is_complete and tried and all(state.ratios[candidate.key] is None for candidate in tried)
    assert all(p.is_closed for p in space.prepared)


def test_where_the_best_runs_no_more_nobody_else_is_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an illegal access, which loses the device: what did that is known, and the next search goes on after it."""
    space = Space(2)
    searching, saved_states = space.searching(monkeypatch)
    lost: list[Candidate] = []

    def milliseconds(prepared: Prepared, *_: object) -> float:
        if lost or prepared.candidate.stream_plan == "sequential":
            lost.append(prepared.candidate)
            raise RuntimeError("an illegal memory access was encountered")
        return prepared.milliseconds

    for module in (search, trials):
        monkeypatch.setattr(module, "milliseconds", milliseconds)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        searching.run()
    state = State.from_json(saved_states[-1])
    assert [key for key, ratio in state.ratios.items() if ratio is None] == [lost[0].key] and not state.is_complete
    assert space.searching(monkeypatch, state)[0].run().is_complete
