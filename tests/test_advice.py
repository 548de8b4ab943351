"""runner=advise: forecasts against schedules by hand, and what it says."""

import itertools
import json
import random
import re
import signal
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import networkx
import pytest
import torch
from conftest import ROOT, Run, gpu_environment, without_progress
from dags import as_networkx, dags
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import GPU, kernel, operator, profile_of
from test_request_fuzz import answer
from torch import nn

from results.advice import WORTH, Advice, Forecast
from results.cell import Cell, Conditions, choose
from results.document import part_from_json, part_to_json
from runners.cell.messages import Failed, Shown
from runners.request.request import Request, SweepOptions
from runners.showings import advise
from runners.showings.advise import known_sets
from systems.advice import Outlook, _width, outlook
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.schedule import sequential
from systems.scheduling.plans.stream_assignment import assign_streams
from systems.scheduling.simulate.gpu import load
from systems.scheduling.simulate.measured_set import MeasuredSchedule, MeasuredSet, ProfiledProgram
from systems.scheduling.simulate.random_schedules import random_schedule
from systems.scheduling.simulate.simulator import Simulator
from tests.modules import Branches, Lambda, captured

SETS = sorted((ROOT / "results" / "reference" / "simulation").glob("*.json.gz"))
CELL = Cell(choose("model", "squeezenet"), choose("system", "nimble"), choose("runner", "advise"), Conditions(1, "cpu"))

pytestmark = pytest.mark.usefixtures("arithmetic_of_torch")


@pytest.fixture(scope="module")
def program() -> Program:
    return capture(Branches().eval(), (torch.randn(1, 3, 8, 8),))


def made_set(program: Program, microseconds: list[float], blocks: int = 8) -> MeasuredSet:
    """Each operator one kernel, of a time of its own; Nimble's schedule was measured, and one stream's in reverse order."""
    graph = program.graph
    signatures = tuple(f"{program.signature(v)}" for v in range(len(graph)))
    by_signature = {s: operator(kernel(us, blocks, 128, 32, 0)) for s, us in zip(signatures, microseconds, strict=True)}
    profile = replace(profile_of([by_signature[s] for s in signatures]), signatures=signatures)
    schedules = (
        MeasuredSchedule("sequential", "captured", sequential(graph), (0.3,), 0.3),
        MeasuredSchedule("nimble", "captured", assign_streams(graph), (0.2,), 0.2),
        MeasuredSchedule("random", "captured", random_schedule(graph, random.Random(0), 0.5), (0.1,), 0.1),
    )
    return MeasuredSet("branches", 1, {}, {"captured": ProfiledProgram(graph, profile)}, schedules)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(1, 100), min_size=20, max_size=20))
@pytest.mark.slow
def test_limits_are_those_of_the_graph(program: Program, times_us: list[float]) -> None:
    """The longest path is networkx's; no forecast is below it, and none above the sum with all launches and edges."""
    measured = made_set(program, times_us[: len(program.graph)])
    said = outlook(program, [measured], GPU)
    own_us = [o.milliseconds * 1e3 for o in measured.programs["captured"].profile.operators]
    chains = networkx.DiGraph([(u, v, {"us": own_us[v]}) for u, v in program.graph.edges])
    chains.add_edges_from((-1, v, {"us": own_us[v]}) for v in range(len(own_us)))
    longest_us = networkx.dag_longest_path_length(chains, weight="us")
    assert said.critical_path_ms * 1e3 == pytest.approx(longest_us)
    assert said.busy_ms * 1e3 == pytest.approx(sum(own_us)) and said.estimated_ms == 0
    fusible_us = [us for us, o in zip(own_us, program.graph.operators, strict=True) if o.name in ("relu", "sigmoid", "cat")]
    assert said.fusible_ms * 1e3 == pytest.approx(sum(fusible_us))
    assert said.sm_area_ms == pytest.approx(said.busy_ms / 132)  # 8 blocks fit an SM
    assert said.one_stream_ms * 1e3 == pytest.approx(
        Simulator(program.graph, measured.programs["captured"].profile, GPU)(sequential(program.graph)).latency_us
    )
    for forecast in said.forecasts:
        assert forecast.latency_ms is not None and said.critical_path_ms <= forecast.latency_ms
        assert forecast.latency_ms <= said.busy_ms + (4 + 3 * len(own_us)) / 1e3


@pytest.mark.parametrize(("blocks", "share"), [(8, 1 / 132), (17, 2 / 132), (2112, 1.0), (3001, (132 + 56) / 132 / 2)])
def test_the_area_is_what_each_wave_holds_of_the_multiprocessors(program: Program, blocks: int, share: float) -> None:
    """Of 132, each of which holds 16 blocks of 128 threads; of 3,001 a second wave has 889, and takes as long."""
    said = outlook(program, [made_set(program, [50.0] * len(program.graph), blocks)], GPU, systems=())
    assert said.sm_area_ms == pytest.approx(share * said.busy_ms)


def test_two_small_branches_gain_what_they_take_at_once(program: Program) -> None:
    """Nimble's schedule was measured too, in turn with one stream; what was drawn at random is no system's."""
    said = outlook(program, [made_set(program, [50.0] * len(program.graph))], GPU)
    gains = {f.system: said.one_stream_ms / (f.latency_ms or 0) for f in said.forecasts}
    widest = said.busy_ms / said.critical_path_ms
    assert set(gains) == {"nimble", "opara", "ios"}
    assert all(gain == pytest.approx(widest, rel=0.05) for gain in gains.values())
    measured = {f.system: f.measured_gain for f in said.forecasts}
    assert said.measured_ms == 0.3 and measured["nimble"] == pytest.approx(1.5)
    drawn = made_set(program, [50.0] * len(program.graph))
    sequential, nimble, _ = drawn.schedules
    drawn = replace(drawn, schedules=(sequential, replace(nimble, name="random")))
    assert {f.measured_gain for f in outlook(program, [drawn], GPU, systems=("nimble",)).forecasts} == {None}


def test_a_search_that_takes_too_long_is_given_up_and_the_others_are_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("systems.advice.SEARCH_SECONDS", 0.2)
    branches = nn.ModuleList(nn.Linear(8, 8 + i) for i in range(60))
    wide = captured(Lambda(lambda x: torch.cat([branch(x).relu() for branch in branches], 1)), torch.zeros(4, 8))
    handler, begin = signal.getsignal(signal.SIGALRM), perf_counter()
    said = outlook(wide, [], GPU)
    nimble, opara, ios = said.forecasts
    assert nimble.latency_ms and opara.latency_ms and perf_counter() - begin < 20
    assert (ios.latency_ms, ios.reason) == (None, "its search takes longer than 0.2 s")
    assert "  ios: its search takes longer than 0.2 s" in advice_of(said).lines
    assert signal.getsignal(signal.SIGALRM) == handler


def test_a_chain_gains_nothing_and_says_why() -> None:
    chain = captured(nn.Sequential(nn.ReLU(), nn.Sigmoid(), nn.Tanh()), torch.zeros(8))
    said = outlook(chain, [], GPU)
    assert said.estimated_ms == said.busy_ms > 0
    assert {f.latency_ms for f in said.forecasts} == {said.one_stream_ms} and said.width == 1
    advice = advice_of(said)
    assert advice.best == (1.0, "cuda_graph", False) and not advice.pays
    assert (
        "depends on the one before" in advice.verdict and "measured nowhere, 100% of their time estimated" in advice.lines[0]
    )


def test_a_model_of_views_launches_nothing() -> None:
    advice = advice_of(outlook(captured(Lambda(lambda x: x.view(-1)), torch.zeros(2, 4)), [], GPU))
    assert (advice.kernels, advice.busy_ms, advice.pays, advice.most) == (0, 0.0, False, 1.0)
    assert advice.verdict == "no: no scheduler is predicted to gain more than 5%, since nothing is launched"
    assert advice.verdict in "\n".join(advice.lines) and "None" not in "\n".join(advice.lines)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(4, 8), (0, 4)),
        (nn.Linear(4, 0), (3, 4)),
        (nn.Conv2d(3, 8, 3), (0, 3, 9, 9)),
        (Lambda(lambda q: nn.functional.scaled_dot_product_attention(q, q, q)), (0, 2, 8, 16)),
        (nn.ReLU(), (0, 4)),
    ],
)
def test_a_model_without_numbers_gains_nothing(module: nn.Module, shape: tuple[int, ...]) -> None:
    assert not advice_of(outlook(captured(module, torch.zeros(shape)), [], GPU)).pays


def test_times_of_another_gpu_are_scaled_and_no_measurement_of_it(program: Program) -> None:
    measured = [made_set(program, [50.0] * len(program.graph))]
    on_own, on_other = outlook(program, measured, GPU), outlook(program, measured, load("v100"))
    assert on_other.busy_ms > on_own.busy_ms and on_other.measured_ms is None
    assert all(f.measured_gain is None for f in on_other.forecasts)
    unknown = outlook(captured(nn.Tanh(), torch.zeros(8)), measured, load("v100"), systems=())
    assert (on_own.is_guess, on_other.is_guess, unknown.is_guess) == (False, True, False), "what is estimated is not scaled"


def test_the_width_is_of_operators_that_launch_something() -> None:
    """Views depend on nothing but the input, and what reads them is one chain."""
    chain = captured(Lambda(lambda x: (((x[0] + 1) * x[1]) - x[2]).relu()), torch.randn(3, 8))
    said = outlook(chain, [], GPU, systems=())
    assert (said.width, chain.graph.width, said.kernels) == (1, 3, 4)
    parts = captured(Lambda(lambda x: torch.cat([(x[i] + 1).view(2, 4).exp() for i in range(3)])), torch.randn(3, 8))
    assert outlook(parts, [], GPU, systems=()).width == 3


@settings(max_examples=300, deadline=None)
@given(dags(max_nodes=9), st.sets(st.integers(0, 8)))
def test_the_width_is_that_of_the_largest_set_without_a_path(graph: OperatorGraph, idle: set[int]) -> None:
    """Every set of operators that launch something is tried."""
    launching = sorted(set(range(len(graph))) - idle)
    reaches = networkx.transitive_closure(as_networkx(graph))
    independent = (
        len(chosen)
        for size in range(len(launching) + 1)
        for chosen in itertools.combinations(launching, size)
        if not any(reaches.has_edge(u, v) for u, v in itertools.combinations(chosen, 2))
    )
    assert _width(graph, launching) == max(independent)


def advice_of(said: Outlook) -> Advice:
    forecasts = tuple(Forecast(**vars(f)) for f in said.forecasts)
    return Advice(CELL, "h200", "measured here", **{**vars(said), "forecasts": forecasts})


def made(gain: float, width: int = 4, critical_path_ms: float = 0.3, sm_area_ms: float = 0.2) -> Advice:
    """Of a scheduler that gains so much over one stream of 1 ms, of which kernels take 0.9 ms."""
    forecasts = Forecast("nimble", 1 / gain, 2), Forecast("ios", None, reason="too wide")
    figures = 9, 9, width, 1.0, None, 0.05, 0.9, critical_path_ms, sm_area_ms, 0.45, 0.0
    return Advice(CELL, "h200", "measured here", False, *figures, forecasts)


@pytest.mark.parametrize(
    ("advice", "pays", "words"),
    [
        (made(1.6), True, "yes: nimble is predicted to be 1.60 times as fast"),
        (made(1.08), True, "; that is within the simulator's error: measure it"),
        (made(1.02), False, "within the simulator's error"),
        (made(1.02, critical_path_ms=0.97), False, "the longest chain of operators is 108%"),
        (made(0.9), False, "edges between streams"),
        (made(1.0, critical_path_ms=0.88), False, "the longest chain of operators is 98%"),
        (made(1.0, sm_area_ms=0.85), False, "kernels hold 94% of the SMs"),
        (made(1.0, width=1), False, "each operator depends on the one before it"),
        (replace(made(1.6), estimated_ms=0.5), True, "; that rests on estimates: measure it"),
        (
            replace(made(1.08), estimated_ms=0.5),
            True,
            "; that is within the simulator's error and rests on estimates: measure it",
        ),
    ],
)
def test_the_verdict_and_its_reason(advice: Advice, pays: bool, words: str) -> None:
    assert advice.pays is pays and words in advice.verdict
    assert advice.launch_share == pytest.approx(0.1)
    assert any("ios: too wide" in line for line in advice.lines)
    assert ("within the simulator's error" in advice.verdict) is (
        advice.most > WORTH and abs(advice.best[0] - WORTH) <= 0.05
    )
    assert any("what fusion may save 50%" in line for line in advice.lines)


@pytest.mark.parametrize(
    ("nimble", "opara", "best", "words"),
    [  # the gain of each: predicted, and measured where that is known
        ((2.3, 1.4), (2.3, 1.5), (1.5, "opara", True), "yes: opara was measured to be 1.50 times as fast as one stream"),
        ((2.3, 1.4), (1.7, None), (1.7, "opara", False), "yes: opara is predicted to be 1.70 times as fast as one stream"),
        ((2.3, 0.9), (1.7, 0.8), (1.0, "cuda_graph", True), "no: no scheduler was measured to gain more than 5%"),
        ((2.3, 1.04), (1.7, 1.0), (1.04, "nimble", True), "no: no scheduler was measured to gain more than 5%"),
        ((2.3, 0.9), (0.9, None), (1.0, "cuda_graph", False), "rests on estimates: measure it"),
    ],
)
def test_a_measured_gain_counts_and_not_the_prediction(
    nimble: tuple[float, float | None],
    opara: tuple[float, float | None],
    best: tuple[float, str, bool],
    words: str,
) -> None:
    pairs = (("nimble", *nimble), ("opara", *opara))
    forecasts = tuple(Forecast(name, 1 / gain, 2, measured_gain=measured) for name, gain, measured in pairs)
    advice = replace(made(1.0), forecasts=forecasts, estimated_ms=0.9)
    assert advice.best == best and words in advice.verdict
    assert not best[2] or ("estimates" not in advice.verdict and "error" not in advice.verdict)


def test_no_is_measured_of_those_alone_that_were() -> None:
    """Nimble was measured below 5 %, and IOS is predicted near it."""
    forecasts = Forecast("nimble", 1 / 1.04, 2, measured_gain=1.048), Forecast("ios", 1 / 1.044, 2)
    advice = replace(made(1.0), forecasts=forecasts)
    assert advice.best == (1.048, "nimble", True)
    assert advice.verdict.startswith("no: no scheduler was measured or is predicted to gain more than 5%, since ")
    assert advice.verdict.endswith("; that is within the simulator's error: measure it") and ",nimble,ios," in advice.command
    far = replace(advice, forecasts=(forecasts[0], Forecast("ios", 1 / 0.9, 2)))
    assert "measure it" not in far.verdict
    unknown = replace(advice, forecasts=(forecasts[0], Forecast("ios", None, reason="too wide")), estimated_ms=0.9)
    assert unknown.verdict.endswith("; that leaves out ios: measure it") and "or is predicted" not in unknown.verdict


def test_no_schedule_gains_more_than_either_limit_lets_it() -> None:
    """One stream takes 1 ms."""
    assert made(1.0, critical_path_ms=0.35, sm_area_ms=0.2).most == pytest.approx(2.5)  # 0.05 of launch and end
    assert made(1.0, critical_path_ms=0.35, sm_area_ms=0.45).most == pytest.approx(2.0)
    assert replace(made(1.0), critical_path_ms=0.0, sm_area_ms=0.0, launch_ms=0.0).most == 1.0
    assert made(1.0, width=1).most == 1.0


def test_a_scheduler_without_a_forecast_is_a_doubt_and_is_measured() -> None:
    """IOS has none, and only of a chain is that no matter."""
    none_gains = made(1.0)
    assert none_gains.verdict.endswith("; that leaves out ios: measure it") and ",nimble,ios," in none_gains.command
    assert ",nimble,ios," in made(1.6).command and "leaves out" not in made(1.6).verdict
    chain = replace(made(1.0, width=1), estimated_ms=0.9)
    assert "measure it" not in chain.verdict and "nimble," not in chain.command
    bounded = made(1.0, sm_area_ms=0.92)  # at most 3 % faster
    assert "leaves out" not in bounded.verdict and "nimble," not in bounded.command


@pytest.mark.parametrize(("streams", "is_said"), [(200, False), (250, True)])
def test_a_launch_of_many_streams_may_take_longer_than_their_kernels(streams: int, is_said: bool) -> None:
    """Of 0.625 ms: a stream takes the host up to 3 us."""
    advice = replace(made(1.6), forecasts=(Forecast("nimble", 0.625, streams),))
    doubt = f"; that leaves out the host, which may take longer to launch {streams} streams: measure it"
    assert advice.verdict.endswith(doubt) is is_said
    measured = replace(advice, forecasts=(Forecast("nimble", 0.625, streams, measured_gain=1.5),))
    assert "host" not in measured.verdict


def test_merged_operators_are_told_where_kernels_are_others() -> None:
    advice = replace(made(1.6), forecasts=(Forecast("ios", 0.5, 3, num_merged=2),))
    assert "  ios 2.00x: 0.500 ms on 3 streams, with 2 merged operators" in advice.lines


@pytest.mark.parametrize("gain", [1.0, 1.02, 1.5])  # the second is too near to WORTH to leave the schedulers out
def test_the_command_that_comes_next_is_right(gain: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For every condition and option that was asked for."""
    monkeypatch.chdir(tmp_path)
    changed = choose("model", "gpt", layers=3)
    conditions = Conditions(8, "cuda", "fp16", "channels_last", 7, "timed")
    advice = replace(made(gain), cell=replace(CELL, model=changed, conditions=conditions))
    command = replace(advice, forecasts=advice.forecasts[:1]).command
    assert all(
        part in command
        for part in (
            "model=gpt model.layers=3",
            "batch=8",
            "precision=fp16",
            "layout=channels_last",
            "algorithms=timed",
            "seed=7",
        )
    )
    arguments = tuple(command.split()[2:])
    assert answer(arguments, monkeypatch) is None, command
    assert ("opara" in command or "ios" in command or "nimble," in command) is (gain > 1)
    assert answer((*arguments, "model.layer=3"), monkeypatch) is not None


def test_what_another_arithmetic_measured_is_not_taken() -> None:
    """All committed sets are of TF32 in convolutions."""
    chain = captured(nn.ReLU(), torch.zeros(8))
    sets = known_sets("squeezenet", 1, chain)  # its own know of operators before others do, and the last one counts
    assert sets[-1].model == "squeezenet" and sets[-1].batch == 1 and sets[0].model != "squeezenet"
    allowed = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = False
        assert known_sets("squeezenet", 1, chain) == []
    finally:
        torch.backends.cudnn.allow_tf32 = allowed


@pytest.mark.slow
def test_gains_are_predicted_within_the_targets() -> None:
    """Of the measured schedules of every committed set: 80 % within a tenth; 90 % of models right about a gain of 5 %."""
    errors, rights, gaining = [], [], []
    for measured in map(MeasuredSet.read, SETS):
        schedules = {each.name: each for each in measured.schedules if each.name != "random"}
        if "sequential" not in schedules:
            continue
        captured = measured.programs["captured"]
        simulator = Simulator(captured.graph, captured.profile, GPU)
        base = schedules["sequential"]
        pairs = [
            (base.latency_ms / s.latency_ms, simulator(base.schedule).latency_us / simulator(s.schedule).latency_us)
            for s in map(schedules.get, ("nimble", "opara", "ios_simulated"))
            if s is not None
        ]
        errors += [predicted / gain - 1 for gain, predicted in pairs]
        best, best_predicted = (max(column) for column in zip(*pairs, strict=True))
        rights.append((best > WORTH) == (best_predicted > WORTH))
        gaining.append(best > WORTH)
    assert len(rights) == 85 and 0.3 < sum(gaining) / len(gaining) < 0.7
    assert sum(abs(error) <= 0.1 for error in errors) >= 0.8 * len(errors)
    assert sum(rights) >= 0.9 * len(rights)


@pytest.mark.slow
def test_the_runner_advises_without_a_gpu(run: Run, folder: Path) -> None:
    done = run("runner=advise", "model=squeezenet", "device=cpu", "output=a.json")
    assert done.returncode == 0, done.stderr
    assert "kernels measured on NVIDIA H200\n" in done.stdout and "estimated" not in done.stdout
    (document,) = json.loads((folder / "a.json").read_text())
    advice = part_from_json(document, Advice)
    assert "\n".join(advice.lines) == done.stdout.strip() and advice.measured_ms is not None
    nimble = advice.forecasts[0]
    assert nimble.system == "nimble" and nimble.measured_gain == pytest.approx(advice.gain(nimble), rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "source"),
    [
        (["runner.gpu=v100"], "on v100: a guess: kernels measured on NVIDIA H200\n"),
        (["runner.gpu=v100", "precision=fp32"], "on v100: kernels measured nowhere, 100% of their time estimated"),
        (["algorithms=timed"], "on h200: kernels measured on NVIDIA H200, by other algorithms\n"),
    ],
)
def test_a_source_that_is_not_the_cell_itself_is_told(run_here: Run, arguments: list[str], source: str) -> None:
    """What was measured of the same network on another GPU or by other algorithms is not set beside what is predicted."""
    done = run_here("runner=advise", "model=squeezenet", "device=cpu", *arguments)
    assert done.returncode == 0 and source in done.stdout and "; measured" not in done.stdout, done.stdout
    assert ", measured " not in done.stdout


@pytest.mark.slow
def test_a_custom_model_is_estimated(run: Run) -> None:
    done = run("runner=advise", "model=custom", "model.factory=tiny:make", "device=cpu", "precision=bf16", "batch=4")
    assert done.returncode == 0, done.stderr
    assert "100% of their time estimated" in done.stdout
    assert re.search(
        r"next, on a GPU: python run.py -m model=custom model.factory=tiny:make batch=4 precision=bf16 system=", done.stdout
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["runner.gpu=h2000"], "did you mean h200"), (["runner.profile=nowhere.json"], "nowhere.json")],
)
def test_a_wrong_request_is_one_line(run_here: Run, arguments: list[str], words: str) -> None:
    done = run_here("runner=advise", "model=squeezenet", "device=cpu", *arguments)
    assert done.returncode == 2 and words in done.stderr and len(without_progress(done.stderr)) == 1, done.stderr


def test_a_profile_of_no_program_is_one_line(run_here: Run, tmp_path: Path, program: Program) -> None:
    document = made_set(program, [50.0] * len(program.graph)).to_json() | {"programs": {}, "schedules": []}
    (tmp_path / "empty.json").write_text(json.dumps(document))
    done = run_here("runner=advise", "model=squeezenet", "device=cpu", f"runner.profile={tmp_path / 'empty.json'}")
    (line,) = without_progress(done.stderr)
    assert done.returncode == 2 and line.endswith("empty.json is no file of runner=profile: it holds no program")


@pytest.mark.parametrize(("status", "code"), [("unsupported", 0), ("failed", 1), ("timeout", 1)])
def test_a_model_without_advice_is_a_line_and_the_next_has_its_own(
    status: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What cannot be is no failure; whatever fails else is, wherever it stands among the cells."""
    cannot = Failed("unsupported", "it cannot be")
    answers = {1: Failed(status, "no such thing"), 2: cannot, 3: Shown(part_to_json(made(1.5)))}
    monkeypatch.setattr(advise, "ask", lambda cell, options: answers[cell.batch])
    output = tmp_path / "a.json"
    cells = tuple(replace(CELL, conditions=Conditions(batch, "cpu")) for batch in answers)
    for order in (cells, cells[::-1]):
        request = Request(order, SweepOptions(tmp_path, False, 1.0, None, 0, 1.0, None, output))
        assert advise.Advise(CELL.runner).run(request) == code
        shown = capsys.readouterr()
        assert f"opweave: squeezenet b1: {status}: no such thing" in shown.err.splitlines() and shown.err.count("\n") == 2
        assert "1.50 times as fast" in shown.out
        assert len(json.loads(output.read_text())) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_advice_on_a_gpu_is_of_its_own_kernels(run: Run) -> None:
    done = run("runner=advise", "model=squeezenet", "device=cuda", **gpu_environment())
    assert done.returncode == 0, done.stderr
    simulated, measured = re.search(r"one stream (\S+) ms simulated, measured (\S+);", done.stdout).groups()  # type: ignore[union-attr]
    assert "kernels measured here\n" in done.stdout and float(simulated) == pytest.approx(float(measured), rel=0.15)
