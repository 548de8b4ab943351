"""Tables of what serves: an engine's iterations, requests at once and at a rate, real traces beside simulated ones."""

from collections.abc import Callable, Iterable, Sequence
from statistics import median

import numpy as np

from results.agreement import Point
from results.latencies import latency_ms, request_throughput
from results.quantity import Quantity
from results.record import Record

from .agreement import points
from .commits import code_state
from .table import DASH, Made, Source, Table, made, table
from .tables import needed

COMMIT_LETTERS = 7


def iterations(records: Iterable[Record]) -> Table:
    """Batches of equal requests on the engine alone; a row a record of runner=engine."""

    def number(record: Record, name: str) -> float:
        return needed(needed(needed(record.measured.get("engine")).quantity(name)).value)

    engines = [record for record in records if record.is_ok and "engine" in record.measured]
    columns: Sequence[Made[Record]] = [
        *_model_column(engines, lambda record: record),
        made("system", lambda record: record.cell.system.label, number=False),
        made("requests", lambda record: str(record.cell.batch)),
        made("tokens in, out", _asked),
        made("batch ms", lambda record: f"{number(record, 'batch_ms'):.1f}"),
        made("prompts, TFLOP/s", lambda record: f"{number(record, 'prompt_tflops'):.0f}"),
        made("increment iteration ms", lambda record: f"{number(record, 'increment_ms'):.2f}"),
        made("of it the GPU idles", lambda record: f"{number(record, 'idle_share'):.1%}"),
        made("commit", _commit, number=False),
    ]

    def place(record: Record) -> tuple[int, int, str]:
        return _layers(record), record.cell.batch, record.cell.system.label

    return table(columns, sorted(engines, key=place))


def at_once(records: Iterable[Record]) -> Table:
    """Requests that come at once; a row a record of runner=serving."""

    def number(record: Record, name: str) -> float:
        return needed(_quantity(record, name).value)

    def throughput(record: Record) -> str:
        values = [request_throughput(trace.requests) for trace in needed(record.serving).traces]
        each = f" ({', '.join(f'{value:.1f}' for value in values)})" if len(values) > 1 else ""
        return f"{median(values):.1f}{each}"

    columns: Sequence[Made[Record]] = [
        made("system", lambda record: record.cell.system.label, number=False),
        made("at once", lambda record: _option(record, "concurrency")),
        made("largest batch", lambda record: str(record.cell.system.options["max_batch_size"])),
        made("tokens in, out", lambda record: ", ".join(_lengths(record)), number=False),
        made("requests a second (of each trace)", throughput),
        made("tokens a second", lambda record: f"{number(record, 'output_throughput'):,.0f}"),
        made(
            "between tokens ms, p50, p99",
            lambda record: ", ".join(f"{number(record, f'itl_p{n}_ms'):.0f}" for n in (50, 99)),
        ),
        made("in vain", lambda record: f"{number(record, 'vain_tokens'):.0%}"),
        made("commit", _commit, number=False),
    ]
    served = [record for record in records if record.is_ok and record.serving and record.cell.runner.get("concurrency")]

    def place(record: Record) -> tuple[int, int, float]:
        size = int(str(record.cell.system.options["max_batch_size"]))
        return -int(_option(record, "concurrency")), size, -number(record, "request_throughput")

    return table(columns, sorted(served, key=place))


def at_a_rate(records: Iterable[Record]) -> Table:
    """Requests that come one by one; a row a record of runner=serving, with percentiles of every sample.

    A record with an unstable trace has no latency, but a dash.
    """

    def percentiles(record: Record, latency: str, *shares: int, digits: int = 0) -> str:
        traces = needed(record.serving).traces
        if not all(trace.is_stable for trace in traces):
            return DASH
        samples_ms = [value for trace in traces for value in latency_ms(trace.requests, latency)]
        return ", ".join(f"{value:.{digits}f}" for value in np.percentile(samples_ms, shares))

    served = [record for record in records if record.is_ok and record.serving and not record.cell.runner.get("concurrency")]
    columns: Sequence[Made[Record]] = [
        *_model_column(served, lambda record: record),
        made("system", lambda record: record.cell.system.label, number=False),
        made("requests", lambda record: _option(record, "requests")),
        made("tokens in, out", lambda record: ", ".join(_lengths(record)), number=False),
        made("req/s that come", lambda record: f"{_come(record):.1f}"),
        made("served", lambda record: f"{needed(_quantity(record, 'request_throughput').value):.2f}"),
        made("first token ms, p50, p99", lambda record: percentiles(record, "ttft", 50, 99)),
        made("a token ms, p50", lambda record: percentiles(record, "tpot", 50, digits=1)),
        made("between tokens ms, p50, p99", lambda record: percentiles(record, "itl", 50, 99, digits=1)),
        made("commit", _commit, number=False),
    ]
    return table(columns, sorted(served, key=lambda record: (_lengths(record), _come(record), record.cell.system.label)))


def at_an_slo(records: Iterable[Record]) -> Table:
    """The largest rate of arrivals that keeps an SLO; a row a record of runner=capacity."""

    def number(record: Record, name: str) -> float:
        return needed(needed(needed(record.measured.get("capacity")).quantity(name)).value)

    def at_it(record: Record) -> float:
        samples = record.measured["capacity"].samples
        return samples["normalized_ms"][samples["stable_rate"].index(number(record, "slo_rate"))]

    def beyond(record: Record) -> float | None:
        """The least rate tried that does not keep it."""
        samples = record.measured["capacity"].samples
        tried = zip(samples["stable_rate"], samples["normalized_ms"], strict=True)
        rates = [*samples["unstable_rate"], *(rate for rate, ms in tried if ms > number(record, "slo_ms"))]
        return min(rates, default=None)

    columns: Sequence[Made[Record]] = [
        made("model", lambda record: record.cell.model.label, number=False),
        made("system", lambda record: record.cell.system.label, number=False),
        made("SLO, normalized ms", lambda record: f"{number(record, 'slo_ms'):.1f}"),
        made("largest req/s that keep it", lambda record: f"{number(record, 'slo_rate'):.1f}"),
        made("least tried that do not", lambda record: f"{needed(beyond(record)):.1f}"),
        made("normalized ms at the largest", lambda record: f"{at_it(record):.1f}"),
        made("requests a trace", lambda record: _option(record, "requests")),
        made("commit", _commit, number=False),
    ]
    return table(columns, [record for record in records if record.is_ok and "capacity" in record.measured])


def _quantity(record: Record, name: str) -> Quantity:
    return needed(next((q for q in needed(record.serving).quantities if q.name == name), None))


def _come(record: Record) -> float:
    """Requests a second that come, over all of the first trace."""
    due_s = needed(record.serving).traces[0].requests.due_s
    return len(due_s) / due_s[-1]


def _asked(record: Record) -> str:
    """Tokens in and out of a request, as the options have them."""
    return f"{_option(record, 'prompt_tokens')}, {_option(record, 'new_tokens')}"


def _lengths(record: Record) -> tuple[str, str]:
    """Tokens of a prompt and of an answer: what was asked for, or what a trace file has, without its name."""
    if record.cell.runner.get("trace") is None:
        return _option(record, "prompt_tokens"), _option(record, "new_tokens")
    requests = needed(record.serving).traces[0].requests
    ends = [(min(counts), max(counts)) for counts in (requests.prompt_tokens, requests.max_new_tokens)]
    return f"{ends[0][0]}-{ends[0][1]}", f"{ends[1][0]}-{ends[1][1]}"


def both_clocks(records: Iterable[Record], costs: str | None = None) -> Table:
    """Traces for real and under a virtual clock; a row a rate of a record of runner=simulation.

    costs: committed ones, with which the same traces are simulated once more; None for no such columns.
    """
    again = {(point.record, point.rate): point for point in (points(costs) if costs is not None else ())}

    def number(row: tuple[Record, float], what: str) -> float:
        record, rate = row
        return needed(needed(needed(record.measured.get("simulation")).quantity(f"{what}_at_{rate:g}")).value)

    def simulated(row: tuple[Record, float], name: str) -> str:
        return _share(number(row, f"{name}_simulated") / number(row, f"{name}_real") - 1)

    def point(row: tuple[Record, float]) -> Point:
        return needed(again.get((row[0].id, row[1])))  # of another model or split there is none

    def throughput_again(row: tuple[Record, float]) -> str:
        return _share(point(row).throughput_error)

    def latency_again(row: tuple[Record, float]) -> str:
        return _share(needed(point(row).latency_error))

    clocked = [record for record in records if record.is_ok and "simulation" in record.measured]
    columns: Sequence[Made[tuple[Record, float]]] = [
        *_model_column(clocked, lambda row: row[0]),
        made("system", lambda row: row[0].cell.system.label, number=False),
        made("largest batch", lambda row: str(row[0].cell.system.options["max_batch_size"])),
        *([made("tokens in, out", lambda row: _asked(row[0]), number=False)] if len({*map(_asked, clocked)}) > 1 else []),
        made("req/s that come", lambda row: f"{row[1]:g}"),
        made("served, real", lambda row: f"{number(row, 'throughput_real'):.2f}"),
        made("simulated", lambda row: simulated(row, "throughput")),
        *([made(f"with {costs}", throughput_again)] if costs is not None else []),
        made("normalized ms, real", lambda row: f"{number(row, 'normalized_real'):.2f}"),
        made("simulated", lambda row: simulated(row, "normalized")),
        *([made(f"with {costs}", latency_again)] if costs is not None else []),
        made("commit", lambda row: _commit(row[0]), number=False),
    ]

    def place(row: tuple[Record, float]) -> tuple[int, str, int, str, float]:
        system = row[0].cell.system
        return _layers(row[0]), system.choice, int(str(system.options["max_batch_size"])), _asked(row[0]), row[1]

    rows = [(record, rate) for record in clocked for rate in sorted({*record.measured["simulation"].samples["rate"]})]
    return table(columns, sorted(rows, key=place))


def _share(difference: float) -> str:
    """ "+1.0%"; never "-0.0%"."""
    return f"{round(difference, 3) + 0.0:+.1%}"


def _model_column(records: Sequence[Record], record_of: Callable[[Source], Record]) -> list[Made[Source]]:
    """What names a row's model, where records have several."""
    several = len({record.cell.model.label for record in records}) > 1
    return [made("model", lambda row: record_of(row).cell.model.label, number=False)] if several else []


def _layers(record: Record) -> int:
    """Of its model: small ones come first."""
    return int(str(record.cell.model.options["layers"]))


def _commit(record: Record) -> str:
    """Of the code that a record is of: rows of one commit compare."""
    return needed(code_state(record.environment)[0])[:COMMIT_LETTERS]


def _option(record: Record, key: str) -> str:
    return str(record.cell.runner.options[key])
