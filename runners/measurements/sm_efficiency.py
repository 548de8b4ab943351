"""SM efficiency: the share of time in which an SM has at least one active warp."""

import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .kernels import traced

METRIC = "sm__cycles_active.avg.pct_of_peak_sustained_elapsed"
DURATION = "gpu__time_duration.sum"
COUNTER_SECONDS = 300


def measure(call: Callable[[], Any], cell: dict[str, Any], captured: bool, method: str, call_ms: float) -> dict[str, Any]:
    """value (0 to 1) and its source: `counters` of the hardware, through Nsight Compute, or `estimated`; with counters also
    profiled_ms, the milliseconds that the call took under Nsight Compute.

    call_ms: what a call takes when nothing profiles it. method: auto (counters where Nsight Compute is, the estimate else),
    counters, estimated or off. The two sources mean different things and are never put in one chart. On a CPU the value is
    None, with the reason.
    """
    nothing = {"value": None, "source": None, "profiled_ms": None}
    if cell["device"] != "cuda":
        return nothing | {"reason": "a CPU has no SMs"}
    if method == "off":
        return nothing | {"reason": "switched off"}
    reason = None
    if method in ("auto", "counters"):
        if shutil.which("ncu"):
            try:
                active_ns, elapsed_ns = parse_counters(profiled(cell, captured, (METRIC, DURATION)))
                value = min(1.0, active_ns / 1e6 / call_ms)
                return {"value": value, "source": "counters", "reason": None, "profiled_ms": elapsed_ns / 1e6}
            except CountersUnavailable as error:
                reason = str(error)
        else:
            reason = "Nsight Compute (ncu) is not on the PATH"
        if method == "counters":
            return nothing | {"reason": reason}
    return nothing | {"value": from_timeline(call), "source": "estimated", "reason": reason}


class CountersUnavailable(Exception):
    """Nsight Compute gave no value; the message is one line."""


def profiled(cell: dict[str, Any], captured: bool, metrics: Sequence[str]) -> str:
    """What Nsight Compute prints of these metrics, as CSV, for one call of a cell, run once more in a process of its own.

    A captured graph is profiled as one workload, with its concurrency kept; other systems by a range around one call, which
    keeps it too. Either takes longer than a call that nothing profiles, and not twice the same, while the time in which SMs
    are active and their warps over that time repeat. So those are put over the time of an undisturbed call; a record tells
    both times. Raises CountersUnavailable.
    """
    # A range begins and ends with the profiler by itself; graphs are profiled wherever they run unless told when.
    replay = ["--graph-profiling", "graph", "--profile-from-start", "off"] if captured else ["--replay-mode", "app-range"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [
            *(
                sys.executable,
                "-m",
                "runners.machine.tether",
                "ncu",
                *replay,
                "--clock-control",
                "none",
                "--cache-control",
                "none",
            ),
            *("--metrics", ",".join(metrics), "--csv", "--page", "raw", "--print-units", "base"),
            *("--log-file", str(log), "--target-processes", "all"),
            *(sys.executable, "-m", "runners.cell.profiled", json.dumps(cell)),
        ]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=COUNTER_SECONDS, env=os.environ)
        except subprocess.TimeoutExpired:
            raise CountersUnavailable(f"Nsight Compute took over {COUNTER_SECONDS} s") from None
        text = log.read_text() if log.exists() else ""
        if run.returncode != 0:
            last = [line for line in "\n".join((run.stdout, run.stderr, text)).splitlines() if line.strip()] or ["no output"]
            raise CountersUnavailable(f"Nsight Compute failed: {last[-1].strip()}")
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


def from_timeline(call: Callable[[], Any]) -> float:
    """Estimate from the kernels' timeline: at each moment the running kernels occupy at most one SM a block.

    An upper bound of what the counters would say while a kernel runs, since it takes every block for resident.
    """
    kernels = [(e["ts"], e["ts"] + e["dur"], _blocks(e)) for e in traced(call) if e["cat"] == "kernel"]
    return occupied(kernels, torch.cuda.get_device_properties(0).multi_processor_count)


def _blocks(event: dict[str, Any]) -> int:
    x, y, z = event["args"]["grid"]
    return x * y * z


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
