"""List schedules, and passes that take the alternatives that a search tells them."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from dags import dags
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from weave_space import Branches, Prepared, Space

import systems
from systems.profiling.timing import Timer
from systems.scheduling.decision import kind_of
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.graph.program import Program
from systems.scheduling.passes import rewriting as module_of_passes
from systems.scheduling.passes.context import Context, Rewritten
from systems.scheduling.passes.rewriting import CHAINS, SWITCHES, Pass, Remembered, Rewriting
from systems.scheduling.plans.launch_order import upward_ranks
from systems.scheduling.plans.list_scheduling import list_schedule
from systems.scheduling.plans.verify import verify
from systems.weave import system as weave_system
from systems.weave.candidate import Candidate
from systems.weave.search import Search
from systems.weave.state import State


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


@pytest.mark.slow
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
@pytest.mark.slow
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
