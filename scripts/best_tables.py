"""The tables of the sweep `best`: compilers and schedulers, each with all that it can change."""

from collections.abc import Callable, Iterable

from results.record import Record
from results.schedule import DecisionRow
from results.siblings import Siblings

from .table import Made, Table, made, table
from .tables import (
    BEST,
    CUDA_GRAPH,
    FUSED,
    MARGIN,
    MODEL,
    NIMBLE,
    NIMBLE_FUSED,
    TUNED_COMPILERS,
    WEAVE,
    Columns,
    fastest,
    milliseconds,
    needed,
    of_record,
    ratio,
)


def at_their_best() -> Columns:
    """Milliseconds in turn of compilers and schedulers, each with all that it can change."""
    return [MODEL, *map(milliseconds, (*TUNED_COMPILERS, CUDA_GRAPH, NIMBLE, *FUSED, WEAVE))]


def front(groups: Iterable[Siblings]) -> Table:
    """Compilers and schedulers, each with all that it can change, and the fastest of one over the fastest of the other."""
    columns: Columns = [
        *at_their_best(),
        fastest("fastest schedule over fastest compiler", (NIMBLE, *FUSED, WEAVE), TUNED_COMPILERS),
        ratio(WEAVE, FUSED[0]),
        MARGIN,
    ]
    return table(columns, groups)


def best(groups: Iterable[Siblings]) -> Table:
    """Compilers and schedulers, each with all that it can change, and the search for torch_compile's fastest variant."""

    def variant(record: Record) -> str | None:
        if (compilation := record.compilation) is None:
            return None
        layout = [compilation.layout] if compilation.layout != "given" else []
        return ", ".join(map(str, [compilation.mode, *layout, *["frozen"] * bool(compilation.freezing)]))

    def tried(record: Record) -> str | None:
        if record.compilation is None:
            return None
        decision = needed(next(iter(record.compilation.decisions), None))
        failed = sum(ms is None for ms in decision.milliseconds.values())
        number = len(decision.milliseconds)
        total = number + (record.compilation.num_untried or 0)
        return f"{number} of {total}" + (f", {failed} in vain" if failed else "")

    def seconds(record: Record) -> str | None:
        return f"{needed(record.compilation.search_s):.0f}" if record.compilation is not None else None

    columns: Columns = [
        *at_their_best(),
        fastest("fastest schedule over fastest compiler", (NIMBLE, *FUSED, WEAVE), TUNED_COMPILERS),
        of_record("variant", BEST, variant),
        of_record("variants tried", BEST, tried),
        of_record("seconds of search", BEST, seconds),
    ]
    return table(columns, groups)


# How the library computes a product with a bias, by one call or several.
LIBRARY_WAYS = ("library", "transposed", "bias apart", "transposed, bias apart")


def products(groups: Iterable[Siblings]) -> Table:
    """Products with a bias that `select_products` computes otherwise than as captured, and what that saves."""
    rows = [
        (group, row)
        for group in groups
        if (record := group.get(NIMBLE_FUSED)) is not None and record.schedule is not None
        for row in record.schedule.decided("select_products")
        if "with bias" in row.pattern and row.chosen != "library"
    ]

    def us(row: DecisionRow, of: Callable[[str], bool]) -> float:
        return 1e3 * min(ms for way, ms in row.milliseconds.items() if ms is not None and of(way))

    def time_of(heading: str, of: Callable[[str], bool]) -> Made[tuple[Siblings, DecisionRow]]:
        return made(f"µs: {heading}", lambda pair: f"{us(pair[1], of):.1f}")

    def saved(pair: tuple[Siblings, DecisionRow]) -> str:
        _, row = pair
        return f"{row.count * (us(row, LIBRARY_WAYS[0].__eq__) - us(row, row.chosen.__eq__)):.0f}"

    columns = [
        made("model", lambda pair: pair[0].group.model.label, number=False),
        made("product", lambda pair: pair[1].pattern, number=False),
        made("count", lambda pair: str(pair[1].count)),
        time_of("library as captured", LIBRARY_WAYS[0].__eq__),
        time_of("library at its fastest", LIBRARY_WAYS.__contains__),
        time_of("fastest Triton kernel", lambda way: way not in LIBRARY_WAYS),
        made("chosen", lambda pair: pair[1].chosen),
        made("saved in all, µs", saved),
    ]
    return table(columns, rows)
