"""The state of a GPU, from NVML: what it is, who else is on it, how it is clocked."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Reasons for a lower clock that falsify a measurement; being idle or set so by an application do not.
THROTTLING = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


@contextmanager
def _handle(visible_device: str) -> Iterator[tuple[Any, Any]]:
    import pynvml

    pynvml.nvmlInit()
    try:
        if visible_device.isdigit():
            yield pynvml, pynvml.nvmlDeviceGetHandleByIndex(int(visible_device))
        else:
            yield pynvml, pynvml.nvmlDeviceGetHandleByUUID(visible_device)
    finally:
        pynvml.nvmlShutdown()


def identity(visible_device: str) -> dict[str, str]:
    """Name and driver: what of a card decides whether a result can be taken over."""
    with _handle(visible_device) as (nvml, card):
        return {"gpu": nvml.nvmlDeviceGetName(card), "driver": nvml.nvmlSystemGetDriverVersion()}


def uuid(visible_device: str) -> str:
    with _handle(visible_device) as (nvml, card):
        return nvml.nvmlDeviceGetUUID(card)


def processes(visible_device: str) -> list[str]:
    """The processes that compute on the card, each in words."""
    with _handle(visible_device) as (nvml, card):
        found = nvml.nvmlDeviceGetComputeRunningProcesses(card)
        return [f"process {p.pid} holds {(p.usedGpuMemory or 0) >> 20} MiB" for p in found]


def clocks(visible_device: str) -> dict[str, Any]:
    """Clocks in MHz, temperature in degrees Celsius, power in W, and the reasons for throttling that hold now."""
    with _handle(visible_device) as (nvml, card):
        reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(card)
        return {
            "sm_mhz": nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM),
            "sm_max_mhz": nvml.nvmlDeviceGetMaxClockInfo(card, nvml.NVML_CLOCK_SM),
            "memory_mhz": nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_MEM),
            "temperature_c": nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU),
            "power_w": nvml.nvmlDeviceGetPowerUsage(card) / 1e3,
            "throttled": [name for bit, name in THROTTLING.items() if reasons & bit],
        }
