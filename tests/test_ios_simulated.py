"""IOS with simulated costs: stages without a measurement."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from simulated import kernel, operator, profile_of

import systems
from runners.cell.measured_schedules import PreparedSchedules
from systems.arithmetic import without_tf32
from systems.base import BadOption, Unsupported
from systems.ios import planning, stage_timer
from systems.ios.planning import Options, find_stages
from systems.ios.stage_simulator import StageSimulator
from systems.ios.stage_timer import StageTimer, Unit
from systems.ios.stored import StoredStages
from systems.profiling.timing import Timer
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.verify import verify
from systems.scheduling.scheduler import Scheduler
from systems.scheduling.simulate.gpu import load
from systems.scheduling.simulate.measured_set import MeasuredSet, ProfiledProgram
from systems.scheduling.simulate.simulator import simulate
from systems.scheduling.simulate.stored import StoredOperators, read_sets
from tests.modules import Branches

X = torch.randn(1, 3, 8, 8)


@pytest.fixture(scope="module")
def program() -> Program:
    return capture(Branches().eval(), (X,))


@pytest.fixture(scope="module")
def file(program: Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    nimble = systems.load("nimble")
    assert isinstance(nimble, Scheduler)
    prepared = PreparedSchedules("branches", 1, program, {"nimble": nimble})
    prepared.measure()
    prepared.profile()
    prepared.close()
    prepared.result().write(path := tmp_path_factory.mktemp("profile") / "branches.json.gz")
    return path


def test_a_search_measures_nothing(program: Program, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object) -> float:
        raise AssertionError("a stage was measured")

    monkeypatch.setattr(stage_timer, "milliseconds", measured)
    ios = systems.load("ios", costs="simulated", profile=str(file), units="operator")
    assert isinstance(ios, Scheduler)
    schedule = ios.plan(program)
    verify(program.graph, schedule)
    assert schedule.search is not None and schedule.search.measured == 0
    assert schedule.stages is not None and max(map(len, schedule.stages)) == 2  # both branches at once


def test_a_stage_costs_what_simulating_it_says(program: Program, file: Path) -> None:
    """One group of all operators is the whole program in sequence, but for the launch of the graph."""
    profile = StoredOperators(read_sets([file])).profile(program)
    costs = StageSimulator(program, Timer(program.device), "h200", str(file))
    everything = [tuple(range(len(program.graph)))]
    one = systems.load("sequential")
    assert isinstance(one, Scheduler)
    whole_us = simulate(one.plan(program), profile, costs.gpu).latency_us
    alone_us = whole_us - costs.gpu.launch_us - costs.gpu.finish_us + costs.gpu.edge_us
    assert costs.concurrent([everything], [costs.number(everything)]) * 1e3 == pytest.approx(alone_us)


class Alike(torch.nn.Module):
    """Three equal convolutions, of which the last one reads another input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Conv2d(3, 4, 1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x) + self.c(x.relu())


def test_units_that_look_alike_are_merged_where_they_read_one_input(tmp_path: Path) -> None:
    program = capture(Alike().eval(), (torch.randn(1, 3, 8, 8),))
    nimble = systems.load("nimble")
    assert isinstance(nimble, Scheduler)
    prepared = PreparedSchedules("alike", 1, program, {"nimble": nimble})
    prepared.profile()
    prepared.measure()
    prepared.close()
    prepared.result().write(tmp_path / "p.json.gz")
    a, b, c = ((o.id,) for o in program.graph.operators if o.name == "conv2d")
    costs = StageSimulator(program, Timer(program.device), "h200", str(tmp_path / "p.json.gz"))
    assert costs.merged([a, c]) is None
    assert (costs.merged([a, b]) or 0) > 0
    assert costs.merged([a, c]) is None


class Wide(torch.nn.Module):
    """Six operators that depend on nothing, and one that sums them up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.sigmoid(x[i : i + 1]) for i in range(6)])


def test_a_block_that_is_too_wide_is_searched_in_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stages are valid, and several operators run at once; where nothing is too wide the search is whole."""
    program = capture(Wide().eval(), (torch.randn(6, 8),))
    operators = [operator(kernel(10, 8, 128, 32, 0)) for _ in range(len(program.graph))]
    profile = profile_of(operators)
    profile = replace(profile, signatures=tuple(map(program.signature, range(len(program.graph)))))
    MeasuredSet("wide", 1, {}, {"captured": ProfiledProgram(program.graph, profile)}, ()).write(tmp_path / "p.json.gz")
    ios = systems.load("ios", costs="simulated", profile=str(tmp_path / "p.json.gz"), units="operator", r=1, s=4)
    assert isinstance(ios, Scheduler)
    costs_ms = []
    for most in (planning.MAX_TRANSITIONS, 100):
        monkeypatch.setattr(planning, "MAX_TRANSITIONS", most)
        monkeypatch.setenv("OPWEAVE_CACHE", str(tmp_path / str(most)))
        schedule = ios.plan(program)
        verify(program.graph, schedule)
        assert schedule.stages is not None and max(map(len, schedule.stages)) == 4
        costs_ms.append(simulate(schedule, profile, load("h200")).latency_us)
    assert costs_ms[1] <= 1.2 * costs_ms[0]


def test_another_profile_is_another_search(program: Program, file: Path, tmp_path: Path) -> None:
    """What the cache knows of a search by one profile is nothing of one by another, under whichever name."""
    options = Options("both", 3, 8, "operator", 24, False, "simulated", str(tmp_path / "p.json.gz"))
    measured = MeasuredSet.read(file)
    names = set()
    for batch in (1, 2):
        replace(measured, batch=batch).write(tmp_path / "p.json.gz")
        names.add(StoredStages(program, options).name)
    assert len(names) == 2


def test_the_same_profile_is_the_same_search_wherever_it_lies(program: Program, file: Path, tmp_path: Path) -> None:
    """As the profiles that runner=advise and weave write for a while; in another arithmetic it is another search."""
    names = set()
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        MeasuredSet.read(file).write(path := tmp_path / folder / "p.json")
        names.add(StoredStages(program, Options("both", 3, 8, "operator", 24, False, "simulated", str(path))).name)
    assert len(names) == 1
    with without_tf32():
        names.add(StoredStages(program, Options("both", 3, 8, "operator", 24, False, "simulated", str(path))).name)
    assert len(names) == 2


def test_a_profile_of_another_arithmetic_is_unsupported(program: Program, file: Path, tmp_path: Path) -> None:
    measured = replace(MeasuredSet.read(file), conditions={"settings": [True, False, False, False]})
    measured.write(path := tmp_path / "p.json")
    ios = systems.load("ios", costs="simulated", profile=str(path), units="operator")
    assert isinstance(ios, Scheduler) and ios.plan(program).stages
    with without_tf32(), pytest.raises(Unsupported, match="measured in fp32, but in tf32"):
        ios.plan(program)


def test_what_is_simulated_as_slow_is_not_measured(program: Program, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage takes what its simulation says: so the search finds the same stages, by measuring these alone."""
    simulated = StageSimulator(program, Timer(program.device), "h200", str(file))
    monkeypatch.setattr(StageTimer, "concurrent", _by_simulation(simulated))
    by_both, by_one = (
        find_stages(
            program, Options("parallel", 3, 8, "operator", 24, False, costs, str(file)), Timer(program.device), print
        )
        for costs in ("both", "simulated")
    )
    assert by_both.stages == by_one.stages
    assert by_both.search.simulated is not None and by_both.search.simulated > 0


def _by_simulation(simulated: StageSimulator) -> Callable[..., float]:
    def concurrent(self: StageTimer, groups: Sequence[Sequence[Unit]], numbers: Sequence[int]) -> float:
        self.names.add(self.name(numbers))
        return simulated.concurrent(groups, [simulated.number(group) for group in groups])

    return concurrent


class Twins(torch.nn.Module):
    """Two convolutions of one input, which merge."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.left(x), self.right(x)], 1)


@pytest.mark.parametrize(("merged_ms", "is_merged"), [(0.001, True), (10.0, False)])
def test_a_search_merges_where_the_profile_says_that_it_pays(tmp_path: Path, merged_ms: float, is_merged: bool) -> None:
    program = capture(Twins().eval(), (X,))
    prepared = PreparedSchedules("twins", 1, program, {})
    prepared.profile()
    measured = prepared.result()
    merges = measured.programs["merges"]
    profile = replace(merges.profile, operators=tuple(replace(o, milliseconds=merged_ms) for o in merges.profile.operators))
    programs = {**measured.programs, "merges": replace(merges, profile=profile)}
    replace(measured, programs=programs).write(file := tmp_path / "twins.json.gz")
    ios = systems.load("ios", costs="simulated", profile=str(file))
    assert isinstance(ios, Scheduler)
    assert bool(ios.plan(program).merges) == is_merged


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"costs": "guessed"}, "measured, simulated"),
        ({"costs": "both", "exhaustive": True}, "leaves most out"),
        ({"costs": "simulated", "gpu": "h20"}, "did you mean h200"),
        ({"profile": "x.json"}, "system.costs=simulated"),
    ],
)
def test_a_wrong_option_is_said(options: dict[str, str], words: str) -> None:
    with pytest.raises(BadOption, match=words):
        systems.load("ios", **options)


def test_a_profile_that_is_not_there_is_said(program: Program) -> None:
    ios = systems.load("ios", costs="simulated", profile="nowhere.json", units="operator")
    with pytest.raises(BadOption, match="nowhere"):
        ios.plan(program)  # type: ignore[attr-defined]


def test_an_operator_without_a_profile_is_unsupported(file: Path) -> None:
    other = capture(torch.nn.Sequential(torch.nn.Linear(8, 4)).eval(), (torch.randn(2, 8),))
    ios = systems.load("ios", costs="simulated", profile=str(file), units="operator")
    with pytest.raises(Unsupported, match="the profile lacks operator"):
        ios.plan(other)  # type: ignore[attr-defined]
