"""The table of half precision: how much of the error that it may have each fused system has."""

from collections.abc import Iterable

from results.record import Record
from results.siblings import Siblings

from .table import Made, Table, made, table
from .tables import needed

PRECISIONS, FUSED = ("fp16", "bf16"), ("nimble_fused", "opara_fused", "ios_fused")
ByCell = dict[tuple[str, str], Record]  # by precision, and the system's choice


def half_precision(groups: Iterable[Siblings]) -> Table:
    """A row a model: the error over its tolerance under each fused system, or the status of a cell without one.

    Of the error by norm and that of the largest elements it is the one nearer to its tolerance.
    """
    by_model: dict[str, ByCell] = {}
    for group in groups:
        for record in group.records.values():
            cells = by_model.setdefault(record.cell.model.label, {})
            cells[record.cell.conditions.precision, record.cell.system.choice] = record

    def share(record: Record) -> str:
        if not record.is_ok:
            return record.status
        part = needed(record.correctness)
        by_norm = needed(part.relative_error) / needed(part.tolerance)
        by_element = needed(part.element_error) / needed(part.element_tolerance)
        return f"{max(by_norm, by_element):.2f}"

    def column(precision: str, system: str) -> Made[tuple[str, ByCell]]:
        return made(f"{precision} {system}", lambda row: share(needed(row[1].get((precision, system)))))

    columns = [
        made("model", lambda row: row[0], number=False),
        *(column(precision, system) for precision in PRECISIONS for system in FUSED),
    ]
    return table(columns, sorted(by_model.items()))
