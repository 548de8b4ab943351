"""runner=simulation: the same traces under a virtual clock and the real one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from serving_cells import OPTIONS, of_cell

from conf import Value
from results.cell import choose
from results.quantity import Measured
from runners.checks import BadRequest
from runners.measurements.registry import plan
from runners.serving.session import ServingSession
from runners.serving.simulation import simulated
from runners.serving.workload import Arrival
from systems.serving import costs
from systems.serving.iteration_level import IterationLevel
from systems.serving.prefix_cache import CachedSlots
from systems.serving.simulated import LinearCost
from systems.serving.slots import ContiguousSlots


def test_a_simulated_trace_is_seen_as_arithmetic_says() -> None:
    trace = [Arrival(0.0, 5, 3), Arrival(1.5, 4, 1)]
    seen = simulated(IterationLevel(ContiguousSlots.all_free(40), 4), LinearCost(1.0), trace)
    assert seen.requests.token_s == ((1.0, 2.0, 3.0), (3.0,)) and seen.queued_s == (0.0, 0.5)
    assert seen.iterations.rows == (1, 1, 2) and seen.iterations.reserved_slots == (8, 8, 13)


def test_prompts_of_a_seed_are_known_to_a_cache_and_no_others() -> None:
    """Of 6 prompts of 20 tokens; blocks of 4 are shared, but for the one with a prompt's last token."""
    trace = [Arrival(float(i), 20, 2) for i in range(6)]
    scheduler = IterationLevel(CachedSlots.all_free(4096, 4), 4)

    def computed(seed: str, shared_tokens: int = 0) -> int:
        return sum(simulated(scheduler, LinearCost(0.1), trace, 1, seed, shared_tokens).iterations.tokens)

    whole = 6 * (20 + 1)  # the last token of each is computed for nobody
    assert [computed("a"), computed("b"), computed("a")] == [whole, whole, whole - 6 * 16]
    assert computed("c", shared_tokens=8) == whole - 5 * 8


def test_both_clocks_serve_the_same_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """With costs that are measured after a load."""
    loads_s: list[float] = []
    monkeypatch.setattr(costs, "_load", lambda engine, batch, load_s: loads_s.append(load_s))
    monkeypatch.setitem(costs.LOAD_S, "cpu", 7.0)
    session = of_cell("simulation", ServingSession, repeats=2, rate=30.0, rates="20")
    (measurement,) = (m for m in plan(session.cell.runner).measurements if m.name == "simulation")
    part = measurement.measure(session)
    assert isinstance(part, Measured) and part.samples["rate"] == (20.0, 20.0, 30.0, 30.0)
    assert len(part.samples["throughput_real"]) == len(part.samples["throughput_simulated"]) == 4
    assert part.samples["cost_tokens"][0] == 1.0 and len(part.samples["cost_tokens"]) == len(part.samples["cost_ms"]) > 3
    assert all(quantity.source for quantity in part.quantities if "real_at" not in quantity.name)
    assert loads_s == [7.0]


@dataclass(frozen=True)
class Clocked:
    rate: float
    real_throughput: float
    virtual_throughput: float
    real_ms: float | None
    virtual_ms: float | None
    lag_ms: float = 0.0


def test_a_simulation_is_as_near_as_its_farthest_ratio() -> None:
    """Of medians at each rate; a latency that one clock does not have is compared with nothing."""

    class Session:
        def both_clocks(self) -> tuple[list[Clocked], dict[str, tuple[float, ...]]]:
            slow = [Clocked(5.0, 4.0, 4.4, 10.0, 9.0), Clocked(5.0, 2.0, 2.2, 10.0, 9.0)]
            return [*slow, Clocked(9.0, 8.0, 7.9, None, 3.0)], {"cost_ms": (1.0,)}

    (measurement,) = (m for m in plan(choose("runner", "simulation")).measurements if m.name == "simulation")
    part = measurement.measure(Session())  # type: ignore[arg-type]
    assert isinstance(part, Measured)
    values = {quantity.name: quantity.value for quantity in part.quantities}
    assert values["throughput_ratio"] == pytest.approx(1.1) and values["normalized_ratio"] == pytest.approx(0.9)
    assert values["throughput_real_at_5"] == 3.0 and values["throughput_simulated_at_9"] == 7.9
    assert part.samples["cost_ms"] == (1.0,)
    assert values["normalized_real_at_9"] is None and len(part.samples["normalized_real"]) == 2


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"concurrency": 2}, r"takes no runner\.concurrency"),
        ({"rates": "5 none"}, "none is not a positive number"),
        ({"rates": "0"}, "0 is not a positive number"),
        ({"rates": "5", "trace": "FILE", "requests": 1}, r"takes no runner\.rates"),
    ],
)
def test_a_simulation_knows_when_requests_come(changed: dict[str, Value], says: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,3,4\n")
    options = {key: str(file) if value == "FILE" else value for key, value in changed.items()}
    with pytest.raises(BadRequest, match=says):
        plan(choose("runner", "simulation", **OPTIONS | options))
