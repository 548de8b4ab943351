"""The table at the end of a sweep."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from results.comparison import speedup
from results.record import file_name, group_key, system_label

DASH = "–"


def print_summary(records: list[dict[str, Any]], folder: Path, console: Console | None = None) -> None:
    """One cell downwards, several as rows; then every reason and warning, and where the records lie."""
    console = console or Console()
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
    table = Table(title=f"{config['model']['name']} · {system_label(config)} · batch {config['batch']} · {where}")
    table.add_column("")
    table.add_column("", justify="right")
    statistics = (record.get("latency") or {}).get("statistics") or {}
    rows = [
        ("status", record["status"]),
        ("precision, layout", f"{config['precision']}, {config['layout']}"),
        ("latency, host", _interval(statistics.get("host"), "ms")),
        ("  min, p90, p99", _tail(statistics.get("host"))),
        ("latency, device", _interval(statistics.get("device"), "ms")),
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
    table = Table(title=_title(records))
    columns = (
        "model",
        "batch",
        "system",
        "status",
        "latency ms",
        "device ms",
        "samples/s",
        "MiB",
        "SM",
        "error",
        "limit ms",
    )
    for column in (*columns, "over eager"):
        left = column in ("model", "system", "status")
        table.add_column(column, justify="left" if left else "right", overflow="fold" if left else "ellipsis")
    eager = {group_key(r["config"]): r for r in records if r["config"]["system"]["name"] == "eager"}
    last = None
    for record in records:
        config, key = record["config"], group_key(record["config"])
        if last not in (None, key):
            table.add_section()
        last = key
        statistics = (record.get("latency") or {}).get("statistics") or {}
        baseline = eager.get(key)
        ratio = speedup(record, baseline) if baseline is not None else None
        table.add_row(
            config["model"]["name"],
            str(config["batch"]),
            system_label(config),
            record["status"],
            _interval(statistics.get("host")),
            f"{statistics['device']['median']:.3f}" if statistics.get("device") else DASH,
            _throughput(record),
            _memory(record),
            _sm_efficiency(record),
            _error(record),
            _limit(record, "critical_path_ms", ""),
            f"{ratio.ratio:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio else DASH,
        )
    console.print(table)
    console.print(
        "latency: median [95 % interval]; MiB: peak over weights and inputs; SM: share of time with an active warp, "
        "c from counters, e estimated; limit: critical path of the operators; over eager: measured in turn",
        style="dim",
    )


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
