"""What a rewriting pass is run with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from systems.scheduling.decision import Decision, place_of
from systems.scheduling.graph.program import Program

Cost = Callable[[Program], float]  # milliseconds of a program
Rewritten = tuple[Program, list[Decision]]  # what a pass returns


def unchanged(program: Program) -> Program:
    return program


def unknown(program: Program) -> bool:
    return False


@dataclass(frozen=True)
class Context:
    """How a pass measures, and what else is switched on.

    Args:
        cost: milliseconds of a program, its operators one after the other.
        cost_at_once: milliseconds of a program of independent operators, each on a stream of its own.
        later: makes of a part of the program what the later passes will, as far as they measure nothing. A pass that fuses
            operators compares with that, since a later one may fuse what it leaves separate.
        switches: those that are on.
        choices: the alternative to take, by `Decision.place`; where there is none, the pass chooses by its own rule.
        knows: whether `cost` knows a program, and so runs nothing. The program's inputs may be on the meta device.
    """

    cost: Cost
    cost_at_once: Cost
    later: Callable[[Program], Program] = unchanged
    switches: frozenset[str] = frozenset()
    choices: Mapping[str, str] = field(default_factory=dict)
    knows: Callable[[Program], bool] = unknown

    def decide(
        self,
        kind: str,
        pattern: str,
        operators: tuple[int, ...],
        signature: str,
        milliseconds: Mapping[str, float | None],
        reasons: Mapping[str, str] | None = None,
        chosen: str | None = None,
    ) -> Decision:
        """The decision of one place. All but two parameters are `Decision`'s.

        Args:
            signature: of what is there, for `place_of`.
            chosen: by the rule of the pass; the fastest where it has none.
        """
        place = place_of(kind, signature)
        times = {name: t for name, t in milliseconds.items() if t is not None}
        wanted = self.choices.get(place)
        taken = wanted if wanted in times else chosen or fastest(times)
        return Decision(kind, pattern, operators, {**milliseconds}, taken, {**(reasons or {})}, place)


def fastest(milliseconds: Mapping[str, float]) -> str:
    """The alternative that takes least; of equal ones the first, which is what is done without the pass."""
    return min(milliseconds, key=milliseconds.__getitem__)
