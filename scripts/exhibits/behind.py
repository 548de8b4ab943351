"""What lies behind an exhibit's ratios: each system's call and kernels, and how fast the same kernels could be."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from results.comparison import is_disturbed
from results.record import Record
from results.selection import Row, Selection
from scripts.charts.limits import ModelLimits, limits_of
from scripts.charts.style import short
from scripts.table import Lacking, Made, Table, made, table

from .preset import EAGER

Part = TypeVar("Part")


def behind(measured: Selection | None) -> list[Table]:
    """A row for each system with a latency, and a row for each model whose kernels are known; no table is empty."""
    if measured is None:
        return []
    return [one.without_empty_columns() for one in (_calls(measured), _bounds(measured)) if one.rows]


@dataclass(frozen=True)
class _Model:
    """A model at a batch.

    Args:
        row: which.
        limits: of its kernels.
        eager: the newest record of eager with a latency.
    """

    row: Row
    limits: ModelLimits | None
    eager: Record | None

    @property
    def in_rounds_ms(self) -> float:
        """Of eager, where ratios come from the rounds. Raises Lacking where they do not."""
        eager = _there(self.eager)
        if eager.comparison is None or not eager.comparison.rounds or is_disturbed(eager):
            raise Lacking
        return eager.comparison.median_ms

    @property
    def eager_ms(self) -> float:
        """In the rounds where ratios come from those, else alone. Raises Lacking without eager."""
        try:
            return self.in_rounds_ms
        except Lacking:
            return _there(_there(self.eager).latency).host.median

    @property
    def back_to_back_ms(self) -> float:
        """Of eager's kernels. Raises Lacking where they are not known."""
        return _there(_there(_there(self.eager).kernels).covered_ms)


def _calls(measured: Selection) -> Table:
    def occupancy(record: Record) -> float:
        return _there(_there(record.schedule).search.occupancy)

    def efficiency(record: Record) -> str:
        part = _there(record.sm_efficiency)
        return f"{100 * _there(part.value):.0f} ({part.source})"

    columns: list[Made[tuple[Row, Record]]] = [
        made("model", lambda one: one[0][0], number=False),
        made("batch", lambda one: str(one[0][1])),
        made("system", lambda one: short(one[1].cell.system), number=False),
        made("call alone, ms", lambda one: _ms(_there(one[1].latency).host.median)),
        made("kernels run, ms", lambda one: _ms(_there(one[1].kernels).covered_ms)),
        made("kernels added up, ms", lambda one: _ms(_there(one[1].kernels).sum_ms)),
        made("SMs, %", lambda one: efficiency(one[1])),
        made("occupancy, %", lambda one: f"{100 * occupancy(one[1]):.0f}"),
    ]
    rows = ((row, _with_latency(measured, row)) for row in measured.rows)
    return table(columns, [(row, record) for row, records in rows for record in records])


def _bounds(measured: Selection) -> Table:
    """By eager's time in the rounds, where the ratios come from those."""
    columns: list[Made[_Model]] = [
        made("model", lambda one: one.row[0], number=False),
        made("batch", lambda one: str(one.row[1])),
        made("kernels in turn, ms", lambda one: _ms(_there(one.limits).busy_ms)),
        made("critical path, ms", lambda one: _ms(_there(one.limits).critical_path_ms)),
        made("eager in the rounds, ms", lambda one: _ms(one.in_rounds_ms)),
        made("eager over the critical path", lambda one: f"{one.eager_ms / _there(one.limits).critical_path_ms:.2f}x"),
        made("eager over its kernels back to back", lambda one: f"{one.eager_ms / one.back_to_back_ms:.2f}x"),
    ]
    models = []
    for row in measured.rows if measured.setting.device == "cuda" else []:
        eager = next((record for record in _with_latency(measured, row) if record.cell.system.key == EAGER), None)
        models.append(_Model(row, limits_of(measured, row), eager))
    return table(columns, [one for one in models if one.limits or (one.eager and one.eager.kernels)])


def _with_latency(measured: Selection, row: Row) -> Sequence[Record]:
    """The newest of each system."""
    parts = (measured.part(row, s, lambda record: record if record.latency is not None else None) for s in measured.systems)
    return [record for record in parts if record is not None]


def _there(part: Part | None) -> Part:
    """What a record has. Raises Lacking where it does not."""
    if part is None:
        raise Lacking
    return part


def _ms(milliseconds: float | None) -> str:
    return f"{_there(milliseconds):.2f}"
