"""What served requests came to: a part of a record."""

from __future__ import annotations

from dataclasses import dataclass

from .quantity import Quantity
from .statistics import Samples


@dataclass(frozen=True)
class ServedRequests:
    """The requests of one trace, as their client saw them. Each field has an entry a request; seconds since the trace began.

    Args:
        due_s: when each was to be sent.
        sent_s: when the load generator gave it to its socket, or to what waits for that.
        prompt_tokens, max_new_tokens: of each.
        token_s: when each of its tokens came.
    """

    due_s: Samples
    sent_s: Samples
    prompt_tokens: tuple[int, ...]
    max_new_tokens: tuple[int, ...]
    token_s: tuple[Samples, ...]


@dataclass(frozen=True)
class Iterations:
    """The iterations of one trace, as the server saw them. Each field has an entry an iteration.

    Args:
        begin_s, end_s: when it was submitted, and when its tokens were there; seconds since the trace began.
        rows: requests in its batch.
        tokens: that it computed.
        useful_tokens: those that a request needed; the others are padding, or of finished requests.
        reserved_slots: K/V slots that requests held.
    """

    begin_s: Samples
    end_s: Samples
    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    useful_tokens: tuple[int, ...]
    reserved_slots: tuple[int, ...]


@dataclass(frozen=True)
class ServedTrace:
    """One trace of requests.

    Args:
        seed: that it was drawn with.
        is_stable: requests finished as fast as they came; without that a latency says only how long the trace was.
        requests, iterations: what its client and the server saw.
    """

    seed: int
    is_stable: bool
    requests: ServedRequests
    iterations: Iterations


@dataclass(frozen=True)
class Serving:
    """A system that serves requests.

    Args:
        quantities: medians over traces; intervals where there are several.
        traces: every one.
        num_slots: K/V slots that the engine has.
        clock: "real", or "virtual" where iterations were not computed but cost what a table says.
        when: the time of measuring.
    """

    quantities: tuple[Quantity, ...]
    traces: tuple[ServedTrace, ...]
    num_slots: int
    clock: str
    when: str | None = None
