"""runner=engine: a batch of equal requests through an engine alone."""

from __future__ import annotations

import pytest
from serving_cells import of_cell

from results.cell import choose
from results.quantity import Measured
from runners.measurements.registry import plan
from runners.serving.session import BatchTimes, EngineSession
from systems.base import BadOption


def test_a_batch_of_equal_requests_takes_as_many_iterations_as_they_have_tokens() -> None:
    session = of_cell("engine", EngineSession, batch=3)
    assert isinstance(session, EngineSession)
    rows = [[len(row.tokens) for row in i.batch.rows] for i in session._serve().iterations]
    assert rows == [[6, 6, 6], [1, 1, 1], [1, 1, 1]] and session.compare().is_correct
    (measurement,) = (m for m in plan(session.cell.runner).measurements if m.name == "engine")
    part = measurement.measure(session)
    assert isinstance(part, Measured) and {name: len(part.samples[name]) for name in part.samples} == {
        "batch_ms": 2,
        "prompts_ms": 2,
        "increment_ms": 4,  # two batches, each with two iterations after that of its prompts
    }
    batch_ms, prompts_ms, tflops, increment_ms, *by_graph = part.quantities
    assert batch_ms.value and prompts_ms.value and increment_ms.value
    assert prompts_ms.value + 2 * increment_ms.value <= 1.5 * batch_ms.value
    weights = sum(
        weight.numel() for name, weight in session.decoder.named_parameters() if weight.dim() == 2 and "blocks" in name
    )  # type: ignore[union-attr]
    assert session.prompt_flops() == 2 * 18 * weights and tflops.value
    assert [quantity.value for quantity in by_graph] == [None, None] and all(quantity.reason for quantity in by_graph)
    with pytest.raises(MemoryError, match="of 3 requests do not fit at once"):
        of_cell("engine", EngineSession, batch=3, slots=20)
    with pytest.raises(BadOption, match="batch=5 is more"):
        of_cell("engine", EngineSession, batch=5)


@pytest.mark.parametrize(
    ("choice", "system_options"),
    [
        ("orca_chunked", {"max_num_batched_tokens": 6}),
        pytest.param("orca_preempting", {"block_size": 4}, marks=pytest.mark.slow),
        pytest.param("orca", {"prefetch": True}, marks=pytest.mark.slow),
        ("request_level_ragged", {"microbatch_size": 1}),
    ],
)
def test_a_batch_fits_unless_a_request_waits_for_slots(choice: str, system_options: dict[str, object]) -> None:
    """However many iterations it takes, and whoever ends before another begins."""
    for new_tokens in (1, 3):
        assert of_cell("engine", EngineSession, 4, choice, slots=48, new_tokens=new_tokens, system_options=system_options)
    with pytest.raises(MemoryError, match="of 4 requests do not fit at once"):
        of_cell("engine", EngineSession, 4, choice, slots=20, system_options=system_options)


def test_the_device_idles_where_no_replay_is() -> None:
    class Ran:
        """What a GPU's session would say."""

        def batch_times(self) -> BatchTimes:
            return BatchTimes(10.0, 4.0, (2.0, 2.0, 2.0))

        def replay_ms(self) -> float:
            return 1.5

        def prompt_flops(self) -> float:
            return 8e12

    (measurement,) = (m for m in plan(choose("runner", "engine", samples=2)).measurements if m.name == "engine")
    part = measurement.measure(Ran())  # type: ignore[arg-type]
    assert isinstance(part, Measured)
    assert {quantity.name: quantity.value for quantity in part.quantities} == {
        **{"batch_ms": 10.0, "prompts_ms": 4.0, "prompt_tflops": 2000.0, "increment_ms": 2.0, "replay_ms": 1.5},
        "idle_share": 0.25,
    }
