"""One cell's record: its request, where it ran, what came out, and when. results/FORMAT.md describes its file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

from .accuracy import Accuracy
from .calls import Comparison, Correctness, Latency, Memory, Throughput
from .cell import Cell
from .environment import Environment
from .limits import Limits
from .occupation import ActiveWarps, Kernels, SmEfficiency
from .quantity import Measured
from .schedule import Compilation, ScheduleSummary
from .serving import Serving
from .warning import Warning

SCHEMA = 2
MOST_OF_NAME = 40  # letters of a model's or system's name in a file's, of which a file system takes 255 bytes
STATUSES = ("ok", "unsupported", "incorrect", "unchecked", "failed", "out_of_memory", "timeout")
# A cell with one of these is not measured again by the next sweep, unless `is_final` says otherwise.
FINAL = ("ok", "unsupported", "incorrect", "unchecked", "out_of_memory")


def now() -> str:
    """The time, as records hold it: ISO 8601, UTC."""
    return datetime.now(UTC).isoformat()


@dataclass(frozen=True)
class Record:
    """What one cell came to.

    Args:
        id: 16 hexadecimal digits; `identity` makes them.
        cell: the request.
        environment: where it ran.
        status: one of STATUSES.
        reason: one line, for every status but ok.
        when: the time at which measuring began.
        learning_s: seconds of searching, tuning, profiling and choosing, in a process of their own.
        operator_threads: the threads that one operator had, on a CPU.
        preparation_s: seconds until the system was ready.
        phases: seconds by phase of the cell's process.
        memory_limit_gib: the limit on host memory that the cell exceeded; None where it did not.
        schedule, compilation: of systems that have them.
        memory to accuracy: what was measured, each None where the runner does not measure it.
        measured: further measurements, by name.
        comparison: the rounds; None where the cell took no part in any.
        pending: measurements that the sweep owes still, since they need a profiler.
        warnings: what speaks against trusting it.
    """

    id: str
    cell: Cell
    environment: Environment
    status: str
    reason: str | None
    when: str
    learning_s: float | None = None
    preparation_s: float | None = None
    phases: dict[str, float] = field(default_factory=dict)
    memory_limit_gib: float | None = None
    operator_threads: int | None = None
    schedule: ScheduleSummary | None = None
    compilation: Compilation | None = None
    memory: Memory | None = None
    correctness: Correctness | None = None
    latency: Latency | None = None
    throughput: Throughput | None = None
    sm_efficiency: SmEfficiency | None = None
    active_warps: ActiveWarps | None = None
    kernels: Kernels | None = None
    limits: Limits | None = None
    serving: Serving | None = None
    accuracy: Accuracy | None = None
    measured: dict[str, Measured] = field(default_factory=dict)
    comparison: Comparison | None = None
    pending: tuple[str, ...] = ()
    warnings: tuple[Warning, ...] = ()

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"

    @property
    def is_final(self) -> bool:
        """Does it spare the next sweep its cell? Not where it exceeded its memory limit: the next sweep may allow more."""
        return self.status in FINAL and self.memory_limit_gib is None

    @property
    def file_name(self) -> str:
        """model-system-b1-cuda-0123456789abcdef.json, with the names that were asked for."""
        cell = self.cell
        model, system = (choice.choice.replace("/", "_")[:MOST_OF_NAME] for choice in (cell.model, cell.system))
        return f"{model}-{system}-b{cell.batch}-{cell.device}-{self.id}.json"

    @property
    def host_ms(self) -> float | None:
        """Median latency on the host's clock, in milliseconds."""
        return self.latency.host.median if self.latency is not None else None

    @property
    def described(self) -> dict[str, Measured]:
        """By measurement what describes itself, for tables and charts that know nothing else of it."""
        return self.measured | ({"serving": Measured(self.serving.quantities)} if self.serving is not None else {})

    @property
    def is_in_rounds(self) -> bool:
        return self.comparison is not None and bool(self.comparison.rounds)


def identity(cell: Cell, environment: Environment) -> str:
    """16 hexadecimal digits that two runs share exactly when they would measure the same in the same place."""
    whole = {"cell": asdict(cell), "environment": environment.identity}
    text = json.dumps(whole, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
