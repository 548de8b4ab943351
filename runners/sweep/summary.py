"""The table at the end of a sweep. What a measurement shows is in its own file."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from conf.text import counted
from results.cell import Group, plain
from results.comparison import Speedup, margin, speedup
from results.record import Record
from results.schedule import Compilation
from results.terminal import Terminal
from runners.measurements.base import DASH, Column, Row
from runners.measurements.registry import compositions, in_order_of_columns

NO_TERMINAL = 200  # columns where nobody's terminal sets a width
MOST_DETAIL = 4
MAY_VARY = ("device", "precision", "layout", "algorithms", "seed")  # of the conditions, shown where a sweep has several
OVER_EAGER = "over eager"


def print_summary(records: Sequence[Record], folder: Path, console: Console | None = None) -> None:
    """One cell downwards, several as rows; then every reason and warning, and where the records lie."""
    console = console or Terminal()
    if not console.is_terminal and len(records) > 1:
        console.width = max(console.width, NO_TERMINAL)
    if not records:
        return
    if len(records) == 1:
        _print_cell(records[0], console)
    else:
        _print_table(records, console)
    for group, alike in by_group(records).items():
        for line, those in _remarks(alike).items():
            systems = ", ".join(record.cell.system.label for record in those)
            who = those[0].cell.label if len(those) == 1 else f"{group.label}, {systems}"
            console.print(f"{who}: {line}", markup=False, highlight=False, soft_wrap=True)
        if (one := margin(alike)) is not None:
            console.print(f"{group.label}: {margin_text(one)}", markup=False, highlight=False, soft_wrap=True)
    where = folder / records[0].file_name if len(records) == 1 else folder
    console.print(f"{'record' if len(records) == 1 else 'records'}: {where}", highlight=False, soft_wrap=True)


def by_group(records: Sequence[Record]) -> dict[Group, list[Record]]:
    groups: dict[Group, list[Record]] = {}
    for record in records:
        groups.setdefault(record.cell.group, []).append(record)
    return groups


def _remarks(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Each reason and warning, once, with the records that have it."""
    records_by_line: dict[str, list[Record]] = {}
    for record in records:
        lines = [f"{record.status}: {record.reason}"] if record.reason else []
        for line in dict.fromkeys((*lines, *(f"warning: {warning.sentence}" for warning in record.warnings))):
            records_by_line.setdefault(line, []).append(record)
    return records_by_line


def margin_text(one: Speedup) -> str:
    """What two processes of one system differ by."""
    low, high = one.low - 1, one.high - 1
    return f"two processes of one system differ by {one.ratio - 1:+.1%} [{low:+.1%}, {high:+.1%}]; less is level"


def _print_cell(record: Record, console: Console) -> None:
    cell = record.cell
    title = f"{cell.model.label} · {cell.system.label} · batch {cell.batch} · {record.environment.place}"
    table = Table(title=title, show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    measured = [row for measurement in in_order_of_columns() for row in measurement.rows or _rows(measurement.columns)]
    rows = [
        Row("status", lambda record: record.status),
        Row("precision, layout", lambda record: record.cell.conditions.arithmetic),
        *measured,
        Row("schedule", schedule_text),
        Row("compilation", compilation_text),
        Row("threads an operator", lambda record: plain(record.operator_threads) if record.operator_threads else DASH),
        Row("learning", lambda record: _seconds(record.learning_s)),
        Row("preparation", lambda record: _seconds(record.preparation_s)),
    ]
    for row in rows:
        if (text := row.text(record)) != DASH:
            table.add_row(row.heading, text)
    console.print(table)


def _rows(columns: Sequence[Column]) -> list[Row]:
    return [Row(column.note or column.heading, column.long_text or column.text) for column in columns]


def _print_table(records: Sequence[Record], console: Console) -> None:
    """As much detail as fits."""
    columns = [*_columns(records), _over_eager(records)]
    for detail in range(MOST_DETAIL, -1, -1):
        shown = _shown(columns, records, detail)
        table = _table(records, shown, detail)
        if console.measure(table, options=console.options.update(max_width=1000)).maximum <= console.width:
            break
    console.print(table)
    notes = [f"{column.heading}: {column.note}" for column in shown if column.note]
    console.print("; ".join(notes), style="dim", highlight=False)


def _columns(records: Sequence[Record]) -> list[Column]:
    """The status and those of every measurement, with the detail that the records' runners give them."""
    runners = {record.cell.runner.name for record in records}
    first = {heading for name in runners & set(compositions()) for heading in compositions()[name].shown_first}
    status = Column("status", 0, lambda record: record.status)
    measured = [column for measurement in in_order_of_columns() for column in measurement.columns]
    return [
        status,
        *(Column(c.heading, 0 if c.heading in first else c.detail, c.text, c.note, c.long_text) for c in measured),
    ]


def _over_eager(records: Sequence[Record]) -> Column:
    """The speedup over eager of the same group."""
    eager_by_group = {record.cell.group: record for record in records if record.cell.system.name == "eager"}

    def ratio(record: Record) -> str:
        return interval(record).partition(" ")[0]

    def interval(record: Record) -> str:
        return _ratio(record, eager_by_group)

    return Column(OVER_EAGER, 0, ratio, "speedup, measured in turn", interval)


def _ratio(record: Record, eager_by_group: Mapping[Group, Record]) -> str:
    baseline = eager_by_group.get(record.cell.group)
    measured = speedup(record, baseline) if baseline is not None else None
    return f"{measured.ratio:.2f}x [{measured.low:.2f}, {measured.high:.2f}]" if measured else DASH


def _shown(columns: Sequence[Column], records: Sequence[Record], detail: int) -> list[Column]:
    """Those of this detail of which any record says something."""
    return [c for c in columns if detail >= c.detail and any(c.text(record) != DASH for record in records)]


def _table(records: Sequence[Record], columns: Sequence[Column], detail: int) -> Table:
    """A row a record, a section a group. With detail, texts have their intervals."""
    table = Table(title=_title(records))
    varied = [key for key in MAY_VARY if len({getattr(r.cell.conditions, key) for r in records}) > 1]
    has_runners = len({record.cell.runner for record in records}) > 1
    named = ["runner"] * has_runners + varied
    for heading in ("model", *named, "batch", "system", *(column.heading for column in columns)):
        wraps = heading in ("model", "system")
        is_word = wraps or heading in ("status", *named)
        table.add_column(heading, justify="left" if is_word else "right", no_wrap=not wraps, overflow="fold")
    previous = None
    for record in records:
        cell = record.cell
        if previous not in (None, cell.group):
            table.add_section()
        previous = cell.group
        conditions = [plain(getattr(cell.conditions, key)) for key in varied]
        texts = [(column.long_text or column.text if detail > 0 else column.text)(record) for column in columns]
        runner = [cell.runner.choice] * has_runners
        table.add_row(cell.model.label, *runner, *conditions, str(cell.batch), cell.system.label, *texts)
    return table


def _title(records: Sequence[Record]) -> str:
    places = {record.environment.place for record in records}
    return " · ".join([*sorted(places), *sorted({record.cell.conditions.arithmetic for record in records})])


def _seconds(seconds: float | None) -> str:
    return DASH if seconds is None else f"{seconds:.1f} s"


def schedule_text(record: Record) -> str:
    """The schedule in numbers."""
    schedule = record.schedule
    if schedule is None:
        return DASH
    numbers = {"operator": schedule.operators, "stream": schedule.streams, "wait": schedule.waits}
    operators, streams, waits = (counted(number, thing) for thing, number in numbers.items())
    return f"{operators}, width {schedule.width}, {streams}, {waits}"


def compilation_text(record: Record) -> str:
    """How a compiler came to its executable, a line each."""
    return "\n".join(_compilation_lines(record.compilation)) if record.compilation else DASH


def _compilation_lines(compilation: Compilation) -> list[str]:
    c, lines = compilation, list[str]()
    if c.handed_over is not None:
        lines.append(f"handed over whole to {c.handed_over}, whose latency this is")
    if c.export_s is not None:
        lines.append(f"exported in {c.export_s:.1f} s{', kept since' if c.exported_now is False else ''}")
    if c.compile_s is not None:
        lines.append(f"compiled in {c.compile_s:.1f} s{', kept since' if c.compiled_now is False else ''}")
    if c.trials is not None and c.tuning_s is not None:
        lines.append(f"{counted(c.trials, 'trial')} in {c.tuning_s:.1f} s")
    if c.tuned is not None and c.functions is not None:
        lines.append(f"{c.tuned} of {counted(c.functions, 'function')} tuned")
    if c.search_s is not None:
        num_tried = sum(len(decision.milliseconds) for decision in c.decisions)
        num_variants = counted(num_tried + (c.num_untried or 0), "variant")
        lines.append(f"{num_tried} of {num_variants} tried in {c.search_s:.1f} s")
        lines.append(f"{c.mode}, layout {c.layout}{', frozen' if c.freezing else ''}")
    return lines
