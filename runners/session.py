"""One cell inside its own process: the model, the system made ready for it, and the measurements in their order."""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch

import models
import systems
from systems.base import Prepared, Unsupported
from systems.scheduling import limits

from . import card, correctness, environment, latency, sm_efficiency, throughput
from .memory import MemoryMeter
from .statistics import spread

# Which measurements a runner makes; correctness goes before all of them.
MEASUREMENTS = {
    "bench": ("memory", "latency", "throughput", "sm_efficiency", "limits"),
    "latency": ("latency",),
    "throughput": ("throughput",),
    "memory": ("memory",),
    "sm_efficiency": ("sm_efficiency",),
    "correctness": (),
    "limits": ("limits",),
}
WIDE = 0.1  # a spread (p90 - p10) / median above this is reported
ROUND_CALLS, ROUND_SECONDS, ROUND_MOST = 10, 0.15, 60


class Session:
    """A cell that is loaded and can be prepared, measured, and called in rounds."""

    def __init__(self, cell: dict[str, Any], visible_device: str, phase: Callable[[str], None]):
        """cell: the resolved config. phase: told what is being done now. Raises models.BadModel."""
        self.cell, self.visible_device, self.phase = cell, visible_device, phase
        self.device: str = cell["device"]
        self._set_precision(cell["precision"])
        phase("loading the model")
        options = {k: v for k, v in cell["model"].items() if k != "name"}
        torch.manual_seed(cell["seed"])
        loaded = models.load(cell["model"]["name"], cell["batch"], device=self.device, **options)
        self.model = models.place(loaded, device=self.device, precision=cell["precision"], layout=cell["layout"])
        self.inputs = self.model.fresh_inputs(cell["seed"])
        self.meter = MemoryMeter(self.device)
        self.prepared: Prepared | None = None

    def _set_precision(self, precision: str) -> None:
        """The same arithmetic for every system. tf32 is PyTorch's default: TF32 in convolutions, not in matrix products."""
        torch.backends.cudnn.allow_tf32 = precision != "fp32"
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.benchmark = True

    def prepare(self) -> float:
        """Make the system ready; returns the seconds it took. Raises Unsupported."""
        options = {k: v for k, v in self.cell["system"].items() if k != "name"}
        system = systems.load(self.cell["system"]["name"], **options)
        if reason := system.unsupported(self.device):
            raise Unsupported(reason)
        self.phase("preparing")
        start = perf_counter()
        self.prepared = system.prepare(self.model.module, self.inputs)
        latency.synchronize(self.device)
        return perf_counter() - start

    def call(self) -> Any:
        assert self.prepared is not None, "prepare comes first"
        return self.prepared(*self.inputs)

    def measure(self, known_limits: dict[str, Any] | None = None) -> dict[str, Any]:
        """Prepare and measure what the cell's runner asks for: the part of a record that comes out of the run.

        known_limits: the model's limits if a sibling has measured them; they are not the system's.
        """
        runner = self.cell["runner"]
        wanted = MEASUREMENTS[runner["name"]]
        record: dict[str, Any] = {"status": "ok", "reason": None, "when": datetime.now(UTC).isoformat(), "warnings": []}
        record["preparation_s"] = self.prepare()
        assert self.prepared is not None
        record["schedule"] = self.prepared.schedule.summary() if self.prepared.schedule else None
        if "memory" in wanted:
            self.phase("memory")
            record["memory"] = self.meter.measure(self.call, self.prepared.memory)
        self.phase("correctness")
        draws = [self.model.fresh_inputs(self.cell["seed"] + 1 + i) for i in range(correctness.DRAWS)]
        record["correctness"] = correctness.measure(self._eager, self.prepared, draws, self.cell["precision"])
        if not record["correctness"]["correct"]:
            return record | {"status": "incorrect", "reason": record["correctness"]["reason"]}
        if "latency" in wanted:
            self.phase("latency")
            record["latency"] = latency.measure(self.call, self.device, runner["samples"])
            record["warnings"] += self._doubts(record["latency"]["host_ms"])
        if "throughput" in wanted:
            self.phase("throughput")
            if "latency" not in wanted:
                latency.warm_up(self.call, self.device)
            expected = min(latency.sample(self.call, self.device, 3))
            record["throughput"] = throughput.measure(self.call, self.device, self.cell["batch"], expected)
        if "sm_efficiency" in wanted:
            self.phase("SM efficiency")
            profiled = partial(sm_efficiency.measure, self.call, self.cell, self.prepared.captured)
            undisturbed = latency.sample(self.call, self.device, ROUND_CALLS, ROUND_SECONDS, ROUND_MOST)
            record["sm_efficiency"] = profiled(runner["sm_efficiency"], median(undisturbed))
        if "limits" in wanted:
            self.phase("limits")
            record["limits"] = known_limits or self._limits()
        return record

    def describe(self) -> dict[str, Any]:
        return environment.describe(self.device, self.visible_device)

    def round(self) -> list[float]:
        """One turn in the interleaved rounds: host milliseconds of a few calls, after two to wake up."""
        for _ in range(2):
            self.call()
        return latency.sample(self.call, self.device, ROUND_CALLS, ROUND_SECONDS, ROUND_MOST)

    def _eager(self, *inputs: torch.Tensor) -> Any:
        return self.model.module(*inputs)

    def _limits(self) -> dict[str, Any]:
        assert self.prepared is not None
        try:
            return limits.measure(self.model.module, self.inputs, self.prepared.program)
        except Unsupported as error:
            return {"critical_path_ms": None, "busy_ms": None, "reason": str(error)}

    def _doubts(self, samples: list[float]) -> list[str]:
        """What speaks against trusting these samples."""
        doubts = []
        if (wide := spread(samples)) > WIDE:
            doubts.append(f"latency scatters: (p90 - p10) / median is {wide:.0%}")
        if self.device == "cuda" and (throttled := card.clocks(self.visible_device)["throttled"]):
            doubts.append(f"the GPU is throttled: {', '.join(throttled)}")
        return doubts
