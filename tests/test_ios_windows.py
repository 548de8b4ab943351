"""Searching a block in windows, against searching it whole."""

import random
from collections.abc import Sequence

import pytest
import torch
from dags import dags, members
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import systems
from systems.ios import planning
from systems.ios.endings import TooManyTransitions
from systems.ios.planning import Options, find_stages
from systems.ios.search import find_schedule
from systems.ios.stage_timer import StageTimer, Unit
from systems.ios.windows import UnitStage, improve
from systems.profiling.timing import Timer
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.operator_graph import OperatorGraph


@given(dags(max_nodes=12, max_edges=24), st.integers(2, 14), st.integers(1, 400), st.integers(0, 99))
def test_windows_make_stages_better_and_none_can_be_done_better(
    graph: OperatorGraph, most: int, limit: int, seed: int
) -> None:
    """Beside the search of the whole, which it equals where a window may hold the whole."""

    def cost_of(stage: frozenset[int]) -> float:
        return random.Random(f"{seed} {sorted(stage)}").randint(1, 20) + 5 * len(stage) ** 0.5

    def cost(stages: Sequence[UnitStage]) -> float:
        return sum(cost_of(frozenset(stage.units)) for stage in stages)

    def solve(units: tuple[int, ...], limit: int = limit) -> list[UnitStage] | None:
        place = {v: i for i, v in enumerate(units)}
        inner = [[place[u] for u in graph.predecessors[v] if u in place] for v in units]

        def stage_cost(ending: int, _: tuple[int, ...]) -> float:
            return cost_of(frozenset(units[i] for i in members(ending)))

        try:
            block_schedule = find_schedule(inner, stage_cost, 2, 3, max_transitions=limit)
        except TooManyTransitions:
            return None
        return [
            UnitStage(tuple(tuple(units[i] for i in sorted(members(g))) for g in groups)) for groups in block_schedule.stages
        ]

    start: list[UnitStage] = [UnitStage(((v,),)) for v in range(len(graph))]
    best_stages = improve(start, most, cost, solve)
    assert cost(best_stages) <= cost(start)
    level = {v: number for number, stage in enumerate(best_stages) for v in stage.units}
    assert sorted(level) == list(range(len(graph))) and sum(map(len, best_stages)) == len(graph)
    group = {
        v: (number, g) for number, stage in enumerate(best_stages) for g, units in enumerate(stage.groups) for v in units
    }
    assert all(level[u] < level[v] or group[u] == group[v] for u, v in graph.edges)
    whole = solve(tuple(range(len(graph))), 10**6)
    assert whole is not None and cost(whole) <= cost(best_stages) + 1e-9
    if most >= len(graph) and limit == 400 and solve(tuple(range(len(graph)))) is not None:
        assert cost(best_stages) == pytest.approx(cost(whole))
    run = best_stages[:1]  # the first window, which is always looked at
    while len(run) < len(best_stages) and sum(map(len, best_stages[: len(run) + 1])) <= most:
        run = best_stages[: len(run) + 1]
    better = solve(tuple(sorted(v for stage in run for v in stage.units))) if len(run) > 1 else None
    assert better is None or cost(better) >= cost(run) - 1e-9


def test_a_block_that_is_split_is_searched_across_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chains side by side: split into parts of three, what was cut apart still runs at once."""

    class Chains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = (nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(5)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = y = torch.relu(x)
            for left, right in zip(self.left, self.right, strict=True):
                x, y = left(x), right(y)
            return x + y

    monkeypatch.setattr(
        "systems.ios.stage_timer.StageTimer.concurrent", lambda self, groups, _: 1.0 + max(sum(map(len, g)) for g in groups)
    )
    module, x = Chains().eval(), torch.randn(1, 4, 6, 6)
    searches = {
        most: systems.load("ios", strategy="parallel", max_part_size=most).schedule(module, (x,)).search for most in (4, 24)
    }
    assert searches[4].splits > 0 and searches[24].splits == 0
    took = {most: sum(part.milliseconds for part in search.parts) for most, search in searches.items()}
    alone = sum(part.sequential_milliseconds for part in searches[4].parts)
    assert took[24] <= took[4] < 0.75 * alone
    assert searches[4].blocks == searches[24].blocks == len(searches[4].parts)


@pytest.mark.parametrize(("merged_ms", "is_merged"), [(1.6, True), (5.6, False)])
@pytest.mark.parametrize("most", [2, 24])
def test_a_greedy_stage_runs_by_the_way_it_is_priced_by(
    monkeypatch: pytest.MonkeyPatch, most: int, merged_ms: float, is_merged: bool
) -> None:
    """Six convolutions of one input hardly overlap. Beyond a part's size the greedy stage alone has all of them."""

    class Six(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolutions = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([each(x) for each in self.convolutions], 1)

    class Given(StageTimer):
        def concurrent(self, groups: Sequence[Sequence[Unit]], numbers: Sequence[int]) -> float:
            self.names.add(self.name(numbers))
            return max(map(len, groups)) + 0.9 * (len(groups) - 1)

        def merged(self, units: Sequence[Unit]) -> float:
            return merged_ms if len(units) == 6 else 9.0

        def is_known(self, numbers: Sequence[int]) -> bool:
            return True

    monkeypatch.setattr(planning, "StageTimer", Given)
    program = capture(Six().eval(), (torch.randn(1, 4, 8, 8),))
    plan = find_stages(program, Options("both", 3, 8, "operator", most, False), Timer(program.device), lambda _: None)
    assert [stage.is_merged for stage in plan.stages if len(stage.operators) == 6] == [is_merged]
    assert sum(part.milliseconds for part in plan.search.parts) == pytest.approx(1 + (1.6 if is_merged else 5.5))
