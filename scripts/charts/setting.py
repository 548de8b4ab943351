"""What must be the same for two records to stand in one chart."""

import re
from dataclasses import dataclass
from typing import Any

from results.record import asked

# The runners that measure a call as it is used; any other runner's records are a kind of their own.
CALLS = ("bench", "latency", "throughput", "memory", "sm_efficiency", "correctness", "limits", "active_warps")


@dataclass(frozen=True, order=True)
class Setting:
    """One machine, one torch, one arithmetic and layout, one kind of run. place: the GPU, or the CPU where there is none."""

    place: str
    host: str
    device: str
    torch: str
    precision: str
    layout: str
    algorithms: str
    kind: str

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Setting":
        config, environment = record["config"], record["environment"]
        runner = config["runner"]["name"]
        return cls(
            place=str(environment.get("gpu") or environment.get("cpu") or "unknown processor"),
            host=str(environment.get("host", "")),
            device=config["device"],
            torch=str(environment.get("libraries", {}).get("torch", "?")),
            precision=config["precision"],
            layout=config["layout"],
            algorithms=asked(config, "algorithms"),
            kind="inference" if runner in CALLS else runner,
        )

    @property
    def label(self) -> str:
        """ "NVIDIA H200, torch 2.11.0, tf32" """
        unusual = [self.layout] * (self.layout != "contiguous") + [self.kind] * (self.kind != "inference")
        unusual += [f"{self.algorithms} algorithms"] * (self.algorithms != "heuristic")
        return ", ".join([self.place, f"torch {self.torch}", self.precision, *unusual])

    @property
    def slug(self) -> str:
        """The label, the machine's name too, as a part of a file's name."""
        return re.sub(r"[^a-z0-9.]+", "-", f"{self.label}, {self.host}".lower()).strip("-")
