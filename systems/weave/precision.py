"""What precision weave's candidates have to have, and which decisions of the passes cost more than that."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf, isfinite
from typing import TypeAlias

import torch
from torch import Tensor

from conf.text import first_line
from systems.base import Prepared
from systems.scheduling.decision import Decision
from systems.scheduling.graph.program import Program

from .candidate import Choices
from .reference import Reference, tensors

PRECISION = 2.0  # times the error of the passes' own decisions that a change may have where there is no reference in fp64

Rewrite: TypeAlias = Callable[[Choices], tuple[Program, list[Decision]]]


class Precision:
    """The precision that executions of a program have to have: that of a cell (`reference`).

    Invariant: what runs change, a counter or a cache, is after each look at outputs as it was when this was made.

    Args:
        captured: the program before any pass, whose output is eager's.
        rewrite: the program under given choices, and its decisions.
        report: told what costs precision.
    """

    def __init__(self, captured: Program, rewrite: Rewrite, report: Callable[[str], None]):
        self.captured, self.rewrite, self.report, self.inputs = captured, rewrite, report, captured.examples
        self.excess: Callable[[list[Tensor]], float] = lambda outputs: 0.0  # of an error over what it may be
        self.buffers = [tensor.detach().clone() for tensor in captured.changed]  # as a run finds them whose outputs count

    def require(self, rewritten: Callable[[], Program]) -> None:
        """Hold outputs to the program in fp64; where that does not run, to eager's.

        Args:
            rewritten: makes the program that the passes decide on, whose error is the measure beside eager.
        """
        try:
            with self._as_found():
                self.excess = Reference(self.captured).excess
                return
        except (RuntimeError, MemoryError) as error:  # no memory for fp64, or no kernel
            self.report(f"compared with eager in its own precision: {first_line(error)}")
        program = rewritten()
        with self._as_found():
            expected = [output.clone() for output in tensors(self.captured.run(self.inputs))]  # one may be a buffer
        with self._as_found():
            own_error = _error(tensors(program.run(self.inputs)), expected)
        least = max((torch.finfo(t.dtype).eps for t in expected if t.is_floating_point()), default=0.0)
        most = PRECISION * max(own_error, least)
        self.excess = lambda outputs: _error(outputs, expected) / most if most else inf * _error(outputs, expected)

    def is_precise(self, prepared: Prepared, change: str) -> bool:
        """Is what is prepared as precise as it has to be?

        change: what it differs in, in words.
        """
        with self._as_found():
            excess = self.excess(tensors(prepared(*self.inputs)))
        if excess <= 1:
            return True
        self.report(f"{change}: dropped, its error is {excess:.1f} times what it may be")
        return False

    def dropped(self, choices: Choices) -> dict[str, Decision]:
        """Those decisions of the passes or among the choices, by place, that cost more precision than a cell may lose.

        Invariant: each of them has to go. Of all in their order, the shortest beginning whose dropping makes the program
        precise ends with it. It alone is dropped, and the rest is looked at again.

        Args:
            choices: in the place of the passes' own.
        """
        costly: dict[str, Decision] = {}
        dropped: dict[str, str] = {}  # what is done without them, by place
        while self.program_excess({**choices, **dropped}) > 1:
            decisions_by_place = self._taken_without(choices, dropped)
            rest = [(place, d.without) for place, d in decisions_by_place.items()]

            def excess_without(count: int, rest: Sequence[tuple[str, str]] = rest) -> float:
                return self.program_excess({**choices, **dropped, **dict(rest[:count])})

            if excess_without(len(rest)) > 1:
                self.report("what the passes do without measuring costs more precision than a cell may lose")
                break
            low, high = 1, len(rest)
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if excess_without(middle) <= 1 else (middle + 1, high)
            place, without = rest[low - 1]
            dropped[place] = without
            costly[place] = decisions_by_place[place]
            self.report(f"dropped, since it costs precision: {in_words(costly[place])}")
        return costly

    def program_excess(self, choices: Choices) -> float:
        """The error of the program under these choices over what it may be."""
        program, _ = self.rewrite(choices)
        with self._as_found():
            return self.excess(tensors(program.run(self.inputs)))

    def _taken_without(self, choices: Choices, dropped: Choices) -> dict[str, Decision]:
        """The decisions under these choices by place, and those that are taken where all of these are dropped too."""
        taken: dict[str, Decision] = {}
        while True:
            rest = {**dropped, **{place: decision.without for place, decision in taken.items()}}
            decisions = self.rewrite({**choices, **rest})[1]
            others = {d.place: d for d in decisions if d.place and d.place not in rest and d.is_change}
            if not others:
                return taken
            taken |= others

    @contextmanager
    def _as_found(self) -> Iterator[None]:
        """What runs change, a counter or a cache, is as it was found, within and afterwards."""
        self._restart()
        try:
            yield
        finally:
            self._restart()

    @torch.no_grad()
    def _restart(self) -> None:
        for tensor, value in zip(self.captured.changed, self.buffers, strict=True):
            tensor.copy_(value)


def in_words(decision: Decision) -> str:
    """What was decided, where, and how."""
    return f"{decision.kind} at {decision.pattern}: {decision.chosen}"


def _error(outputs: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative error of an output."""
    return max((_distance(a, b) for a, b in zip(outputs, expected, strict=True)), default=0.0)


def _distance(out: Tensor, reference: Tensor) -> float:
    """||out - reference|| / ||reference||; infinite where `out` is not finite, and the reference is."""
    wide = torch.complex128 if reference.is_complex() else torch.float64
    apart, size = (out.to(wide) - reference.to(wide)).norm().item(), reference.to(wide).norm().item()
    if isfinite(apart):
        return apart / (size or 1.0)
    return 0.0 if torch.equal(out, reference) else inf
