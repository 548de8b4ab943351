"""What runner=serving is asked for. This file never imports torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from runners.checks import BadRequest, at_least, is_positive, not_negative, positive_integer
from runners.measurements.base import RunnerOptions

from .workload import Arrival, at_rate, drawn, read, span_of

COSTS = Path(__file__).resolve().parents[2] / "results" / "reference" / "simulation" / "serving"  # of runner=iteration_costs
SUFFIX = ".json.gz"
YEAR_S = 365 * 24 * 3600.0
DRAWN = "prompt_tokens", "new_tokens", "rate", "burstiness"  # keys of what a trace's file has
TIMED = "rate", "burstiness", "trace_speed"  # keys of when requests are due
MOST_REQUESTS = 10**6  # of all traces: they are drawn, and their prompts too, before the first is sent


@dataclass(frozen=True)
class ServingOptions(RunnerOptions):
    """Which requests come, and when.

    Args:
        prompt_tokens, new_tokens: ends of uniform distributions, "32-512", or one number.
        requests: of a trace.
        rate: arrivals a second.
        burstiness: shape of the gamma distribution of gaps; 1 is a Poisson process.
        concurrency: requests that are unfinished at a time; 0 sends each when it is due.
        trace: a file of arrivals and lengths in the place of drawn ones; None draws them.
        trace_speed: of the file's clock.
        shared_tokens: at the beginning of each prompt, the same in all of a trace.
        slo_ms: the largest normalized latency that is good; 0 names none.
        repeats: traces, each of a seed of its own.

    longest_s: the longest trace that is served.
    """

    longest_s: ClassVar[float] = YEAR_S
    prompt_tokens: str | int
    new_tokens: str | int
    requests: int
    rate: float
    burstiness: float
    concurrency: int
    trace: str | None
    trace_speed: float
    shared_tokens: int
    slo_ms: float
    repeats: int

    def __post_init__(self) -> None:
        span_of("runner.prompt_tokens", self.prompt_tokens)
        span_of("runner.new_tokens", self.new_tokens)
        positive_integer("runner.requests", self.requests)
        positive_integer("runner.repeats", self.repeats)
        if self.requests * self.repeats > MOST_REQUESTS:
            repeats = f" and runner.repeats={self.repeats}" * (self.repeats > 1)
            raise BadRequest(f"runner.requests={self.requests}{repeats} are more than {MOST_REQUESTS} requests")
        at_least("runner.concurrency", self.concurrency, 0)
        not_negative("runner.slo_ms", self.slo_ms)
        at_least("runner.shared_tokens", self.shared_tokens, 0)
        for key in ("rate", "burstiness", "trace_speed"):
            if not is_positive(getattr(self, key)):
                raise BadRequest(f"runner.{key}={getattr(self, key)} is not a positive number")
        if self.trace is not None and not isinstance(self.trace, str):
            raise BadRequest(f"runner.trace={self.trace} is not a path")
        if self.trace is None:
            self._check_length("rate", self.rate, self.requests / self.rate)
            return
        arrivals = self.trace_of(seed=0)
        if len(arrivals) < self.requests:
            raise BadRequest(f"runner.requests={self.requests}: {self.trace} has {len(arrivals)}")
        self._check_length("trace_speed", self.trace_speed, arrivals[-1].due_s)

    @property
    def unread(self) -> dict[str, str]:
        reasons: dict[str, str] = {}
        if self.trace is None:
            reasons["trace_speed"] = "it is of the clock of a runner.trace, and there is none"
        else:
            reasons |= dict.fromkeys(DRAWN, "runner.trace has arrivals and lengths of its own")
        if self.concurrency:
            reasons |= dict.fromkeys(TIMED, "runner.concurrency sends a request when another is finished")
        return reasons

    def _check_length(self, key: str, value: str | float, last_s: float) -> None:
        """Raises BadRequest where a trace takes too long. last_s: when its last request comes."""
        if last_s > self.longest_s:
            years = last_s / YEAR_S
            number = f"{years:,.1f}" if years < 1e9 else f"{years:.3g}"
            raise BadRequest(f"runner.{key}={value}: the last of {self.requests} requests comes after {number} years")

    def trace_of(self, seed: int) -> tuple[Arrival, ...]:
        """The requests of one trace. A file's are the same for every seed."""
        if self.trace is not None:
            arrivals = read(Path(self.trace).expanduser(), self.requests)
            return tuple(replace(arrival, due_s=arrival.due_s / self.trace_speed) for arrival in arrivals)
        prompt, new = span_of("runner.prompt_tokens", self.prompt_tokens), span_of("runner.new_tokens", self.new_tokens)
        return drawn(self.requests, self.rate, self.burstiness, prompt, new, seed)

    def trace_at(self, rate: float, seed: int) -> tuple[Arrival, ...]:
        """The requests of one trace, which come at exactly `rate` a second."""
        return at_rate(self.trace_of(seed), rate)


@dataclass(frozen=True)
class EngineOptions(RunnerOptions):
    """prompt_tokens, new_tokens: of each request of a batch. samples: batches that are timed."""

    prompt_tokens: int
    new_tokens: int
    samples: int

    def __post_init__(self) -> None:
        for key in ("prompt_tokens", "new_tokens", "samples"):
            positive_integer(f"runner.{key}", getattr(self, key))


@dataclass(frozen=True)
class CapacityOptions:
    """How the largest rate is looked for.

    Args:
        steps: halvings of the interval that holds it.
        slo_ms: the largest median normalized latency; 0 takes the chapter's rule (figure 4.8).
        concurrency, trace: of the load, both none: a rate is what is looked for.
    """

    steps: int
    slo_ms: float
    concurrency: int
    trace: str | None

    def __post_init__(self) -> None:
        positive_integer("runner.steps", self.steps)
        if self.concurrency or self.trace is not None:
            raise BadRequest("runner=capacity looks for a rate: it takes neither runner.concurrency nor runner.trace")


@dataclass(frozen=True)
class SimulationOptions(ServingOptions):
    """rates: arrivals a second of further traces, blanks between them; None for those of `rate` alone."""

    rates: str | float | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.concurrency:
            raise BadRequest("runner=simulation knows when requests come: it takes no runner.concurrency")
        if self.rates is not None and self.trace is not None:
            raise BadRequest("a trace has its rate: runner.trace takes no runner.rates")
        for text in self._rate_texts:
            try:
                is_rate = is_positive(float(text))
            except ValueError:
                is_rate = False
            if not is_rate:
                raise BadRequest(f"runner.rates={self.rates}: {text} is not a positive number")
            self._check_length("rates", text, self.requests / float(text))

    @property
    def unread(self) -> dict[str, str]:
        return super().unread | {"slo_ms": "runner=simulation has no goodput"}

    @property
    def _rate_texts(self) -> tuple[str, ...]:
        return () if self.rates is None else tuple(str(self.rates).split())

    @property
    def all_rates(self) -> tuple[float, ...]:
        """Each once, ascending; of a file that at which its requests come, `rate` where all come at once."""
        if self.trace is not None:
            arrivals = self.trace_of(seed=0)
            last_s = arrivals[-1].due_s
            return ((len(arrivals) - 1) / last_s if last_s else self.rate,)
        return tuple(sorted({self.rate, *map(float, self._rate_texts)}))


def costs_file(name: str) -> Path:
    """A file of costs by its path, or by the name of one that is committed."""
    path = Path(name).expanduser()
    return path if path.is_file() else COSTS / f"{name}{SUFFIX}"


@dataclass(frozen=True)
class SimulatedOptions(ServingOptions):
    """What is simulated.

    Args:
        measurements: names, blanks between them.
        costs: a file of runner=iteration_costs, or the name of one that is committed; it is needed.
        reductions: another, of several GPUs, for sums; or None.
    """

    longest_s: ClassVar[float] = math.inf  # a virtual clock waits for nothing
    measurements: str
    costs: str | None
    reductions: str | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.concurrency:
            raise BadRequest("runner=simulated knows when requests come: it takes no runner.concurrency")
        for key in ("costs", "reductions"):
            if (name := getattr(self, key)) is not None and not costs_file(name).is_file():
                known = ", ".join(sorted(file.name.removesuffix(SUFFIX) for file in COSTS.glob(f"*{SUFFIX}")))
                raise BadRequest(
                    f"runner.{key}={name} is not a file: runner=iteration_costs output=FILE writes one"
                    + f"; committed are {known}" * bool(known)
                )

    @property
    def unread(self) -> dict[str, str]:
        looks_for_rate = "capacity" in self.measurements.split()
        return super().unread | ({} if looks_for_rate else {"steps": "runner.measurements has no capacity"})
