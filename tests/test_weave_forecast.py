"""What weave's search leaves to simulation."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from simulated import GPU, kernel, operator, profile_of
from weave_space import Branches, Space

import systems
from systems.base import Unsupported
from systems.profiling.profile import Profile
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.verify import verify
from systems.weave import candidate, forecast, search, stream_plans
from systems.weave.candidate import Candidate
from systems.weave.state import State
from systems.weave.stream_plans import STREAM_PLANS


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
