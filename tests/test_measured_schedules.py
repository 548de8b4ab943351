"""Schedules that are drawn, and sets of measured ones with their files."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from subprocess import CompletedProcess

import networkx as nx
import pytest
import torch
from conftest import gpu_environment, without_progress
from dags import from_edges
from hypothesis import given
from hypothesis import strategies as st

import systems
from results.cell import Cell, Conditions, choose
from runners.cell.measured_schedules import PreparedSchedules
from runners.machine.installation import ROOT
from runners.machine.manifest import state
from runners.showings.asking import write
from runners.showings.profile import Profile
from systems.ios.merges import merge_candidates, merged_operators
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.plans.lower import lower
from systems.scheduling.plans.schedule import Search, sequential
from systems.scheduling.plans.verify import verify
from systems.scheduling.scheduler import Scheduler
from systems.scheduling.simulate.measured_set import MeasuredSet
from systems.scheduling.simulate.random_schedules import longest_chain, random_merges, random_schedule, random_schedules
from tests.dags import dags

Damage = Callable[[dict], object]
Run = Callable[..., CompletedProcess[str]]


class Inception(torch.nn.Module):
    """Three convolutions of one input, of which some merge, and their concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = torch.nn.ModuleList(torch.nn.Conv2d(3, c, k, padding=k // 2) for c, k in ((4, 1), (2, 3), (3, 5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.relu(branch(x)) for branch in self.branches], 1)


@given(dags(), st.integers(0, 2**32), st.floats(0, 1))
def test_what_is_drawn_is_valid(graph: OperatorGraph, seed: int, share: float) -> None:
    verify(graph, random_schedule(graph, Random(seed), share))


@given(dags(), st.integers(0, 2**32))
def test_a_seed_draws_the_same_again(graph: OperatorGraph, seed: int) -> None:
    assert random_schedules(graph, 5, seed) == random_schedules(graph, 5, seed)


def test_the_last_one_is_sequential_and_schedules_differ() -> None:
    graph = from_edges(40, [(0, v) for v in range(1, 40)])
    drawn = random_schedules(graph, 40, 0)
    ordered = [sum(mask.bit_count() for mask in schedule.happens_before()) for schedule in drawn]
    assert ordered[-1] == 40 * 39 / 2  # every two of 40 are ordered
    assert ordered[0] < ordered[-1] / 2 and len(set(ordered)) > 20


def test_merges_are_those_that_an_executor_carries_out() -> None:
    module, x = Inception().eval(), torch.randn(1, 3, 8, 8)
    program = capture(module, (x,))
    drawn = {random_merges(program, Random(seed)) for seed in range(20)}
    assert len(drawn) > 2  # several subsets, and none at all
    for merges in drawn - {()}:
        plain = sequential(program.graph)
        merged, _ = lower(program, type(plain)(plain.graph, "merged", plain.order, plain.streams, (), merges=merges))
        (out,) = merged.run((x,))
        torch.testing.assert_close(out, module(x))


def test_chains_of_chosen_schedules_lie_evenly() -> None:
    """No step between two of them is more than thrice the mean one, where chains from 1 to 120 can be drawn."""
    graph = from_edges(120, [])
    chains = [longest_chain(schedule) for schedule in random_schedules(graph, 12, 0)]
    steps = [b - a for a, b in pairwise(chains)]
    assert chains[-1] == 120 and min(steps) >= 0 and max(steps) <= 3 * (chains[-1] - chains[0]) / 11


@given(dags(), st.integers(0, 2**32), st.floats(0, 1))
def test_the_longest_chain_is_that_of_what_happens_before_what(graph: OperatorGraph, seed: int, share: float) -> None:
    schedule = random_schedule(graph, Random(seed), share)
    ordered = nx.DiGraph(
        (u, v) for v, mask in enumerate(schedule.happens_before()) for u in range(len(graph)) if mask >> u & 1
    )
    assert longest_chain(schedule) == 1 + nx.dag_longest_path_length(ordered)


def test_every_merge_that_a_search_may_choose_is_an_operator_once() -> None:
    """Of three branches that merge with each other: three pairs and all three, each as a merge of the program makes it."""
    module, x = Inception().eval(), torch.randn(1, 3, 8, 8)
    program = capture(module, (x,))
    merges = merged_operators(program)
    assert merges is not None
    plain = sequential(program.graph)
    expected = set()
    for units in merge_candidates(program):
        schedule = replace(plain, merges=(tuple(v for unit in units for v in unit),))
        merged, _ = lower(program, schedule)
        expected |= {merged.signature(v) for v, o in enumerate(merged.graph.operators) if o.name == "merged_conv2d"}
    assert sorted(expected) == sorted(merges.signature(v) for v in range(len(merges.graph))) and len(expected) == 4
    assert len(merges.run(merges.examples)) == len(merges.outputs) >= 4


def test_a_program_without_convolutions_has_no_merges() -> None:
    assert merged_operators(capture(torch.nn.Linear(3, 2).eval(), (torch.randn(1, 3),))) is None


@pytest.fixture(scope="module")
def measured() -> MeasuredSet:
    program = capture(Inception().eval(), (torch.randn(1, 3, 8, 8),))
    schedulers = {name: scheduler for name in ("nimble", "nimble_fused") if isinstance(scheduler := _load(name), Scheduler)}
    prepared = PreparedSchedules("inception", 1, program, schedulers, num_random=5, num_merged=2)
    prepared.measure()
    prepared.measure()
    prepared.profile()
    prepared.close()
    return prepared.result()


def _load(name: str) -> systems.base.System:
    if name == "nimble_fused":
        return systems.load("nimble", fold_batch_norm=True, merge_linears=True)
    return systems.load(name)


def test_each_schedule_is_measured_twice_and_each_program_profiled(measured: MeasuredSet) -> None:
    assert [s.name for s in measured.schedules] == ["nimble", "nimble_fused", *["random"] * 5]
    assert all(len(s.replay_ms) == 2 and min(*s.replay_ms, s.call_ms) > 0 for s in measured.schedules)
    assert {s.program for s in measured.schedules if s.name == "random"} > {"captured"} and "merges" in measured.programs
    assert measured.commit == state(ROOT).commit
    for name, program in measured.programs.items():
        assert len(program.profile.operators) == len(program.graph), name
        assert any(o.bytes_written for o in program.profile.operators)
    for schedule in measured.schedules:
        verify(measured.programs[schedule.program].graph, schedule.schedule)


@pytest.mark.parametrize("name", ["set.json", "set.json.gz"])
def test_a_file_holds_all_of_a_set(measured: MeasuredSet, tmp_path: Path, name: str) -> None:
    first, *others = measured.schedules
    searched = replace(first, search=Search(seconds=0.5, measured=3, simulated=4))
    measured = replace(measured, schedules=(searched, *others))
    measured.write(tmp_path / name)
    assert MeasuredSet.read(tmp_path / name) == measured


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d.pop("programs"),
        lambda d: d.update(batch="1"),
        lambda d: d["programs"]["captured"]["operators"][0].__setitem__(2, 10**6),
        lambda d: d["programs"]["captured"]["edges"].append([3, 1]),
        lambda d: d["schedules"][0].update(program="other"),
        lambda d: d["schedules"][0].update(replay_ms=["fast"]),
        lambda d: d["schedules"][0].update(waits=[[1]]),
    ],
)
def test_a_damaged_file_is_none(measured: MeasuredSet, damage: Damage) -> None:
    document = measured.to_json()
    damage(document)
    with pytest.raises(ValueError):
        MeasuredSet.from_json(document)


def test_a_file_of_another_kind_is_none(tmp_path: Path) -> None:
    (file := tmp_path / "x.json.gz").write_bytes(b"\x1f\x8bnothing")
    with pytest.raises(ValueError, match="no set of measured schedules"):
        MeasuredSet.read(file)


@pytest.mark.slow
def test_the_runner_shows_a_set(tmp_path: Path) -> None:
    """As a cell's process does, here on a CPU."""
    runner = choose("runner", "profile", schedules="greedy nimble", random_schedules=2)
    cell = Cell(choose("model", "ios_sample"), choose("system", "nimble"), runner, Conditions(1, "cpu"))
    write(tmp_path / "x.json.gz", Profile(runner).show(cell, "0", lambda phase: None))
    assert [s.name for s in MeasuredSet.read(tmp_path / "x.json.gz").schedules] == ["nimble", "greedy", "random", "random"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["runner=profile", "runner.schedules=nimbel"], "did you mean nimble"),
        (["runner=profile", "runner.random_schedules=-1"], "not an integer of at least 0"),
        (["-m", "runner=profile", "batch=1,2"], "writes one file"),
        (["runner=profile", "output=x.json"], "runner=profile measures the kernels of a GPU: device=cpu has none"),
        (["runner=calibrate"], "runner=calibrate measures the kernels of a GPU: device=cpu has none"),
    ],
)
def test_a_wrong_request_is_one_line(run_here: Run, arguments: list[str], words: str) -> None:
    done = run_here(*arguments, "device=cpu")
    assert done.returncode == 2 and words in done.stderr and len(without_progress(done.stderr)) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_calibration_names_its_gpu_and_its_commit(run: Run, folder: Path) -> None:
    done = run("runner=calibrate", "device=cuda", "output=c.json", **gpu_environment())
    assert done.returncode == 0, done.stderr
    document = json.loads((folder / "c.json").read_text())
    assert document["conditions"]["device"] == torch.cuda.get_device_name() and document["commit"] == state(ROOT).commit
    assert all(probe["microseconds"] > 0 for probe in document["probes"])
