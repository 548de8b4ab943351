"""What the committed records tell of each exhibit."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from results.finding import CANNOT, NOT_RUN, Finding
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
FIRST_TABLE = "h200"
# The folders of exhibits whose records are not, or not only, in the first table's: the best first. Those of several
# processes a system are of several folders: "A + B" is both together.
ELSEWHERE = {
    "nimble/figure2b": ("h200-figure2b",),
    "nimble/figure7": ("h200-turns", "h200-zoo"),
    "nimble/table1": ("h200-turns",),
    "nimble/figure8": ("h200-turns",),
    "nimble/supplement_figure1": ("h200-turns",),
    "nimble/supplement_figure2": ("h200-turns",),
    "opara/figure1": ("h200-figure5",),
    "opara/figure2": ("h200-orders", "h200-opara"),
    "opara/figure5": ("h200-figure5", "h200-zoo", "h200-schedulers", "h200-turns"),
    "opara/figure8": ("h200-opara", "h200-zoo"),
    "opara/prototype": ("h200-figure5", "h200-zoo"),
    "opara/profiling": ("h200-figure5",),
    "opara/figure9": ("h200-opara",),
    "ios/autotune": ("h200-tuned",),
    "ios/frameworks": ("h200-zoo",),
    "ios/figure15": ("h200-zoo",),
    **dict.fromkeys(
        (f"ios/{name}" for name in ("schedules", "figure14", "blockwise", "active_warps", "batch_sizes", "specialization")),
        ("h200-ios",),
    ),
    "ios/pruning": ("h200-ios-pruning",),
    **dict.fromkeys((f"windtunnel/table5.{n}_nycflights13" for n in (3, 4, 5, 6)), ("h200-windtunnel",)),
}


@dataclass(frozen=True)
class Recorded:
    """An exhibit as the records of one folder tell of it."""

    run: Run
    evidence: Evidence
    findings: list[Finding]
    verdict: Verdict

    @property
    def tells(self) -> bool:
        return self.verdict.verdict not in (CANNOT, NOT_RUN)


def recorded(preset: Preset) -> list[Recorded]:
    """One of each folder that may tell of an exhibit: those that do come first, in the order of ELSEWHERE."""
    folders = dict.fromkeys((*ELSEWHERE.get(preset.name, ()), FIRST_TABLE))
    return sorted(_of_folders(preset, list(folders)), key=lambda one: not one.tells)


def _of_folders(preset: Preset, names: list[str]) -> Iterator[Recorded]:
    for name in names:
        run = Run(preset, {}, REFERENCE / name, Path(OUTPUT), small=False, files=SCHEDULES)
        evidence = run.evidence([record for part in name.split(" + ") for record in _records(REFERENCE / part)])
        figures = findings(preset, evidence)
        yield Recorded(run, evidence, figures, judgement.judge(preset, evidence, figures, small=False))


@cache
def _records(folder: Path) -> list[Record]:
    return list(Store(folder).read().records.values()) if folder.is_dir() else []
