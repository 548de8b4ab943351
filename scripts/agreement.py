"""How near simulations of serving are to engines that served the same traces for real.

Invariant: a simulated figure is shown only while each real point of its costs and of such lengths of requests is
within THROUGHPUT and LATENCY of them.
"""

import gzip
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import conf
from conf.text import counted
from results.agreement import LATENCY, THROUGHPUT, Lengths, Point
from results.document import part_from_json
from results.files import read_json
from results.pack import SUFFIX

ROOT = conf.FOLDER.parent
REFERENCE = ROOT / "results" / "reference"
COSTS, COSTS_SUFFIX = REFERENCE / "simulation" / "serving", ".json.gz"  # of runner=iteration_costs
SPLITS = {"tensor": "in parts of each layer", "pipeline": "in stages"}  # of a model, in words
OF_POINTS = b'"simulation"'  # what each record of real points has; to read all others takes 10 s
PREFIX = (__package__ or "").removesuffix("scripts")  # "opweave." in a wheel, nothing in a checkout


def are_there(costs: str) -> bool:
    """Whether some costs are a file, or the name of a committed one."""
    return Path(costs).expanduser().is_file() or (COSTS / f"{costs}{COSTS_SUFFIX}").exists()


def points(costs: str) -> tuple[Point, ...]:
    """Every committed real point of a model, split, precision and GPU that the costs are of.

    Args:
        costs: a file of runner=iteration_costs, or the name of a committed one.
    """
    path = Path(costs).expanduser()
    if path.is_file():
        return _simulated(str(path.resolve()))[0]
    names = committed()
    return _simulated(*names)[names.index(costs)]


def committed() -> list[str]:
    """The names of committed costs."""
    return sorted(file.name.removesuffix(COSTS_SUFFIX) for file in COSTS.glob(f"*{COSTS_SUFFIX}"))


@cache
def _simulated(*costs: str) -> list[tuple[Point, ...]]:
    """The points of each costs. A process of its own simulates them, since scripts do not import systems."""
    packs = [
        pack for pack in sorted(REFERENCE.glob(f"h*/serving*{SUFFIX}")) if OF_POINTS in gzip.decompress(pack.read_bytes())
    ]
    command = [sys.executable, "-m", f"{PREFIX}runners.serving.agreement", *costs, "--", *map(str, packs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [tuple(part_from_json(point, Point) for point in each) for each in json.loads(done.stdout)]


def points_of(costs: str, lengths: Lengths) -> tuple[Point, ...]:
    """Those whose requests have such lengths."""
    return tuple(point for point in points(costs) if point.lengths == lengths)


def farthest(among: Sequence[Point]) -> tuple[float, float]:
    """The largest errors of throughput and of latency, as shares; 0 where there is none."""
    latencies = [abs(error) for point in among if (error := point.latency_error) is not None]
    return max((abs(point.throughput_error) for point in among), default=0.0), max(latencies, default=0.0)


def standing(costs: str, lengths: Lengths, systems: Iterable[str] = ()) -> tuple[bool, str]:
    """Whether figures that are simulated with some costs are shown, and by what numbers.

    Args:
        costs: a file of runner=iteration_costs, or the name of a committed one.
        lengths: of the requests.
        systems: choices that are compared; those without a real point are named.

    They go by points of requests of the same lengths: static batches of equal requests are farther off than those of others.
    Costs without real points go by the points of committed ones that are split in no other way. Costs of a part of layers or
    of a stage do so only where others of such a part have points: a model on one GPU shows nothing of sums and stages.
    """
    if not are_there(costs):
        return False, f"its costs, {costs}, are not there any more"
    among, whose = points_of(costs, lengths), ""
    if not among:
        splits = _splits(costs)
        others = {name: points_of(name, lengths) for name in committed() if _splits(name) <= splits}
        for split in sorted(splits):
            if not any(each and split in _splits(name) for name, each in others.items()):
                return False, f"no record here is of an engine {SPLITS[split]} that served requests of such lengths"
        among, whose = tuple(point for each in others.values() for point in each), " of other costs"
    if not among:
        return False, "no record here is of an engine that served requests of such lengths"
    num_near, (throughput, latency) = sum(point.is_near for point in among), farthest(among)
    off = f"throughput is off by {throughput:.1%} at most, and median normalized latency by {latency:.1%}"
    if num_near < len(among):
        most = f"{THROUGHPUT:.0%} and {LATENCY:.0%}"
        return False, f"{len(among) - num_near} of {counted(len(among), 'real point')}{whose} are not within {most}: {off}"
    real = {point.cell.system.choice for point in among}
    lacking = sorted({*systems} - real)
    off += f", and no real point is of {', '.join(lacking)}" * bool(lacking)
    return True, f"at {counted(len(among), 'real point')}{whose} {off}"


def _splits(costs: str) -> set[str]:
    """How the model is split, of which some costs are one part: of SPLITS."""
    path = Path(costs).expanduser()
    parts = read_json(path if path.is_file() else COSTS / f"{costs}{COSTS_SUFFIX}")["parts"]
    return {split for split in SPLITS if parts[split] > 1}
