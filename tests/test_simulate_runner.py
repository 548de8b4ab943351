"""runner=simulate: predictions out of committed profiles, what-ifs, and what a wrong request is told."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from subprocess import CompletedProcess

import pytest
import torch
from conftest import ROOT, without_progress
from dags import from_edges
from scipy.stats import spearmanr
from simulated import GPU, kernel, operator, profile_of

from results.cell import Cell, Choice, Conditions
from results.timeline import COMPUTE, Bar, Timeline, from_trace, to_trace
from systems.base import BadOption, Unsupported
from systems.scheduling.graph.capture import capture
from systems.scheduling.plans.stream_assignment import assign_streams
from systems.scheduling.simulate.baselines import baselines
from systems.scheduling.simulate.gpu import load
from systems.scheduling.simulate.measured_set import MeasuredSchedule, MeasuredSet, ProfiledProgram
from systems.scheduling.simulate.simulator import Simulator, simulate
from systems.scheduling.simulate.stored import StoredOperators, read_sets
from systems.scheduling.simulate.what_if import on_another
from tests.modules import Branches

Run = Callable[..., CompletedProcess[str]]
SETS = sorted((ROOT / "results" / "reference" / "simulation").glob("*.json.gz"))
TRAINING = ("googlenet", "nasnet", "bert", "resnet50", "mobilenet_v2")  # on which the constants were fitted


@pytest.mark.parametrize("name", ["squeezenet-b1", "resnet18-b1", "t5-b1", "efficientnet_b0-b32", "inception_v3-b32"])
def test_models_that_were_not_fitted_are_predicted(name: str) -> None:
    """The bound is the target's 95th percentile, of each schedule."""
    measured = MeasuredSet.read(ROOT / "results" / "reference" / "simulation" / f"{name}.json.gz")
    assert measured.model not in TRAINING
    for each in measured.schedules:
        profile = measured.programs[each.program].profile
        predicted_ms = simulate(each.schedule, profile, load("h200")).latency_us / 1e3
        assert predicted_ms == pytest.approx(each.latency_ms, rel=0.12), each.name


@pytest.mark.slow
def test_the_error_stays_within_its_target_over_all_models_that_were_not_fitted() -> None:
    """Of every committed schedule of a system: 5 % in the mean, 12 % at the 95th percentile."""
    errors = []
    for measured in filter(lambda each: each.model not in TRAINING, map(MeasuredSet.read, SETS)):
        simulators = {name: Simulator(p.graph, p.profile, GPU) for name, p in measured.programs.items()}
        for each in measured.schedules:
            if each.name != "random":
                simulated_ms = simulators[each.program](each.schedule).latency_us / 1e3
                errors.append(abs(simulated_ms / each.latency_ms - 1))
    assert len(errors) >= 200
    assert sum(errors) / len(errors) <= 0.05 and sorted(errors)[int(0.95 * len(errors))] <= 0.12


@pytest.mark.parametrize("file", SETS, ids=lambda file: file.name)
def test_every_committed_set_is_of_an_h200(file: Path) -> None:
    measured = MeasuredSet.read(file)
    programs = measured.programs.values()
    assert {p.profile.device for p in programs} == {"NVIDIA H200"}
    assert all(
        k.milliseconds > 0 and k.warm_ms and k.cold_ms for p in programs for o in p.profile.operators for k in o.kernels
    )


@pytest.mark.parametrize("model", ["googlenet", "inception_v3", "nasnet", "randwire"])
def test_random_schedules_lie_evenly_and_are_ranked(model: str) -> None:
    """The targets: at least 40, over at least 1.5x, no wide gap between two, and a rank correlation of at least 0.95."""
    measured = MeasuredSet.read(ROOT / "results" / "reference" / "simulation" / f"{model}-b1.json.gz")
    assert measured.commit is not None and measured.modified is False
    simulators = {name: Simulator(p.graph, p.profile, GPU) for name, p in measured.programs.items()}
    drawn = [each for each in measured.schedules if each.name == "random"]
    measured_ms = [each.latency_ms for each in drawn]
    ordered = sorted(measured_ms)
    assert len(drawn) >= 40 and ordered[-1] >= 1.5 * ordered[0]
    assert max(b - a for a, b in pairwise(ordered)) < 0.1 * (ordered[-1] - ordered[0])
    simulated_us = [simulators[each.program](each.schedule).latency_us for each in drawn]
    assert spearmanr(measured_ms, simulated_us)[0] >= 0.95


@pytest.mark.parametrize("model", ["inception_v3", "nasnet_large"])
def test_ios_by_simulated_costs_loses_at_most_three_percent(model: str) -> None:
    """Against IOS by measured costs, over at least 20 rounds in which they took turns."""
    measured = MeasuredSet.read(ROOT / "results" / "reference" / "simulation" / f"{model}-b1-ios.json.gz")
    assert measured.commit is not None and measured.modified is False
    rounds_ms = {each.name: each.replay_ms for each in measured.schedules}
    ratios = [one / other for one, other in zip(rounds_ms["ios_simulated"], rounds_ms["ios"], strict=True)]
    assert len(ratios) >= 20 and median(ratios) <= 1.03


@pytest.mark.parametrize("name", ["nasnet-b32", "googlenet-b1", "bert-b8"])
def test_no_simulation_is_below_the_larger_bound(name: str) -> None:
    measured = MeasuredSet.read(ROOT / "results" / "reference" / "simulation" / f"{name}.json.gz")
    simulators = {name: Simulator(p.graph, p.profile, GPU) for name, p in measured.programs.items()}
    for each in measured.schedules:
        simulator = simulators[each.program]
        assert simulator(each.schedule).latency_us >= baselines(each.schedule, simulator).bound_us, each.name


def test_a_last_wave_holds_what_its_blocks_fill() -> None:
    """Of 132 multiprocessors, each of which holds one block: 133 blocks of 200 us take 2 waves, 131 of 100 us one."""
    graph = from_edges(2, [])
    profile = profile_of([operator(kernel(200, 133, 1024, 64, 0)), operator(kernel(100, 131, 1024, 64, 0))])
    simulator, schedule = Simulator(graph, profile, GPU), assign_streams(graph)
    bound_us = baselines(schedule, simulator).bound_us
    assert bound_us == pytest.approx(max(200.0, 200 * 133 / 264 + 100 * 131 / 132))
    assert simulator(schedule).latency_us >= bound_us


@pytest.fixture
def measured() -> MeasuredSet:
    """Nimble's schedule of two branches, as if it had been measured."""
    program = capture(Branches().eval(), (torch.randn(1, 3, 8, 8),))
    signatures = tuple(program.signature(v) for v in range(len(program.graph)))
    profile = replace(profile_of([operator(kernel(10, 8, 128, 32, 0))] * len(signatures)), signatures=signatures)
    schedule = MeasuredSchedule("nimble", "captured", assign_streams(program.graph), (0.030, 0.032), 0.05)
    return MeasuredSet("branches", 1, {}, {"captured": ProfiledProgram(program.graph, profile)}, (schedule,))


def test_a_program_finds_its_operators_wherever_it_was_captured(measured: MeasuredSet) -> None:
    other = measured.programs["captured"]
    moved = tuple(s.replace("relu", "device(type='cuda', index=0) relu") for s in other.profile.signatures)
    program = capture(Branches().eval(), (torch.randn(1, 3, 8, 8),))
    assert StoredOperators([measured]).profile(program).operators == other.profile.operators
    changed = replace(other, profile=replace(other.profile, signatures=moved))
    with pytest.raises(Unsupported, match=r"lacks operator .*relu"):
        StoredOperators([replace(measured, programs={"captured": changed})]).profile(program)


def test_a_measurement_is_of_the_same_order_alone(measured: MeasuredSet) -> None:
    profiled = measured.programs["captured"]
    schedule, stored = assign_streams(profiled.graph), StoredOperators([measured])
    assert stored.measurement(schedule, profiled.profile) is measured.schedules[0]
    other = replace(schedule, streams=(0,) * len(profiled.graph), waits=())
    assert stored.measurement(other, profiled.profile) is None


class Attention(torch.nn.Module):
    """With a mask that lies transposed, which is copied on a CPU alone."""

    def __init__(self, is_copied: bool) -> None:
        super().__init__()
        self.is_copied = is_copied

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mask = mask.transpose(2, 3)
        if self.is_copied:
            mask = mask.clone(memory_format=torch.contiguous_format)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, mask)


def test_a_copy_that_a_gpus_capture_leaves_out_takes_no_time(measured: MeasuredSet) -> None:
    """The set is of a GPU's capture, whose attention reads the mask as it lies, and one that reads it in order."""
    inputs = torch.randn(1, 2, 8, 4), torch.randn(1, 1, 8, 8)
    on_gpu, on_cpu = (capture(Attention(is_copied).eval(), inputs) for is_copied in (False, True))
    signatures = (*map(on_gpu.signature, range(len(on_gpu.graph))), on_cpu.signature(len(on_cpu.graph) - 1))
    operators = [operator(kernel(10, 8, 128, 32, 0)) if "attention" in s else operator() for s in signatures]
    graph = from_edges(len(signatures), [])
    profile = replace(profile_of(operators), signatures=signatures)
    stored = StoredOperators([replace(measured, programs={"captured": ProfiledProgram(graph, profile)}, schedules=())])
    assert [o.milliseconds for o in stored.profile(on_cpu).operators] == [0.0, 0.0, 0.01]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert", "gpt2"])
def test_a_laptop_knows_what_was_measured_of_attention(run: Run, model: str) -> None:
    done = run("runner=simulate", f"model={model}", "system=nimble", "device=cpu")
    assert done.returncode == 0 and "measured" in done.stdout, done.stderr


def test_half_the_bandwidth_takes_twice_as_long_for_what_memory_limits() -> None:
    busy = profile_of([operator(kernel(10, 132, 128, 32, 0), moved=48_000_000), operator(kernel(10, 132, 128, 32, 0))])
    slower = on_another(busy, GPU, load("h200", bandwidth_gb_s=2400.0))
    assert slower.milliseconds == pytest.approx([0.020, 0.010]) and "scaled" in slower.device


def test_half_the_multiprocessors_take_twice_the_waves() -> None:
    """264 blocks of 1,024 threads fill 132 multiprocessors once, and 66 twice; 132 of them fit 66 as well."""
    profile = profile_of([operator(kernel(10, 264, 1024, 32, 0)), operator(kernel(10, 132, 1024, 32, 0))])
    assert on_another(profile, GPU, load("h200", multiprocessors=66)).milliseconds == pytest.approx([0.020, 0.010])
    assert on_another(profile, GPU, GPU).milliseconds == pytest.approx(profile.milliseconds)


@pytest.mark.slow
def test_the_runner_predicts_and_draws_over_what_was_measured(run: Run, folder: Path) -> None:
    """Of the three measured timelines one is of the same cell, but for its device."""
    of_nimble, of_opara = Choice("nimble", "nimble"), Choice("opara", "opara")
    cells = [
        Cell(Choice("squeezenet", "squeezenet"), system, Choice("timeline", "timeline"), Conditions(batch, "cuda"))
        for system, batch in ((of_nimble, 8), (of_nimble, 1), (of_opara, 1))
    ]
    by_hand = [Timeline(cell, "by hand", (Bar(0, "relu", 0.0, 0.3, COMPUTE),)) for cell in cells]
    (folder / "measured.json").write_text(json.dumps(to_trace(by_hand)))
    arguments = "system=nimble", "device=cpu", "output=t.json", "runner.timeline=measured.json"
    done = run("runner=simulate", "model=squeezenet", *arguments)
    assert done.returncode == 0, done.stderr
    latency, measured, error = re.search(r"h200: (\S+) ms .* measured (\S+) ms, error (\S+)%", done.stdout).groups()  # type: ignore[union-attr]
    assert float(latency) / float(measured) - 1 == pytest.approx(float(error) / 100, abs=0.01)
    above, timeline = from_trace(json.loads((folder / "t.json").read_text()))
    assert above == by_hand[1]
    assert timeline.source == "simulated on h200" and max(b.end for b in timeline.bars) <= float(latency)


@pytest.mark.parametrize(("costs", "is_said"), [("both", True), ("measured", False), ("simulated", False)])
@pytest.mark.slow
def test_a_schedule_that_a_laptop_chose_by_its_own_times_is_told(run_here: Run, costs: str, is_said: bool) -> None:
    """Simulated costs choose in the place of measured ones."""
    done = run_here("runner=simulate", "model=squeezenet", "system=ios", f"system.costs={costs}", "device=cpu")
    assert done.returncode == 0 and "simulated on h200: " in done.stdout, done.stderr
    assert ("; times of this cpu chose the schedule: system.costs=simulated" in done.stdout) is is_said


def test_what_a_profile_lacks_is_told_with_what_estimates_it(run_here: Run) -> None:
    done = run_here("runner=simulate", "model=squeezenet", "system=nimble", "device=cpu", "precision=fp16")
    assert done.returncode == 0 and "the profile lacks operator 0 (conv2d): " in done.stderr
    assert done.stderr.endswith("; runner=advise estimates what a profile lacks\n")


def test_a_search_on_a_cpu_is_refused_before_it_begins(run_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is asked. A plan needs no search: that of a file that is not there is refused as such."""
    arguments = "runner=simulate", "model=squeezenet", "system=weave", "device=cpu"
    done = run_here(*arguments, "system.plan=nowhere.json")
    assert done.returncode == 2 and "nowhere.json cannot be read" in done.stderr
    monkeypatch.setattr("runners.showings.simulate.ask", lambda *_: pytest.fail("a process is asked"))
    done = run_here(*arguments)
    assert done.returncode == 0 and done.stderr.startswith("opweave: weave on squeezenet: unsupported: ")
    assert "no times of a GPU, by which weave searches" in done.stderr
    assert run_here(*arguments, "output=t.json").returncode == 2


@pytest.mark.slow
def test_a_what_if_is_labelled_and_has_no_error(run: Run, folder: Path) -> None:
    arguments = "system=nimble", "device=cpu", "runner.gpu=v100", "output=t.json"
    done = run("runner=simulate", "model=googlenet", *arguments)
    assert done.returncode == 0, done.stderr
    assert "a guess, simulated on v100" in done.stdout and "measured" not in done.stdout
    (timeline,) = from_trace(json.loads((folder / "t.json").read_text()))
    assert timeline.source == "a guess, simulated on v100"


@pytest.mark.slow
def test_a_committed_timeline_is_found(run: Run, folder: Path) -> None:
    done = run("-m", "runner=simulate", "model=googlenet", "system=nimble,opara", "device=cpu", "output=t.json")
    assert done.returncode == 0, done.stderr
    timelines = from_trace(json.loads((folder / "t.json").read_text()))
    assert [(t.cell.system.choice, t.cell.device) for t in timelines] == [
        (system, device) for system in ("nimble", "opara") for device in ("cuda", "cpu")
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["runner.gpu=h2000"], "did you mean h200"),
        (["runner.multiprocessors=0"], "positive integer"),
        (["runner.bandwidth_gb_s=-1"], "positive number"),
        (["runner.profile=nowhere.json"], "nowhere.json cannot be read: No such file or directory"),
        (["runner.timeline=nowhere.json"], "nowhere.json"),
    ],
)
def test_a_wrong_request_is_one_line(run_here: Run, arguments: list[str], words: str) -> None:
    done = run_here("runner=simulate", "model=squeezenet", "device=cpu", *arguments)
    assert done.returncode == 2 and words in done.stderr and len(without_progress(done.stderr)) == 1, done.stderr


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "tf32_products"])
def test_times_of_another_arithmetic_predict_nothing(run_here: Run, precision: str) -> None:
    done = run_here("runner=simulate", "model=squeezenet", "system=nimble", "device=cpu", f"precision={precision}")
    assert done.returncode == 0 and " ms" not in done.stdout
    assert f"unsupported: no profile here was measured in {precision}, but in tf32" in done.stderr


def test_a_file_of_another_kind_is_no_profile(tmp_path: Path) -> None:
    (file := tmp_path / "nimble.json").write_text(json.dumps({"operators": [{"id": 0}], "streams": 1}))
    wrong = r"nimble.json is no file of runner=profile: this is no set of measured schedules: it lacks 'signature'$"
    with pytest.raises(BadOption, match=wrong):
        read_sets([file])


def test_a_set_is_of_its_own_arithmetic_and_one_that_names_none_of_any(measured: MeasuredSet, tmp_path: Path) -> None:
    files = []
    for name, settings in (("tf32", [True, False, False, False]), ("fp32", [False, True, False, False]), ("any", None)):
        conditions = {} if settings is None else {"settings": settings}
        replace(measured, model=name, conditions=conditions).write(file := tmp_path / f"{name}.json")
        files.append(file)
    convolutions, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = convolutions.allow_tf32, products.allow_tf32
    try:
        for arithmetic, names in (((True, False), {"tf32", "any"}), ((False, False), {"fp32", "any"})):
            convolutions.allow_tf32, products.allow_tf32 = arithmetic
            assert {each.model for each in read_sets(files)} == names
        convolutions.allow_tf32, products.allow_tf32 = True, True
        with pytest.raises(Unsupported, match="measured in tf32_products, but in fp32 or tf32"):
            read_sets(files[:2])
    finally:
        convolutions.allow_tf32, products.allow_tf32 = before


@pytest.mark.slow
def test_a_model_without_a_profile_is_unsupported(run_here: Run) -> None:
    done = run_here("runner=simulate", "model=squeezenet", "batch=3", "device=cpu")
    assert done.returncode == 0 and "no profile of squeezenet at batch 3" in done.stderr
    assert "runner=profile writes on a GPU; runner=advise estimates without" in done.stderr
