"""SM efficiency: the share of time in which an SM has at least one active warp."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from results.cell import Cell
from results.document import cell_to_json
from results.occupation import SmEfficiency as SmEfficiencyPart
from results.record import Record, now
from results.words import one_line
from runners.checks import one_of
from runners.machine.installation import module_name

from .base import Column, Measurement, Part, Row, sourced
from .subject import Subject

METRIC = "sm__cycles_active.avg.pct_of_peak_sustained_elapsed"
DURATION = "gpu__time_duration.sum"
COUNTER_SECONDS = 300


METHODS = ("auto", "counters", "estimated", "off")

# What Nsight Compute profiles as one workload: a graph, with its concurrency kept; each kernel, where each runs alone; or a
# range around the call, which keeps the concurrency of several streams, and lasts ten times as long as the call.
GRAPH = ("--graph-profiling", "graph", "--profile-from-start", "off")
KERNELS = ("--replay-mode", "kernel", "--profile-from-start", "off")
RANGE = ("--replay-mode", "app-range")  # it begins and ends with the profiler by itself


@dataclass(frozen=True)
class SmEfficiencyOptions:
    """sm_efficiency: counters of the hardware, an estimate, auto (counters where Nsight Compute is), or off."""

    sm_efficiency: str

    def __post_init__(self) -> None:
        one_of("runner.sm_efficiency", self.sm_efficiency, METHODS)


def workloads_of(session: Subject) -> Sequence[str]:
    """What Nsight Compute is told to profile of a session's call: GRAPH, KERNELS or RANGE."""
    if session.is_captured:
        return GRAPH
    return KERNELS if session.streams == 1 else RANGE


def measure(
    call: Callable[[], object], cell: Cell, workloads: Sequence[str], method: str, call_ms: float | None
) -> SmEfficiencyPart:
    """The share of a call in which an SM has an active warp, 0 to 1, and its source.

    The two sources mean different things and are never put in one chart. On a CPU there is no value.

    Args:
        call: one call of the prepared system, for the estimate.
        cell: run once more in another process, for the counters.
        workloads: what Nsight Compute is told to profile.
        method: one of METHODS.
        call_ms: milliseconds of a call when nothing profiles it.
    """
    if cell.device != "cuda":
        return SmEfficiencyPart(None, None, "a CPU has no SMs", when=now())
    if method == "off":
        return SmEfficiencyPart(None, None, "switched off", when=now())
    reason = None
    if method in ("auto", "counters"):
        if shutil.which("ncu"):
            assert call_ms is not None, "an undisturbed call is timed before any profiler"
            try:
                active_ns, elapsed_ns = parse_counters(profiled(cell, workloads, (METRIC, DURATION)))
                value = min(1.0, active_ns / 1e6 / call_ms)
                return SmEfficiencyPart(value, "counters", None, elapsed_ns / 1e6, now())
            except CountersUnavailable as error:
                reason = str(error)
        else:
            reason = "Nsight Compute (ncu) is not on the PATH"
        if method == "counters":
            return SmEfficiencyPart(None, None, reason, when=now())
    return SmEfficiencyPart(from_timeline(call), "estimated", reason, when=now())


class CountersUnavailable(Exception):
    """Nsight Compute gave no value; the message is one line."""


def profiled(cell: Cell, workloads: Sequence[str], metrics: Sequence[str]) -> str:
    """What Nsight Compute prints of these metrics, as CSV, for one call of a cell, run once more in a process of its own.

    A profiled call takes longer than one that nothing profiles. The time in which SMs are active is put over the time of an
    undisturbed call; a record tells both. Raises CountersUnavailable.

    Args:
        cell: what is called.
        workloads: GRAPH, KERNELS or RANGE.
        metrics: the counters, by Nsight Compute's names.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [
            *(
                sys.executable,
                "-P",
                "-m",
                module_name("runners.machine.tether"),
                "ncu",
                *workloads,
                "--clock-control",
                "none",
                "--cache-control",
                "none",
            ),
            *("--metrics", ",".join(metrics), "--csv", "--page", "raw", "--print-units", "base"),
            *("--log-file", str(log), "--target-processes", "all"),
            *(sys.executable, "-P", "-m", module_name("runners.cell.profiled"), json.dumps(cell_to_json(cell))),
        ]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=COUNTER_SECONDS, env=os.environ)
        except subprocess.TimeoutExpired:
            raise CountersUnavailable(f"Nsight Compute took over {COUNTER_SECONDS} s") from None
        text = log.read_text() if log.exists() else ""
        if run.returncode != 0:
            last = [line for line in "\n".join((run.stdout, run.stderr, text)).splitlines() if line.strip()] or ["no output"]
            raise CountersUnavailable(f"Nsight Compute failed: {one_line(last[-1])}")
        return text


def parse_counters(text: str) -> tuple[float, float]:
    """Nanoseconds in which the average SM was active, and all that elapsed, summed over the profiled workloads.

    text: what Nsight Compute printed as CSV. Raises CountersUnavailable where it holds no workload.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))[1:]  # the first holds units
    try:
        measured = [(float(r[DURATION].replace(",", "")), float(r[METRIC].replace(",", ""))) for r in rows]
    except (KeyError, ValueError) as error:
        raise CountersUnavailable(f"Nsight Compute reported no {METRIC}") from error
    if not measured:
        raise CountersUnavailable("Nsight Compute profiled nothing")
    return sum(duration * percent / 100 for duration, percent in measured), sum(duration for duration, _ in measured)


def from_timeline(call: Callable[[], object]) -> float:
    """Estimate from the kernels' timeline: at each moment the running kernels occupy at most one SM a block.

    An upper bound of what the counters would say while a kernel runs, since it takes every block for resident.
    """
    import torch

    from systems.profiling.trace import KernelEvent, traced

    kernels = [(e.begin_us, e.end_us, prod(e.grid)) for e in traced(call) if isinstance(e, KernelEvent)]
    return occupied(kernels, torch.cuda.get_device_properties(0).multi_processor_count)


def occupied(kernels: list[tuple[float, float, int]], sm_count: int) -> float:
    """The mean over time of min(1, running blocks / SMs), for kernels given as (start, end, blocks)."""
    if not kernels:
        return 0.0
    changes = sorted([(s, b) for s, _, b in kernels] + [(e, -b) for _, e, b in kernels])
    begin, end = changes[0][0], changes[-1][0]
    area, running, last = 0.0, 0, begin
    for moment, blocks in changes:
        area += (moment - last) * min(1.0, running / sm_count)
        running, last = running + blocks, moment
    return area / (end - begin)


def _text(record: Record, *, is_long: bool = False) -> str:
    return sourced(record.sm_efficiency, "{:.0%}", is_long=is_long)


class SmEfficiency(Measurement):
    """How much of the GPU has something to do, over one call."""

    name = "sm_efficiency"
    Options = SmEfficiencyOptions
    needs_profiler = True
    place = 40
    columns = (Column("SM", 4, _text, "share of time with an active warp, c from counters, e estimated"),)
    rows = (Row("SM efficiency", lambda record: _text(record, is_long=True)),)
    options: SmEfficiencyOptions

    def before_profiling(self, session: Subject) -> None:
        session.time_undisturbed()

    def measure(self, session: Subject) -> Part:
        method = self.options.sm_efficiency
        return measure(session.call, session.cell, workloads_of(session), method, session.undisturbed_ms)

    def missing(self, reason: str) -> Part:
        return SmEfficiencyPart(None, None, reason)
