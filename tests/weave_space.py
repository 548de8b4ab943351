"""What tests of weave share: programs, and a space of candidates whose costs are drawn at random."""

import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from systems.scheduling.decision import Decision
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.weave import search, trials
from systems.weave.candidate import Candidate
from systems.weave.changes import WORTH
from systems.weave.search import Search
from systems.weave.state import State

PLACES = ("p", "q", "r")


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.a(x)).relu() + self.b(x).relu().sigmoid()  # type: ignore[no-any-return]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = Branches()

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x) * 1.0  # type: ignore[no-any-return]


@cache
def scaled() -> tuple[Program, Callable[[float], Program]]:
    """A program, and the same with its output times a factor."""
    captured = capture(Scaled().eval(), (torch.randn(1, 4, 6, 6),))
    last = len(captured.graph) - 1

    def times(factor: float) -> Program:
        calls = [*captured.calls[:last], captured.calls[last].map(lambda leaf: factor if leaf == 1.0 else leaf)]
        return Program(captured.graph, calls, captured.outputs, captured.output_spec, captured.examples)

    return captured, times


@cache
def branches() -> Program:
    """A program that no search changes."""
    return capture(Branches().eval(), (torch.randn(1, 4, 6, 6),))


class Prepared:
    """Stands in for an executor: a call takes what its candidate is given."""

    def __init__(self, candidate: Candidate, milliseconds: float, output: Tensor):
        self.candidate, self.milliseconds, self.output, self.is_closed = candidate, milliseconds, output, False

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self.output

    def close(self) -> None:
        self.is_closed = True


class Space:
    """Costs of candidates drawn at random, and what a search prepares of them."""

    def __init__(self, seed: int, wrong: Callable[[Candidate], bool] = lambda candidate: False):
        self.seed, self.wrong = seed, wrong
        self.program = branches()
        (self.output,) = self.program.run(self.program.examples)
        self.prepared: list[Prepared] = []

    def cost(self, candidate: Candidate) -> float:
        return 0.5 + random.Random(f"{self.seed} {candidate.key}").random()

    def decisions(self, choices: dict[str, str]) -> list[Decision]:
        own = [
            Decision("kind", place, (i,), {"own": 1.0, "other": 1.2, "third": WORTH + 0.1}, "own", {}, place)
            for i, place in enumerate(PLACES)
        ]
        return [replace(d, chosen=choices.get(d.place, "own")) for d in own]

    def searching(
        self, monkeypatch: pytest.MonkeyPatch, state: State | None = None, most: int = 10**6, **options: object
    ) -> tuple[Search, list[dict]]:
        saved_states: list[dict] = []

        def prepare(candidate: Candidate) -> Prepared:
            if len(self.prepared) >= most:
                raise KeyboardInterrupt
            output = self.output * 1.5 if self.wrong(candidate) else self.output
            self.prepared.append(Prepared(candidate, self.cost(candidate), output))
            return self.prepared[-1]

        made = Search(
            self.program,
            lambda choices: (self.program, self.decisions(dict(choices))),
            1e6,
            lambda message: None,
            lambda state: saved_states.append(json.loads(json.dumps(state.to_json()))),
            state,
        )
        monkeypatch.setattr(made, "_prepare", prepare)
        # A test run has frozen all that it imports; only to count that takes a tenth of a second.
        monkeypatch.setattr(search, "collector_spared", nullcontext)
        monkeypatch.setattr(trials, "milliseconds", lambda prepared, *_: prepared.milliseconds)
        return made, saved_states
