"""The latencies and the throughput of served requests. Latencies have the names and definitions of vLLM's and SGLang's
benchmarks and of the chapter.

TTFT is from when a request was due to its first token, TPOT the mean gap after it, ITL every gap. An answer that comes in
one piece has neither of the last two. End to end is from when it was due to its last token; normalized by its tokens that is
the chapter's latency (section 4.5.2).
"""

from __future__ import annotations

from itertools import pairwise

from .record import ServedRequests


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


def latencies_ms(requests: ServedRequests) -> dict[str, list[float]]:
    """Every sample of each latency, by its name."""
    whole = [(tokens[-1] - due, tokens) for due, tokens in zip(requests.due_s, requests.token_s, strict=True)]
    samples_s = {
        "ttft": [tokens[0] - due for due, tokens in zip(requests.due_s, requests.token_s, strict=True)],
        "tpot": [(tokens[-1] - tokens[0]) / (len(tokens) - 1) for tokens in requests.token_s if tokens[-1] > tokens[0]],
        "itl": [
            after - before for tokens in requests.token_s for before, after in pairwise(tokens) if tokens[-1] > tokens[0]
        ],
        "end_to_end": [latency for latency, _ in whole],
        "normalized": [latency / len(tokens) for latency, tokens in whole],
    }
    return {name: [value * 1e3 for value in values] for name, values in samples_s.items()}
