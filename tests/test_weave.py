"""Weave: its search against every single change, what it keeps, its plan files, and its list schedules."""

import json
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from conftest import Run, command, environment
from dags import dags
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import GPU, kernel, operator, profile_of
from torch import Tensor, nn

import systems
from systems.base import BadOption, Unsupported
from systems.profiling.profile import Profile
from systems.profiling.timing import Timer
from systems.scheduling import scheduler
from systems.scheduling.decision import Decision, kind_of
from systems.scheduling.execution.arena import Arena
from systems.scheduling.execution.execute import execute
from systems.scheduling.execution.scheduled import Scheduled
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.graph.program import Program
from systems.scheduling.passes import fuse_in_triton
from systems.scheduling.passes import rewriting as module_of_passes
from systems.scheduling.passes.context import Context, Rewritten
from systems.scheduling.passes.rewriting import CHAINS, SWITCHES, Pass, Remembered, Rewriting
from systems.scheduling.plans.launch_order import upward_ranks
from systems.scheduling.plans.list_scheduling import list_schedule
from systems.scheduling.plans.priorities import PRIORITIES
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.verify import verify
from systems.weave import candidate, forecast, reference, search, stream_plans, trials
from systems.weave import system as weave_system
from systems.weave.candidate import Candidate
from systems.weave.changes import WORTH
from systems.weave.search import MARGIN, Search
from systems.weave.state import State
from systems.weave.stream_plans import SEARCHED, STREAM_PLANS
from systems.weave.trials import ROUNDS


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.a(x)).relu() + self.b(x).relu().sigmoid()  # type: ignore[no-any-return]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = Branches()

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x) * 1.0  # type: ignore[no-any-return]


@cache
def scaled() -> tuple[Program, Callable[[float], Program]]:
    """A program, and the same with its output times a factor."""
    captured = capture(Scaled().eval(), (torch.randn(1, 4, 6, 6),))
    last = len(captured.graph) - 1

    def times(factor: float) -> Program:
        calls = [*captured.calls[:last], captured.calls[last].map(lambda leaf: factor if leaf == 1.0 else leaf)]
        return Program(captured.graph, calls, captured.outputs, captured.output_spec, captured.examples)

    return captured, times


PLACES = ("p", "q", "r")
ALTERNATIVES = ("own", "other", "third")


class Prepared:
    """Stands in for an executor: a call takes what its candidate is given."""

    def __init__(self, candidate: Candidate, milliseconds: float, output: Tensor):
        self.candidate, self.milliseconds, self.output, self.is_closed = candidate, milliseconds, output, False

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self.output

    def close(self) -> None:
        self.is_closed = True


class Space:
    """Costs of candidates drawn at random, and what a search prepares of them."""

    def __init__(self, seed: int, wrong: Callable[[Candidate], bool] = lambda candidate: False):
        self.seed, self.wrong = seed, wrong
        self.program: Program = capture(Branches().eval(), (torch.randn(1, 4, 6, 6),))
        (self.output,) = self.program.run(self.program.examples)
        self.prepared: list[Prepared] = []

    def cost(self, candidate: Candidate) -> float:
        return 0.5 + random.Random(f"{self.seed} {candidate.key}").random()

    def decisions(self, choices: dict[str, str]) -> list[Decision]:
        own = [
            Decision("kind", place, (i,), {"own": 1.0, "other": 1.2, "third": WORTH + 0.1}, "own", {}, place)
            for i, place in enumerate(PLACES)
        ]
        return [replace(d, chosen=choices.get(d.place, "own")) for d in own]

    def searching(
        self, monkeypatch: pytest.MonkeyPatch, state: State | None = None, most: int = 10**6, **options: object
    ) -> tuple[Search, list[dict]]:
        saved_states: list[dict] = []

        def prepare(candidate: Candidate) -> Prepared:
            if len(self.prepared) >= most:
                raise KeyboardInterrupt
            output = self.output * 1.5 if self.wrong(candidate) else self.output
            self.prepared.append(Prepared(candidate, self.cost(candidate), output))
            return self.prepared[-1]

        made = Search(
            self.program,
            lambda choices: (self.program, self.decisions(dict(choices))),
            1e6,
            lambda message: None,
            lambda state: saved_states.append(json.loads(json.dumps(state.to_json()))),
            state,
        )
        monkeypatch.setattr(made, "_prepare", prepare)
        monkeypatch.setattr(trials, "milliseconds", lambda prepared, inputs: prepared.milliseconds)
        return made, saved_states


def test_what_is_forecast_as_slow_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forecast has the stream plans apart, of which some are SLOW; all others are measured as ever."""
    space = Space(0)
    searching, states = space.searching(monkeypatch)
    slow = {name for i, name in enumerate(STREAM_PLANS) if i % 2}
    plans = {name: replace(STREAM_PLANS["nimble"](space.program), system=name) for name in STREAM_PLANS}
    monkeypatch.setattr(candidate, "STREAM_PLANS", {name: lambda program, name=name: plans[name] for name in STREAM_PLANS})
    searching.forecast = lambda program, schedule: 2.0 if schedule.system in slow else 1.0
    state = searching.run()
    tried = {p.candidate.stream_plan for p in space.prepared}
    assert tried == set(STREAM_PLANS) - slow and state.is_complete
    assert len(state.simulated) >= len(slow) and set(state.simulated.values()) == {2.0}
    assert State.from_json(states[-1]) == state and not state.simulated.keys() & state.ratios.keys()


def test_by_simulated_costs_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest by the forecast is taken, of those that launch nothing early, and the cost of the space plays no part."""
    space = Space(4)
    searching, states = space.searching(monkeypatch)
    places = {name: i for i, name in enumerate(STREAM_PLANS)}
    plans = {name: replace(STREAM_PLANS["nimble"](space.program), system=name) for name in STREAM_PLANS}
    monkeypatch.setattr(candidate, "STREAM_PLANS", {name: lambda program, name=name: plans[name] for name in STREAM_PLANS})
    monkeypatch.setattr(search, "in_turn", None)  # a call would fail
    searching.is_measuring = False
    searching.forecast = lambda program, schedule: 1.0 / (1 + places[schedule.system])
    simulated: list[str] = []
    of_both = searching._forecasts
    monkeypatch.setattr(searching, "_forecasts", lambda c: simulated.append(c.key) or of_both(c))
    state = searching.run()
    assert len(simulated) == len(set(simulated))
    assert state.chosen == Candidate(list(STREAM_PLANS)[-1]) and state.is_complete and searching.num_tried == 0
    assert not state.ratios and len(state.simulated) >= len(STREAM_PLANS) - 1
    early = replace(state.best, is_early=True)
    assert searching._forecasts(early) is None and searching._is_spared("early launches", early, None)
    assert State.from_json(states[-1]) == state and all(p.is_closed for p in space.prepared)


def test_a_forecast_for_an_unknown_device_is_refused() -> None:
    with pytest.raises(Unsupported, match="conf/gpu has no cpu"):
        systems.load("weave", costs="both").prepare(Branches().eval(), (torch.randn(1, 4, 6, 6),))


def test_a_forecast_is_a_simulation_of_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls beside each other take as long as the longer one, and longer in one stream."""
    program = capture(Branches().eval(), (torch.randn(1, 4, 6, 6),))
    profile = profile_of([operator(kernel(10, 8, 128, 32, 0))] * len(program.graph))
    monkeypatch.setattr(forecast, "profile", lambda program: profile)
    beside, alone = (forecast.milliseconds(program, STREAM_PLANS[name](program), GPU) for name in ("nimble", "sequential"))
    assert beside < 0.9 * alone


@pytest.mark.usefixtures("cache_folder")
@pytest.mark.parametrize("name", ["IOS", "IOS, barriers"])
def test_ios_is_searched_by_simulation_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Two equal convolutions of one input, alone in a stage; the profile says that they are cheaper beside each other."""
    program = capture(Branches().eval(), (torch.randn(1, 4, 6, 6),))
    monkeypatch.setattr(stream_plans, "profile", lambda program: signed_profile(program))
    with pytest.raises(Unsupported, match="simulated for a GPU: skipped on a CPU"):
        STREAM_PLANS[name](program)
    monkeypatch.setattr(stream_plans, "find", lambda device: GPU)
    schedule = STREAM_PLANS[name](program)
    verify(program.graph, schedule)
    assert any(len(groups) > 1 for groups in schedule.stages or ())
    assert bool(schedule.waits) and schedule.stream_count == 2
    monkeypatch.setattr(stream_plans, "load", lambda *_, **__: pytest.fail("it was searched before"))
    assert STREAM_PLANS[name](program) == schedule


def signed_profile(program: Program) -> Profile:
    """Each operator takes 10 us on a few multiprocessors."""
    made = profile_of([operator(kernel(10, 8, 128, 32, 0))] * len(program.graph))
    return replace(made, signatures=tuple(program.signature(v) for v in range(len(program.graph))))


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
    assert dict(state.best.choices) == needing and "1 places that it needs" in state.gains[0].change


@pytest.mark.parametrize(("ratio", "num_rounds"), [(0.9, 3 * ROUNDS + 3), (1.01, ROUNDS + 1), (1.2, 3)])
def test_what_is_clearly_slower_gets_few_rounds(monkeypatch: pytest.MonkeyPatch, ratio: float, num_rounds: int) -> None:
    """What looks faster is measured once more, and in the end captured anew; the first round of each warms up."""
    space = Space(0)
    space.cost = lambda c: ratio if c.stream_plan == "sequential" else 1.0  # type: ignore[method-assign]
    searching, _ = space.searching(monkeypatch)
    calls: list[Prepared] = []
    monkeypatch.setattr(trials, "milliseconds", lambda prepared, inputs: calls.append(prepared) or prepared.milliseconds)
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
    monkeypatch.setattr(trials, "milliseconds", lambda prepared, inputs: float((1 + made.index(prepared)) % 3))
    coming = iter(made)
    assert trials.fastest_of(lambda: next(coming), 3, space.program.examples) is made[2]
    assert [each.is_closed for each in made] == [True, True, False]

    def short() -> Prepared:
        if len(made) == 4:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        made.append(executor())
        return made[-1]

    assert trials.fastest_of(short, 3, space.program.examples) is made[3] and not made[3].is_closed


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
        monkeypatch.setattr(trials, "milliseconds", lambda prepared, inputs: times.pop(0))
        return trials.in_turn(best, other, searching.inputs)

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
        monkeypatch.setattr(again, "_drop_imprecise", None)  # a call would fail
        assert again.run().best == whole.best and again.state.first == whole.first
    begun = State(first=Candidate(), ratios={"another": 2.0})
    again, _ = space.searching(monkeypatch, replace(begun, best=begun.first or Candidate()))
    monkeypatch.setattr(again, "_drop_imprecise", None)
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
    found = again.run()
    assert found.best == (Candidate() if is_slower_anew else before) and (found.total is None) is is_slower_anew
    assert found.is_complete is not is_over and State.from_json(saved_states[-1]) == found
    space.prepared.clear()
    last, _ = space.searching(monkeypatch, State.from_json(saved_states[-1]))
    last.budget_s = again.budget_s
    assert last.run().best == found.best and space.prepared == []


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
    kept = [State.from_json(document) for document in saved_states]
    assert {each.total for each in kept if each.best == single} == {total}
    assert None in {each.total for each in kept if each.best == better}


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


def test_what_costs_precision_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Space(2).searching(monkeypatch)[0].run()
    assert right.best != Candidate()
    space = Space(2, wrong=lambda candidate: candidate != Candidate())
    state = space.searching(monkeypatch)[0].run()
    assert state.best == Candidate() and state.gains == []


@settings(max_examples=25, deadline=None)
@given(bad=st.sets(st.integers(0, 6)), order=st.permutations(range(7)))
def test_of_the_passes_decisions_exactly_those_go_that_cost_precision(bad: set[int], order: list[int]) -> None:
    """Each bad decision multiplies the output by 1.01; the errors of several add up."""
    captured, times = scaled()

    def rewrite(choices: Mapping[str, str]) -> tuple[Program, list[Decision]]:
        own = {f"kind {i}": choices.get(f"kind {i}", "new") for i in order}
        return times(1.01 ** sum(own[f"kind {i}"] == "new" for i in bad)), [
            Decision("kind", p, (), {"old": 1.0, "new": 0.5}, c, {}, p) for p, c in own.items()
        ]

    messages: list[str] = []
    searching = Search(captured, rewrite, 1e6, messages.append, lambda state: None)
    searching.excess = searching._reference()
    searching._drop_imprecise()
    assert dict(searching.state.best.choices) == {f"kind {i}": "old" for i in bad}
    assert len(searching.state.dropped) == len(bad) and State.from_json(searching.state.to_json()) == searching.state
    assert all("costs precision" in message for message in messages)


def test_decisions_that_others_bring_up_are_dropped_with_them() -> None:
    """As the parts of a place that is left separate, which take kernels of their own; only the library is precise."""
    captured, times = scaled()

    def rewrite(choices: Mapping[str, str]) -> tuple[Program, list[Decision]]:
        whole, part = choices.get("kind whole", "new"), choices.get("kind part", "new")
        decisions = [Decision("kind", "whole", (), {"old": 1.0, "new": 0.5}, whole, {}, "kind whole")]
        if whole == "old":
            decisions.append(Decision("kind", "part", (), {"old": 1.0, "new": 0.5}, part, {}, "kind part"))
        return times(1.0 if (whole, part) == ("old", "old") else 1.01), decisions

    searching = Search(captured, rewrite, 1e6, lambda words: None, lambda state: None)
    searching.excess = searching._reference()
    searching._drop_imprecise()
    assert dict(searching.state.best.choices) == {"kind whole": "old", "kind part": "old"}


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


def test_what_no_decision_explains_is_told() -> None:
    captured, times = scaled()
    wrong, messages = times(1.01), list[str]()
    decisions = [Decision("kind", "p", (), {"old": 1.0, "new": 0.5}, "new", {}, "kind p")]
    searching = Search(captured, lambda choices: (wrong, decisions), 1e6, messages.append, lambda state: None)
    searching.excess = searching._reference()
    searching._drop_imprecise()
    assert searching.state.dropped == [] and "do without measuring" in messages[-1]


class Conversions(nn.Module):
    """What widening has to reach: conversions, a constant, whole numbers, a dtype among the arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.embedding = nn.Linear(8, 8), nn.Embedding(5, 8)
        self.register_buffer("shift", torch.randn(8))

    def forward(self, x: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x).to(torch.float16).float() + self.shift + self.embedding(i)
        return torch.softmax(y, -1, dtype=torch.float32) * torch.ones(8), i + 1


def test_a_widened_program_computes_in_fp64_alone() -> None:
    module, inputs = Conversions().eval(), (torch.randn(3, 8), torch.arange(3))
    program = capture(module, inputs)
    outputs = reference.wide_outputs(program)
    assert [o.dtype for o in outputs] == [torch.float64, torch.int64] and torch.equal(outputs[1], inputs[1] + 1)
    y = module.linear(inputs[0]) + module.shift + module.embedding(inputs[1])
    exact = [p.double() for p in (module.linear.weight, module.linear.bias)]
    y = (
        nn.functional.linear(inputs[0].double(), *exact)
        + module.shift.double()
        + module.embedding.weight.double()[inputs[1]]
    )
    torch.testing.assert_close(outputs[0], torch.softmax(y, -1), rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert module(*inputs)[0].dtype == torch.float32  # the program itself is what it was
    (disturbed, _) = reference.wide_outputs(program, "fp32")
    assert 1e-9 < reference.distance(disturbed, outputs[0]).norm < 1e-5


class Counter(nn.Module):
    """Adds to a buffer, and reads what it has written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(self.linear(x))
        return self.linear(self.total)


def test_a_widened_program_reads_what_it_has_written_and_leaves_the_module() -> None:
    module, x = Counter().eval(), torch.randn(3)
    (output,) = reference.wide_outputs(capture(module, (x,)))
    assert not module.total.any()
    linear = nn.Linear(3, 3).double()
    linear.load_state_dict(module.linear.state_dict())
    torch.testing.assert_close(output, linear(linear(x.double())).detach(), rtol=1e-12, atol=1e-12)


def test_a_widened_program_holds_one_weight_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model whose weights in fp64 would not fit."""
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))).eval()
    program = capture(module, (torch.randn(1, 64),))
    made: list[ref[Tensor]] = []
    most = 0
    disturb = reference.disturb

    def noting(tensor: Tensor, *arguments: Any) -> None:
        nonlocal most
        made.append(ref(tensor))
        most = max(most, sum(t is not None and t.numel() > 64 for t in (each() for each in made)))
        disturb(tensor, *arguments)

    monkeypatch.setattr(reference, "disturb", noting)
    reference.wide_outputs(program, "fp32")
    assert most == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_reference_takes_what_eager_makes_and_not_what_is_off(dtype: torch.dtype) -> None:
    module, x = Branches().eval().to(dtype), torch.randn(2, 4, 8, 8, dtype=dtype)
    captured = capture(module, (x,))
    assert reference.precision_of(captured) == {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    eager_reference = reference.Reference(captured)
    (out,) = captured.run((x,))
    assert eager_reference.excess([out]) <= 1
    one = out.clone()
    one.view(-1)[7] += 20 * torch.finfo(dtype).eps * out.abs().max() * (100 if dtype == torch.float32 else 1)
    hole = out.clone()
    hole.view(-1)[7] = torch.nan
    assert min(eager_reference.excess([wrong]) for wrong in (one, hole, out * 1.1, out.roll(1))) > 1


def test_without_fp64_a_search_compares_with_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(captured: Program) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(search, "Reference", none)
    space = Space(2, wrong=lambda candidate: candidate != Candidate())
    state = space.searching(monkeypatch)[0].run()
    assert state.best == Candidate() and state.gains == []
    assert Space(2).searching(monkeypatch)[0].run().best != Candidate()


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

    def milliseconds(prepared: Prepared, inputs: object) -> float:
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

    def milliseconds(prepared: Prepared, inputs: object) -> float:
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


@pytest.mark.usefixtures("cache_folder")
def test_it_prepares_a_module_and_searches_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Branches().eval(), torch.randn(2, 4, 8, 8)
    system = systems.load("weave", budget_s=20.0)
    system.learn(module, (x,))
    assert system.state.is_complete and set(system.state.ratios) >= {
        Candidate(name).key for name in STREAM_PLANS if name != "nimble" and name not in SEARCHED
    }
    last = (replace(system.state.best, stream_plan=name).key for name in SEARCHED)
    assert not system.state.ratios.keys() & set(last)  # nothing is simulated for a CPU
    again = systems.load("weave", budget_s=20.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Search, "_try", lambda *_: pytest.fail("it was measured before"))
        prepared = again.prepare(module, (x,))
    with torch.no_grad():
        torch.testing.assert_close(prepared(x), module(x), rtol=1e-4, atol=1e-5)
    assert prepared.schedule.system == "weave" and prepared.schedule.search.measured == len(system.state.ratios)
    prepared.close()


@pytest.fixture
def plan_file(folder: Path, run: Run) -> Path:
    """A plan for a model of TINY, by the command line."""
    done = run(
        "runner=schedule",
        "model=custom",
        "model.factory=tiny:make",
        "system=weave",
        "system.budget_s=0",
        "device=cpu",
        "output=plan.json",
    )
    assert done.returncode == 0, done.stderr
    return folder / "plan.json"


ASKED = (
    "model=custom",
    "model.factory=tiny:make",
    "device=cpu",
    "runner=latency",
    "runner.samples=3",
    "rounds=0",
    "results=r",
)


def test_a_plan_is_executed_without_a_search_and_refused_where_it_does_not_fit(
    plan_file: Path, folder: Path, run: Run, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # as the command line has it here
    planned = json.loads(plan_file.read_text())
    assert planned["system"] == "weave" and planned["recipe"]["times"] and "structure" in planned["recipe"]["fingerprint"]
    prepared = _prepared_tiny(folder, plan_file)  # in a cache that knows nothing
    assert prepared.schedule.streams == Schedule.from_json(planned).streams
    assert not list(cache_folder.glob("times-*.json"))
    wrong = {
        "times": (lambda d: d["recipe"].update(times={}), "times lacks"),
        "torch": (lambda d: d["recipe"]["fingerprint"].update(torch="0.1"), "torch is '0.1' in the plan"),
        "structure": (lambda d: d["recipe"]["fingerprint"].update(structure="x"), "structure is 'x'"),
        "edges": (lambda d: d["edges"].pop(), "other operators here"),
        "recipe": (lambda d: d.pop("recipe"), "is no plan of weave"),
        "other": (lambda d: d.update(system="nimble", recipe=None), "is no plan of weave: it is a schedule of nimble"),
        "choices": (lambda d: d["recipe"].update(choices=[]), "is no plan of weave"),
    }
    for name, (change, message) in wrong.items():
        document = json.loads(json.dumps(planned))
        change(document)
        (folder / f"{name}.json").write_text(json.dumps(document))
        with pytest.raises(BadOption, match=message):
            _prepared_tiny(folder, folder / f"{name}.json")
    done = run(*ASKED, "batch=3", "system=weave", "system.plan=plan.json")
    assert done.returncode == 2 and "system.plan=plan.json does not fit: inputs is" in done.stderr
    assert len([line for line in done.stderr.splitlines() if not line.startswith("[")]) == 1  # the rest is progress


def test_a_plan_holds_the_captured_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache_folder: Path) -> None:
    """Nothing is traced where the module is the plan's, and everything where it may not be."""
    module, x = Factor().eval(), torch.randn(2, 3)
    file = tmp_path / "plan.json"
    schedule = systems.load("weave", budget_s=0.0).schedule(module, (x,))
    file.write_text(json.dumps(schedule.to_json(model="factor", batch=2, device="cpu")))
    traced: list[nn.Module] = []
    capture_anew = scheduler.capture
    monkeypatch.setattr(scheduler, "capture", lambda module, inputs: traced.append(module) or capture_anew(module, inputs))

    def prepared(module: nn.Module) -> Tensor:
        made = systems.load("weave", plan=str(file)).prepare(module, (x,))
        out = made(x).clone()
        made.close()
        return out

    other = Factor().eval()
    with torch.no_grad():
        torch.testing.assert_close(prepared(other), other(x))  # other weights
        assert traced == []
        # Nobody who reads the module knows this variable.
        monkeypatch.setattr(Factor, "factor", 1.001)
        with pytest.raises(BadOption, match="structure is"):
            prepared(other)
        assert traced == [other]
        monkeypatch.undo()
    traced.clear()
    document = json.loads(file.read_text())
    document["recipe"]["captured"]["calls"][0][1] = "aten.nothing.default"
    file.write_text(json.dumps(document))
    with pytest.raises(BadOption, match="captured cannot be read"):
        prepared(other)


class Clock:
    """Stands in for perf_counter: each candidate that is prepared takes a second."""

    def __init__(self, searching: Search, monkeypatch: pytest.MonkeyPatch):
        self.now = searching.begin = 1000.0
        prepare = searching._prepare

        def taking_a_second(candidate: Candidate) -> Prepared:
            self.now += 1
            return prepare(candidate)  # type: ignore[return-value]

        monkeypatch.setattr(searching, "_prepare", taking_a_second)
        monkeypatch.setattr(search, "perf_counter", lambda: self.now)


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
    space.prepared.clear()
    assert again.run() == state and space.prepared == []  # the budget is spent
    longer = space.searching(monkeypatch, State.from_json(saved_states[-1]))[0].run()
    assert longer.is_complete and space.cost(longer.chosen) <= space.cost(state.chosen) + 1e-9
    new = [each.candidate for each in space.prepared]
    assert any(candidate.stream_plan not in SEARCHED and candidate not in tried for candidate in new)


@pytest.mark.parametrize("seed", range(12))
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


@pytest.mark.usefixtures("cache_folder")
def test_local_search_is_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    program = capture(Branches().eval(), (torch.randn(1, 4, 6, 6),))
    graph = program.graph

    def profile(program: Program) -> Profile:
        return profile_of([operator(kernel(5 + v, 200, 128, 32, 0)) for v in range(len(graph))])

    monkeypatch.setattr(stream_plans, "profile", profile)
    monkeypatch.setattr(stream_plans, "find", lambda device: GPU)
    monkeypatch.setattr(stream_plans, "operator_ms", lambda program: [0.005] * len(graph))
    trials: list[int] = []

    def on_one_stream(schedule: Schedule, cost: Callable[[Schedule], float], count: int) -> Schedule:
        """In the place of local search, which has tests of its own."""
        assert cost(schedule) == forecast.milliseconds(program, schedule, GPU) * 1e3
        assert all(cost(schedule) <= cost(STREAM_PLANS[name](program)) for name in ("nimble", "list, 4 streams"))
        trials.append(count)
        return replace(schedule, streams=(0,) * len(graph), waits=())

    monkeypatch.setattr(forecast, "profile", profile)
    monkeypatch.setattr(stream_plans.local_search, "improved", on_one_stream)
    first, second = (STREAM_PLANS["local search"](program) for _ in range(2))
    assert first == second and first.stream_count == 1 and trials == [stream_plans.MOST_TRIALS]
    verify(graph, first)
    for wrong in (None, [[1]], [[1], ["a"]], [[0], [0, 1]]):
        assert stream_plans._order_and_streams(wrong) is None


@pytest.mark.parametrize("learns", [True, False])
def test_a_search_profiles_in_no_process_but_one_that_learns(learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler slows each later launch of a graph: whoever prepares in his own process pays for none."""
    system = systems.load("weave", budget_s=0.0)
    may_profile: list[bool] = []

    def rewritten(program: Program) -> None:
        may_profile.extend(system.may_profile(torch.device(device)) for device in ("cuda", "cpu"))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU that conf/gpu lacks")
        may_profile.append(system.may_profile(torch.device("cuda")))
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")

    monkeypatch.setattr(system, "_rewritten", rewritten)
    with pytest.raises(KeyboardInterrupt):
        (system.learn if learns else system.prepare)(Branches().eval(), (torch.randn(1, 4, 6, 6),))
    assert may_profile == [learns, False, False] and not system.may_profile(torch.device("cuda"))
    space = Space(1)
    for last_plans in (SEARCHED, {}):
        searching, _ = space.searching(monkeypatch)
        searching.last_plans = last_plans
        space.prepared.clear()
        assert searching.run().is_complete
        assert any(each.candidate.stream_plan in SEARCHED for each in space.prepared) == bool(last_plans)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
        ),
    ],
)
@pytest.mark.usefixtures("cache_folder")
def test_candidates_of_a_search_lie_in_the_same_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is made with the same arena; on a GPU it has one range, whose address all have."""
    made: list[Scheduled] = []
    arenas: set[Arena] = set()

    def noting(program: Program, schedule: Schedule, arena: Arena) -> Scheduled:
        arenas.add(arena)
        made.append(execute(program, schedule, arena))
        return made[-1]

    monkeypatch.setattr(search, "execute", noting)
    module, x = Branches().eval().to(device), torch.randn(1, 4, 8, 8, device=device)
    systems.load("weave", budget_s=25.0).prepare(module, (x,)).close()
    (arena,) = arenas
    assert len(made) > 3 and len(arena.ranges) == (1 if device == "cuda" else 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("cache_folder")
def test_a_plan_brings_its_kernels_along(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton's cache is another one where the plan is executed: no kernel of ours was compiled, and none lies there."""

    def one_of_ours(times: Mapping[str, float | None], is_kernel_saved: bool) -> str:
        return next(name for name, t in times.items() if t is not None and name != "separate")

    monkeypatch.setattr(fuse_in_triton, "_own_choice", one_of_ours)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "first"))
    module, x = Branches().eval().cuda(), torch.randn(1, 4, 8, 8, device="cuda")
    schedule = systems.load("weave", budget_s=0.0).schedule(module, (x,))
    binaries = schedule.recipe["binaries"] if schedule.recipe else None
    assert isinstance(binaries, list) and binaries
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(schedule.to_json(model="branches", batch=1, device="cuda")))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "second"))
    prepared = systems.load("weave", plan=str(file)).prepare(module, (x,))
    assert not list((tmp_path / "second").rglob("_[a-z]*"))
    with torch.no_grad():
        torch.testing.assert_close(prepared(x), module(x), rtol=1e-2, atol=1e-2)
    prepared.close()


class Factor(nn.Module):
    """A layer and a number that is no part of it."""

    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu() * self.factor  # type: ignore[no-any-return]


def _prepared_tiny(folder: Path, file: Path) -> Any:
    import importlib.util

    spec = importlib.util.spec_from_file_location("tiny_of_weave", folder / "tiny.py")
    assert spec and spec.loader
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    torch.manual_seed(0)
    module, inputs = tiny.make(1)[:2]
    return systems.load("weave", plan=str(file)).prepare(module.eval(), inputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget_s": -1.0}, "budget_s is -1"),
        ({"plan": "nowhere.json"}, "cannot be read"),
        ({"fuse_in_triton": 2}, "fuse_in_triton"),
    ],
)
def test_wrong_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(BadOption, match=message):
        systems.load("weave", **options)


@pytest.mark.slow
def test_a_search_that_is_killed_loses_nothing_that_was_measured(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    command_line = command(
        "runner=schedule", "model=squeezenet", "system=weave", "system.budget_s=300", "device=cpu", "output=plan.json"
    )
    with subprocess.Popen(
        command_line,
        cwd=folder,
        env=environment(OPWEAVE_CACHE=str(cache)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            state = _await_state(cache, 3)
        finally:
            process.send_signal(signal.SIGKILL)
    assert state is not None and not (folder / "plan.json").exists()
    done = subprocess.run(
        [*command_line[:-2], "device=cpu", "output=plan.json", "system.budget_s=0"],
        cwd=folder,
        env=environment(OPWEAVE_CACHE=str(cache)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    planned = json.loads((folder / "plan.json").read_text())
    assert planned["search"]["measured"] >= len(state["ratios"]) >= 3


def _await_state(cache: Path, least: int) -> dict | None:
    end = time.monotonic() + 200
    while time.monotonic() < end:
        for file in cache.glob("weave-*.json"):
            for entry in json.loads(file.read_text())["measured"].values():
                if len(entry["ratios"]) >= least:
                    return entry  # type: ignore[no-any-return]
        time.sleep(0.1)
    return None


@given(graph=dags(), k=st.integers(1, 6), seed=st.integers(0, 1000))
def test_a_list_schedule_is_valid_and_within_grahams_bound(graph: OperatorGraph, k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    milliseconds = (torch.rand(len(graph), generator=generator) + 0.01).tolist()
    schedule = list_schedule(graph, milliseconds, k)
    verify(graph, schedule)
    assert schedule.stream_count <= k
    ends: dict[int, float] = {}
    before = schedule.happens_before()
    for v in schedule.order:
        ends[v] = milliseconds[v] + max((ends[u] for u in ends if before[v] >> u & 1), default=0.0)
    longest, busy = max(upward_ranks(graph, milliseconds), default=0.0), sum(milliseconds)
    assert max(ends.values(), default=0.0) <= (busy / k + (1 - 1 / k) * longest) * (1 + 1e-9)


@given(graph=dags(), k=st.integers(1, 6))
def test_no_wait_of_a_list_schedule_can_be_left_out(graph: OperatorGraph, k: int) -> None:
    schedule = list_schedule(graph, [1.0] * len(graph), k)
    needed = graph.minimum_equivalent.edges
    for wait in schedule.waits:
        rest = replace(schedule, waits=tuple(w for w in schedule.waits if w != wait)).happens_before()
        assert any(not rest[v] >> u & 1 for u, v in needed), f"{wait} orders nothing"


def test_a_timer_of_a_recipe_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from systems.weave.recipe import Misfit, NotingTimer, RecordedTimer

    noting = NotingTimer(torch.device("cpu"))
    monkeypatch.setattr(Timer, "find", None)
    assert noting.known("a", lambda: 2.0) == 2.0
    recorded = RecordedTimer(torch.device("cpu"), noting.times)
    assert recorded.known("a", lambda: pytest.fail("measured")) == 2.0
    with pytest.raises(Misfit, match="times lacks b"):
        recorded.known("b", lambda: 1.0)


class Everything(nn.Module):
    """A place for each pass that measures on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.LayerNorm(32)
        self.query, self.key = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(x).relu().flatten(2)  # [N, 8, 64]
        x = x.unflatten(2, (2, 32)).flatten(1, 2)  # [N, 16, 32]
        x = self.norm(x.sigmoid() + 1)
        return self.query(x).tanh() + self.key(x).tanh()  # type: ignore[no-any-return]


KINDS = ("merge_linears", "select_kernels", "select_products", "fuse_convolution", "fuse_reductions")


def test_passes_take_the_alternatives_that_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Everything().eval(), torch.randn(2, 8, 8, 8)
    program, rewriting = capture(module, (x,)), Rewriting(**dict.fromkeys(SWITCHES, True))
    timer = Timer(torch.device("cpu"))
    monkeypatch.setattr(timer, "known", lambda signature, measure: 1.0)  # so that every place stays as it is
    _, decisions = rewriting.apply(program, timer)
    other_by_kind = {d.kind: (d.place, name) for d in decisions if d.place for name in d.milliseconds if name != d.chosen}
    assert set(other_by_kind) == {*KINDS}
    for kind, (place, name) in other_by_kind.items():
        rewritten, changed = rewriting.apply(program, timer, {place: name})
        assert {d.chosen for d in changed if d.place == place} == {name}, kind
        with torch.no_grad():
            torch.testing.assert_close(rewritten.run((x,))[0], module(x), rtol=1e-4, atol=1e-4)


def test_passes_that_ran_under_the_same_choices_do_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    program, rewriting = capture(Everything().eval(), (torch.randn(2, 8, 8, 8),)), Rewriting(**dict.fromkeys(SWITCHES, True))
    timer = Timer(torch.device("cpu"))
    monkeypatch.setattr(timer, "known", lambda signature, measure: 1.0)
    ran: list[str] = []

    def noting(each: Pass) -> Pass:
        def run(program: Program, context: Context) -> Rewritten:
            ran.append(each.kind)
            return each.run(program, context)

        run.__name__ = each.kind
        return replace(each, run=run)

    noted = tuple(noting(p) if p.measures else p for p in module_of_passes.PASSES)  # the others run for each part too
    monkeypatch.setattr(module_of_passes, "PASSES", noted)
    kinds = [p.kind for p in rewriting.passes if p.measures]
    _, decisions = rewriting.apply(program, timer)
    assert all(kind_of(d.place) == d.kind for d in decisions if d.place)
    alternatives = [(d.place, name) for d in decisions if d.place for name in d.milliseconds if name != d.chosen]
    chance, remembered, choices = random.Random(0), Remembered(), dict[str, str]()
    for _ in range(20):
        trial = choices | dict([chance.choice(alternatives)])
        expected = rewriting.apply(program, timer, trial)
        ran.clear()
        rewritten = rewriting.apply(program, timer, trial, remembered)
        assert rewritten[0].graph == expected[0].graph and rewritten[1] == expected[1]
        assert ran == kinds[len(kinds) - len(ran) :]
        ran.clear()
        assert rewriting.apply(program, timer, trial, remembered)[1] == expected[1] and ran == []
        last = max((kinds.index(kind_of(place)) for place in trial), default=0)
        other = trial | dict([chance.choice([a for a in alternatives if kinds.index(kind_of(a[0])) >= last])])
        rewriting.apply(program, timer, other, remembered)
        assert len(ran) <= len(kinds) - last
        choices = trial if chance.random() < 0.5 else choices
    assert len(remembered) <= CHAINS * len(rewriting.passes)


def test_what_a_search_has_spent_is_kept_though_it_tried_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the passes' own measuring takes the whole budget: the process that is timed must not search then."""
    space = Space(0)
    searching, saved_states = space.searching(monkeypatch)
    prepare = searching._prepare

    def slow(candidate: Candidate) -> Prepared:
        searching.begin -= 2e6
        return prepare(candidate)  # type: ignore[return-value]

    monkeypatch.setattr(searching, "_prepare", slow)
    assert searching.run().ratios == {} and saved_states[-1]["seconds"] > searching.budget_s
    space.prepared.clear()
    space.searching(monkeypatch, State.from_json(saved_states[-1]))[0].run()
    assert space.prepared == []


@pytest.mark.usefixtures("cache_folder")
def test_a_search_goes_on_with_what_was_found_of_the_same_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[State | None] = []

    def noting(*arguments: Any) -> Search:
        states.append(arguments[5])
        return Search(*arguments)

    monkeypatch.setattr(weave_system, "Search", noting)
    module, x = Branches().eval(), torch.randn(1, 4, 8, 8)
    for _ in range(2):
        systems.load("weave", budget_s=3.0).prepare(module, (x,)).close()
    monkeypatch.setattr(weave_system, "code_in", lambda *_: "of other kernels")
    systems.load("weave", budget_s=3.0).prepare(module, (x,)).close()
    assert [state is None for state in states] == [True, False, True]
