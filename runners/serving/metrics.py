"""What a client's times come to: quantities of all traces, and whether a trace is stable."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from results import latencies
from results.quantity import Quantity
from results.serving import Iterations, ServedRequests
from results.statistics import describe

from .traffic import Seen

LEAST_LATENCIES = 3  # mean ones that a trace lasts, at least
LEAST_STEADY = 4  # requests: three lie on one plane, whatever they are
STEADY = (0.1, 0.9)  # of the arrivals: who comes before and after does not count for stability
MOST_GROWTH = 0.05  # of the time that passes: latencies of a stable trace grow no more, or by a gap between two arrivals
UNSTABLE = "requests came faster than they were finished, or too few to tell: a latency would say how long the trace was"
WHOLE = "no answer came in more than one piece"
UNSEEN = "a peer does not say what its iterations are"
PERCENTILES = (50, 90, 99)
LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "end_to_end": "end-to-end latency",
    "normalized": "normalized latency",
    "queued": "time in the queue",
}


def is_stable(requests: ServedRequests, concurrency: int) -> bool:
    """Do latencies say how fast the server is, and not how long the trace? In a closed loop they do.

    A trace is unstable for one of two reasons:
    - It lasts less than LEAST_LATENCIES mean latencies. By Little's law more than a third of its requests are unfinished
      then, on average: most of them meet a server that fills or empties. Such a trace shows no growth at any rate, since a
      large batch takes all of it before the first request is finished.
    - Latencies grow with the time that passes, as those of a server that falls behind do. The growth is that of the plane
      of least squares through the latencies of the steady part, over the time and the number of tokens. So longer requests
      that happen to come late are no growth. A rising load alone adds little to it.
    """
    if concurrency or len(requests.due_s) == 1:
        return True
    latencies_s = [tokens[-1] - due for due, tokens in zip(requests.due_s, requests.token_s, strict=True)]
    gap_s = (requests.due_s[-1] - requests.due_s[0]) / (len(requests.due_s) - 1)
    if LEAST_LATENCIES * np.mean(latencies_s) > gap_s * len(requests.due_s):
        return False
    first, last = (int(share * (len(requests.due_s) - 1)) for share in STEADY)
    steady = slice(first, last + 1)
    due = np.array(requests.due_s[steady])
    if len(due) < LEAST_STEADY or due[0] == due[-1]:
        return True
    end_to_end = np.array(latencies_s[steady])
    passed_s = due[-1] - due[0]
    num_tokens = [len(tokens) for tokens in requests.token_s[steady]]
    line = np.stack([np.ones(len(due)), (due - due[0]) / passed_s], axis=1)
    plane = np.column_stack([line, np.array(num_tokens) / max(num_tokens)])
    if np.linalg.matrix_rank(plane) < plane.shape[1]:  # lengths are equal, or grow as the time does
        plane = line
    growth_s = np.linalg.lstsq(plane, end_to_end)[0][1]
    return bool(growth_s <= max(passed_s / (last - first), MOST_GROWTH * passed_s))


def latencies_ms(seen: Seen) -> dict[str, list[float]]:
    """Every sample of each of LATENCIES."""
    return latencies.latencies_ms(seen.requests) | {"queued": [seconds * 1e3 for seconds in seen.queued_s]}


def quantities(seen: Sequence[Seen], stable: Sequence[bool], num_slots: int, slo_ms: float) -> tuple[Quantity, ...]:
    """The numbers of some traces: medians over them, with intervals where there are several.

    Args:
        seen: every trace.
        stable: of each whether it was; without one there is no latency.
        num_slots: K/V slots of the engine.
        slo_ms: the largest normalized latency that is good; 0: none was named.
    """
    made = [
        _over("request_throughput", "request throughput", "req/s", seen, request_throughput, True),
        _over("output_throughput", "output throughput", "tokens/s", seen, lambda s: _token_throughput(s, False), True),
        _over("total_throughput", "total throughput", "tokens/s", seen, lambda s: _token_throughput(s, True), True),
    ]
    if slo_ms:
        made.append(_over("goodput", "goodput", "req/s", seen, lambda s: _goodput(s, slo_ms), True))
    all_ms = [latencies_ms(s) for s in seen]
    for name, heading in LATENCIES.items():
        for percentile in PERCENTILES:
            key = f"{name}_p{percentile}_ms"
            heading_of = f"{heading}, {'median' if percentile == 50 else f'p{percentile}'}"
            if not all(stable):
                made.append(Quantity(key, heading_of, "ms", None, reason=UNSTABLE))
            elif not all(of[name] for of in all_ms):
                made.append(Quantity(key, heading_of, "ms", None, reason=UNSEEN if name == "queued" else WHOLE))
            else:
                values = [float(np.percentile(of[name], percentile)) for of in all_ms]
                made.append(_quantity(key, heading_of, "ms", values))
    lag = _over("lag_p99_ms", "load generator's lag, p99", "ms", seen, lag_p99_ms)
    of_iterations = (
        ("batch_size", "mean batch size", "requests", lambda s: _mean(s.iterations, s.iterations.rows), True),
        ("slot_use", "K/V slots in use", "share", lambda s: _slot_use(s, num_slots), True),
        ("vain_tokens", "tokens computed in vain", "share", _vain, False),
        ("computed_tokens", "tokens computed over those that requests have", "share", _computed, False),
        ("iterations", "iterations", "", lambda s: len(s.iterations.rows), False),
        ("iteration_ms", "iteration, median", "ms", _iteration_ms, False),
    )
    if all(s.iterations.rows for s in seen):
        numbers = [_over(name, text, unit, seen, value, more) for name, text, unit, value, more in of_iterations]
    else:
        numbers = [Quantity(name, text, unit, None, reason=UNSEEN) for name, text, unit, _, _ in of_iterations]
    return (*made, *numbers, lag)


def lag_p99_ms(seen: Seen) -> float:
    return latencies.lag_p99_ms(seen.requests)


def _over(
    name: str,
    heading: str,
    unit: str,
    seen: Sequence[Seen],
    value: Callable[[Seen], float],
    is_more_better: bool = False,
) -> Quantity:
    return _quantity(name, heading, unit, [float(value(s)) for s in seen], is_more_better)


def _quantity(name: str, heading: str, unit: str, values: Sequence[float], is_more_better: bool = False) -> Quantity:
    statistics = describe(values)
    low, high = statistics.ci95 if len(values) > 1 else (None, None)
    return Quantity(name, heading, unit, statistics.median, low, high, is_more_better)


def request_throughput(seen: Seen) -> float:
    return latencies.request_throughput(seen.requests)


def _token_throughput(seen: Seen, has_prompts: bool) -> float:
    num_tokens = sum(map(len, seen.requests.token_s)) + has_prompts * sum(seen.requests.prompt_tokens)
    return num_tokens / latencies.seconds(seen.requests)


def _goodput(seen: Seen, slo_ms: float) -> float:
    return sum(value <= slo_ms for value in latencies.latency_ms(seen.requests, "normalized")) / latencies.seconds(
        seen.requests
    )


def _mean(of: Iterations, values: Sequence[float]) -> float:
    """Over the time of iterations, each as long as it took."""
    lengths = [end - begin for begin, end in zip(of.begin_s, of.end_s, strict=True)]
    return float(np.average(values, weights=lengths))


def _slot_use(seen: Seen, num_slots: int) -> float:
    return _mean(seen.iterations, seen.iterations.reserved_slots) / num_slots


def _vain(seen: Seen) -> float:
    return 1 - sum(seen.iterations.useful_tokens) / sum(seen.iterations.tokens)


def _computed(seen: Seen) -> float:
    """1 where each token of a stream is computed once, the last never. Less is shared, more is padding or computed anew."""
    requests = seen.requests
    lengths = zip(requests.prompt_tokens, requests.token_s, strict=True)
    return sum(seen.iterations.tokens) / sum(prompt + len(token_s) - 1 for prompt, token_s in lengths)


def _iteration_ms(seen: Seen) -> float:
    iterations = seen.iterations
    return float(np.median([(end - begin) * 1e3 for begin, end in zip(iterations.begin_s, iterations.end_s, strict=True)]))
