"""IOS as a system: strategies, schedule files, what a search measures and keeps."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import models
import systems
from runners.measurements.correctness import relative_error
from systems.base import BadOption
from systems.ios.stage_timer import StageTimer
from systems.ios.system import STRATEGIES
from systems.ios.units import find_units
from systems.profiling.timing import Timer
from systems.scheduling.decision import Decision, rows
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.lower import lower
from systems.scheduling.plans.merge import merge
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.verify import verify

pytestmark = pytest.mark.usefixtures("cache_folder")


class Branches(nn.Module):
    """Branches that can be merged, and others beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.c = nn.Conv2d(8, 8, (1, 7), padding=(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.a(x).relu(), self.b(x).relu(), nn.functional.avg_pool2d(x, 3, 1, 1)], dim=1)
        return self.c(y[:, :8]) + y[:, 8:16]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_agrees_with_eager(strategy: str) -> None:
    torch.manual_seed(0)
    module, x = Branches().eval(), torch.randn(2, 8, 12, 12)
    for options in ({}, {"barriers": False}) if strategy != "sequential" else ({},):
        prepared = systems.load("ios", strategy=strategy, **options).prepare(module, (x,))
        for _ in range(2):
            x = torch.randn_like(x)
            with torch.no_grad():
                assert relative_error(prepared(x), module(x)) < 1e-5
        prepared.close()


def test_a_merge_that_was_found_is_written_and_executed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Branches().eval(), torch.randn(2, 8, 12, 12)
    monkeypatch.setattr(
        "systems.ios.stage_timer.StageTimer.concurrent", lambda self, groups, numbers: 10.0 * sum(map(len, groups))
    )
    monkeypatch.setattr("systems.ios.stage_timer.StageTimer.merged", _merge_costs_little)
    schedule = systems.load("ios").schedule(module, (x,))
    assert schedule.merges and schedule.search.transitions > 0
    program = capture(module, (x,))
    for planned in (systems.load("ios", barriers=False).schedule(module, (x,)), schedule):
        assert planned.merges == schedule.merges
        verify(program.graph, planned)
        lowered, executed = lower(program, planned)
        verify(lowered.graph, executed)
    assert [o.name for o in lowered.graph.operators].count("merged_conv2d") == 1
    file = tmp_path / "schedule.json"
    file.write_text(json.dumps(schedule.to_json(model="m", batch=2, device="cpu")))
    larger = torch.randn(5, 8, 12, 12)  # specialised for another batch size, executed at this one
    prepared = systems.load("ios", schedule=str(file)).prepare(module, (larger,))
    with torch.no_grad():
        assert relative_error(prepared(larger), module(larger)) < 1e-5
    assert prepared.schedule is not None and len(prepared.schedule.graph) == len(lowered.graph)
    prepared.close()


def _merge_costs_little(timer: object, units: list[tuple[int, ...]]) -> float | None:
    return None if merge(timer.program, units) is None else 0.1  # type: ignore[attr-defined]


def test_a_schedule_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    x = torch.randn(2, 8, 12, 12)
    schedule = systems.load("ios", strategy="greedy").schedule(Branches().eval(), (x,))
    file = tmp_path / "other.json"
    file.write_text(json.dumps(schedule.to_json(model="m", batch=2, device="cpu")))
    with pytest.raises(BadOption, match=r"other.json does not fit this model: .* this model"):
        systems.load("ios", schedule=str(file)).prepare(nn.Conv2d(8, 8, 1).eval(), (x,))
    whole = file.read_bytes()
    for broken in (whole[:-9], b"", whole.replace(b"conv", b"\xff")):
        file.write_bytes(broken)
        with pytest.raises(BadOption, match=r"other.json: no JSON: "):
            systems.load("ios", schedule=str(file))
    with pytest.raises(BadOption, match=r"none.json cannot be read"):
        systems.load("ios", schedule=str(tmp_path / "none.json"))


@pytest.mark.parametrize("name", ["nimble", "opara", "weave"])
def test_a_schedule_of_another_scheduler_is_refused_by_both_names(tmp_path: Path, name: str) -> None:
    """It fits the model, and its record would call it IOS's."""
    x, module = torch.randn(2, 8, 12, 12), Branches().eval()
    schedule = systems.load("nimble").schedule(module, (x,))
    file = tmp_path / "other.json"
    file.write_text(json.dumps(replace(schedule, system=name).to_json(model="m", batch=2, device="cpu")))
    with pytest.raises(BadOption, match=rf"other.json is a schedule of {name}, and ios executes its own alone"):
        systems.load("ios", schedule=str(file))


class Normed(nn.Module):
    """Convolutions of one input, each with a batch norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, k, padding=k // 2, bias=False), nn.BatchNorm2d(8), nn.ReLU()) for k in (1, 3, 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def test_what_was_rewritten_is_merged_too_and_its_schedule_fits_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("systems.ios.stage_timer.milliseconds", _model_of_a_device)
    module = Normed().eval()
    for norm in (m for m in module.modules() if isinstance(m, nn.BatchNorm2d)):
        nn.init.uniform_(norm.running_mean)  # type: ignore[arg-type]
        nn.init.uniform_(norm.running_var, 0.5, 2)  # type: ignore[arg-type]
    x = torch.randn(2, 8, 12, 12)
    system = systems.load("ios", strategy="merge", fold_batch_norm=True, fuse_elementwise=True)
    schedule = system.schedule(module, (x,))
    assert schedule.merges and sum(d.count for d in schedule.decisions if d.kind == "fold_batch_norm") == 3
    prepared = system.prepare(module, (x,))
    for _ in range(2):
        with torch.no_grad():
            for got, expected in zip(tree_leaves(prepared(x)), tree_leaves(module(x)), strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
            for p in module.parameters():
                p.mul_(1.2)
    prepared.close()
    file = tmp_path / "rewritten.json"
    file.write_text(json.dumps(schedule.to_json(model="m", batch=2, device="cpu")))
    with pytest.raises(BadOption, match="does not fit this model"):
        systems.load("ios", schedule=str(file)).prepare(module, (x,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "fast"}, "not one of both"),
        ({"units": "conv"}, "not one of operator"),
        ({"r": -1}, "at least 0"),
        ({"strategy": "sequential", "barriers": False}, "a sequential schedule has nothing else"),
        ({"schedule": "s.json", "barriers": False}, "s.json is executed as it stands"),
    ],
)
def test_wrong_options_are_told(options: dict, message: str) -> None:
    with pytest.raises(BadOption, match=message):
        systems.load("ios", **options)


def _model_of_a_device(program: Program, groups: list[list[int]] | None = None, *_: float, **__: float) -> float:
    """Milliseconds that depend on the stage alone: what is asked for by a search depends on what the stages before took."""
    longest, work = max(map(len, groups or [[]]), default=0), len(program.graph)
    return max(longest, 0.4 * work) + 0.1


def test_each_distinct_stage_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal blocks are measured as one, and a second search measures nothing."""
    monkeypatch.setattr("systems.ios.stage_timer.milliseconds", _model_of_a_device)
    module = nn.Sequential(Branches(), nn.MaxPool2d(1), Branches(), nn.MaxPool2d(1)).eval()
    single, x = Branches().eval(), torch.randn(2, 8, 12, 12)
    assert systems.load("ios").schedule(single, (x,)).search.measured > 10
    first = systems.load("ios").schedule(module, (x,))
    assert first.search.measured == 1  # the pool, which is both times the same
    assert systems.load("ios", max_part_size=23).schedule(module, (x,)).search.measured == 0


class Bags(nn.Module):
    """Embeddings side by side, as a recommender's, and their sum."""

    def __init__(self, count: int):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(5, 4) for _ in range(count))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.stack([table(ids[:, i]) for i, table in enumerate(self.tables)]).sum(0)


def test_a_block_of_dozens_side_by_side_is_split_until_it_can_be_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every choice open a block of 20 has more than 3^20 transitions."""
    monkeypatch.setattr(
        "systems.ios.stage_timer.StageTimer.concurrent", lambda self, groups, _: float(max(map(len, groups)))
    )
    module, ids = Bags(20).eval(), torch.randint(5, (2, 20))
    schedule = systems.load("ios", strategy="parallel", s=0, r=0).schedule(module, (ids,))
    assert schedule.search.splits > 0
    verify(schedule.graph, schedule)
    assert max(len(stage) for stage in schedule.to_json(model="bags", batch=2, device="cpu")["stages"]) >= 5
    prepared = systems.load("ios", strategy="parallel", s=0, r=0).prepare(module, (ids,))
    torch.testing.assert_close(prepared(ids), module(ids))
    prepared.close()


def test_a_search_tells_of_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups at once take as long as the longest, so that a stage of several is told to gain by it."""
    monkeypatch.setattr(
        "systems.ios.stage_timer.StageTimer.concurrent", lambda self, groups, _: float(max(map(len, groups)))
    )
    module, x = nn.Sequential(Branches(), nn.Conv2d(8, 8, 1)).eval(), torch.randn(2, 8, 12, 12)
    search = systems.load("ios", strategy="parallel").schedule(module, (x,)).search
    parts = search.parts
    assert len(parts) == search.blocks and sum(part.units for part in parts) == search.units
    assert sum(part.transitions for part in parts) == search.transitions
    for part in parts:
        assert part.sequential_milliseconds == part.units >= part.milliseconds > 0
        assert (part.milliseconds < part.sequential_milliseconds) == (part.width > 1)
    plain = systems.load("ios", strategy="sequential").schedule(module, (x,)).search
    assert [part.width for part in plain.parts] == [part.width for part in parts]


@pytest.mark.parametrize("strategy", ["both", pytest.param("parallel", marks=pytest.mark.slow), "merge"])
def test_a_stage_is_a_decision_whose_alternatives_took_what_was_measured(strategy: str) -> None:
    """Measured for real; then each stage is looked up by its operators among the measurements that the cache keeps."""
    module, x = nn.Sequential(Branches(), nn.MaxPool2d(1), Branches()).eval(), torch.randn(2, 8, 12, 12)
    schedule = systems.load("ios", strategy=strategy).schedule(module, (x,))
    program = capture(module, (x,))
    measurements = Timer(program.device)
    timer, units = StageTimer(program, measurements), find_units(program, "auto")

    def concurrent(groups: list[tuple[int, ...]]) -> float:
        return timer.concurrent([[group] for group in groups], [timer.number([group]) for group in groups])

    decisions = []
    assert schedule.stages is not None and schedule.merges is not None
    for groups in schedule.stages:
        operators = tuple(sorted(sum(groups, ())))
        inside = [unit for unit in units if set(unit) <= set(operators)]
        milliseconds: dict[str, float | None] = {"in turn": sum(concurrent([unit]) for unit in inside)}
        is_merged = operators in schedule.merges
        if strategy != "merge" and len(inside) > 1:
            milliseconds["concurrent"] = concurrent(inside if is_merged else list(groups))
        if strategy != "parallel" and (is_merged or (len(groups) == len(inside) > 1)):
            merged = timer.merged(inside)
            milliseconds |= {} if merged is None else {"merged": merged}
        chosen = "in turn" if len(inside) == 1 else "merged" if is_merged else "concurrent"
        decisions.append(Decision("ios", "", operators, milliseconds, chosen))
    assert measurements.taken == 0
    decision_rows = [(d.count, d.num_operators, d.chosen, d.milliseconds) for d in schedule.decisions]
    assert decision_rows == [(d.count, d.num_operators, d.chosen, d.milliseconds) for d in rows(decisions)]
    for d in schedule.decisions:
        ways = {name: t for name, t in d.milliseconds.items() if name != "in turn" and t is not None}
        assert not ways or d.milliseconds[d.chosen] == min(ways.values())
    total = sum(part.milliseconds or 0.0 for part in schedule.search.parts)  # type: ignore[union-attr]
    assert sum(d.count * (d.milliseconds[d.chosen] or 0.0) for d in schedule.decisions) == pytest.approx(total, rel=1e-3)


def test_decisions_of_stages_follow_those_of_passes_and_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the cache with the stages, and in a schedule file; a record's limits of the rewritten model do not count them."""
    monkeypatch.setattr("systems.ios.stage_timer.milliseconds", _model_of_a_device)
    module, x = Normed().eval(), torch.randn(2, 8, 12, 12)
    fused = systems.load("ios", fold_batch_norm=True)
    schedule = fused.schedule(module, (x,))
    assert [d.kind for d in schedule.decisions] == ["fold_batch_norm"] + ["ios"] * (len(schedule.decisions) - 1)
    assert schedule.decisions[1].pattern == "3x conv2d + relu"
    assert fused.schedule(module, (x,)) == schedule  # from the cache
    read = Schedule.from_json(json.loads(json.dumps(schedule.to_json(model="m", batch=2, device="cpu"))))
    assert read.decisions == schedule.decisions
    assert not systems.load("ios", strategy="greedy").schedule(module, (x,)).decisions  # nothing was measured


def test_a_bounded_search_measures_less_and_finds_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("systems.ios.stage_timer.milliseconds", _model_of_a_device)
    module, x = nn.Sequential(Branches(), nn.MaxPool2d(1), Branches()).eval(), torch.randn(2, 8, 12, 12)
    schedules = {}
    for exhaustive in (False, True):
        monkeypatch.setenv("OPWEAVE_CACHE", str(tmp_path / str(exhaustive)))
        schedules[exhaustive] = systems.load("ios", exhaustive=exhaustive).schedule(module, (x,))
    assert schedules[False].search.measured < schedules[True].search.measured
    assert schedules[False].stages == schedules[True].stages


def test_an_interrupted_search_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("systems.ios.stage_timer.milliseconds", _model_of_a_device)
    module, x = Branches().eval(), torch.randn(2, 8, 12, 12)
    interrupted = systems.load("ios")

    def report(message: str) -> None:
        if "5 stages measured" in message:
            raise KeyboardInterrupt

    interrupted.report = report  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        interrupted.schedule(module, (x,))
    whole = systems.load("ios").schedule(module, (x,)).search.measured
    (tmp_path / "file").touch()
    monkeypatch.setenv("OPWEAVE_CACHE", str(tmp_path / "file" / "folder"))
    with pytest.warns(UserWarning, match="cannot be written"):
        assert systems.load("ios").schedule(module, (x,)).search.measured == whole + 5


@pytest.mark.parametrize("model", ["squeezenet", pytest.param("efficientnet_b0_cifar10", marks=pytest.mark.slow)])
def test_real_models(model: str) -> None:
    loaded = models.load(model, 1)
    prepared = systems.load("ios", r=2, s=3).prepare(loaded.module, loaded.inputs)
    inputs = loaded.fresh_inputs(5)
    with torch.no_grad():
        expected = tree_leaves(loaded.module(*inputs))
    for got, reference in zip(tree_leaves(prepared(*inputs)), expected, strict=True):
        assert relative_error(got, reference) < 1e-4
    prepared.close()
