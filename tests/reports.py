"""A report that tests look at: of a few records, one schedule and one verdict."""

import copy
from functools import cache
from typing import Any

from conftest import ROOT

from results.published.values import exhibit
from results.verdict import Verdict
from scripts import report
from scripts.charts.measured import by_setting, read
from scripts.page.schedule_graph import ScheduleGraph
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.stream_assignment import assign_streams

REFERENCE = ROOT / "results" / "reference" / "h200"
VERDICT = Verdict(
    exhibit="nimble/figure7",
    claim="Nimble is up to 22.34 times as fast as PyTorch <NASNet-A mobile>",
    published="22.34x",
    measured="14.09x [12.86, 25.37]",
    verdict="holds in part",
    reason="The order of the models holds.",
    command="python scripts/reproduce.py nimble/figure7",
    place="NVIDIA H200",
)


def document(graph: OperatorGraph, schedule: Schedule) -> dict[str, Any]:
    return schedule.to_json(model="a model", batch=1, device="cpu")


@cache
def records() -> list[dict[str, Any]]:
    """A few of the reference's, with one that is incorrect although it holds measurements, and one that did not run."""
    found = [copy.deepcopy(r) for r in read([REFERENCE]) if r["config"]["model"]["name"] in ("nasnet", "bert", "randwire")]
    for record in found:
        config = record["config"]
        name = config["model"]["name"], config["system"]["name"], config["batch"]
        if name == ("bert", "nimble", 1):
            record |= {"status": "incorrect", "reason": "relative error 1.0e+00 exceeds <the> tolerance"}
        if name == ("nasnet", "torchscript", 1):
            record |= {"status": "unsupported", "reason": "no compiler | here", "latency": None, "comparison": None}
    return found


@cache
def made() -> report.Report:
    chain = OperatorGraph.from_edges(7, [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (0, 5), (5, 6), (4, 6)])
    graph = ScheduleGraph(document(chain, assign_streams(chain)))
    return report.make(by_setting(records()), "eager", exhibit("nimble/figure7"), [graph], [VERDICT], "pictures")
