"""runner=capacity: the largest rate that keeps an SLO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_records import record as made_record
from serving_cells import OPTIONS, of_cell
from test_serving_metrics import seen_of

from results.cell import choose
from results.quantity import Measured
from runners.checks import BadRequest
from runners.measurements.registry import plan
from runners.serving import metrics, traffic
from runners.serving.capacity import Tried, largest_rate
from runners.serving.session import ServingSession
from runners.serving.traffic import Seen
from runners.serving.workload import Arrival
from systems.base import BadOption
from systems.serving.system import Server


@given(st.floats(0.01, 500), st.floats(0.1, 50), st.integers(1, 5))
def test_the_largest_rate_is_found_to_a_fraction_of_an_octave(limit: float, first: float, steps: int) -> None:
    """Of a server that is unstable far beyond its limit, and slow just beyond it."""

    def try_rate(rate: float) -> Tried:
        return Tried(rate, None if rate > 2 * limit else 5.0 if rate <= limit else 15.0, rate, rate / limit)

    best, tried = largest_rate(try_rate, 10.0, first, steps)
    if first * 2**-10 < limit < first * 2**9:
        assert best is not None and best.rate <= limit <= best.rate * 2 ** (1 / 2**steps) * 1.000001
        assert len({t.rate for t in tried}) == len(tried)
    assert best is None or best.keeps(10.0)


def test_a_rate_is_looked_for_until_requests_are_alone() -> None:
    """Of a server that is too slow for a request alone: a lower rate would take longer and say the same."""

    def try_rate(rate: float) -> Tried:
        return Tried(rate, 15.0, rate, rate / 8)

    best, tried = largest_rate(try_rate, 10.0, 4.0, 3)
    assert best is None and [t.rate for t in tried] == [4.0, 2.0, 1.0, 0.5]
    assert largest_rate(try_rate, 20.0, 0.25, 0)[1][-1].rate == 0.25 * 2**10  # upwards it goes on


def test_a_rate_at_which_requests_pile_up_keeps_no_slo(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = seen_of([0.0, 1.0], [(2.0, 3.0, 6.0), (4.0,)])
    for is_stable in (True, False):
        monkeypatch.setattr(metrics, "is_stable", lambda requests, warm_up, is_stable=is_stable: is_stable)
        tried = Tried.of(0.5, [seen])
        assert tried.normalized_ms == (pytest.approx((6e3 / 3 + 3e3) / 2) if is_stable else None)
        assert tried.keeps(2500.0) is is_stable and not tried.keeps(2499.0)


def test_a_rate_keeps_an_slo_where_the_median_of_stable_traces_does() -> None:
    """Of three seeds one may be slower, and none unstable."""

    def answered(latency_s: float) -> Seen:
        return seen_of([0.0, 100.0], [(latency_s,), (100.0 + latency_s,)])

    tried = Tried.of(0.5, [answered(seconds) for seconds in (9.0, 1.0, 2.0)])
    assert tried.trace_ms == (9000.0, 1000.0, 2000.0) and tried.normalized_ms == 2000.0 and tried.keeps(2000.0)
    assert tried.throughput == 2 / 102 and tried.num_unfinished == 4 / 102
    tried = Tried.of(0.5, [answered(1.0), answered(200.0), answered(1.0)])
    assert tried.trace_ms == (1000.0, None, 1000.0) and tried.normalized_ms is None and not tried.keeps(1e6)


def test_the_slo_is_twice_what_a_request_takes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    session = of_cell("capacity", ServingSession, rate=5.0, requests=4, steps=1)
    (measurement,) = (m for m in plan(session.cell.runner).measurements if m.name == "capacity")
    monkeypatch.setattr(session, "try_rate", lambda rate: Tried(rate, 1.0 if rate < 7 else 1e9, rate, rate))
    monkeypatch.setattr(session, "alone_ms", lambda prompt, new: prompt + new / 100)
    part = measurement.measure(session)
    assert isinstance(part, Measured)
    assert [quantity.value for quantity in part.quantities] == [5.0, 2 * 128.32, 10.0] and part.samples[
        "unstable_rate"
    ] == ()
    assert part.samples["stable_rate"] == pytest.approx((5.0, 10.0, 50**0.5)) and part.quantities[0].reason is None
    monkeypatch.setattr(measurement, "options", replace(measurement.options, slo_ms=50.0))  # type: ignore[type-var]
    part = measurement.measure(session)
    assert isinstance(part, Measured) and part.quantities[1].value == 50.0
    shown = replace(made_record(of=session.cell), measured={"capacity": part})
    assert [column.text(shown) for column in measurement.columns] == ["5", "50.0", "1.0"]
    assert [column.text(made_record()) for column in measurement.columns] == ["–", "–", "–"]
    monkeypatch.undo()
    assert session.alone_ms(6, 3) > 0 and session.try_rate(20.0).throughput > 0
    with pytest.raises(BadOption, match=r"^a request alone says .*: 128 prompt .* 256 positions; or say an SLO"):
        session.alone_ms(128, 300)
    few = of_cell("capacity", ServingSession, slots=100)
    with pytest.raises(BadOption, match=r"128 prompt tokens and 32 to generate are more than the 100 K/V slots"):
        measurement.__class__(few.cell.runner).measure(few)


def test_each_seed_has_a_trace_at_each_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    session = of_cell("capacity", ServingSession, repeats=3, steps=1, slo_ms=1e6)
    (measurement,) = (m for m in plan(session.cell.runner).measurements if m.name == "capacity")
    served: list[tuple[float, int]] = []  # when the second request of a trace came, and the seed

    def run(server: Server, trace: Sequence[Arrival], prompts: str, *others: int) -> Seen:
        span_s = trace[-1].due_s
        seed = int(prompts.split()[0])
        served.append((trace[1].due_s, seed))
        assert span_s == pytest.approx(7 / float(prompts.split()[-1]), rel=1e-3)
        is_late = seed == 1 and len(served) > 3
        return seen_of([a.due_s for a in trace], [(a.due_s + span_s * (1 + seed) / (2 if is_late else 200),) for a in trace])

    monkeypatch.setattr(traffic, "run", run)
    part = measurement.measure(session)
    assert isinstance(part, Measured)
    assert [seed for _, seed in served] == [0, 1, 2] * len(set(part.samples["stable_rate"] + part.samples["unstable_rate"]))
    assert len({due_s for due_s, _ in served[:3]}) == 3  # each seed has arrivals of its own
    assert part.samples["stable_rate"] == (50.0,) and part.samples["trace_rate"][:3] == (50.0,) * 3
    assert part.samples["unstable_trace_rate"] == part.samples["unstable_rate"]
    assert part.samples["normalized_ms"] == (sorted(part.samples["trace_ms"][:3])[1],)


def test_a_capacity_takes_no_other_load() -> None:
    for changed in ({"concurrency": 3}, {"steps": 0}):
        with pytest.raises(BadRequest):
            plan(choose("runner", "capacity", **OPTIONS | {"steps": 1} | changed))
