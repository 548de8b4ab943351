"""What traces come to: latencies and throughput by their definitions, and when a server keeps up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from results.serving import Iterations, ServedRequests
from results.statistics import describe
from runners.serving import metrics
from runners.serving.capacity import Tried
from runners.serving.traffic import Seen


def seen_of(due: list[float], tokens: list[tuple[float, ...]]) -> Seen:
    count = len(due)
    requests = ServedRequests(tuple(due), tuple(due), (10,) * count, tuple(map(len, tokens)), tuple(tokens))
    iterations = Iterations((0.0, 1.0), (1.0, 4.0), (1, 3), (8, 2), (4, 2), (5, 10))
    return Seen(requests, iterations, (0.5,) * count)


def test_metrics_are_those_of_their_definitions() -> None:
    seen = seen_of([0.0, 1.0], [(2.0, 3.0, 6.0), (4.0,)])
    assert metrics.latencies_ms(seen) == {
        "ttft": [2000.0, 3000.0],
        "tpot": [2000.0],
        "itl": [1000.0, 3000.0],
        "end_to_end": [6000.0, 3000.0],
        "normalized": [2000.0, 3000.0],
        "queued": [500.0, 500.0],
    }
    made = {q.name: q.value for q in metrics.quantities([seen], [True], num_slots=20, slo_ms=2500.0)}
    assert made["request_throughput"] == 2 / 6 and made["output_throughput"] == 4 / 6 and made["total_throughput"] == 24 / 6
    assert made["goodput"] == 1 / 6 and made["normalized_p50_ms"] == 2500.0 and made["itl_p90_ms"] == pytest.approx(2800.0)
    assert made["batch_size"] == (1 * 1 + 3 * 3) / 4 and made["slot_use"] == pytest.approx((5 * 1 + 10 * 3) / 4 / 20)
    assert made["vain_tokens"] == pytest.approx(1 - 6 / 10) and made["iterations"] == 2 and made["iteration_ms"] == 2000.0


def test_several_traces_have_medians_with_intervals() -> None:
    all_seen = [seen_of([0.0, 1.0], [(2.0, 3.0), (4.0, end)]) for end in (5.0, 6.0, 8.0)]
    made = {q.name: q for q in metrics.quantities(all_seen, [True] * 3, 20, 0.0)}
    throughput = made["request_throughput"]
    assert throughput.value == 2 / 6 and (throughput.low, throughput.high) == describe((2 / 5, 2 / 6, 2 / 8)).ci95
    assert "goodput" not in made


def test_answers_in_one_piece_have_no_gaps_between_tokens() -> None:
    """As those of a static batch: a gap of 0 would make it look best."""
    made = {q.name: q for q in metrics.quantities([seen_of([0.0], [(2.0, 2.0, 2.0)])], [True], 20, 0.0)}
    for name in ("itl_p50_ms", "tpot_p99_ms"):
        assert made[name].value is None and made[name].reason == metrics.WHOLE
    assert made["ttft_p50_ms"].value == 2000.0


def test_an_unstable_trace_has_no_latency() -> None:
    """Its latencies grow with its length; a stable one's do not."""
    due = [float(i) for i in range(100)]
    stable = seen_of(due, [(moment + 3.0,) for moment in due])
    unstable = seen_of(due, [(2 * moment + 3.0,) for moment in due])
    assert metrics.is_stable(stable.requests, 0) and not metrics.is_stable(unstable.requests, 0)
    assert metrics.is_stable(unstable.requests, concurrency=4)
    made = {q.name: q for q in metrics.quantities([stable, unstable], [True, False], 20, 0.0)}
    assert made["ttft_p50_ms"].value is None and made["ttft_p50_ms"].reason == metrics.UNSTABLE
    assert made["request_throughput"].value is not None


@pytest.mark.parametrize("count", [2, 5, 12, 40])
def test_a_server_that_is_hardly_used_is_stable_however_short_the_trace(count: int) -> None:
    due = [float(i) for i in range(count)]
    idle = seen_of(due, [(moment + 0.4,) for moment in due])
    assert metrics.is_stable(idle.requests, 0)
    if count >= 12:
        busy = seen_of(due, [(2 * moment + 0.4,) for moment in due])
        assert not metrics.is_stable(busy.requests, 0)


@given(st.integers(100, 400), st.floats(0.3, 3.0), st.integers(0, 99), st.booleans())
def test_what_a_queue_before_one_server_comes_to_tells_stable_from_unstable(
    count: int, load: float, seed: int, is_rising: bool
) -> None:
    """The oracle: a request takes `load` seconds, one after another, and one comes a second, later ones perhaps sooner."""
    assume(not 0.75 < load < 1.3)
    gaps = np.random.default_rng(seed).gamma(4.0, 0.25, count)  # bursts alone pile requests up in a short trace
    if is_rising and load < 1:
        gaps *= np.linspace(2.0, 1.0, count)  # a day's load: fewer at first, and never more than the server takes
    due, free, ends = np.cumsum(gaps), 0.0, []
    for moment in due:
        free = max(free, float(moment)) + load
        ends.append((free,))
    assert metrics.is_stable(seen_of([float(d) for d in due], ends).requests, 0) is (load < 1)


@given(st.integers(0, 999))
def test_requests_that_happen_to_be_longer_late_are_no_growth(seed: int) -> None:
    """A hundred requests in 25 seconds, of up to 128 tokens that take 36 ms each, from a server that is never behind."""
    generator = np.random.default_rng(seed)
    due = np.cumsum(generator.exponential(0.25, 100))
    lengths = generator.integers(1, 129, 100)
    ends = [tuple(moment + 0.036 * np.arange(1, length + 1)) for moment, length in zip(due, lengths, strict=True)]
    assert metrics.is_stable(seen_of([float(d) for d in due], ends).requests, 0)
    behind = [tuple(token + 0.2 * i for token in tokens) for i, tokens in enumerate(ends)]
    assert not metrics.is_stable(seen_of([float(d) for d in due], behind).requests, 0)


def test_lengths_that_grow_as_the_time_does_hide_no_growth() -> None:
    due = [float(i) for i in range(40)]
    ends = [tuple(moment + 0.01 * (i + 1) + 0.08 * moment for i in range(int(moment) + 1)) for moment in due]
    assert not metrics.is_stable(seen_of(due, ends).requests, 0)


def test_three_steady_requests_tell_nothing() -> None:
    """Three points lie on one plane, and one that comes early would tilt it."""
    ends = [
        tuple(moment + 0.03 * (i + 1) for i in range(n))
        for moment, n in zip((0.0, 1.0, 1.94, 3.0), (10, 21, 30, 9), strict=True)
    ]
    assert metrics.is_stable(seen_of([0.0, 1.0, 2.0, 3.0], ends).requests, 0)


def test_requests_that_nearly_all_come_before_the_first_is_finished_are_unstable() -> None:
    """A large batch takes them all, so no latency is longer than another. One request alone waits for nobody."""
    due = [i / 120 for i in range(100)]
    assert not metrics.is_stable(seen_of(due, [(moment + 1.5,) for moment in due]).requests, 0)
    assert metrics.is_stable(seen_of(due, [(moment + 0.25,) for moment in due]).requests, 0)
    assert not metrics.is_stable(seen_of([0.0] * 60, [(1.0,)] * 60).requests, 0)
    assert metrics.is_stable(seen_of([0.0], [(1.0,)]).requests, 0)


def test_a_load_that_rises_is_stable_where_latencies_stay() -> None:
    """Azure's trace begins slowly, so more requests are unfinished at its end than at its beginning."""
    due = [float(i) for i in range(30)] + [30 + i / 10 for i in range(300)]
    assert metrics.is_stable(seen_of(due, [(moment + 6.0,) for moment in due]).requests, 0)


def test_how_many_requests_are_unfinished_is_the_mean_over_the_trace() -> None:
    tried = Tried.of(0.5, [seen_of([0.0, 1.0], [(2.0, 3.0, 6.0), (4.0,)])])
    assert tried.num_unfinished == pytest.approx((6 + 3) / 6) and tried.throughput == 2 / 6
