"""The table at the end of a sweep."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from results.comparison import speedup
from results.record import asked, file_name, group_key, in_words, label, system_label
from results.words import counted

DASH = "–"
NOTES = {
    "latency ms": "median, with its 95 % interval where there is room",
    "MiB": "peak over weights and inputs",
    "SM": "share of time with an active warp, c from counters, e estimated",
    "warps": "active on the whole GPU on average, c from counters, e estimated",
    "limit ms": "critical path of the operators (latency over it)",
    "over eager": "speedup, measured in turn",
}
NO_TERMINAL = 200  # columns where nobody's terminal sets a width
MOST_DETAIL = 4
MAY_VARY = ("runner", "device", "precision", "layout", "algorithms", "seed")  # shown where a sweep has several


def print_summary(records: list[dict[str, Any]], folder: Path, console: Console | None = None) -> None:
    """One cell downwards, several as rows; then every reason and warning, and where the records lie."""
    console = console or Console(markup=False)
    if not console.is_terminal and len(records) > 1:
        console.width = max(console.width, NO_TERMINAL)
    if not records:
        return
    if len(records) == 1:
        _print_cell(records[0], console)
    else:
        _print_table(records, console)
    for record in records:
        title = f"{label(record['config']['model'])} {system_label(record['config'])} b{record['config']['batch']}"
        if record["reason"]:
            console.print(f"{title}: {record['status']}: {record['reason']}", markup=False, highlight=False, soft_wrap=True)
        for warning in record["warnings"]:
            console.print(f"{title}: warning: {warning}", markup=False, highlight=False, soft_wrap=True)
    where = folder / file_name(records[0]) if len(records) == 1 else folder
    console.print(f"{'record' if len(records) == 1 else 'records'}: {where}", highlight=False, soft_wrap=True)


def _print_cell(record: dict[str, Any], console: Console) -> None:
    config = record["config"]
    where = record["environment"].get("gpu") or record["environment"]["cpu"]
    table = Table(
        title=f"{label(config['model'])} · {system_label(config)} · batch {config['batch']} · {where}", show_header=False
    )
    table.add_column("")
    table.add_column("", justify="right")
    rows = [
        ("status", record["status"]),
        ("precision, layout", in_words(config)),
        ("latency, host", _interval(_statistics(record, "host"), "ms")),
        ("  min, p90, p99", _tail(_statistics(record, "host"))),
        ("latency, device", _interval(_statistics(record, "device"), "ms")),
        ("throughput", _throughput(record, " samples/s")),
        ("memory over weights and inputs", _memory(record, " MiB")),
        ("SM efficiency", _sm_efficiency(record, long=True)),
        ("active warps on the whole GPU", _active_warps(record, long=True)),
        ("relative error against eager", _error(record)),
        ("critical path of the operators", _limit(record, "critical_path_ms", " ms, latency is {:.2f} times that")),
        ("sum of the operators", _limit(record, "busy_ms", " ms, latency is {:.2f} times that")),
        ("schedule", _schedule(record)),
        ("compilation", _compilation(record)),
        ("preparation", f"{record['preparation_s']:.1f} s" if "preparation_s" in record else DASH),
    ]
    for name, value in rows:
        if value != DASH:
            table.add_row(name, value)
    console.print(table)


def _print_table(records: list[dict[str, Any]], console: Console) -> None:
    """As much detail as fits."""
    for detail in range(MOST_DETAIL, -1, -1):
        table = _table(records, detail)
        if console.measure(table, options=console.options.update(max_width=1000)).maximum <= console.width:
            break
    console.print(table)
    shown = {str(column.header) for column in table.columns}
    notes = [f"{heading}: {meaning}" for heading, meaning in NOTES.items() if heading in shown]
    console.print("; ".join(notes), style="dim", highlight=False)


def _table(records: list[dict[str, Any]], detail: int) -> Table:
    eager = {group_key(r["config"]): r for r in records if r["config"]["system"]["name"] == "eager"}
    latency, ratio = (_interval, _over) if detail > 0 else (_median, _ratio)
    training = any(r["config"]["runner"]["name"] == "training" for r in records)  # what counts there is throughput
    columns: list[tuple[str, int, Any]] = [  # heading, the detail from which it is shown, what stands in it
        ("status", 0, lambda r: r["status"]),
        ("latency ms", 0, lambda r: latency(_statistics(r, "host"))),
        ("device ms", 3, lambda r: _median(_statistics(r, "device"))),
        ("samples/s", 0 if training else 2, _throughput),
        ("MiB", 3, _memory),
        ("SM", 4, _sm_efficiency),
        ("warps", 0, _active_warps),
        ("error", 2, _error),
        ("limit ms", 4, lambda r: _limit(r, "critical_path_ms", " ({:.1f}x)")),
        ("over eager", 0, lambda r: ratio(r, eager.get(group_key(r["config"])))),
    ]
    columns = [c for c in columns if detail >= c[1] and any(c[2](r) != DASH for r in records)]
    table = Table(title=_title(records))
    varied = [key for key in MAY_VARY if len({str(asked(r["config"], key)) for r in records}) > 1]
    for heading in ("model", *varied, "batch", "system", *(c[0] for c in columns)):
        wraps = heading in ("model", "system")
        left = wraps or heading in ("status", *varied)
        table.add_column(heading, justify="left" if left else "right", no_wrap=not wraps, overflow="fold")
    last = None
    for record in records:
        config, key = record["config"], group_key(record["config"])
        if last not in (None, key):
            table.add_section()
        last = key
        cells = [label(config["model"]), *(_name(asked(config, key)) for key in varied), str(config["batch"])]
        table.add_row(*cells, system_label(config), *(value(record) for _, _, value in columns))
    return table


def _name(value: Any) -> str:
    return value["name"] if isinstance(value, dict) else str(value)


def _statistics(record: dict[str, Any], clock: str) -> dict[str, Any] | None:
    return ((record.get("latency") or {}).get("statistics") or {}).get(clock)


def _median(statistics: dict[str, Any] | None) -> str:
    return f"{statistics['median']:.3f}" if statistics else DASH


def _over(record: dict[str, Any], baseline: dict[str, Any] | None) -> str:
    measured = speedup(record, baseline) if baseline is not None else None
    return f"{measured.ratio:.2f}x [{measured.low:.2f}, {measured.high:.2f}]" if measured else DASH


def _ratio(record: dict[str, Any], baseline: dict[str, Any] | None) -> str:
    return _over(record, baseline).partition(" ")[0]


def _title(records: list[dict[str, Any]]) -> str:
    places = {r["environment"].get("gpu") or r["environment"]["cpu"] for r in records}
    return " · ".join([*sorted(places), *sorted({in_words(r["config"]) for r in records})])


def _interval(statistics: dict[str, Any] | None, unit: str = "") -> str:
    if not statistics:
        return DASH
    low, high = statistics["ci95"]
    return f"{statistics['median']:.3f} [{low:.3f}, {high:.3f}] {unit}".strip()


def _tail(statistics: dict[str, Any] | None) -> str:
    return f"{statistics['min']:.3f}, {statistics['p90']:.3f}, {statistics['p99']:.3f} ms" if statistics else DASH


def _throughput(record: dict[str, Any], unit: str = "") -> str:
    measured = record.get("throughput")
    return f"{measured['statistics']['median']:,.1f}{unit}" if measured else DASH


def _memory(record: dict[str, Any], unit: str = "") -> str:
    measured = record.get("memory")
    return f"{measured['peak_bytes'] / 2**20:,.1f}{unit}" if measured else DASH


def _sm_efficiency(record: dict[str, Any], long: bool = False) -> str:
    return _sourced(record.get("sm_efficiency"), "{:.0%}", long)


def _active_warps(record: dict[str, Any], long: bool = False) -> str:
    return _sourced(record.get("active_warps"), "{:,.1f}", long)


def _sourced(measured: dict[str, Any] | None, number: str, long: bool) -> str:
    """A value and where it comes from, or why there is none."""
    if not measured:
        return DASH
    if measured["value"] is None:
        return f"none: {measured['reason']}" if long else DASH
    return f"{number.format(measured['value'])} ({measured['source'] if long else measured['source'][0]})"


def _error(record: dict[str, Any]) -> str:
    measured = record.get("correctness")
    return f"{measured['relative_error']:.1e}" if measured else DASH


def _limit(record: dict[str, Any], key: str, distance: str) -> str:
    """Of the operators that the system runs: those of the model, or what it rewrites them to."""
    limits, latency = record.get("limits") or {}, _statistics(record, "host")
    limit = limits.get("rewritten", limits).get(key)
    if limit is None:
        return DASH
    return f"{limit:.3f}" + (distance.format(latency["median"] / limit) if latency and limit else "")


def _schedule(record: dict[str, Any]) -> str:
    schedule = record.get("schedule")
    if not schedule:
        return DASH
    operators, streams, waits = (counted(schedule[f"{thing}s"], thing) for thing in ("operator", "stream", "wait"))
    return f"{operators}, width {schedule['width']}, {streams}, {waits}"


def _compilation(record: dict[str, Any]) -> str:
    """What a compiler's record tells of how it came to its executable, a line each."""
    told = record.get("compilation") or {}
    lines = []
    if "export_s" in told:
        lines.append(f"exported in {told['export_s']:.1f} s{'' if told['exported_now'] else ', kept since'}")
    if "compile_s" in told:
        lines.append(f"compiled in {told['compile_s']:.1f} s{'' if told.get('compiled_now', True) else ', kept since'}")
    if "trials" in told:
        lines.append(f"{counted(told['trials'], 'trial')} in {told['tuning_s']:.1f} s")
    if "tuned" in told:
        lines.append(f"{told['tuned']} of {counted(told['functions'], 'function')} tuned")
    if "tried" in told:
        variants = len(told["tried"]) + told["not_tried"]
        lines.append(f"{len(told['tried'])} of {counted(variants, 'variant')} tried in {told['search_s']:.1f} s")
        lines.append(f"{told['mode']}, layout {told['layout']}{', frozen' if told['freezing'] else ''}")
    return "\n".join(lines) or DASH
