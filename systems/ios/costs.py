"""What a stage costs: measured on the device, each distinct one once (IOS, Section 4.1, GenerateStage)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from systems.scheduling.part import part
from systems.scheduling.program import Output, Program
from systems.scheduling.rewrite import replace
from systems.scheduling.timing import Timer, milliseconds

from .merge import merge

Unit = tuple[int, ...]


@dataclass
class StageTimer:
    """Times stages of `program`. measured: told how many have been measured so far."""

    program: Program
    timer: Timer
    measured: Callable[[int], None] = lambda _: None

    def concurrent(self, groups: Sequence[Sequence[Unit]]) -> float:
        """Milliseconds of groups of units, the groups at once, each one's units one after the other."""
        operators = [sorted(v for unit in group for v in unit) for group in groups]
        operators.sort(key=lambda group: (self._group(group), group))
        signature = " | ".join(self._group(group) for group in operators)

        def measure() -> float:
            members = sorted(v for group in operators for v in group)
            place = {v: i for i, v in enumerate(members)}
            return milliseconds(part(self.program, members), [[place[v] for v in group] for group in operators])

        return self._known(signature, measure)

    def merged(self, units: Sequence[Unit]) -> float | None:
        """Milliseconds of the units as one operator; None where they cannot be merged."""
        replacement = merge(self.program, units)
        if replacement is None:
            return None
        signature = "merged " + " | ".join(self._group(unit) for unit in units)

        def measure() -> float:
            whole, place = replace(self.program, [replacement])
            return milliseconds(part(whole, [place[replacement.operators[0]]]))

        return self._known(signature, measure)

    def _known(self, signature: str, measure: Callable[[], float]) -> float:
        before = self.timer.taken
        found = self.timer.known(signature, measure)
        if self.timer.taken > before:
            self.measured(self.timer.taken)
        return found

    def _group(self, operators: Sequence[int]) -> str:
        """What a group does, wherever it stands: its operators, and which of them feed which."""
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
