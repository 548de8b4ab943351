"""A report that tests look at: of a few records, one schedule and one verdict."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from conftest import ROOT
from dags import from_edges
from made_records import cell

from results.published.values import exhibit
from results.record import Record
from results.schedule_file import ScheduleFile
from results.selection import by_setting, read
from results.timeline import COMPUTE, MEMORY, Bar, Timeline
from results.verdict import Verdict
from scripts import report
from scripts.charts.style import order
from scripts.page.schedule_graph import ScheduleGraph
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.stream_assignment import assign_streams

REFERENCE = ROOT / "results" / "reference" / "h200"
OVERVIEW = str(REFERENCE / "overview.jsonl.gz")
VERDICT = Verdict(
    exhibit="nimble/figure7",
    claim="Nimble is up to 22.34 times as fast as PyTorch <NASNet-A mobile>",
    published="22.34x",
    measured="14.09x [12.86, 25.37]",
    verdict="holds in part",
    reason="The order of the models holds.",
    command="python scripts/reproduce.py nimble/figure7",
    place="NVIDIA H200",
    judged=8,
    figures=12,
)


TIMELINE = Timeline(
    cell("nimble", "nasnet"),
    "kernels",
    (Bar(0, "conv2d", 0.0, 1.0, COMPUTE), Bar(1, "relu", 0.5, 1.0, MEMORY)),
    machine="a GPU, torch 1.0",
)


def document(graph: OperatorGraph, schedule: Schedule) -> dict[str, Any]:
    return schedule.to_json(model="a model", batch=1, device="cpu")


@cache
def records() -> list[Record]:
    """A few of the reference's, with one that is incorrect although it holds measurements, and one that did not run."""
    changes: dict[str, dict[str, Any]] = {
        "bert nimble b1": {"status": "incorrect", "reason": "relative error 1.0e+00 exceeds <the> tolerance"},
        "nasnet torchscript b1": {
            "status": "unsupported",
            "reason": "no compiler | here",
            "latency": None,
            "comparison": None,
        },
    }
    few = [r for r in read([Path(OVERVIEW)]) if r.cell.model.name in ("nasnet", "bert", "randwire")]
    return [replace(record, **changes.get(record.cell.label, {})) for record in few]


@cache
def made() -> report.Report:
    chain = from_edges(7, [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (0, 5), (5, 6), (4, 6)])
    graph = ScheduleGraph(ScheduleFile.from_json(document(chain, assign_streams(chain))))
    return report.make(
        by_setting(records(), order), "eager", exhibit("nimble/figure7"), [graph], [TIMELINE], [VERDICT], "pictures"
    )
