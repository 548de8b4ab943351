"""How fast any schedule could be: a part of a record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """How fast any schedule of these operators could be.

    Args:
        critical_path_ms: the longest chain of dependent operators, each at its own measured time.
        busy_ms: the sum over all operators.
        operators, kernels, width: of the graph.
        source: "kernels" on a GPU, "host" on a CPU.
        macs: multiply-accumulates of a call; None for a custom model.
        reason: why there are none.
        sm_area_ms: of a GPU, the sum over kernels of the share of SMs held, times the time.
        traffic_ms: of a GPU, weights, inputs and outputs at the bandwidth of a copy, without what the L2 cache may hold.
        launch_ms: of a GPU, a graph of as many kernels that do nothing, on the number of streams that takes the least.
        rewritten: the limits of the operators that rewriting passes made of the model's.
        when: the time of measuring.
    """

    critical_path_ms: float | None
    busy_ms: float | None
    operators: int | None = None
    kernels: int | None = None
    width: int | None = None
    source: str | None = None
    macs: int | None = None
    reason: str | None = None
    sm_area_ms: float | None = None
    traffic_ms: float | None = None
    launch_ms: float | None = None
    rewritten: Limits | None = None
    when: str | None = None

    @property
    def executed(self) -> Limits:
        """Of the operators that the system runs: those of the model, or what it rewrites them to."""
        return self.rewritten or self

    @property
    def bounds(self) -> dict[str, float]:
        """Milliseconds by name, the largest first: what no schedule of these operators is faster than."""
        named = {
            "critical path": self.critical_path_ms,
            "SM area": self.sm_area_ms,
            "memory traffic": self.traffic_ms,
            "launch": self.launch_ms,
        }
        known = {name: ms for name, ms in named.items() if ms is not None}
        return dict(sorted(known.items(), key=lambda item: -item[1]))

    @staticmethod
    def least(systems: Iterable[Limits]) -> dict[str, float]:
        """As `bounds`, of each the least that any system's operators have: kernels that take longer are no excuse."""
        least: dict[str, float] = {}
        for limits in systems:
            least |= {name: min(ms, least.get(name, ms)) for name, ms in limits.executed.bounds.items()}
        return dict(sorted(least.items(), key=lambda item: -item[1]))
