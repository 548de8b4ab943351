"""runner=energy, with a mock of NVML's counter: there is no GPU where this is tested."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from made_records import cell, record

from runners.checks import BadRequest
from runners.machine import card
from runners.measurements import energy
from runners.measurements.energy import EnergyOptions, Step, is_fine, joules_per_call, measure, steps_of


class NVMLError(Exception):
    """As NVML's own."""


def mocked_nvml(read: Any) -> SimpleNamespace:
    """A mock of NVML whose energy counter is `read`."""
    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetTotalEnergyConsumption=lambda _: read(),
    )


class MockedGpu:
    """A GPU that takes `watts`, on a clock of its own: a call takes `call_s`, the counter moves every `period_s`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, watts: float, call_s: float, period_s: float):
        self.watts, self.call_s, self.period_s, self.seconds, self.calls = watts, call_s, period_s, 0.0, 0
        monkeypatch.setattr(energy, "perf_counter", lambda: self.seconds)
        monkeypatch.setattr(energy, "synchronize", lambda _: None)
        monkeypatch.setattr(energy, "sample", lambda *_: [call_s * 1e3])
        monkeypatch.setitem(sys.modules, "pynvml", mocked_nvml(self.read))  # type: ignore[arg-type]

    def call(self) -> None:
        self.calls += 1
        self.seconds += self.call_s

    def read(self) -> int:
        whole = int(self.seconds / self.period_s + 1e-9) * self.period_s
        return 10**9 + int(self.watts * whole * 1e3)


@pytest.mark.parametrize("call_s", [1e-4, 3e-3, 0.4])
@pytest.mark.parametrize("period_s", [0.02, 0.1])
def test_joules_are_those_that_the_mocked_gpu_takes(monkeypatch: pytest.MonkeyPatch, call_s: float, period_s: float) -> None:
    gpu = MockedGpu(monkeypatch, 500.0, call_s, period_s)
    part = measure(gpu.call, "cuda", 8, "0", 2.0)
    a_call, a_sample = part.quantities
    assert a_call.value is not None and a_sample.value is not None and a_call.low is not None and a_call.high is not None
    assert a_call.value == pytest.approx(500.0 * call_s, rel=0.05) and a_sample.value == a_call.value / 8
    assert a_call.low <= a_call.value <= a_call.high and (a_call.unit, a_call.is_more_better) == ("J", False)
    assert len(part.samples["joules_per_call"]) == energy.WINDOWS and "idle power included" in (a_call.source or "")
    assert 2.0 <= gpu.seconds <= energy.MOST_S + call_s


def test_it_goes_on_until_a_step_of_the_counter_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = MockedGpu(monkeypatch, 300.0, 1e-3, 0.01)
    steps_of(fine.call, "cuda", fine.read, 2.0, 5)
    assert fine.seconds == pytest.approx(2.0, abs=0.1)
    coarse = MockedGpu(monkeypatch, 300.0, 1e-3, 0.1)
    steps = steps_of(coarse.call, "cuda", coarse.read, 2.0, 5)
    assert is_fine(steps) and not is_fine(steps[:50]) and 10.0 <= coarse.seconds < 11.0


def test_windows_begin_and_end_at_steps_of_the_counter() -> None:
    steps = [Step(10 * i, 2000 * i) for i in range(21)]
    assert joules_per_call(steps) == (0.2,) * energy.WINDOWS
    assert joules_per_call(steps[:3]) == (0.2, 0.2)  # fewer steps than windows
    assert not is_fine(steps[:5])
    even = [Step(i, 10 * i) for i in range(200)]
    assert is_fine(even) and not is_fine([*even, Step(201, 4000)])  # the largest step counts


def refused() -> int:
    raise NVMLError("Not Supported")


@pytest.mark.parametrize(
    ("device", "read", "reason"),
    [("cpu", lambda: 0, "CPU"), ("cuda", refused, "Not Supported"), ("cuda", lambda: 7, "did not move")],
)
def test_without_a_counter_there_is_a_reason(monkeypatch: pytest.MonkeyPatch, device: str, read: Any, reason: str) -> None:
    gpu = MockedGpu(monkeypatch, 300.0, 0.1, 0.1)
    monkeypatch.setitem(sys.modules, "pynvml", mocked_nvml(read))  # type: ignore[arg-type]
    part = measure(gpu.call, device, 1, "0", 2.0)
    assert [q.name for q in part.quantities] == ["joules_per_call", "joules_per_sample"]
    assert all(q.value is None and reason in (q.reason or "") for q in part.quantities) and not part.samples


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 21.0])
def test_seconds_that_cannot_be_are_refused(seconds: float) -> None:
    with pytest.raises(BadRequest, match="energy_s"):
        EnergyOptions(seconds)


def test_tables_show_joules_or_why_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = measure(MockedGpu(monkeypatch, 500.0, 1e-2, 0.02).call, "cuda", 2, "0", 2.0)
    with_joules = record(of=cell(device="cuda"), measured={"energy": measured})
    without = record(measured={"energy": energy.missing("no counter")})
    (column,), (a_call, a_sample) = energy.Energy.columns, energy.Energy.rows or ()
    assert (
        column.text(with_joules) == "5"
        and a_call.text(with_joules).startswith("5 [")
        and "2.5 [" in a_sample.text(with_joules)
    )
    assert column.text(without) == column.text(record()) == "–" and a_call.text(without) == "none: no counter"


def test_the_counter_is_of_the_card_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", mocked_nvml(iter([5, 6]).__next__))  # type: ignore[arg-type]
    with card.energy_counter("0") as read:
        assert (read(), read()) == (5, 6)
