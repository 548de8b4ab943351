"""Weave's search that is killed, goes on, or holds what it found against the first once more."""

from dataclasses import replace

import pytest
from weave_space import Prepared, Space

from systems.weave import search
from systems.weave.candidate import Candidate
from systems.weave.search import Search
from systems.weave.state import State
from systems.weave.stream_plans import SEARCHED


@pytest.mark.parametrize("most", [3, 5, 9, 14])
def test_a_killed_search_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    space = Space(2)
    whole = space.searching(monkeypatch)[0].run()
    assert whole.best != whole.first
    space.prepared.clear()
    killed, saved_states = space.searching(monkeypatch, most=most)
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    tried = [p.candidate.key for p in space.prepared[1:]]
    space.prepared.clear()
    rest, _ = space.searching(monkeypatch, State.from_json(saved_states[-1]))
    assert rest.run().chosen == whole.chosen
    *later, _, _ = space.prepared[1:]  # the first and the best are captured anew in the end
    assert set(tried).isdisjoint(p.candidate.key for p in later) and len(tried) == most - 1


def test_a_search_that_goes_on_begins_with_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to try, whatever is kept is what it found, and nothing is looked at for its precision again."""
    space = Space(2)
    searching, saved_states = space.searching(monkeypatch)
    whole = searching.run()
    assert whole.best != whole.first
    for is_complete in (True, False):
        again, _ = space.searching(monkeypatch, replace(State.from_json(saved_states[-1]), is_complete=is_complete))
        monkeypatch.setattr(again.precision, "dropped", None)  # a call would fail
        assert again.run().best == whole.best and again.state.first == whole.first
    begun = State(first=Candidate(), ratios={"another": 2.0}, weights=whole.weights)
    again, _ = space.searching(monkeypatch, replace(begun, best=begun.first or Candidate()))
    monkeypatch.setattr(again.precision, "dropped", None)
    assert again.run().first == Candidate()


def test_gains_that_a_new_capture_does_not_show_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here each that is prepared later is faster; captured anew, all are equally fast."""
    space = Space(0)
    space.cost = lambda c: 1 / (1 + len(space.prepared))  # type: ignore[method-assign]
    searching, saved_states = space.searching(monkeypatch)
    confirm = searching._confirm

    def captured_anew() -> bool:
        assert searching.state.gains
        space.cost = lambda c: 1.0  # type: ignore[method-assign]
        return confirm()

    monkeypatch.setattr(searching, "_confirm", captured_anew)
    state = searching.run()
    assert state.best == state.first == Candidate() and state.gains == [] and state.total is None
    assert State.from_json(saved_states[-1]) == state and state.is_complete


@pytest.mark.parametrize("is_over", [False, True])
def test_gains_that_are_given_up_leave_each_change_to_a_trial_alone(monkeypatch: pytest.MonkeyPatch, is_over: bool) -> None:
    """Two changes look faster beside each other, and captured anew only the first is: within one budget, or a longer one."""
    space = Space(0)
    single = Candidate().choose("p", "other")
    both = single.choose("q", "other")
    space.cost = lambda c: {single: 0.8, both: 0.7}.get(c, 1.0)  # type: ignore[method-assign]
    searching, saved_states = space.searching(monkeypatch)
    confirm = searching._confirm

    def captured_anew() -> bool:
        if searching.state.best == both:
            space.cost = lambda c: {single: 0.8}.get(c, 1.0)  # type: ignore[method-assign]
            searching.budget_s = 0.0 if is_over else searching.budget_s
        return confirm()

    monkeypatch.setattr(searching, "_confirm", captured_anew)
    state = searching.run()
    if is_over:
        assert state.best == state.first and not state.is_complete and state.ratios[both.key] == 1.0
        state = space.searching(monkeypatch, State.from_json(saved_states[-1]))[0].run()
    assert state.best == single and state.total is not None and state.is_complete
    assert state.ratios[both.key] == 1.0 and all(p.is_closed for p in space.prepared)


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize("is_slower_anew", [False, True])
def test_a_best_that_was_not_confirmed_is_by_the_next_search(
    monkeypatch: pytest.MonkeyPatch, is_over: bool, is_slower_anew: bool
) -> None:
    """The search before was killed as it captured anew; the next one's budget may be over."""
    space = Space(2)
    killed, saved_states = space.searching(monkeypatch)

    def interrupted() -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(killed, "_confirm", interrupted)
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    state = State.from_json(saved_states[-1])
    assert not state.is_complete and state.best != state.first and state.total is None
    if is_slower_anew:
        space.cost = lambda c: 1.0 if c == Candidate() else 2.0  # type: ignore[method-assign]
    again, saved_states = space.searching(monkeypatch, state)
    again.budget_s = 0.0 if is_over else again.budget_s
    before = state.best
    resumed = again.run()
    assert resumed.best == (Candidate() if is_slower_anew else before) and (resumed.total is None) is is_slower_anew
    assert resumed.is_complete is not is_over and State.from_json(saved_states[-1]) == resumed
    space.prepared.clear()
    last, _ = space.searching(monkeypatch, State.from_json(saved_states[-1]))
    last.budget_s = again.budget_s
    assert last.run().best == resumed.best and space.prepared == []


def test_a_later_gain_is_held_against_the_first_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A total is of the best: one that was measured of an earlier best counts no more."""
    space = Space(0)
    single = Candidate().choose("p", "other")
    better = single.choose("q", "other")
    space.cost = lambda c: {single: 0.8, better: 0.6}.get(c, 1.0)  # type: ignore[method-assign]
    total = search.Gain("all", 1.0, 0.8)
    searching, saved_states = space.searching(monkeypatch, State(best=single, first=Candidate(), total=total))
    state = searching.run()
    assert state.best == better and state.total is not None and state.total.after_ms == 0.6
    states = [State.from_json(document) for document in saved_states]
    assert {each.total for each in states if each.best == single} == {total}
    assert None in {each.total for each in states if each.best == better}


class Clock:
    """Stands in for the clock: each candidate that is prepared takes a second."""

    def __init__(self, searching: Search, monkeypatch: pytest.MonkeyPatch):
        self.now = searching.begin = 1000.0
        prepare = searching._prepare

        def taking_a_second(candidate: Candidate) -> Prepared:
            self.now += 1
            return prepare(candidate)  # type: ignore[return-value]

        monkeypatch.setattr(searching, "_prepare", taking_a_second)
        searching.clock = lambda: self.now


def test_a_share_of_the_budget_is_kept_for_plans_that_are_tried_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer search goes on from the best before them, and tries them again on what it finds."""
    space = Space(4)
    searching, saved_states = space.searching(monkeypatch)
    searching.budget_s, searching.kept_s = 20.0, 10.0
    clock = Clock(searching, monkeypatch)
    state = searching.run()
    tried = [each.candidate for each in space.prepared]
    last = [candidate for candidate in tried if candidate.stream_plan in SEARCHED]
    assert len({candidate.stream_plan for candidate in last}) == len(SEARCHED) and not state.is_complete
    assert all(candidate.stream_plan not in SEARCHED for candidate in tried[: tried.index(last[0])])
    assert tried.index(last[0]) <= 11 and 1020.0 <= clock.now < 1025.0 and state.seconds >= 20.0  # and what is left is used
    again = space.searching(monkeypatch, State.from_json(saved_states[-1]))[0]
    again.budget_s, again.kept_s, again.last_plans = 20.0, 0.0, {}  # as in the process that is measured
    again.clock, again.begin = searching.clock, searching.begin
    space.prepared.clear()
    assert again.run() == state and space.prepared == []  # the budget is spent
    longer = space.searching(monkeypatch, State.from_json(saved_states[-1]))[0].run()
    assert longer.is_complete and space.cost(longer.chosen) <= space.cost(state.chosen) + 1e-9
    new = [each.candidate for each in space.prepared]
    assert any(candidate.stream_plan not in SEARCHED and candidate not in tried for candidate in new)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 12))])
def test_no_plan_that_was_found_is_lost(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Wherever a search is killed, and whoever goes on, with the plans that are tried last or without: what is chosen gets
    no slower, and he who may try all finds as much as one that nobody killed."""
    space = Space(seed)
    whole = space.searching(monkeypatch)[0].run()
    num_prepared = len(space.prepared)
    for most in range(2, num_prepared, 3):
        space.prepared.clear()
        killed, saved_states = space.searching(monkeypatch, most=most)
        with pytest.raises(KeyboardInterrupt):
            killed.run()
        state = State.from_json(saved_states[-1])
        costs = [space.cost(state.chosen)]
        for last_plans in ({}, SEARCHED, {}):
            going_on, _ = space.searching(monkeypatch, State.from_json(state.to_json()))
            going_on.last_plans = last_plans
            state = going_on.run()
            costs.append(space.cost(state.chosen))
        assert costs == sorted(costs, reverse=True) and state.is_complete
        assert costs[-1] == pytest.approx(space.cost(whole.chosen))
