"""What calls of a system took, and whether their outputs were right: parts of a record."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from .statistics import Samples, Statistics


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
