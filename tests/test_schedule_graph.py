"""Schedules as graphs in the report: layers, lanes, stages, merges, and what is no schedule."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from dags import as_networkx, dags, from_edges
from hypothesis import given
from reports import document

from results.schedule_file import NoSchedule, ScheduleFile
from scripts.page.schedule_graph import ScheduleGraph
from scripts.report import make
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.plans.stream_assignment import assign_streams


@given(dags(max_nodes=40))
def test_layers_and_lanes_are_those_of_the_happens_before(graph: OperatorGraph) -> None:
    schedule = assign_streams(graph)
    drawn = ScheduleGraph(ScheduleFile.from_json(document(graph, schedule)))
    layer = drawn.layers()
    order = as_networkx(graph)
    order.add_edges_from(schedule.waits)
    members: dict[int, list[int]] = {}
    for operator in sorted(drawn.schedule.operators, key=lambda o: o.position):
        members.setdefault(operator.stream, []).append(operator.id)
    for stream in members.values():
        order.add_edges_from(pairwise(stream))
    deepest = dict.fromkeys(order, 0)
    for v in nx.topological_sort(order):
        deepest[v] = max((deepest[u] + 1 for u in order.predecessors(v)), default=0)
    assert layer == deepest
    lane = drawn.lanes(layer)
    assert set(lane) == set(members)
    taken = [(lane[s], layer_) for s, vs in members.items() for layer_ in range(layer[vs[0]], layer[vs[-1]] + 1)]
    assert len(set(taken)) == len(taken)  # no two streams in one lane while both are alive
    svg = drawn.to_svg()
    assert (svg.count("</title></path>"), svg.count("<text ")) == (len(graph), len(graph))
    assert svg.count('class="stream"') == len(members)
    lines = "".join(re.findall(r'<path fill="none"[^>]* d="([^"]*)"', svg))
    assert lines.count("M") == len({*drawn.schedule.edges, *drawn.schedule.waits})


def test_stages_follow_one_another_and_merges_are_framed() -> None:
    graph = from_edges(5, [(0, 1), (0, 2), (3, 4)])
    schedule = document(graph, assign_streams(graph))
    schedule |= {"stages": [[[0], [3]], [[1], [2], [4]]], "merges": [[1, 2]]}
    drawn = ScheduleGraph(ScheduleFile.from_json(schedule))
    layer = drawn.layers()
    assert max(layer[0], layer[3]) < min(layer[1], layer[2], layer[4])
    svg = drawn.to_svg()
    assert svg.count("in merge 1") == 2 and "stage 2" in svg
    assert "2 stages, 1 merge" in drawn.summary and "merges" not in drawn.summary


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("{", "s.json: "),
        ("[]", "not a JSON object"),
        ('{"model": "m"}', "it lacks system"),
        ({"edges": [[0, 9]]}, "names the operator 9, which it does not have"),
        ({"edges": [[0]]}, "is no schedule: edges"),
        ({"operators": [{"id": 0}]}, "is no schedule: operators"),
    ],
)
def test_what_is_no_schedule_is_told(tmp_path: Path, broken: Any, message: str) -> None:
    graph = from_edges(2, [(0, 1)])
    file = tmp_path / "s.json"
    whole = document(graph, assign_streams(graph))
    file.write_text(broken if isinstance(broken, str) else json.dumps(whole | broken))
    with pytest.raises(NoSchedule) as raised:
        ScheduleGraph.read(file)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_schedule_with_a_cycle_is_told() -> None:
    graph = from_edges(2, [(0, 1)])
    with pytest.raises(NoSchedule, match="has a cycle"):
        ScheduleGraph(ScheduleFile.from_json(document(graph, assign_streams(graph)) | {"waits": [[1, 0]]})).to_svg()


def test_a_schedule_says_what_its_decisions_gained_and_what_bounds_it() -> None:
    chain = from_edges(3, [(0, 1), (1, 2)])
    row = {"kind": "weave", "pattern": "early launches: yes", "count": 1, "num_operators": 0, "chosen": "after"}
    taken = [
        row | {"milliseconds": {"before": 0.5, "after": 0.4}},
        row | {"chosen": "a", "milliseconds": {"a": 1.0, "b": 2.0}},
    ]
    limits = {"critical_path_ms": 0.2, "busy_ms": 0.4, "operators": 3, "kernels": 3, "width": 1, "source": "kernels"}
    whole = document(chain, assign_streams(chain)) | {"decisions": taken, "limits": limits | {"launch_ms": 0.3}}
    drawn = ScheduleGraph(ScheduleFile.from_json(whole))
    assert drawn.gains == ["early launches: yes: 0.500 to 0.400 ms, 1.250x"]
    assert drawn.summary.endswith("launch 0.300 ms, critical path 0.200 ms")
    report = make({}, "eager", [], [drawn], [], [], "pictures")
    assert drawn.gains[0] in report.html() and f"- {drawn.gains[0]}" in report.markdown()
