"""What a record keeps of a system has the fields that systems write, though neither room knows the other."""

from dataclasses import fields

from dags import from_edges

from results import schedule as results_schedule
from results.document import part_from_json
from systems import base
from systems.scheduling import decision
from systems.scheduling.plans import schedule as made


def names(kind: type) -> set[str]:
    return {field.name.removeprefix("is_") for field in fields(kind)}


def test_a_record_has_a_field_for_each_of_a_compilation() -> None:
    assert names(results_schedule.Compilation) == names(base.Compilation)


def test_a_record_has_a_field_for_each_of_a_decision_and_a_search() -> None:
    assert names(results_schedule.DecisionRow) == names(decision.DecisionRow)
    assert names(results_schedule.Search) == names(made.Search)


def test_a_summary_of_a_schedule_is_read_as_a_record_holds_it() -> None:
    row = decision.DecisionRow("merge_linears", "two products", 3, 6, "merged", {"separate": 2.0, "merged": 1.0})
    graph = from_edges(2, [(0, 1)])
    search = made.Search(seconds=0.5, states=3, transitions=4)
    schedule = made.Schedule(graph, "ios", (0, 1), (0, 0), (), search=search, decisions=(row,))
    summary = part_from_json(schedule.summary(), results_schedule.ScheduleSummary)
    assert (summary.operators, summary.edges, summary.search.states) == (2, 1, 3)
    assert summary.decisions[0].gain == 2.0 == row.gain and summary.decided("merge_linears") == summary.decisions


def test_a_compilation_is_read_as_a_record_holds_it() -> None:
    compilation = base.Compilation(export_s=1.0, is_exported_now=True, trials=3)
    read = part_from_json(compilation.to_json(), results_schedule.Compilation)
    assert (read.export_s, read.exported_now, read.trials) == (1.0, True, 3)
