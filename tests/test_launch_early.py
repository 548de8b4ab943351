"""Kernels that are launched while the one before them in their stream ends."""

import json
from dataclasses import dataclass
from dataclasses import replace as changed
from itertools import pairwise

import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import models
import systems
from systems.kernels.kernel import Kernel, Launch
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.scheduling.graph.rewrite import Replacement, replace
from systems.scheduling.plans import launch_early as rule
from systems.scheduling.plans.lower import lower
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.stream_assignment import assign_streams
from systems.weave.stream_plans import STREAM_PLANS

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@dataclass(frozen=True)
class Twice(Kernel):
    """A stand-in for a kernel of the project, which has none for a CPU."""

    def __call__(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2

    def launch(self, *tensors: Tensor | None) -> Launch:
        raise NotImplementedError


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x.relu()
        return x.exp().sin().neg() + x.cos().tanh().abs()  # type: ignore[no-any-return]


def with_kernels(own: list[bool]) -> Program:
    """`Branches`, with kernels of the project in the place of its unary operators that `own` names."""
    program = capture(Branches().eval(), (torch.randn(3),))
    replacements = [
        Replacement((v,), "twice", "opweave.twice", changed(program.calls[v], function=Twice()), {v: None})
        for v, is_own in enumerate(own)
        if is_own and len(program.calls[v].args) == 1
    ]
    return replace(program, replacements)[0]


@examples(15)
@given(own=st.lists(st.booleans(), min_size=8, max_size=8))
def test_a_kernel_is_early_behind_another_of_its_stream_alone(own: list[bool]) -> None:
    program = with_kernels(own)
    schedule = assign_streams(program.graph)
    with pytest.MonkeyPatch.context() as patch:
        assert rule.early_operators(program, schedule) == ()  # a CPU launches nothing early
        patch.setattr(rule, "launches_early", lambda device: True)
        early = rule.early_operators(program, schedule)
        names = [o.name for o in program.graph.operators]
        for stream in set(schedule.streams):
            members = [v for v in schedule.order if schedule.streams[v] == stream]
            expected = [v for u, v in pairwise(members) if names[u] == names[v] == "twice"]
            assert [v for v in early if schedule.streams[v] == stream] == expected
        lowered, same = lower(program, changed(schedule, early=early))
    assert same.graph == lowered.graph == program.graph and same.early == early
    kernels = {v: c.function for v, c in enumerate(lowered.calls) if isinstance(c.function, Twice)}
    assert {v for v, kernel in kernels.items() if kernel.is_early} == set(early)


def test_what_cannot_be_early_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    program = with_kernels([True] * 8)
    schedule = assign_streams(program.graph)
    with pytest.raises(ValueError, match="cpu launches no kernel early"):
        lower(program, changed(schedule, early=(0,)))
    monkeypatch.setattr(rule, "launches_early", lambda device: True)
    last = len(program.graph) - 1
    with pytest.raises(ValueError, match="is launched early, and is no kernel of this project"):
        lower(program, changed(schedule, early=(last,)))


def test_without_early_launches_a_program_stays_the_same() -> None:
    """One with state orders its operators by more than what they read."""
    program = with_kernels([True] * 8)
    assert lower(program, assign_streams(program.graph))[0] is program


def test_a_schedule_file_keeps_early_launches() -> None:
    schedule = assign_streams(with_kernels([True] * 8).graph)
    for early in ((), (1, 4)):
        text = json.dumps(changed(schedule, early=early).to_json(model="m", batch=1, device="cuda"))
        assert Schedule.from_json(json.loads(text)).early == early


@pytest.mark.parametrize("name", [pytest.param(n, marks=GPU) for n in ("googlenet", "randwire", "mobilenet_v2")])
@pytest.mark.parametrize("plan", ["nimble", "sequential", "list, 4 streams"])
def test_early_launches_leave_what_a_model_computes(name: str, plan: str) -> None:
    """Bit for bit: the same kernels, in the same streams, called a hundred times on inputs that change."""
    from systems.scheduling.execution.execute import execute

    model = models.load(name, 1, device="cuda")
    with torch.no_grad():
        prepared = systems.load("nimble_fused").prepare(model.module, model.inputs)
        program = prepared.program
        schedule = STREAM_PLANS[plan](program)
        early = rule.early_operators(program, schedule)
        assert early or plan != "sequential"
        late, soon = (execute(*lower(program, changed(schedule, early=each))) for each in ((), early))
        for _ in range(10):
            inputs = [torch.randn_like(x) for x in model.inputs]
            expected = late(*inputs).clone()
            for _ in range(10):
                assert torch.equal(soon(*inputs), expected)
