"""How near simulations of serving are to engines that served the same traces for real.

Invariant: a simulated figure is shown only while each real point of its costs is within THROUGHPUT and LATENCY of them.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import conf
from results.pack import SUFFIX
from results.record import Record
from results.store import Store

ROOT = conf.FOLDER.parent
REFERENCE = ROOT / "results" / "reference"
COSTS, COSTS_SUFFIX = REFERENCE / "simulation" / "serving", ".json.gz"  # of runner=iteration_costs
PREFIX = (__package__ or "").removesuffix("scripts")  # "opweave." in a wheel, nothing in a checkout
THROUGHPUT, LATENCY = 0.05, 0.10  # by which a simulation may be off


@dataclass(frozen=True)
class Point:
    """A rate of arrivals under two clocks.

    Args:
        record: the id of the real one's record.
        rate: arrivals, requests a second.
        throughput_real, throughput: requests finished a second, for real and simulated.
        normalized_ms_real, normalized_ms: median normalized latencies; None where requests came faster than they were
            finished.
    """

    record: str
    rate: float
    throughput_real: float
    throughput: float
    normalized_ms_real: float | None
    normalized_ms: float | None

    @property
    def throughput_error(self) -> float:
        """0.01 where the simulated one is 1 % more."""
        return self.throughput / self.throughput_real - 1

    @property
    def latency_error(self) -> float | None:
        """None where one of the two has no latency."""
        if self.normalized_ms is None or self.normalized_ms_real is None:
            return None
        return self.normalized_ms / self.normalized_ms_real - 1

    @property
    def is_near(self) -> bool:
        """Both are stable or neither is, and the numbers that there are agree."""
        if (self.normalized_ms is None) != (self.normalized_ms_real is None):
            return False
        return abs(self.throughput_error) <= THROUGHPUT and abs(self.latency_error or 0.0) <= LATENCY


def are_there(costs: str) -> bool:
    """Whether some costs are a file, or the name of a committed one."""
    return Path(costs).expanduser().is_file() or (COSTS / f"{costs}{COSTS_SUFFIX}").exists()


@cache
def points(costs: str) -> tuple[Point, ...]:
    """Every committed real point of a model, split, precision and GPU that the costs are of.

    A process of its own simulates them, since scripts do not import systems.

    Args:
        costs: a file of runner=iteration_costs, or the name of a committed one.
    """
    path = Path(costs).expanduser()
    command = [sys.executable, "-m", f"{PREFIX}runners.serving.agreement", str(path.resolve()) if path.is_file() else costs]
    done = subprocess.run([*command, *map(str, _packs())], cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(Point(**fields) for fields in json.loads(done.stdout))


def records(costs: str) -> dict[str, Record]:
    """The records that `points` are of, by their id."""
    ids = {point.record for point in points(costs)}
    return {record.id: record for pack in _packs() for record in Store(pack).read().records.values() if record.id in ids}


def _packs() -> list[Path]:
    """Committed records of what served."""
    return sorted(REFERENCE.glob(f"h*/serving*{SUFFIX}"))


def farthest(among: Sequence[Point]) -> tuple[float, float]:
    """The largest errors of throughput and of latency, as shares; 0 where there is none."""
    latencies = [abs(error) for point in among if (error := point.latency_error) is not None]
    return max((abs(point.throughput_error) for point in among), default=0.0), max(latencies, default=0.0)


def standing(costs: str) -> tuple[bool, str]:
    """Whether figures that are simulated with some costs are shown, and by what numbers.

    Costs without real points, as of more GPUs than were measured on, go by the points of all that are committed.
    """
    if not are_there(costs):
        return False, f"its costs, {costs}, are not there any more"
    among, whose = points(costs), ""
    if not among:
        names = sorted(file.name.removesuffix(COSTS_SUFFIX) for file in COSTS.glob(f"*{COSTS_SUFFIX}"))
        among, whose = tuple(point for name in names for point in points(name)), " of other costs"
    if not among:
        return False, "no record here is of an engine that served the same traces"
    num_near, (throughput, latency) = sum(point.is_near for point in among), farthest(among)
    off = f"throughput is off by {throughput:.1%} at most, and median normalized latency by {latency:.1%}"
    if num_near < len(among):
        most = f"{THROUGHPUT:.0%} and {LATENCY:.0%}"
        return False, f"{len(among) - num_near} of {len(among)} real points{whose} are not within {most}: {off}"
    return True, f"at {len(among)} real points{whose} {off}"
