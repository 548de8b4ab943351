"""How near a simulation of serving is to an engine that served the same traces for real."""

from __future__ import annotations

from dataclasses import dataclass

from .cell import Cell

THROUGHPUT, LATENCY = 0.05, 0.10  # by which a simulation may be off


@dataclass(frozen=True)
class Lengths:
    """Of a trace's requests, as runner=serving takes them: prompt_tokens, new_tokens."""

    prompt_tokens: str
    new_tokens: str

    @classmethod
    def of(cls, cell: Cell) -> Lengths:
        return cls(str(cell.runner.options["prompt_tokens"]), str(cell.runner.options["new_tokens"]))


@dataclass(frozen=True)
class Point:
    """A rate of arrivals under two clocks.

    Args:
        record: the id of the real one's record.
        cell: what served for real.
        rate: arrivals, requests a second.
        throughput_real, throughput: requests finished a second, for real and simulated; medians over repeats.
        normalized_ms_real, normalized_ms: median normalized latencies; None where requests came faster than they were
            finished.
    """

    record: str
    cell: Cell
    rate: float
    throughput_real: float
    throughput: float
    normalized_ms_real: float | None
    normalized_ms: float | None

    @property
    def lengths(self) -> Lengths:
        return Lengths.of(self.cell)

    @property
    def throughput_error(self) -> float:
        """0.01 where the simulated one is 1 % more."""
        return self.throughput / self.throughput_real - 1

    @property
    def latency_error(self) -> float | None:
        """None where one of the two has no latency."""
        if self.normalized_ms is None or self.normalized_ms_real is None:
            return None
        return self.normalized_ms / self.normalized_ms_real - 1

    @property
    def is_near(self) -> bool:
        """Both are stable or neither is, and the numbers that there are agree."""
        if (self.normalized_ms is None) != (self.normalized_ms_real is None):
            return False
        return abs(self.throughput_error) <= THROUGHPUT and abs(self.latency_error or 0.0) <= LATENCY
