"""The committed cells as a table that a person reads and a diff shows: results/reference/h200.csv, a row a cell.

`python scripts/readme.py` writes it, and results/reference/README.md says what its columns are.
"""

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from decimal import Decimal
from pathlib import Path

from results.pack import SUFFIX, sweep_of
from results.quantity import Quantity
from results.record import Record
from results.store import Store

from .commits import code_state

ENERGY, CALL = "energy", "joules_per_call"
DIGITS = 5  # that count
COMMIT_LETTERS = 12


@dataclass(frozen=True)
class Row:
    """A cell: texts, and numbers as they are shown, empty where there is none; results/reference/README.md has each."""

    sweep: str
    model: str
    batch: int
    precision: str
    layout: str
    algorithms: str
    runner: str
    system: str
    status: str
    quantity: str
    unit: str
    value: str
    low: str
    high: str
    in_turn_ms: str
    memory_mib: str
    joules: str
    critical_path_ms: str
    busy_ms: str
    date: str
    commit: str
    modified: str


def table(folder: Path) -> str:
    """The cells of every pack of a folder, as CSV: by sweep, then by model and system."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = [field.name for field in fields(Row)]
    writer.writerow(columns)
    for pack in sorted(folder.glob(f"*{SUFFIX}"), key=sweep_of):
        for row in rows(sweep_of(pack), Store(pack).read().records.values()):
            writer.writerow([getattr(row, column) for column in columns])
    return out.getvalue()


def rows(sweep: str, records: Iterable[Record]) -> Iterator[Row]:
    for record in records:
        cell, conditions = record.cell, record.cell.conditions
        commit, modified = code_state(record.environment)
        main = quantity(record)
        energy = record.measured[ENERGY].quantity(CALL) if ENERGY in record.measured else None
        limits = record.limits.executed if record.limits is not None else None
        yield Row(
            sweep=sweep,
            model=cell.model.label,
            batch=cell.batch,
            precision=conditions.precision,
            layout=conditions.layout,
            algorithms=conditions.algorithms,
            runner=cell.runner.label,
            system=cell.system.label,
            status=record.status,
            quantity=main.heading if main is not None else "",
            unit=main.unit if main is not None else "",
            value=shown(main.value if main is not None else None),
            low=shown(main.low if main is not None else None),
            high=shown(main.high if main is not None else None),
            in_turn_ms=shown(record.comparison.median_ms if record.comparison and record.is_in_rounds else None),
            memory_mib=shown(record.memory.peak_bytes / 2**20 if record.memory is not None else None),
            joules=shown(energy.value if energy is not None else None),
            critical_path_ms=shown(limits.critical_path_ms if limits is not None else None),
            busy_ms=shown(limits.busy_ms if limits is not None else None),
            date=record.when[:10],
            commit=(commit or "")[:COMMIT_LETTERS],
            modified="" if modified is None else str(modified).lower(),
        )


def quantity(record: Record) -> Quantity | None:
    """The number that a cell is about: its latency, else its AUC, its warps, or the first of what describes itself."""
    if (latency := record.latency) is not None:
        return Quantity("latency", "latency", "ms", latency.host.median, *latency.host.ci95)
    if (accuracy := record.accuracy) is not None:
        return Quantity("auc", "AUC", "", accuracy.auc, accuracy.low, accuracy.high)
    if (warps := record.active_warps) is not None:
        return Quantity("active_warps", "active warps", "warps", warps.value)
    return next((q for name, part in record.described.items() if name != ENERGY for q in part.quantities), None)


def shown(number: float | None) -> str:
    """A number with DIGITS digits and no exponent; "" for None."""
    return "" if number is None else f"{Decimal(f'{number:.{DIGITS}g}'):f}"
