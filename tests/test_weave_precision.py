"""What weave's search holds a candidate's output to, and what it drops for it."""

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from weave_space import Branches, Prepared, Scaled, Space, scaled

import systems
from systems.base import BadOption
from systems.scheduling.decision import Decision
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.scheduling.passes.rewriting import Rewriting
from systems.weave import precision, reference
from systems.weave.candidate import Candidate
from systems.weave.precision import Precision, Rewrite
from systems.weave.search import Search
from systems.weave.state import Gain, State


def required(captured: Program, rewrite: Rewrite, report: Callable[[str], None] = lambda words: None) -> Precision:
    """What is required of the executions of a program."""
    made = Precision(captured, rewrite, report)
    made.require(lambda: rewrite({})[0])
    return made


def test_what_costs_precision_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Space(2).searching(monkeypatch)[0].run()
    assert right.best != Candidate()
    space = Space(2, wrong=lambda candidate: candidate != Candidate())
    state = space.searching(monkeypatch)[0].run()
    assert state.best == Candidate() and state.gains == []


@examples(25)
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
    dropped = required(captured, rewrite, messages.append).dropped({})
    assert {place: decision.without for place, decision in dropped.items()} == {f"kind {i}": "old" for i in bad}
    assert all("costs precision" in message for message in messages) and len(messages) == len(bad)


def test_decisions_that_others_bring_up_are_dropped_with_them() -> None:
    """As the parts of a place that is left separate, which take kernels of their own; only the library is precise."""
    captured, times = scaled()

    def rewrite(choices: Mapping[str, str]) -> tuple[Program, list[Decision]]:
        whole, part = choices.get("kind whole", "new"), choices.get("kind part", "new")
        decisions = [Decision("kind", "whole", (), {"old": 1.0, "new": 0.5}, whole, {}, "kind whole")]
        if whole == "old":
            decisions.append(Decision("kind", "part", (), {"old": 1.0, "new": 0.5}, part, {}, "kind part"))
        return times(1.0 if (whole, part) == ("old", "old") else 1.01), decisions

    dropped = required(captured, rewrite).dropped({})
    assert {place: decision.without for place, decision in dropped.items()} == {"kind whole": "old", "kind part": "old"}
    assert [*required(captured, rewrite).dropped({"kind whole": "old"})] == ["kind part"]


def test_what_no_decision_explains_is_told() -> None:
    captured, times = scaled()
    wrong, messages = times(1.01), list[str]()
    decisions = [Decision("kind", "p", (), {"old": 1.0, "new": 0.5}, "new", {}, "kind p")]
    dropped = required(captured, lambda choices: (wrong, decisions), messages.append).dropped({})
    assert dropped == {} and "do without measuring" in messages[-1]


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


@torch.library.custom_op("opweave_test::attended", mutates_args=())
def attended(x: Tensor) -> Tensor:
    """The same values, which in fp64 are laid out by rows and else by columns."""
    return x.clone() if x.dtype == torch.float64 else x.mT.contiguous().mT


@attended.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape) if x.dtype == torch.float64 else x.new_empty(x.shape).mT.contiguous().mT


def test_a_kernel_of_fp64_may_lay_its_output_out_in_another_way() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return attended(x).mT.view(-1) * 2

    x = torch.randn(3, 4)
    (output,) = reference.wide_outputs(capture(Attention().eval(), (x,)))
    assert torch.equal(output, x.double().mT.reshape(-1) * 2)


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


class Stateful(nn.Module):
    """An output that depends on a counter and on a mean of what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.full((8,), 0.5))
        self.register_buffer("count", torch.ones((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.count.add_(1)
        self.mean.mul_(0.5).add_(y.mean(0) * 0.5)
        return y * self.count - self.mean


def test_a_module_that_keeps_state_is_held_to_what_it_computes_from_the_same_state() -> None:
    """Neither the reference nor what is compared with it goes on from the runs before."""
    module, x = Stateful().eval(), torch.randn(4, 8)
    before = {name: t.clone() for name, t in module.state_dict().items()}
    captured = capture(module, (x,))
    eager_reference = reference.Reference(captured)
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())
    with captured.undone():
        (out,) = captured.run((x,))
    wrong = [out * 1.01, out + module.mean, out * 2]
    assert eager_reference.excess([out]) <= 1 < min(eager_reference.excess([each]) for each in wrong)
    own = required(captured, lambda choices: (captured, []))
    for _ in range(3):
        captured.run((x,))  # as a trial does
        assert own.program_excess({}) <= 1


def test_looking_at_precision_leaves_a_counter_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next trial prepares from there: one place further lies beyond the end of a full cache."""
    module, x = Stateful().eval(), torch.randn(4, 8)
    count = module.count
    captured = capture(module, (x,))
    searching = Search(captured, lambda choices: (captured, []), 1e6, lambda words: None, lambda state: None)
    own = searching.precision
    own.require(lambda: captured)
    assert count == 1
    assert own.dropped({}) == {}
    assert count == 1
    assert own.is_precise(Prepared(Candidate(), 0.0, torch.ones(4, 8)), "a change") is False and count == 1
    with closing(searching._prepare(Candidate())) as prepared:
        assert own.is_precise(prepared, "no change") and count == 1
    monkeypatch.setattr(precision, "Reference", without_memory)
    own.require(lambda: captured)
    assert count == 1


def without_memory(captured: Program) -> None:
    raise MemoryError("no memory for fp64")


def test_no_budget_is_too_small_for_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the passes decide without a search is held to the reference, once."""
    captured, times = scaled()

    def rewrite(choices: Mapping[str, str]) -> tuple[Program, list[Decision]]:
        chosen = choices.get("kind p", "new")
        decision = Decision("kind", "p", (), {"old": 1.0, "new": 0.5}, chosen, {}, "kind p")
        return times(1.01 if chosen == "new" else 1.0), [decision]

    searching = Search(captured, rewrite, 0.0, lambda words: None, lambda state: None)
    state = searching.run()
    assert dict(state.best.choices) == {"kind p": "old"} and state.first == state.best and state.ratios == {}
    assert state.dropped == ["kind at p: new"] and State.from_json(state.to_json()) == state
    again = Search(captured, rewrite, 0.0, lambda words: None, lambda state: None, state)
    monkeypatch.setattr(again.precision, "require", lambda rewritten: pytest.fail("it was held to it before"))
    assert again.run() == state


def test_with_other_weights_a_state_is_held_to_the_reference_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One decision costs precision with the second weights alone, and then with all: what it gained is given up."""
    module = Scaled().eval()
    captured = capture(module, (torch.randn(1, 4, 6, 6),))
    last, bad = len(captured.graph) - 1, set[str]()

    def rewrite(choices: Mapping[str, str]) -> tuple[Program, list[Decision]]:
        own = {place: choices.get(place, "new") for place in ("kind p", "kind q")}
        factor = 1.01 if any(own[place] == "new" for place in bad) else 1.0
        calls = [*captured.calls[:last], captured.calls[last].map(lambda leaf: factor if leaf == 1.0 else leaf)]
        decisions = [Decision("kind", p, (), {"old": 1.0, "new": 0.5}, c, {}, p) for p, c in own.items()]
        return Program(captured.graph, calls, captured.outputs, captured.output_spec, captured.examples), decisions

    def run(state: State) -> State:
        done = Search(captured, rewrite, 0.0, lambda words: None, lambda state: None, state).run()
        return State.from_json(done.to_json())

    monkeypatch.setattr(Search, "_in_turn", lambda *_: (1.0, 0.9))  # what gains
    state = run(State())
    best = state.best.choose("kind q", "new")  # as a search leaves it
    state = replace(state, best=best, gains=[Gain("q", 1.0, 0.9)], total=Gain("all", 1.0, 0.9), is_complete=True)
    bad.add("kind p")
    assert run(state).best == best  # the same weights
    with torch.no_grad():
        module.module.a.weight.mul_(0.5)
    of_halved = run(state)
    assert dict(of_halved.best.choices) == {"kind p": "old", "kind q": "new"} and of_halved.dropped == [
        "kind at kind p: new"
    ]
    assert of_halved.first is not None and dict(of_halved.first.choices) == {"kind p": "old"} and not of_halved.is_complete
    bad.add("kind q")
    with torch.no_grad():
        module.module.a.weight.mul_(0.5)
    again = run(of_halved)
    assert again.first == again.best and dict(again.best.choices) == {"kind p": "old", "kind q": "old"}
    assert again.gains == [] and again.total is None


@pytest.mark.usefixtures("cache_folder")
def test_a_plan_is_held_to_the_reference_with_other_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module, x = Scaled().eval(), torch.randn(1, 4, 6, 6)
    file = tmp_path / "plan.json"
    schedule = systems.load("weave", budget_s=0.0, fuse_elementwise=False).schedule(module, (x,))
    file.write_text(json.dumps(schedule.to_json(model="scaled", batch=1, device="cpu")))
    apply, factor = Rewriting.apply, 1.0

    def rewritten(*arguments: Any) -> tuple[Program, list[Decision]]:
        program, decisions = apply(*arguments)
        calls = [
            call.map(lambda leaf: factor if isinstance(leaf, float) and leaf == 1.0 else leaf) for call in program.calls
        ]
        return Program(program.graph, calls, program.outputs, program.output_spec, program.examples), decisions

    monkeypatch.setattr(Rewriting, "apply", rewritten)

    def prepare(module: nn.Module) -> None:
        systems.load("weave", plan=str(file), fuse_elementwise=False).prepare(module, (x,)).close()

    other = Scaled().eval()
    prepare(other)
    factor = 1.01
    prepare(module)  # the plan's own
    with pytest.raises(BadOption, match=r"with these weights its error is \d+\.\d times what it may be"):
        prepare(other)


def test_without_fp64_a_search_compares_with_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(captured: Program) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(precision, "Reference", none)
    space = Space(2, wrong=lambda candidate: candidate != Candidate())
    state = space.searching(monkeypatch)[0].run()
    assert state.best == Candidate() and state.gains == []
    assert Space(2).searching(monkeypatch)[0].run().best != Candidate()


def test_elements_that_are_no_numbers_hide_no_others() -> None:
    """Masked logits: minus infinity has to be where eager has it, and the other elements are compared."""

    class Masked(nn.Module):
        mask: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.register_buffer("mask", torch.ones(6, 6, dtype=torch.bool).triu(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).masked_fill(self.mask, float("-inf"))

    module, x = Masked().eval(), torch.randn(6, 6)
    in_fp64 = reference.Reference(capture(module, (x,)))
    with torch.no_grad():
        own = module(x)
    assert in_fp64.excess([own]) <= 1
    assert in_fp64.excess([torch.full((6, 6), 1e9)]) > 1
    assert in_fp64.excess([torch.where(own.isinf(), 0.0, own)]) > 1
    assert in_fp64.excess([torch.where(own.isinf(), float("inf"), own)]) > 1
    wrong = own.clone()
    wrong[5, 0] += 1e-2
    assert in_fp64.excess([wrong]) > 1
    wrong[5, 0] = float("nan")
    assert in_fp64.excess([wrong]) > 1
