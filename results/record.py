"""One cell's record: its request, where it ran, what came out, and when. results/FORMAT.md describes its file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from statistics import median
from typing import TypeAlias

from .cell import Cell
from .course import Course
from .schedule import Compilation, ScheduleSummary
from .statistics import Statistics
from .warning import Warning

SCHEMA = 2
MOST_OF_NAME = 40  # letters of a model's or system's name in a file's, of which a file system takes 255 bytes
STATUSES = ("ok", "unsupported", "incorrect", "unchecked", "failed", "out_of_memory", "timeout")
# A cell with one of these is not measured again by the next sweep, unless `is_final` says otherwise.
FINAL = ("ok", "unsupported", "incorrect", "unchecked", "out_of_memory")

Samples: TypeAlias = tuple[float, ...]


def now() -> str:
    """The time, as records hold it: ISO 8601, UTC."""
    return datetime.now(UTC).isoformat()


@dataclass(frozen=True)
class Clocks:
    """A GPU's clocks in MHz, its temperature, its power, and the reasons for throttling that held."""

    sm_mhz: int
    sm_max_mhz: int
    memory_mhz: int
    temperature_c: int
    power_w: float
    throttled: tuple[str, ...] = ()


@dataclass(frozen=True)
class Environment:
    """Where a cell ran. The first fields, up to `sources`, decide whether a record stands for a new run.

    Args:
        host, cpu, cores: the machine, and the CPU cores that the sweep may use.
        python, libraries: versions, libraries by name.
        code: a digest of the project's code that the cell runs.
        gpu, driver: the GPU and its driver's version.
        settings: variables of the shell that change speed or results.
        sources: a digest of a custom model's own files.
        os, threads: the system, and PyTorch's threads.
        commit, modified: the commit of the code, and whether files differ from it; None where neither is known.
        cuda, cudnn: versions.
        sm_count, gpu_memory_bytes, compute_capability: of the GPU.
        clocks: of the GPU while the cell ran.
    """

    host: str
    cpu: str
    cores: int
    python: str
    libraries: dict[str, str]
    code: str
    gpu: str | None = None
    driver: str | None = None
    settings: dict[str, str] = field(default_factory=dict)
    sources: str | None = None
    os: str | None = None
    threads: int | None = None
    commit: str | None = None
    modified: bool | None = None
    cuda: str | None = None
    cudnn: int | None = None
    sm_count: int | None = None
    gpu_memory_bytes: int | None = None
    compute_capability: str | None = None
    clocks: Clocks | None = None

    @property
    def place(self) -> str:
        """The GPU, or the CPU where there is none."""
        return self.gpu or self.cpu

    @property
    def identity(self) -> dict[str, object]:
        """What must be the same for a record to stand for a new run."""
        names = ("host", "cpu", "cores", "python", "libraries", "code", "gpu", "driver", "settings", "sources")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Latency:
    """Single calls, each ended by a device synchronisation.

    Args:
        warmup_calls: calls before the first sample.
        host_ms: milliseconds of each call on the host's clock.
        device_ms: milliseconds of each call between events of the device; None on a CPU.
        host, device: their statistics.
    """

    warmup_calls: int
    host_ms: Samples
    device_ms: Samples | None
    host: Statistics
    device: Statistics | None


@dataclass(frozen=True)
class Throughput:
    """Calls back to back. runs: samples per second of each run of `calls` calls."""

    calls: int
    runs: Samples
    statistics: Statistics


@dataclass(frozen=True)
class Memory:
    """Bytes over the model's own weights and inputs.

    Args:
        source: "torch allocator", or "resident set" on a CPU.
        weights_and_inputs_bytes: what the peak does not count.
        peak_bytes: the largest over a few calls.
        peak_reserved_bytes: the segments that torch's allocator took for it; None on a CPU.
        system: what the system knows of itself, bytes by name.
    """

    source: str
    weights_and_inputs_bytes: int
    peak_bytes: int
    peak_reserved_bytes: int | None = None
    system: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Correctness:
    """Compared with eager in a higher precision. Errors are relative. The fields from `steps` to `dropout` are of training.

    Args:
        is_correct: every error is within its tolerance, and a larger one could have been seen.
        reason: why not.
        relative_error: ||out - reference|| / ||reference|| of the tensor that comes nearest to its tolerance, or exceeds it
            most, the largest over draws; None where nothing was compared.
        rounding: eager's own error of the same tensor, or what a unit of rounding does to it where that is more.
        tolerance: the largest relative error that is correct: what the check could not have seen.
        inputs: draws that were compared.
        steps: steps of training that were compared.
        losses, eager_losses: of these steps.
        dropout: whether the model dropped values in them.
        is_checked: False where no wrong execution could have been told from a right one.
        reference: the precision of what it was compared with.
        element_error, element_tolerance: max |out - reference| / max |reference|, and the largest that is correct.
        input_effect: how far apart the reference's outputs for different inputs are.
        equals_eager: every output is eager's own bit for bit.
        jumps: elements that eager itself changes far beyond rounding when its weights move by half a unit of it, as where a
            router chooses another expert. The output was held to what eager's outcomes span. None where there are none, or
            an error was not too large.
    """

    is_correct: bool
    reason: str | None
    relative_error: float | None
    rounding: float | None
    tolerance: float | None
    inputs: int | None = None
    steps: int | None = None
    losses: Samples | None = None
    eager_losses: Samples | None = None
    dropout: bool | None = None
    is_checked: bool = True
    reference: str | None = None
    element_error: float | None = None
    element_tolerance: float | None = None
    input_effect: float | None = None
    equals_eager: bool | None = None
    jumps: int | None = None


@dataclass(frozen=True)
class SmEfficiency:
    """The share of time in which an SM has an active warp, 0 to 1.

    Args:
        value: None where it was not measured; `reason` says why.
        source: "counters" of the hardware, or "estimated" from the kernels' timeline.
        reason: why there is no value, or why it is an estimate.
        profiled_ms: milliseconds of the call under Nsight Compute.
        when: the time of measuring.
    """

    value: float | None
    source: str | None
    reason: str | None
    profiled_ms: float | None = None
    when: str | None = None


@dataclass(frozen=True)
class ActiveWarps:
    """The warps in flight on the whole GPU, the mean over a call; fields as SmEfficiency has them.

    estimated_course: the warps over the milliseconds of one call, an estimate whatever the source of the value.
    """

    value: float | None
    source: str | None
    reason: str | None
    profiled_ms: float | None = None
    estimated_course: Course | None = None
    when: str | None = None


@dataclass(frozen=True)
class Kernels:
    """Kernels and copies of one call: their number, their durations added up, and the time in which any runs."""

    count: float | None
    sum_ms: float | None
    covered_ms: float | None
    reason: str | None = None
    when: str | None = None


@dataclass(frozen=True)
class Limits:
    """How fast any schedule of these operators could be.

    Args:
        critical_path_ms: the longest chain of dependent operators, each at its own measured time.
        busy_ms: the sum over all operators.
        operators, kernels, width: of the graph.
        source: "kernels" on a GPU, "host" on a CPU.
        macs: multiply-accumulates of a call; None for a custom model.
        reason: why there are none.
        sm_area_ms: of a GPU, the sum over kernels of the share of SMs held, times the time.
        traffic_ms: of a GPU, weights, inputs and outputs at the bandwidth of a copy, without what the L2 cache may hold.
        launch_ms: of a GPU, a graph of as many kernels that do nothing, on as many streams as the operators are wide.
        rewritten: the limits of the operators that rewriting passes made of the model's.
        when: the time of measuring.
    """

    critical_path_ms: float | None
    busy_ms: float | None
    operators: int | None = None
    kernels: int | None = None
    width: int | None = None
    source: str | None = None
    macs: int | None = None
    reason: str | None = None
    sm_area_ms: float | None = None
    traffic_ms: float | None = None
    launch_ms: float | None = None
    rewritten: Limits | None = None
    when: str | None = None

    @property
    def executed(self) -> Limits:
        """Of the operators that the system runs: those of the model, or what it rewrites them to."""
        return self.rewritten or self

    @property
    def bounds(self) -> dict[str, float]:
        """Milliseconds by name, the largest first: what no schedule of these operators is faster than."""
        named = {
            "critical path": self.critical_path_ms,
            "SM area": self.sm_area_ms,
            "memory traffic": self.traffic_ms,
            "launch": self.launch_ms,
        }
        known = {name: ms for name, ms in named.items() if ms is not None}
        return dict(sorted(known.items(), key=lambda item: -item[1]))

    @staticmethod
    def least(systems: Iterable[Limits]) -> dict[str, float]:
        """As `bounds`, of each the least that any system's operators have: kernels that take longer are no excuse."""
        least: dict[str, float] = {}
        for limits in systems:
            least |= {name: min(ms, least.get(name, ms)) for name, ms in limits.executed.bounds.items()}
        return dict(sorted(least.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class PredictionTime:
    """How long predicting one batch takes, from the table to probabilities on the host.

    Args:
        batch: rows.
        form: "values": the table as the data set has it; "categories": each of its categories as a number into a list.
        us: microseconds, the median of several calls with other rows.
        encode_us: of what comes before the predictor: encoders, and transfer where there is one.
    """

    batch: int
    form: str
    us: float
    encode_us: float


@dataclass(frozen=True)
class SeedAccuracy:
    """One draw of the split and of all else that is drawn.

    Args:
        seed: of the draw.
        auc, auc_variance: on the test rows, with DeLong's variance.
        log_loss: on the test rows.
        fit_s, tune_s: seconds of fitting, and of tuning afterwards.
        epochs: of tuning.
        gain, gain_variance: the AUC over that of the pipeline that was tuned, on the same rows.
        translation_error: the largest difference between raw scores of that pipeline and of its exact translation.
        predict_us: microseconds a test row, from the table to its probability, all test rows at once.
        epoch_s: seconds of an epoch's steps of tuning, without validation, the median.
        predictions: of batches, by systems that are compared in it.
    """

    seed: int
    auc: float
    auc_variance: float
    log_loss: float
    fit_s: float
    tune_s: float = 0.0
    epochs: int | None = None
    gain: float | None = None
    gain_variance: float | None = None
    translation_error: float | None = None
    predict_us: float | None = None
    epoch_s: float | None = None
    predictions: tuple[PredictionTime, ...] = ()


@dataclass(frozen=True)
class TableCounts:
    """What a table has, as table 5.2 of the dissertation counts it.

    Args:
        numeric, categorical: features.
        categories: different ones of all categorical features, in the training rows of one seed.
        positive_share: of all rows, 0 to 1.
    """

    numeric: int
    categorical: int
    categories: int
    positive_share: float


@dataclass(frozen=True)
class Accuracy:
    """How good predictions are on test rows that nothing was chosen by, over several seeds.

    Args:
        auc: the mean over seeds.
        low, high: the ends of its 95 % interval, over draws of test rows and of seeds.
        log_loss: the mean over seeds.
        seeds: each of them.
        training_rows, validation_rows, test_rows: of one seed.
        split: "rows" or "order".
        form: "whole", or "small" for few rows and trees.
        gain, gain_low, gain_high: the AUC over the pipeline's, for systems that tune one, with its interval.
        parameters: numbers that training changed last.
        when: the time of measuring.
        table: what the table has; None in older records.
    """

    auc: float
    low: float
    high: float
    log_loss: float
    seeds: tuple[SeedAccuracy, ...]
    training_rows: int
    validation_rows: int
    test_rows: int
    split: str
    form: str
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None
    parameters: int | None = None
    when: str | None = None
    table: TableCounts | None = None


@dataclass(frozen=True)
class Comparison:
    """The interleaved rounds that a cell shares with its siblings.

    Args:
        group: an id that records of the same rounds share.
        cells: the ids of the records that took part.
        when: the time of the rounds.
        rounds: host milliseconds of a few calls in each round.
        again: those of a second process of the same cell, which took its turns too; None for all cells but one.
    """

    group: str
    cells: tuple[str, ...]
    when: str
    rounds: tuple[Samples, ...]
    again: tuple[Samples, ...] | None = None

    @property
    def median_ms(self) -> float:
        """Median milliseconds of a call, of all rounds."""
        return median(call for turn in self.rounds for call in turn)


@dataclass(frozen=True)
class Quantity:
    """One number of a measurement that describes itself.

    Args:
        name: a key, unique within the measurement ("joules_per_call").
        heading: what a table's column and a chart's axis say ("energy").
        unit: of the value ("mJ").
        value: None where it was not measured; `reason` says why.
        low, high: the ends of its 95 % interval.
        is_more_better: whether a larger value is better.
        source: where the value comes from.
        reason: why there is no value.
    """

    name: str
    heading: str
    unit: str
    value: float | None
    low: float | None = None
    high: float | None = None
    is_more_better: bool = False
    source: str | None = None
    reason: str | None = None

    @property
    def title(self) -> str:
        """The heading with the unit, where there is one."""
        return f"{self.heading}, {self.unit}" if self.unit else self.heading


@dataclass(frozen=True)
class Measured:
    """A measurement without a type of its own here: its quantities, and its samples by name."""

    quantities: tuple[Quantity, ...]
    samples: dict[str, Samples] = field(default_factory=dict)
    when: str | None = None

    def quantity(self, name: str) -> Quantity | None:
        return next((quantity for quantity in self.quantities if quantity.name == name), None)


@dataclass(frozen=True)
class ServedRequests:
    """The requests of one trace, as their client saw them. Each field has an entry a request; seconds since the trace began.

    Args:
        due_s: when each was to be sent.
        sent_s: when the load generator gave it to its socket, or to what waits for that.
        prompt_tokens, max_new_tokens: of each.
        token_s: when each of its tokens came.
    """

    due_s: Samples
    sent_s: Samples
    prompt_tokens: tuple[int, ...]
    max_new_tokens: tuple[int, ...]
    token_s: tuple[Samples, ...]


@dataclass(frozen=True)
class Iterations:
    """The iterations of one trace, as the server saw them. Each field has an entry an iteration.

    Args:
        begin_s, end_s: when it was submitted, and when its tokens were there; seconds since the trace began.
        rows: requests in its batch.
        tokens: that it computed.
        useful_tokens: those that a request needed; the others are padding, or of finished requests.
        reserved_slots: K/V slots that requests held.
    """

    begin_s: Samples
    end_s: Samples
    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    useful_tokens: tuple[int, ...]
    reserved_slots: tuple[int, ...]


@dataclass(frozen=True)
class ServedTrace:
    """One trace of requests.

    Args:
        seed: that it was drawn with.
        is_stable: requests finished as fast as they came; without that a latency says only how long the trace was.
        requests, iterations: what its client and the server saw.
    """

    seed: int
    is_stable: bool
    requests: ServedRequests
    iterations: Iterations


@dataclass(frozen=True)
class Serving:
    """A system that serves requests.

    Args:
        quantities: medians over traces; intervals where there are several.
        traces: every one.
        num_slots: K/V slots that the engine has.
        clock: "real", or "virtual" where iterations were not computed but cost what a table says.
        when: the time of measuring.
    """

    quantities: tuple[Quantity, ...]
    traces: tuple[ServedTrace, ...]
    num_slots: int
    clock: str
    when: str | None = None


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
