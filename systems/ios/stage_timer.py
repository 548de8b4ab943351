"""What a stage costs: measured on the device, each distinct stage once (IOS, Section 4.1, GenerateStage)."""

from collections.abc import Callable, Sequence
from hashlib import sha256

from systems.profiling.timing import WARM_UP_RUNS, Timer, milliseconds
from systems.scheduling.graph.part import Examples, part
from systems.scheduling.graph.program import Output, Program
from systems.scheduling.graph.rewrite import replace
from systems.scheduling.plans.merge import merge, merge_name

Unit = tuple[int, ...]  # operators, in the order of capture
SECONDS = {"cuda": 0.003, "cpu": 0.01}  # of one measurement, of which a search makes thousands


class StageTimer:
    """Times stages of a program.

    NOTE: groups of units have numbers, and two groups of the same work have the same number. So a search, which asks for
    millions of stages, looks each one up by a few integers.

    Args:
        program: whose units are timed.
        timer: keeps what was measured.
        on_measured: hears the number of measurements so far.
    """

    def __init__(self, program: Program, timer: Timer, on_measured: Callable[[int], None] = lambda _: None):
        self.program, self.timer, self.on_measured = program, timer, on_measured
        self.seconds = SECONDS[program.device.type]
        self.number_by_signature: dict[str, int] = {}
        self.digests: list[str] = []  # of the groups, by number
        self.operator_signatures: dict[int, str] = {}
        self.warm: set[str] = set()  # signatures of the operators that have run in this process
        self.examples: Examples = {}
        self.names: set[str] = set()  # of the stages that were asked for

    def number(self, group: Sequence[Unit]) -> int:
        """The number of a group: by what its operators do and which of them feed which, wherever the group stands."""
        signature = self._signature(sorted(v for unit in group for v in unit))
        if signature not in self.number_by_signature:
            self.number_by_signature[signature] = len(self.digests)
            self.digests.append(sha256(signature.encode()).hexdigest()[:16])
        return self.number_by_signature[signature]

    def concurrent(self, groups: Sequence[Sequence[Unit]], numbers: Sequence[int]) -> float:
        """Milliseconds of groups of units at once, the units of each one after the other; `numbers` are the groups'."""

        def measure() -> float:
            # Groups in one order, so that the same stage is launched in the same way wherever it stands.
            ordered = [g for _, g in sorted(zip((self.digests[n] for n in numbers), groups, strict=True))]
            members = sorted(v for group in ordered for unit in group for v in unit)
            place = {v: i for i, v in enumerate(members)}
            streams = [sorted(place[v] for unit in group for v in unit) for group in ordered]
            signatures = {self._operator(v) for v in members}
            warm_up_runs = 0 if signatures <= self.warm else WARM_UP_RUNS
            self.warm |= signatures
            stage = part(self.program, members, examples_of=self.examples)
            return milliseconds(stage, streams, self.seconds, warm_up_runs, self._lower_bound(groups, numbers))

        self.names.add(name := self.name(numbers))
        return self._known(name, measure)

    def _lower_bound(self, groups: Sequence[Sequence[Unit]], numbers: Sequence[int]) -> float:
        """The longest of the groups, or of one group the longest unit, as far as these were measured."""
        parts = numbers if len(groups) > 1 else [self.number([unit]) for unit in groups[0]] if len(groups[0]) > 1 else []
        return max((self.timer.find(self.name([n])) or 0.0 for n in parts), default=0.0)

    def is_known(self, numbers: Sequence[int]) -> bool:
        """Was a stage of the groups with these numbers measured before?"""
        return self.timer.find(self.name(numbers)) is not None

    def merged(self, units: Sequence[Unit]) -> float | None:
        """Milliseconds of the units as one operator; None where they cannot be merged."""
        replacement = merge(self.program, units)
        if replacement is None:
            return None

        def measure() -> float:
            whole, place = replace(self.program, [replacement])
            return milliseconds(part(whole, [place[replacement.operators[0]]]), seconds=self.seconds)

        return self._known("merged " + merge_name(replacement, [*map(self._signature, units)]), measure)

    def name(self, numbers: Sequence[int]) -> str:
        """The name of a stage's measurement, the same in whichever order its groups stand."""
        return " | ".join(sorted(self.digests[n] for n in numbers))

    def _known(self, signature: str, measure: Callable[[], float]) -> float:
        before = self.timer.taken
        cost = self.timer.known(signature, measure)
        if self.timer.taken > before:
            self.on_measured(self.timer.taken)
        return cost

    def _signature(self, operators: Sequence[int]) -> str:
        place = {v: i for i, v in enumerate(operators)}
        described = []
        for v in operators:
            inside = [
                str(place[a.operator])
                for a in self.program.calls[v].leaves()
                if isinstance(a, Output) and a.operator in place
            ]
            described.append(self._operator(v) + (f" of {','.join(inside)}" if inside else ""))
        return "; ".join(described)

    def _operator(self, v: int) -> str:
        if v not in self.operator_signatures:
            self.operator_signatures[v] = self.program.signature(v)
        return self.operator_signatures[v]
