"""The table at the end of a sweep."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from results.comparison import speedup
from results.record import file_name, group_key, system_label

DASH = "–"


WIDE, WIDER = 110, 150  # columns of a terminal from which more of the table is shown
NO_TERMINAL = 180


def print_summary(records: list[dict[str, Any]], folder: Path, console: Console | None = None) -> None:
    """One cell downwards, several as rows; then every reason and warning, and where the records lie."""
    console = console or Console()
    if not console.is_terminal and len(records) > 1:
        console.width = max(console.width, NO_TERMINAL)
    if not records:
        return
    if len(records) == 1:
        _print_cell(records[0], console)
    else:
        _print_table(records, console)
    for record in records:
        title = f"{record['config']['model']['name']} {system_label(record['config'])} b{record['config']['batch']}"
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
        title=f"{config['model']['name']} · {system_label(config)} · batch {config['batch']} · {where}", show_header=False
    )
    table.add_column("")
    table.add_column("", justify="right")
    rows = [
        ("status", record["status"]),
        ("precision, layout", f"{config['precision']}, {config['layout']}"),
        ("latency, host", _interval(_statistics(record, "host"), "ms")),
        ("  min, p90, p99", _tail(_statistics(record, "host"))),
        ("latency, device", _interval(_statistics(record, "device"), "ms")),
        ("throughput", _throughput(record, " samples/s")),
        ("memory over weights and inputs", _memory(record, " MiB")),
        ("SM efficiency", _sm_efficiency(record, long=True)),
        ("relative error against eager", _error(record)),
        ("critical path of the operators", _limit(record, "critical_path_ms")),
        ("sum of the operators", _limit(record, "busy_ms")),
        ("schedule", _schedule(record)),
        ("preparation", f"{record['preparation_s']:.1f} s" if "preparation_s" in record else DASH),
    ]
    for name, value in rows:
        if value != DASH:
            table.add_row(name, value)
    console.print(table)


def _print_table(records: list[dict[str, Any]], console: Console) -> None:
    eager = {group_key(r["config"]): r for r in records if r["config"]["system"]["name"] == "eager"}
    columns: list[tuple[str, int, Any]] = [  # heading, width of terminal that it needs, what stands in it
        ("status", 0, lambda r: r["status"]),
        ("latency ms", 0, lambda r: _interval(_statistics(r, "host"))),
        ("device ms", WIDER, lambda r: _median(_statistics(r, "device"))),
        ("samples/s", WIDE, _throughput),
        ("MiB", WIDE, _memory),
        ("SM", WIDER, _sm_efficiency),
        ("error", WIDE, _error),
        ("limit ms", WIDER, lambda r: _limit(r, "critical_path_ms", "")),
        ("over eager", 0, lambda r: _over(r, eager.get(group_key(r["config"])))),
    ]
    columns = [c for c in columns if console.width >= c[1] and any(c[2](r) != DASH for r in records)]
    table = Table(title=_title(records))
    for heading in ("model", "batch", "system", *(c[0] for c in columns)):
        left = heading in ("model", "system", "status")
        table.add_column(heading, justify="left" if left else "right", no_wrap=heading not in ("model", "system"))
    names = _short_labels(records)
    last = None
    for record in records:
        config, key = record["config"], group_key(record["config"])
        if last not in (None, key):
            table.add_section()
        last = key
        cells = [value(record) for _, _, value in columns]
        table.add_row(config["model"]["name"], str(config["batch"]), names[record["id"]], *cells)
    console.print(table)
    notes = ["latency: median [95 % interval]", "over eager: measured in turn"]
    if console.width >= WIDE:
        notes.append("MiB: peak over weights and inputs")
    if console.width >= WIDER:
        notes += ["SM: share of time with an active warp, c from counters, e estimated", "limit: critical path of operators"]
    console.print("; ".join(notes), style="dim")


def _short_labels(records: list[dict[str, Any]]) -> dict[str, str]:
    """A system's name by record id, with its options only where two systems of a name stand in one group."""
    seen: dict[tuple[str, str], set[str]] = {}
    for r in records:
        key = (group_key(r["config"]), r["config"]["system"]["name"])
        seen.setdefault(key, set()).add(system_label(r["config"]))
    ambiguous = {name for (_, name), options in seen.items() if len(options) > 1}
    return {
        r["id"]: system_label(r["config"]) if r["config"]["system"]["name"] in ambiguous else r["config"]["system"]["name"]
        for r in records
    }


def _statistics(record: dict[str, Any], clock: str) -> dict[str, Any] | None:
    return ((record.get("latency") or {}).get("statistics") or {}).get(clock)


def _median(statistics: dict[str, Any] | None) -> str:
    return f"{statistics['median']:.3f}" if statistics else DASH


def _over(record: dict[str, Any], baseline: dict[str, Any] | None) -> str:
    ratio = speedup(record, baseline) if baseline is not None else None
    return f"{ratio.ratio:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio else DASH


def _title(records: list[dict[str, Any]]) -> str:
    places = {r["environment"].get("gpu") or r["environment"]["cpu"] for r in records}
    precisions = {f"{r['config']['precision']}, {r['config']['layout']}" for r in records}
    return " · ".join([*sorted(places), *sorted(precisions)])


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
    measured = record.get("sm_efficiency")
    if not measured:
        return DASH
    if measured["value"] is None:
        return f"none: {measured['reason']}" if long else DASH
    return f"{measured['value']:.0%} ({measured['source'] if long else measured['source'][0]})"


def _error(record: dict[str, Any]) -> str:
    measured = record.get("correctness")
    return f"{measured['relative_error']:.1e}" if measured else DASH


def _limit(record: dict[str, Any], key: str, unit: str = " ms") -> str:
    limits = record.get("limits") or {}
    return f"{limits[key]:.3f}{unit}" if limits.get(key) is not None else DASH


def _schedule(record: dict[str, Any]) -> str:
    schedule = record.get("schedule")
    if not schedule:
        return DASH
    return "{operators} operators, width {width}, {streams} streams, {waits} waits".format(**schedule)
