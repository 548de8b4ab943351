"""The table of networks of today: weave beside the fastest of all others, and of those from outside this project."""

from collections.abc import Callable, Iterable

from results.cell import Choice, named
from results.comparison import Speedup, margin
from results.record import Limits, Record
from results.siblings import Siblings

from .charts.style import short
from .table import DASH, Made, Table, made, table
from .tables import BATCH, CUDA_GRAPH, NAME, milliseconds, needed, times

WEAVE = named("system", "weave")
OURS = tuple(named("system", name) for name in ("nimble", "opara", "ios", "weave"))


def networks_of_today(groups: Iterable[Siblings]) -> Table:
    """A row a model, batch and precision: milliseconds in turn, ratios, and what bounds any system of the group."""

    def over_fastest(heading: str, without: tuple[Choice, ...]) -> Made[Siblings]:
        """The least ratio, with the system that it is over. A system that did not run is none of them."""

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

    def limit(heading: str, of: Callable[[Limits], float | None]) -> Made[Siblings]:
        """The least of a group's systems: kernels that take longer are no excuse."""

        def entry(group: Siblings) -> str:
            limits = [record.limits.executed for record in group.records.values() if record.limits is not None]
            least = min((value for each in limits if (value := of(each)) is not None), default=None)
            return DASH if least is None else f"{least:.3f}"

        return made(heading, entry)

    def weave_of(group: Siblings) -> Record:
        return needed(group.get(WEAVE))

    columns = [
        NAME,
        BATCH,
        made("precision", lambda group: group.group.conditions.precision, number=False),
        milliseconds(CUDA_GRAPH),
        milliseconds(WEAVE),
        over_fastest("weave over the fastest other", (WEAVE,)),
        over_fastest("weave over the fastest from outside", OURS),
        made("two processes of one system", lambda group: times(margin(list(group.records.values())))),
        limit("critical path", lambda limits: limits.critical_path_ms),
        limit("SM area", lambda limits: limits.sm_area_ms),
        made("commit", lambda group: (weave_of(group).environment.commit or DASH)[:7], number=False),
    ]
    return table(columns, groups)
