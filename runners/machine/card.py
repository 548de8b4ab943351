"""The state of a GPU, from NVML: what it is, who else is on it, how it is clocked, what energy it has taken."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from results.environment import Clocks

# Reasons for a lower clock that falsify a measurement; being idle or set so by an application do not.
THROTTLING = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


class Unavailable(Exception):
    """NVML does not say; the message is one line."""


@dataclass(frozen=True)
class Process:
    """One that computes on a card. id: of the process. mebibytes: what it holds of the card's memory."""

    id: int
    mebibytes: int


@contextmanager
def _handle(visible_device: str) -> Iterator[tuple[Any, Any]]:
    import pynvml

    visible_device = visible_device.split(",")[0]  # of several that a cell has, the first
    pynvml.nvmlInit()
    try:
        if visible_device.isdigit():
            yield pynvml, pynvml.nvmlDeviceGetHandleByIndex(int(visible_device))
        else:
            yield pynvml, pynvml.nvmlDeviceGetHandleByUUID(visible_device)
    finally:
        pynvml.nvmlShutdown()


def identity(visible_device: str) -> tuple[str, str]:
    """Name, and version of the driver: what of a card decides whether a result can be taken over."""
    with _handle(visible_device) as (nvml, card):
        return nvml.nvmlDeviceGetName(card), nvml.nvmlSystemGetDriverVersion()


def uuid(visible_device: str) -> str:
    with _handle(visible_device) as (nvml, card):
        return nvml.nvmlDeviceGetUUID(card)


def processes(visible_device: str) -> list[Process]:
    """The processes that compute on any of the cards, each once."""
    held: dict[int, int] = {}
    for one in visible_device.split(","):
        with _handle(one) as (nvml, card):
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(card):
                held[process.pid] = held.get(process.pid, 0) + (process.usedGpuMemory or 0)
    return [Process(id_, count >> 20) for id_, count in held.items()]


def clocks(visible_device: str) -> Clocks:
    """The clocks now, and the reasons for throttling that hold now."""
    with _handle(visible_device) as (nvml, card):
        reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(card)
        return Clocks(
            sm_mhz=nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM),
            sm_max_mhz=nvml.nvmlDeviceGetMaxClockInfo(card, nvml.NVML_CLOCK_SM),
            memory_mhz=nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_MEM),
            temperature_c=nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU),
            power_w=nvml.nvmlDeviceGetPowerUsage(card) / 1e3,
            throttled=tuple(name for bit, name in THROTTLING.items() if reasons & bit),
        )


@contextmanager
def energy_counter(visible_device: str) -> Iterator[Callable[[], int]]:
    """A function that reads the millijoules which the card has taken since its driver was loaded.

    The function raises Unavailable where the card has no such counter (older than Volta, or a part of a card).
    """
    with _handle(visible_device) as (nvml, card):

        def read() -> int:
            try:
                return int(nvml.nvmlDeviceGetTotalEnergyConsumption(card))
            except nvml.NVMLError as error:
                raise Unavailable(f"NVML reads no energy counter of this GPU: {error}") from error

        yield read
