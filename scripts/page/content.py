"""What a report says of the records of one setting: the environment, a row for each cell, and what did not run."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from results.record import in_words
from scripts.charts.limits import limits_of
from scripts.charts.measured import Measured, Record, Row
from scripts.charts.style import short

DASH = "–"


@dataclass(frozen=True)
class Entry:
    """One entry of a table. value: what it sorts by, its text if None. title: more of it, shown on pointing at it."""

    text: str
    value: float | None = None
    title: str = ""

    @property
    def missing(self) -> bool:
        return self.text == DASH


@dataclass(frozen=True)
class Column:
    """heading, and in a few words what it means. number: is aligned as one; words: is text of several, which may wrap."""

    heading: str
    meaning: str = ""
    number: bool = True
    words: bool = False


@dataclass(frozen=True)
class Table:
    columns: Sequence[Column]
    rows: Sequence[Sequence[Entry]]

    def without_empty_columns(self) -> "Table":
        """The table with those columns alone that say something."""
        kept = [i for i in range(len(self.columns)) if any(not row[i].missing for row in self.rows)]
        return Table([self.columns[i] for i in kept], [[row[i] for i in kept] for row in self.rows])


def environment(measured: Measured) -> list[tuple[str, str]]:
    """Where and with what the records were measured: name and value, several values where they differ."""
    records = measured.records

    def values(*path: str) -> str:
        found: dict[str, None] = {}
        for record in records:
            value: Any = record["environment"]
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            if isinstance(value, dict):
                value = " ".join(f"{name}={of}" for name, of in value.items())
            if value is not None:
                found[str(value)] = None
        return ", ".join(sorted(found))

    def libraries() -> str:
        names = sorted({name for record in records for name in record["environment"].get("libraries", {})})
        return ", ".join(f"{name} {values('libraries', name)}" for name in names)

    memory = {r["environment"]["gpu_memory_bytes"] for r in records if "gpu_memory_bytes" in r["environment"]}
    throttled = {reason for r in records for reason in r["environment"].get("clocks", {}).get("throttled", [])}
    when = sorted(record["when"][:10] for record in records)
    config = records[0]["config"]
    numbers = sorted({r["environment"]["cudnn"] for r in records if r["environment"].get("cudnn")})
    cudnn = ", ".join(f"{n // 10000}.{n // 100 % 100}.{n % 100}" for n in numbers)  # 91900 is 9.19.0
    clocks = sorted({r["environment"]["clocks"]["sm_mhz"] for r in records if "clocks" in r["environment"]})
    rows = [
        ("GPU", values("gpu")),
        ("GPU memory", ", ".join(f"{size / 2**30:.0f} GiB" for size in sorted(memory))),
        ("multiprocessors", values("sm_count")),
        ("SM clock when measured", " to ".join(map(str, sorted({clocks[0], clocks[-1]}))) + " MHz" if clocks else ""),
        ("throttled by", ", ".join(sorted(throttled))),
        ("driver, CUDA, cuDNN", ", ".join(filter(None, (values("driver"), values("cuda"), cudnn)))),
        ("CPU", values("cpu")),
        ("cores", values("cores")),
        ("threads", values("threads")),
        ("host", values("host")),
        ("system", values("os")),
        ("Python", values("python")),
        ("libraries", libraries()),
        ("settings of the shell", values("settings")),
        ("precision, layout", in_words(config)),
        ("commit", ", ".join(sorted({_commit(record) for record in records} - {""}))),
        ("measured", when[0] if when[0] == when[-1] else f"{when[0]} to {when[-1]}"),
        ("records", _counts(records)),
    ]
    return [(name, value) for name, value in rows if value]


def cells(measured: Measured, baseline: str) -> Table:
    """A row for each cell, in the order of models; an incorrect system has a status and no speed."""
    columns: list[tuple[Column, Callable[[Row, str], Entry]]] = [
        (Column("model", number=False), lambda row, _: Entry(row[0])),
        (Column("batch"), lambda row, _: Entry(str(row[1]), row[1])),
        (Column("system", number=False), lambda _, system: _system(system)),
        (Column("status", number=False), lambda row, system: _status(measured, row, system)),
        (
            Column("latency, ms", "host time of a call with a synchronisation: median and 95 % interval"),
            lambda row, system: _statistic(measured, row, system, "latency", "host"),
        ),
        (
            Column("p99, ms", "99th percentile of the same"),
            lambda row, system: _latency(measured, row, system, "host", "p99"),
        ),
        (
            Column("device, ms", "time between events on the GPU, median"),
            lambda row, system: _latency(measured, row, system, "device", "median"),
        ),
        (
            Column(
                f"over {baseline}",
                "speedup from interleaved rounds: median and 95 % interval; * from latencies, each system's measured alone",
            ),
            lambda row, system: _speedup(measured, row, system, baseline),
        ),
        (
            Column("over path", "latency over the critical path of the operators"),
            lambda row, system: _over_path(measured, row, system),
        ),
        (
            Column("samples/s", "throughput, back to back"),
            lambda row, system: _statistic(measured, row, system, "throughput"),
        ),
        (Column("MiB", "peak memory over weights and inputs"), lambda row, system: _memory(measured, row, system)),
        (
            Column("SM, counted", "SM efficiency from hardware counters, %"),
            lambda row, system: _sm_efficiency(measured, row, system, "counters"),
        ),
        (
            Column(
                "SM, estimated", "SM efficiency estimated from the kernels' timeline, %: not comparable with the counted"
            ),
            lambda row, system: _sm_efficiency(measured, row, system, "estimated"),
        ),
        (Column("error", "largest relative error against eager"), lambda row, system: _error(measured, row, system)),
        (Column("streams"), lambda row, system: _schedule(measured, row, system, "streams")),
        (Column("waits"), lambda row, system: _schedule(measured, row, system, "waits")),
        (
            Column("search, ms", "time of the search for a schedule"),
            lambda row, system: _schedule(measured, row, system, "search"),
        ),
        (Column("preparation, s", "from the module to what can be called"), lambda row, s: _preparation(measured, row, s)),
    ]
    there = [(row, s) for row in measured.rows for s in measured.systems if measured.records_of(row, s)]
    rows = [[entry(row, system) for _, entry in columns] for row, system in there]
    return Table([column for column, _ in columns], rows).without_empty_columns()


def remarks(measured: Measured) -> Table:
    """Cells that did not run, with the reason, and warnings about those that did."""
    rows = []
    for row in measured.rows:
        for system in measured.systems:
            records = measured.records_of(row, system)
            if not records:
                continue
            about = Entry(row[0]), Entry(str(row[1]), row[1]), _system(system)
            if records[0]["status"] != "ok":
                rows.append([*about, Entry(records[0]["status"]), Entry(records[0]["reason"] or DASH)])
            warnings = dict.fromkeys(warning for record in records for warning in record["warnings"])
            rows += [[*about, Entry("warning"), Entry(warning)] for warning in warnings]
    texts = Column("system", number=False), Column("what", number=False), Column("reason", number=False, words=True)
    return Table([Column("model", number=False), Column("batch"), *texts], rows)


def _system(label: str) -> Entry:
    """One whose schedule file is told by its name alone, as charts tell it: a path would push the numbers off the page."""
    text = short(label)
    return Entry(text, title=label if text != label else "")


def _status(measured: Measured, row: Row, system: str) -> Entry:
    record = measured.records_of(row, system)[0]
    return Entry(record["status"], title=record["reason"] or "")


def _number(value: float | None, form: str, title: str = "") -> Entry:
    return Entry(DASH) if value is None else Entry(format(value, form), value, title)


def _with_interval(value: float, low: float, high: float, form: str) -> Entry:
    return Entry(f"{value:{form}} [{low:{form}}, {high:{form}}]", value)


def _statistic(measured: Measured, row: Row, system: str, part: str, which: str | None = None) -> Entry:
    statistics = _part(measured, row, system, part).get("statistics") or {}
    statistics = (statistics.get(which) or {}) if which else statistics
    if not statistics:
        return Entry(DASH)
    form = ",.1f" if part == "throughput" else ".3f"
    low, high = statistics["ci95"]
    return _with_interval(statistics["median"], low, high, form)


def _latency(measured: Measured, row: Row, system: str, clock: str, which: str) -> Entry:
    statistics = (_part(measured, row, system, "latency").get("statistics") or {}).get(clock) or {}
    return _number(statistics.get(which), ".3f")


def _speedup(measured: Measured, row: Row, system: str, baseline: str) -> Entry:
    found = measured.over(row, system, baseline)
    if found is None:
        return Entry(DASH)
    entry = _with_interval(found.ratio, found.low, found.high, ".2f")
    return entry if found.in_turn else replace(entry, text=f"{entry.text} *")


def _over_path(measured: Measured, row: Row, system: str) -> Entry:
    limits = limits_of(measured, row)
    statistics = (_part(measured, row, system, "latency").get("statistics") or {}).get("host")
    if limits is None or not statistics:
        return Entry(DASH)
    title = f"critical path {limits[0]:.3f} ms, busy time {limits[1]:.3f} ms"
    return _number(statistics["median"] / limits[0], ".2f", title)


def _memory(measured: Measured, row: Row, system: str) -> Entry:
    size = _part(measured, row, system, "memory").get("peak_bytes")
    return _number(None if size is None else size / 2**20, ",.1f")


def _sm_efficiency(measured: Measured, row: Row, system: str, source: str) -> Entry:
    found = _part(measured, row, system, "sm_efficiency")
    value = found.get("value") if found.get("source") == source else None
    return _number(None if value is None else 100 * value, ".1f")


def _error(measured: Measured, row: Row, system: str) -> Entry:
    return _number(_part(measured, row, system, "correctness").get("relative_error"), ".1e")


def _schedule(measured: Measured, row: Row, system: str, what: str) -> Entry:
    schedule = _part(measured, row, system, "schedule")
    if what != "search":
        return _number(schedule.get(what), ",d")
    seconds = (schedule.get("search") or {}).get("seconds")
    return _number(None if seconds is None else seconds * 1e3, ",.2f")


def _preparation(measured: Measured, row: Row, system: str) -> Entry:
    record = measured.record(row, system, "preparation_s")
    return _number(record.get("preparation_s") if record is not None and record["status"] == "ok" else None, ",.2f")


def _part(measured: Measured, row: Row, system: str, part: str) -> dict[str, Any]:
    """A measurement of a cell that is ok, {} where there is none: what an incorrect system did has no speed."""
    record: Record | None = measured.record(row, system, part)
    return record.get(part) or {} if record is not None and record["status"] == "ok" else {}


def _commit(record: Record) -> str:
    environment_ = record["environment"]
    commit = environment_.get("commit") or ""
    return commit[:12] + (" and changes" if commit and environment_.get("modified") else "")


def _counts(records: Iterable[Record]) -> str:
    statuses = [record["status"] for record in records]
    return ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(sorted(statuses)))
