"""The tables of weave: beside what its search begins with, and beside all others."""

from collections.abc import Iterable

from results.cell import Choice
from results.comparison import Speedup
from results.limits import Limits
from results.record import Record
from results.siblings import Siblings

from .charts.style import short
from .standing import STREAMS
from .table import DASH, Made, Table, made, table
from .tables import BATCH, CUDA_GRAPH, FUSED, MARGIN, MODEL, NAME, WEAVE, in_rounds, milliseconds, needed, times

# Choices of systems. The first is nimble_fused of commit 5a62506, by system=checkout.
BEFORE, START = "nimble_fused_before", "nimble_fused"


def _limit(name: str) -> Made[Siblings]:
    """The least of a group's systems."""

    def entry(group: Siblings) -> str:
        least = Limits.least(record.limits for record in group.records.values() if record.limits is not None)
        return f"{least[name]:.3f}" if name in least else DASH

    return made(name, entry)


def _record_of(group: Siblings, choice: str) -> Record:
    return needed(next((r for r in group.records.values() if r.cell.system.choice == choice and r.is_ok), None))


# What two processes of one system differ by, what bounds any system of a group, and weave's commit.
LAST: tuple[Made[Siblings], ...] = (
    MARGIN,
    _limit("critical path"),
    _limit("SM area"),
    made("commit", lambda group: (_record_of(group, WEAVE.choice).environment.commit or DASH)[:7], number=False),
)


def searched(groups: Iterable[Siblings]) -> Table:
    """A row a model: milliseconds in turn, and ratios over what weave begins with."""

    def milliseconds(choice: str) -> Made[Siblings]:
        return made(choice, lambda group: f"{in_rounds(_record_of(group, choice)):.3f}")

    def over(worse: str) -> Made[Siblings]:
        def entry(group: Siblings) -> str:
            better, baseline = (_record_of(group, choice).cell.system.key for choice in (WEAVE.choice, worse))
            return times(group.over(better, baseline))

        return made(f"weave over {worse}", entry)

    columns = [MODEL, *map(milliseconds, (BEFORE, START, WEAVE.choice)), *map(over, (BEFORE, START)), *LAST]
    return table(columns, groups)


def beside_all(groups: Iterable[Siblings]) -> Table:
    """A row a model, batch and precision: milliseconds in turn, and ratios over the fastest of all and from outside."""
    columns = [
        NAME,
        BATCH,
        made("precision", lambda group: group.group.conditions.precision, number=False),
        milliseconds(CUDA_GRAPH),
        milliseconds(WEAVE),
        _over_fastest("weave over the fastest other", (WEAVE,)),
        _over_fastest("weave over the fastest from outside", (WEAVE, *STREAMS, *FUSED)),
        *LAST,
    ]
    return table(columns, groups)


def _over_fastest(heading: str, without: tuple[Choice, ...]) -> Made[Siblings]:
    """The least ratio in turn, with the system that it is over. A system that did not run is none of them."""

    def entry(group: Siblings) -> str:
        ratios: dict[Choice, Speedup] = {
            system: over
            for system in group.records
            if system not in without and (over := group.over(WEAVE, system)) is not None and over.is_in_turn
        }
        if not ratios:
            return DASH
        fastest = min(ratios, key=lambda system: ratios[system].ratio)
        return f"{times(ratios[fastest])} {short(fastest)}"

    return made(heading, entry, number=False)
