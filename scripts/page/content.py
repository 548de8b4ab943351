"""The report's tables for the records of one setting: the environment, a row for each cell, and what did not run."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TypeAlias, TypeVar

import conf
from results.cell import Choice
from results.comparison import margin
from results.environment import Environment
from results.limits import Limits
from results.occupation import SmEfficiency
from results.quantity import Measured, Quantity
from results.record import Record
from results.schedule import AFTER, BEFORE, Search, gained_in_whole
from results.selection import Row, Selection, latency_of, quantity_of
from results.statistics import Statistics
from scripts.charts.limits import limits_by_row
from scripts.charts.sm_efficiency import from_source
from scripts.charts.style import short
from scripts.commits import code_state
from scripts.table import DASH, Column, Entry, Made, Table, made, table

Part = TypeVar("Part")
Place: TypeAlias = tuple[Row, Choice]
Cells: TypeAlias = Made[Place]

CALLS = "calls"  # the table of cells whose calls are timed


def environment(measured: Selection) -> list[tuple[str, str]]:
    """Where and with what the records were measured: name and value, several values where they differ."""
    records = measured.records
    places = [record.environment for record in records]

    def values(read: Callable[[Environment], object]) -> str:
        return ", ".join(sorted({str(value) for place in places if (value := read(place)) is not None}))

    def library(name: str) -> str:
        return f"{name} {values(lambda place: place.libraries.get(name))}"

    def settings(place: Environment) -> str:
        return " ".join(f"{name}={value}" for name, value in place.settings.items())

    memory = sorted({place.gpu_memory_bytes for place in places if place.gpu_memory_bytes is not None})
    throttled = {reason for place in places if place.clocks is not None for reason in place.clocks.throttled}
    when = sorted(record.when[:10] for record in records)
    numbers = sorted({place.cudnn for place in places if place.cudnn})
    cudnn = ", ".join(f"{n // 10000}.{n // 100 % 100}.{n % 100}" for n in numbers)  # 91900 is 9.19.0
    clocks = sorted({place.clocks.sm_mhz for place in places if place.clocks is not None})
    drivers = values(lambda place: place.driver), values(lambda place: place.cuda), cudnn
    rows = [
        ("GPU", values(lambda place: place.gpu)),
        ("GPU memory", ", ".join(f"{size / 2**30:.0f} GiB" for size in memory)),
        ("multiprocessors", values(lambda place: place.sm_count)),
        ("SM clock when measured", " to ".join(map(str, sorted({clocks[0], clocks[-1]}))) + " MHz" if clocks else ""),
        ("throttled by", ", ".join(sorted(throttled))),
        ("driver, CUDA, cuDNN", ", ".join(filter(None, drivers))),
        ("CPU", values(lambda place: place.cpu)),
        ("cores", values(lambda place: place.cores)),
        ("threads", values(lambda place: place.threads)),
        ("host", values(lambda place: place.host)),
        ("system", values(lambda place: place.os)),
        ("Python", values(lambda place: place.python)),
        ("libraries", ", ".join(map(library, sorted({name for place in places for name in place.libraries})))),
        ("settings of the shell", ", ".join(sorted({settings(place) for place in places} - {""}))),
        ("precision, layout", records[0].cell.conditions.arithmetic),
        ("commit", ", ".join(sorted({_commit(place) for place in places} - {""}))),
        ("measured", when[0] if when[0] == when[-1] else f"{when[0]} to {when[-1]}"),
        ("systems without a file of conf/system", _without_a_file(measured)),
        ("two processes of one system differ by", _margins(measured)),
        ("records", _counts(records)),
    ]
    return [(name, value) for name, value in rows if value]


def cells(measured: Selection, baseline: Choice) -> dict[str, Table]:
    """A row for each cell, in the order of models; an incorrect system has a status and no speed.

    Quantities of measurements without a type of their own have a column each, by what they say of themselves. Where no cell
    that has them was called alone, as none of a served model is, the measurement has a table of its own.

    Returns:
        CALLS, of the calls and what was measured beside them, and the other tables by their measurements' names. A table
        without a row is not there.
    """
    limits = limits_by_row(measured)
    places = [(row, s) for row in measured.rows for s in measured.systems if measured.records_of(row, s)]
    examples = measured.quantities()
    quantities: dict[str, list[str]] = {}
    for name in examples:
        quantities.setdefault(name.partition(".")[0], []).append(name)
    called = [place for place in places if measured.part(*place, _of_calls)]
    alone = {}
    for measurement in quantities:
        having = [place for place in places if measured.part(*place, partial(_described, measurement))]
        if not set(having) & set(called):
            alone[measurement] = having
    elsewhere = {place for having in alone.values() for place in having}

    def of(heading: str, part: Callable[[Record], Part | None], entry: Callable[[Part], Entry], meaning: str = "") -> Cells:
        """A column about a part of the newest record that has it."""

        def make(place: Place) -> Entry:
            value = measured.part(*place, part)
            return Entry(DASH) if value is None else entry(value)

        return made(heading, make, meaning)

    def over(place: Place) -> Entry:
        ratio = measured.over(*place, baseline)
        if ratio is None:
            return Entry(DASH)
        entry = _with_interval(ratio.ratio, ratio.low, ratio.high, ".2f")
        return entry if ratio.is_in_turn else replace(entry, text=f"{entry.text} *")

    def over_path(place: Place) -> Entry:
        row, system = place
        latency = measured.part(row, system, latency_of)
        if latency is None or row not in limits:
            return Entry(DASH)
        path, busy = limits[row].critical_path_ms, limits[row].busy_ms
        return _number(latency.host.median / path, ".2f", f"critical path {path:.3f} ms, busy time {busy:.3f} ms")

    def quantity(name: str) -> Cells:
        example, read = examples[name], quantity_of(name)
        meaning = f"{name}; {'more' if example.is_more_better else 'less'} is better"
        return of(example.title, read, _quantity, meaning)

    about: list[Cells] = [
        made("model", lambda place: place[0][0], number=False),
        made("batch", lambda place: Entry(str(place[0][1]), place[0][1])),
        made("system", lambda place: _system(place[1]), number=False),
        made("status", lambda place: _status(measured.records_of(*place)[0]), number=False),
    ]
    error = of(
        "error",
        lambda record: record.correctness.relative_error if record.correctness else None,
        lambda error: _number(error, ".1e"),
        "largest relative error against eager in higher precision",
    )
    preparation = of(
        "preparation, s",
        lambda record: record.preparation_s,
        lambda seconds: _number(seconds, ",.2f"),
        "from the module to what can be called",
    )
    calls: list[Cells] = [
        of(
            "latency, ms",
            latency_of,
            lambda latency: _statistics(latency.host, ".3f"),
            "host time of a call with a synchronisation: median and 95 % interval",
        ),
        of("p99, ms", latency_of, lambda latency: _number(latency.host.p99, ".3f"), "99th percentile of the same"),
        of(
            "device, ms",
            _device_time,
            lambda device: _number(device.median, ".3f"),
            "time between events on the GPU, median",
        ),
        made(
            f"over {baseline}",
            over,
            "speedup from interleaved rounds: median and 95 % interval; * from latencies, each system's measured alone",
        ),
        made("over path", over_path, "latency over the critical path of the model's own operators, whatever a system runs"),
        of(
            "bounded by",
            lambda record: record.limits.executed if record.limits and record.limits.executed.bounds else None,
            _bound,
            "the largest of critical path, SM area, memory traffic and launch of the operators that the system runs",
        ),
        of(
            "samples/s",
            lambda record: record.throughput,
            lambda throughput: _statistics(throughput.statistics, ",.1f"),
            "throughput, back to back",
        ),
        of(
            "MiB",
            lambda record: record.memory,
            lambda memory: _number(memory.peak_bytes / 2**20, ",.1f"),
            "peak memory over weights and inputs",
        ),
        of("SM, counted", from_source("counters"), _percent, "SM efficiency from hardware counters, %"),
        of(
            "SM, estimated",
            from_source("estimated"),
            _percent,
            "SM efficiency estimated from the kernels' timeline, %: not comparable with the counted",
        ),
        error,
        of("streams", lambda record: record.schedule, lambda schedule: _number(schedule.streams, ",d")),
        of("waits", lambda record: record.schedule, lambda schedule: _number(schedule.waits, ",d")),
        of("search, ms", _timed_search, lambda search: _number(1e3 * (search.seconds or 0), ",.2f"), "time of the search"),
        of(
            "learning, s",
            lambda record: record.learning_s,
            lambda seconds: _number(seconds, ",.2f"),
            "searching, tuning, profiling and choosing, in a process of their own",
        ),
        preparation,
    ]
    beside = [quantity(name) for measurement, names in quantities.items() if measurement not in alone for name in names]
    tables = {CALLS: table([*about, *calls, *beside], [place for place in places if place not in elsewhere])}
    for measurement, having in alone.items():
        tables[measurement] = table([*about, *map(quantity, quantities[measurement]), error, preparation], having)
    return {name: made.without_empty_columns() for name, made in tables.items() if made.rows}


def gains(measured: Selection) -> Table:
    """What decisions gained in the whole, for each cell whose scheduler measured that, in the order in which it took them.

    The last of a cell is of all of them together, both captured anew, where it was measured.
    """
    rows = []
    for row in measured.rows:
        for system in measured.systems:
            schedule = measured.part(row, system, lambda record: record.schedule)
            about = Entry(row[0]), Entry(str(row[1]), row[1]), _system(system)
            for decision in gained_in_whole(schedule.decisions if schedule is not None else ()):
                times = [decision.milliseconds[name] or 0.0 for name in (BEFORE, AFTER)]
                numbers = *(_number(ms, ".3f") for ms in times), _number(decision.gain or 0.0, ".3f")
                rows.append([*about, Entry(decision.pattern), *numbers])
    texts = Column("system", number=False), Column("change", number=False, words=True)
    numbers_of = (
        Column("before, ms", "of a call, in turn with the next"),
        Column("after, ms"),
        Column("gain", "before over after"),
    )
    return Table([Column("model", number=False), Column("batch"), *texts, *numbers_of], rows)


def remarks(measured: Selection) -> Table:
    """Cells that did not run, with the reason, and warnings about those that did."""
    rows = []
    for row in measured.rows:
        for system in measured.systems:
            records = measured.records_of(row, system)
            if not records:
                continue
            about = Entry(row[0]), Entry(str(row[1]), row[1]), _system(system)
            if not records[0].is_ok:
                rows.append([*about, Entry(records[0].status), Entry(records[0].reason or DASH)])
            sentences = dict.fromkeys(warning.sentence for record in records for warning in record.warnings)
            rows += [[*about, Entry("warning"), Entry(sentence)] for sentence in sentences]
    texts = Column("system", number=False), Column("what", number=False), Column("reason", number=False, words=True)
    return Table([Column("model", number=False), Column("batch"), *texts], rows)


def _of_calls(record: Record) -> object:
    """Anything that was measured of calls."""
    return record.latency or record.throughput or record.memory or record.sm_efficiency


def _described(measurement: str, record: Record) -> Measured | None:
    return record.described.get(measurement)


def _system(system: Choice) -> Entry:
    """A system with the name alone of its schedule file, as in charts: a path would push the numbers off the page."""
    text = short(system)
    return Entry(text, title=system.label if system.label != text else "")


def _status(record: Record) -> Entry:
    return Entry(record.status, title=record.reason or "")


def _number(value: float, form: str, title: str = "") -> Entry:
    return Entry(format(value, form), value, title)


def _with_interval(value: float, low: float, high: float, form: str) -> Entry:
    return Entry(f"{value:{form}} [{low:{form}}, {high:{form}}]", value)


def _statistics(statistics: Statistics, form: str) -> Entry:
    return _with_interval(statistics.median, *statistics.ci95, form)


def _quantity(quantity: Quantity) -> Entry:
    """A value to four digits, with its interval where it has one."""
    value = quantity.value or 0.0
    if quantity.low is None or quantity.high is None:
        return _number(value, ",.4g")
    return _with_interval(value, quantity.low, quantity.high, ",.4g")


def _bound(limits: Limits) -> Entry:
    bounds = [f"{name} {ms:.3f} ms" for name, ms in limits.bounds.items()]
    return Entry(bounds[0], next(iter(limits.bounds.values())), ", ".join(bounds))


def _percent(efficiency: SmEfficiency) -> Entry:
    return _number(100 * (efficiency.value or 0.0), ".1f")


def _device_time(record: Record) -> Statistics | None:
    return record.latency.device if record.latency is not None else None


def _timed_search(record: Record) -> Search | None:
    """The search of a schedule that says how long it took."""
    search = record.schedule.search if record.schedule is not None else None
    return search if search is not None and search.seconds is not None else None


def _without_a_file(measured: Selection) -> str:
    """What each system is whose name the records alone have, as one of a checkout: "NAME (checkout of nimble_fused)"."""
    systems = {record.cell.system for record in measured.records}
    others = sorted({(s.choice, s.name, s.get("runs")) for s in systems if s.choice not in conf.choices("system")}, key=str)
    return ", ".join(f"{choice} ({name}{f' of {runs}' if runs else ''})" for choice, name, runs in others)


def _margins(measured: Selection) -> str:
    """The A/A margins of the rows that have one."""
    by_row = [[record for s in measured.systems for record in measured.records_of(row, s)] for row in measured.rows]
    shares = [abs(one.ratio - 1) for records in by_row if (one := margin(records)) is not None]
    if not shares:
        return ""
    return f"{median(shares):.1%}" + (f", at most {max(shares):.1%} of {len(shares)} rows" if len(shares) > 1 else "")


def _commit(place: Environment) -> str:
    commit, modified = code_state(place)
    return (commit or "")[:12] + (" and changes" if commit and modified else "")


def _counts(records: Iterable[Record]) -> str:
    statuses = [record.status for record in records]
    return ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(sorted(statuses)))
