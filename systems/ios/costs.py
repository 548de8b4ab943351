"""What a stage costs: measured on the device, each distinct one once (IOS, Section 4.1, GenerateStage)."""

from collections.abc import Callable, Sequence
from hashlib import sha256

from systems.scheduling.part import part
from systems.scheduling.program import Output, Program
from systems.scheduling.rewrite import replace
from systems.scheduling.timing import Timer, milliseconds

from .merge import merge

Unit = tuple[int, ...]


class StageTimer:
    """Times stages of `program`. measured: told how many have been measured so far.

    Groups of units are known by numbers, equal for those that do the same work, so that a search can look up a stage by a
    few integers: it asks for millions.
    """

    def __init__(self, program: Program, timer: Timer, measured: Callable[[int], None] = lambda _: None):
        self.program, self.timer, self.measured = program, timer, measured
        self.numbers: dict[str, int] = {}
        self.digests: list[str] = []

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
            return milliseconds(part(self.program, members), streams)

        return self._known(" | ".join(sorted(self.digests[n] for n in numbers)), measure)

    def merged(self, units: Sequence[Unit]) -> float | None:
        """Milliseconds of the units as one operator; None where they cannot be merged."""
        replacement = merge(self.program, units)
        if replacement is None:
            return None

        def measure() -> float:
            whole, place = replace(self.program, [replacement])
            return milliseconds(part(whole, [place[replacement.operators[0]]]))

        return self._known("merged " + " | ".join(map(self._signature, units)), measure)

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
            described.append(self.program.signature(v) + (f" of {','.join(inside)}" if inside else ""))
        return "; ".join(described)
