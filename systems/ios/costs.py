"""What a stage costs: measured on the device, each distinct one once (IOS, Section 4.1, GenerateStage)."""

from collections.abc import Callable, Sequence
from hashlib import sha256

from systems.profiling.timing import WARM_UP_RUNS, Timer, milliseconds
from systems.scheduling.graph.part import Examples, part
from systems.scheduling.graph.program import Output, Program
from systems.scheduling.graph.rewrite import replace

from .merge import merge

Unit = tuple[int, ...]
SECONDS = {"cuda": 0.003, "cpu": 0.01}  # of one measurement, of which a search makes thousands


class StageTimer:
    """Times stages of `program`. measured: told how many have been measured so far.

    Groups of units are known by numbers, equal for those that do the same work, so that a search can look up a stage by a
    few integers: it asks for millions.
    """

    def __init__(self, program: Program, timer: Timer, measured: Callable[[int], None] = lambda _: None):
        self.program, self.timer, self.measured = program, timer, measured
        self.seconds = SECONDS[program.device.type]
        self.numbers: dict[str, int] = {}
        self.digests: list[str] = []
        self.signatures: dict[int, str] = {}
        self.warm: set[str] = set()  # what has run in this process
        self.examples: Examples = {}

    def number(self, group: Sequence[Unit]) -> int:
        """The number of a group: of what its operators do and which of them feed which, not of where it stands."""
        signature = self._signature(sorted(v for unit in group for v in unit))
        if signature not in self.numbers:
            self.numbers[signature] = len(self.digests)
            self.digests.append(sha256(signature.encode()).hexdigest()[:16])
        return self.numbers[signature]

    def concurrent(self, groups: Sequence[Sequence[Unit]], numbers: Sequence[int]) -> float:
        """Milliseconds of groups of units at once, each one's units one after the other; `numbers` are the groups'."""

        def measure() -> float:
            # Groups in one order, so that the same stage is launched in the same way wherever it stands.
            ordered = [g for _, g in sorted(zip((self.digests[n] for n in numbers), groups, strict=True))]
            members = sorted(v for group in ordered for unit in group for v in unit)
            place = {v: i for i, v in enumerate(members)}
            streams = [sorted(place[v] for unit in group for v in unit) for group in ordered]
            ours = {self._operator(v) for v in members}
            warm_up_runs = 0 if ours <= self.warm else WARM_UP_RUNS
            self.warm |= ours
            stage = part(self.program, members, examples_of=self.examples)
            return milliseconds(stage, streams, self.seconds, warm_up_runs, self._least(groups, numbers))

        return self._known(self._concurrent(numbers), measure)

    def _least(self, groups: Sequence[Sequence[Unit]], numbers: Sequence[int]) -> float:
        """What the groups take at least, as far as is known: the longest of them, or of one group the longest unit."""
        parts = numbers if len(groups) > 1 else [self.number([unit]) for unit in groups[0]] if len(groups[0]) > 1 else []
        return max((self.timer.find(self._concurrent([n])) or 0.0 for n in parts), default=0.0)

    def is_known(self, numbers: Sequence[int]) -> bool:
        """Were groups with these numbers measured at once before?"""
        return self.timer.find(self._concurrent(numbers)) is not None

    def merged(self, units: Sequence[Unit]) -> float | None:
        """Milliseconds of the units as one operator; None where they cannot be merged."""
        replacement = merge(self.program, units)
        if replacement is None:
            return None

        def measure() -> float:
            whole, place = replace(self.program, [replacement])
            return milliseconds(part(whole, [place[replacement.operators[0]]]), seconds=self.seconds)

        return self._known("merged " + " | ".join(map(self._signature, units)), measure)

    def _concurrent(self, numbers: Sequence[int]) -> str:
        return " | ".join(sorted(self.digests[n] for n in numbers))

    def _known(self, signature: str, measure: Callable[[], float]) -> float:
        before = self.timer.taken
        found = self.timer.known(signature, measure)
        if self.timer.taken > before:
            self.measured(self.timer.taken)
        return found

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
        if v not in self.signatures:
            self.signatures[v] = self.program.signature(v)
        return self.signatures[v]
