"""What is told of a GPU's state; without a GPU a stand-in for NVML tells it."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from results.warning import Warning
from runners.machine import card
from runners.measurements import latency

CLOCK_SM, CLOCK_MEM = 1, 2


class StandInForNvml:
    """An H200 with given processes and reasons for a lower clock; there is no GPU where this is tested."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = CLOCK_SM, CLOCK_MEM, 0

    def __init__(self, processes: list[Any] | None = None, reasons: int = 0):
        self.processes, self.reasons, self.initialised = processes or [], reasons, 0

    def nvmlInit(self) -> None:
        self.initialised += 1

    def nvmlShutdown(self) -> None:
        self.initialised -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"card {index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return self.processes if handle == "card 0" else []

    def nvmlDeviceGetCurrentClocksEventReasons(self, _: str) -> int:
        return self.reasons

    def nvmlDeviceGetClockInfo(self, _: str, clock: int) -> int:
        return {CLOCK_SM: 1200, CLOCK_MEM: 3201}[clock]

    def nvmlDeviceGetMaxClockInfo(self, _: str, clock: int) -> int:
        return {CLOCK_SM: 1980, CLOCK_MEM: 3201}[clock]

    def nvmlDeviceGetTemperature(self, *_: Any) -> int:
        return 60

    def nvmlDeviceGetPowerUsage(self, _: str) -> int:
        return 650_000


def test_other_processes_are_told_of_their_own_card(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = StandInForNvml([SimpleNamespace(pid=7, usedGpuMemory=3 << 30), SimpleNamespace(pid=8, usedGpuMemory=None)])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    assert card.processes("0") == [card.Process(7, 3072), card.Process(8, 0)]
    assert card.processes("1") == [] and nvml.initialised == 0
    assert card.processes("1,0") == card.processes("0"), "of a cell with several cards any counts"
    assert card.processes("0,0") == [card.Process(7, 6144), card.Process(8, 0)], "what one holds of both"
    assert card.processes("GPU-6b2cfc51") == []  # CUDA_VISIBLE_DEVICES may name a card by its UUID


@pytest.mark.parametrize(
    ("reasons", "causes"),
    [(0x0, []), (0x1 | 0x2, []), (0x4, ["power cap"]), (0x8 | 0x20, ["hardware slowdown", "thermal slowdown"])],
)
def test_a_lower_clock_is_told_unless_it_is_idle_or_asked_for(
    monkeypatch: pytest.MonkeyPatch, reasons: int, causes: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", StandInForNvml(reasons=reasons))  # type: ignore[arg-type]
    clocks = card.clocks("0")
    assert clocks.throttled == tuple(causes)
    assert (clocks.sm_mhz, clocks.sm_max_mhz, clocks.power_w) == (1200, 1980, 650.0)
    throttled = (Warning("throttled", {"reasons": ", ".join(causes)}),) if causes else ()
    assert latency.doubts((1.0,) * 10, "cuda", "0") == throttled
    assert latency.doubts((1.0, 2.0) * 5, "cuda", "0") == (Warning("latency_scatters", {"spread": 1 / 1.5}), *throttled)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_process_on_the_gpu_is_seen() -> None:
    before = {process.id for process in card.processes("0")}
    code = "import torch; x = torch.ones(1 << 20, device='cuda'); print('there', flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    other = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)  # type: ignore[call-overload]
    assert other.stdout.readline() == "there\n"
    assert {process.id for process in card.processes("0")} - before
    other.communicate("\n")
