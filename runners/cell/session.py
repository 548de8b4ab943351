"""One cell inside its own process: the model, the system made ready for it, and the measurements in their order."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from statistics import median
from time import perf_counter
from typing import Any

import torch

import models
import systems
from results.record import asked
from results.statistics import spread
from runners.machine import card
from runners.measurements import active_warps, correctness, kernels, latency, sm_efficiency, throughput
from runners.measurements.memory import MemoryMeter
from systems.base import Prepared, Unsupported
from systems.notice import Notice
from systems.profiling import limits

from .arithmetic import set_arithmetic
from .pending import AGAIN, PROFILED

# Which measurements a runner makes; correctness goes before all of them.
MEASUREMENTS = {
    "bench": ("memory", "latency", "throughput", "sm_efficiency", "kernels", "limits"),
    "latency": ("latency",),
    "throughput": ("throughput",),
    "memory": ("memory",),
    "sm_efficiency": ("sm_efficiency",),
    "correctness": (),
    "limits": ("limits",),
    "active_warps": ("active_warps",),
    "training": ("kernels",),  # beside what runners/measurements/training.py makes itself
}
WIDE = 0.1  # a spread (p90 - p10) / median above this is reported
AWAKE_SECONDS = 0.3
ROUND_CALLS, ROUND_SECONDS, ROUND_MOST = 10, 0.15, 60


def open_session(cell: dict[str, Any], visible_device: str, phase: Callable[[str], None]) -> "Session":
    """The session that the cell's runner asks for; raises as Session."""
    if cell["runner"]["name"] == "training":
        from runners.measurements.training import TrainingSession

        return TrainingSession(cell, visible_device, phase)
    return Session(cell, visible_device, phase)


class Session:
    """A cell that is loaded and can be prepared, measured, and called in rounds."""

    training = False  # the form of the model

    def __init__(self, cell: dict[str, Any], visible_device: str, phase: Callable[[str], None]):
        """cell: the resolved config. phase: told what is being done now.

        Raises models.BadModel, systems.base.BadOption, and Unsupported before the model is loaded for nothing.
        """
        self.cell, self.visible_device, self.phase = cell, visible_device, phase
        self.device: str = cell["device"]
        options = {k: v for k, v in cell["system"].items() if k != "name"}
        self.system = systems.load(cell["system"]["name"], **options)
        self.system.report = lambda told: phase(f"preparing: {told}")
        if reason := self.system.unsupported(self.device):
            raise Unsupported(reason)
        set_arithmetic(cell["precision"], asked(cell, "algorithms"))
        phase("loading the model")
        options = {k: v for k, v in cell["model"].items() if k != "name"}
        torch.manual_seed(cell["seed"])
        loaded = models.load(cell["model"]["name"], cell["batch"], training=self.training, device=self.device, **options)
        self.model = models.place(loaded, device=self.device, precision=cell["precision"], layout=cell["layout"])
        self.inputs = self.model.fresh_inputs(cell["seed"])
        if self.device == "cuda" and torch.backends.cudnn.benchmark:
            phase("choosing algorithms")
            self._choose_algorithms()
        self.prepared: Prepared | None = None
        self.notices: list[str] = []

    def _choose_algorithms(self) -> None:
        """Have cuDNN choose its algorithms on a GPU that is awake, in the same way for every system.

        It takes the fastest of one timing each, and a system may leave the GPU idle (its clock low) for seconds, while it
        traces or compiles, before its first run.
        """
        awake = torch.randn(4096, 4096, device=self.device)
        begin = perf_counter()
        while perf_counter() - begin < AWAKE_SECONDS:
            awake = torch.tanh(awake @ awake)
            torch.cuda.synchronize()
        del awake
        for _ in range(3):
            self._run_eagerly()
        torch.cuda.synchronize()

    @torch.no_grad()
    def _run_eagerly(self) -> None:
        """What cuDNN is to choose algorithms for."""
        self._eager(*self.inputs)

    def prepare(self) -> float:
        """Make the system ready; returns the seconds it took. Raises Unsupported."""
        self.phase("preparing")
        start = perf_counter()
        with self._heard():
            self.prepared = self._made_ready()
        latency.synchronize(self.device)
        return perf_counter() - start

    def _made_ready(self) -> Prepared:
        return self.system.prepare(self.model.module, self.inputs)

    @contextmanager
    def _heard(self) -> Iterator[None]:
        """Keep the notices that are given within, for the record; other warnings go where they would."""
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always", Notice)
            yield
        for warning in heard:
            if issubclass(warning.category, Notice):
                self.notices.append(str(warning.message))
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)

    def call(self) -> Any:
        assert self.prepared is not None, "prepare comes first"
        return self.prepared(*self.inputs)

    def measure(
        self, known_limits: dict[str, Any] | None = None, profile: bool = True, again: bool = False
    ) -> dict[str, Any]:
        """Prepare and measure what the cell's runner asks for: the part of a record that comes out of the run.

        known_limits: the model's limits if a sibling has measured them; a system that rewrites the model has its own beside
        them. profile: False leaves what needs a profiler for a later call of `profile`. Where preparing itself has used one,
        the status is AGAIN and nothing is measured: another process, told so by `again`, finds on disk what was learned.
        Raises Unsupported.
        """
        runner = self.cell["runner"]
        wanted = MEASUREMENTS[runner["name"]]
        record: dict[str, Any] = {"status": "ok", "reason": None, "when": datetime.now(UTC).isoformat(), "warnings": []}
        meter = MemoryMeter(self.device) if "memory" in wanted else None
        record["preparation_s"] = self.prepare()
        assert self.prepared is not None
        record["warnings"] += dict.fromkeys(self.notices)
        if self.system.profiled:
            if not again:
                return record | {"status": AGAIN}
            record["warnings"].append("its process was profiled while it was prepared, which slows its launches")
        record["schedule"] = self.prepared.schedule.summary() if self.prepared.schedule else None
        record["compilation"] = self.prepared.compilation or None
        if meter is not None:
            self.phase("memory")
            record["memory"] = meter.measure(self.call, self.prepared.memory)
        self.phase("correctness")
        draws = [self.model.fresh_inputs(self.cell["seed"] + 1 + i) for i in range(correctness.DRAWS)]
        record["correctness"] = correctness.measure(self._eager, self.prepared, draws, self.cell["precision"])
        if not record["correctness"]["correct"]:
            return record | {"status": "incorrect", "reason": record["correctness"]["reason"]}
        record["warnings"] += self.settle()
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
        return record | self._profile_or_not(profile, known_limits)

    def settle(self) -> list[str]:
        """Bring every CUDA Graph, ours and those within libraries, into the state in which the rounds find it; what to say
        where that cannot be.
        """
        if self.device == "cuda":
            from systems.scheduling.execution.context_switch import switch_contexts

            if not switch_contexts(torch.device("cuda", torch.cuda.current_device())):
                return ["the GPU has no room for another context: a CUDA Graph may be slower here than in the rounds"]
        return []

    def _profile_or_not(self, profile: bool, known_limits: dict[str, Any] | None = None) -> dict[str, Any]:
        """What takes a profiler, or what stands for it until it is measured."""
        if profile:
            return self.profile(known_limits)
        return {name: PROFILED[name] for name in MEASUREMENTS[self.cell["runner"]["name"]] if name in PROFILED}

    def profile(self, known_limits: dict[str, Any] | None = None) -> dict[str, Any]:
        """What of the cell's measurements takes a profiler. Nothing is timed in this process afterwards: once a profiler was
        in it, each launch takes longer for as long as it lives.
        """
        assert self.prepared is not None, "prepare comes first"
        wanted = [name for name in MEASUREMENTS[self.cell["runner"]["name"]] if name in PROFILED]
        found: dict[str, Any] = {}
        asked = self.call, self.cell, self.prepared.captured
        if {"sm_efficiency", "active_warps"} & set(wanted):
            undisturbed = median(latency.sample(self.call, self.device, ROUND_CALLS, ROUND_SECONDS, ROUND_MOST))
        if "sm_efficiency" in wanted:
            self.phase("SM efficiency")
            method = self.cell["runner"]["sm_efficiency"]
            found["sm_efficiency"] = sm_efficiency.measure(*asked, method, undisturbed) | _now()
        if "active_warps" in wanted:
            self.phase("active warps")
            found["active_warps"] = active_warps.measure(*asked, undisturbed) | _now()
        if "kernels" in wanted:
            self.phase("kernels")
            found["kernels"] = kernels.measure(self.call, self.device) | _now()
        if "limits" in wanted:
            self.phase("limits")
            found["limits"] = (known_limits or self._limits()) | self._own_limits()
        return found

    def round(self) -> list[float]:
        """One turn in the interleaved rounds: host milliseconds of a few calls, after two to wake up."""
        for _ in range(2):
            self.call()
        return latency.sample(self.call, self.device, ROUND_CALLS, ROUND_SECONDS, ROUND_MOST)

    def _eager(self, *inputs: torch.Tensor) -> Any:
        return self.model.module(*inputs)

    def _limits(self) -> dict[str, Any]:
        """The model's own, the same for every system."""
        assert self.prepared is not None
        try:
            captured = None if self._rewritten() else self.prepared.program
            found = limits.measure(self.model.module, self.inputs, captured)
        except Unsupported as error:
            found = {"critical_path_ms": None, "busy_ms": None, "reason": str(error)}
        return found | {"macs": self._macs()}

    def _own_limits(self) -> dict[str, Any]:
        """Those of the operators that rewriting passes have made of the model's, if any have."""
        if not self._rewritten():
            return {}
        assert self.prepared is not None
        return {"rewritten": limits.measure(self.model.module, self.inputs, self.prepared.program)}

    def _rewritten(self) -> bool:
        return bool(self.prepared and self.prepared.schedule and self.prepared.schedule.rewriting)

    def _macs(self) -> int | None:
        """Multiply-accumulates of a call; None for a custom model, whose operators may not run without data."""
        name, options = self.cell["model"]["name"], {k: v for k, v in self.cell["model"].items() if k != "name"}
        if name == "custom":
            return None
        shape = models.load(name, self.cell["batch"], device="meta", **options)
        return models.count(shape.module, shape.inputs).macs

    def _doubts(self, samples: list[float]) -> list[str]:
        """What speaks against trusting these samples."""
        doubts = []
        if (wide := spread(samples)) > WIDE:
            doubts.append(f"latency scatters: (p90 - p10) / median is {wide:.0%}")
        if self.device == "cuda" and (throttled := card.clocks(self.visible_device)["throttled"]):
            doubts.append(f"the GPU is throttled: {', '.join(throttled)}")
        return doubts


def _now() -> dict[str, str]:
    return {"when": datetime.now(UTC).isoformat()}
