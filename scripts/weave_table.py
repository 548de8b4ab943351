"""The table of weave's search beside what it begins with."""

from collections.abc import Callable, Iterable

from results.comparison import margin
from results.record import Limits, Record
from results.siblings import Siblings

from .table import DASH, Made, Table, made, table
from .tables import MODEL, in_rounds, needed, times

# Choices of systems. The first is nimble_fused of commit 5a62506, by system=checkout.
BEFORE, FUSED, WEAVE = "nimble_fused_before", "nimble_fused", "weave"


def searched(groups: Iterable[Siblings]) -> Table:
    """A row a model: milliseconds in turn, ratios, what two processes of one system differ by, and what bounds weave."""

    def record_of(group: Siblings, choice: str) -> Record:
        return needed(next((r for r in group.records.values() if r.cell.system.choice == choice and r.is_ok), None))

    def milliseconds(choice: str) -> Made[Siblings]:
        return made(choice, lambda group: f"{in_rounds(record_of(group, choice)):.3f}")

    def over(worse: str) -> Made[Siblings]:
        def entry(group: Siblings) -> str:
            better, baseline = (record_of(group, choice).cell.system.key for choice in (WEAVE, worse))
            return times(group.over(better, baseline))

        return made(f"weave over {worse}", entry)

    def difference(group: Siblings) -> str:
        return times(margin(list(group.records.values())))

    def limit(heading: str, of: Callable[[Limits], float | None]) -> Made[Siblings]:
        """The least of a model's systems: kernels that take longer are no excuse."""

        def entry(group: Siblings) -> str:
            limits = [record.limits.executed for record in group.records.values() if record.limits is not None]
            least_ms = min((ms for each in limits if (ms := of(each)) is not None), default=None)
            return DASH if least_ms is None else f"{least_ms:.3f}"

        return made(heading, entry)

    columns = [
        MODEL,
        *map(milliseconds, (BEFORE, FUSED, WEAVE)),
        *map(over, (BEFORE, FUSED)),
        made("two processes of one system", difference),
        limit("critical path", lambda limits: limits.critical_path_ms),
        limit("SM area", lambda limits: limits.sm_area_ms),
        made("commit", lambda group: (record_of(group, WEAVE).environment.commit or DASH)[:7], number=False),
    ]
    return table(columns, groups)
