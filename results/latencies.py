"""The latencies and the throughput of served requests. Latencies have the names and definitions of vLLM's and SGLang's
benchmarks and of the chapter.

TTFT is from when a request was due to its first token, TPOT the mean gap after it, ITL every gap. An answer that comes in
one piece has neither of the last two. End to end is from when it was due to its last token; normalized by its tokens that is
the chapter's latency (section 4.5.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from .serving import ServedRequests


def request_throughput(requests: ServedRequests) -> float:
    """Requests a second, from the first that was due to the last token."""
    return len(requests.due_s) / seconds(requests)


def seconds(requests: ServedRequests) -> float:
    """From the first request that was due to the last token."""
    return max(tokens[-1] for tokens in requests.token_s) - min(requests.due_s)


def lag_p99_ms(requests: ServedRequests) -> float:
    """How late requests were sent: the 99th percentile, in milliseconds."""
    import numpy as np

    return float(np.percentile([(sent - due) * 1e3 for due, sent in zip(requests.due_s, requests.sent_s, strict=True)], 99))


def latency_ms(requests: ServedRequests, name: str) -> list[float]:
    """Every sample of one latency, which SAMPLES_S names."""
    return [value * 1e3 for value in SAMPLES_S[name](requests)]


def latencies_ms(requests: ServedRequests) -> dict[str, list[float]]:
    """Every sample of each latency, by its name."""
    return {name: latency_ms(requests, name) for name in SAMPLES_S}


def _since_due(requests: ServedRequests, token: int) -> list[float]:
    """From when each request was due to one of its tokens, in seconds."""
    return [tokens[token] - due for due, tokens in zip(requests.due_s, requests.token_s, strict=True)]


def _in_pieces(requests: ServedRequests) -> Iterator[Sequence[float]]:
    """When the tokens came of each answer that was not there at once, in seconds."""
    return (tokens for tokens in requests.token_s if tokens[-1] > tokens[0])


SAMPLES_S: dict[str, Callable[[ServedRequests], list[float]]] = {
    "ttft": lambda requests: _since_due(requests, 0),
    "tpot": lambda requests: [(tokens[-1] - tokens[0]) / (len(tokens) - 1) for tokens in _in_pieces(requests)],
    "itl": lambda requests: [after - before for tokens in _in_pieces(requests) for before, after in pairwise(tokens)],
    "end_to_end": lambda requests: _since_due(requests, -1),
    "normalized": lambda requests: [
        latency / len(tokens) for latency, tokens in zip(_since_due(requests, -1), requests.token_s, strict=True)
    ],
}
