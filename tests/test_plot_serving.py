"""Charts of servers: latency over throughput, and the course of batches."""

from dataclasses import replace

import matplotlib.pyplot as plt
import pytest
from drawn_charts import EAGER
from made_records import cell, chosen, record

from results.cell import Cell, choose
from results.quantity import Quantity
from results.record import Record
from results.selection import NoResults
from results.selection import Selection as Selected
from results.serving import Iterations, ServedRequests, ServedTrace, Serving
from scripts import plot
from scripts.charts import batch_course, serving, style

pytestmark = pytest.mark.usefixtures("closed_figures")


def test_latency_over_throughput_has_a_line_for_each_largest_batch() -> None:
    """Rates that were not kept up with have a throughput and no latency, and the newest trace of a rate counts."""

    def served(size: int, rate: float, throughput: float, latency_ms: float | None, when: str = "2026-01-01") -> Record:
        reason = None if latency_ms else "unstable"
        numbers = (
            Quantity("request_throughput", "request throughput", "req/s", throughput),
            Quantity("normalized_p50_ms", "normalized latency", "ms", latency_ms, reason=reason),
        )
        runner = choose("runner", "serving", rate=rate)
        one = replace(
            cell(), model=chosen("model", "gpt"), system=chosen("system", "orca", max_batch_size=size), runner=runner
        )
        return record(of=one, serving=Serving(numbers, (), 1, "real"), when=when)

    many = [served(8, 1.0, 0.9, 7.0, "2025-01-01"), served(8, 1.0, 1.0, 5.0), served(8, 4.0, 3.5, None)]
    chart = serving.draw(Selected([*many, served(1, 1.0, 1.0, 9.0)], style.order))
    (axes,) = chart.figure.axes
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines if line.get_marker() != "x"]
    assert ([1.0], [5.0]) in lines and ([1.0], [9.0]) in lines
    lost = [list(line.get_xdata()) for line in axes.lines if line.get_marker() == "x"]
    assert [3.5] in lost
    labels = {text.get_text() for legend in chart.figure.legends for text in legend.get_texts()}
    assert labels == {"Orca", "batches up to 1", "batches up to 8", "falls behind"}
    with pytest.raises(NoResults, match="keeps up"):
        serving.draw(Selected([served(8, 4.0, 3.5, None)], style.order))


def test_lines_of_one_system_with_other_options_look_different() -> None:
    name = "request_level_microbatches"
    systems = [
        chosen("system", name, max_batch_size=batch, microbatch_size=size) for batch, size in ((8, 2), (8, 4), (16, 2))
    ]
    styles = [serving._style(system, systems) for system in systems]
    assert styles[0]["color"] != styles[1]["color"] and styles[0]["linestyle"] != styles[1]["linestyle"]
    assert styles[0]["color"] == styles[2]["color"] and styles[0]["marker"] != styles[2]["marker"]


def test_the_course_of_batches_is_that_of_the_iterations() -> None:
    """An iteration's numbers stand until the next begins, and fall to none where the server has nothing to do."""
    iterations = Iterations((0.0, 0.1, 5.0), (0.1, 0.2, 5.1), (2, 3, 1), (9, 3, 4), (9, 3, 4), (40, 60, 20))
    served = ServedRequests((0.0,), (0.0,), (4,), (1,), ((5.1,),))
    one = replace(cell(), model=chosen("model", "gpt"), system=chosen("system", "orca", max_batch_size=4))

    def record_of(of: Cell, *traces: ServedTrace) -> Record:
        return record(of=of, serving=Serving((), traces, 100, "real"))

    told = record_of(one, ServedTrace(0, True, served, iterations))
    chart = batch_course.draw(Selected([told], style.order))
    top, bottom = chart.figure.axes
    (course, bound), (slots,) = top.lines, bottom.lines
    assert [list(line.get_xdata()) for line in (course, slots)] == [[0.0, 0.1, 0.2, 5.0, 5.1]] * 2
    assert list(course.get_ydata()) == [2, 3, 0, 1, 0] and list(slots.get_ydata()) == [40, 60, 0, 20, 0]
    assert set(bound.get_ydata()) == {4} and top.get_ylim()[1] > 4
    assert "of 100" in bottom.get_title(loc="left") and chart.name == "batch_course"
    plt.close(chart.figure)
    nothing = Iterations((), (), (), (), (), ())
    untold = record_of(replace(one, system=chosen("system", "vllm")), ServedTrace(0, True, served, nothing))
    with pytest.raises(NoResults, match="no record holds the iterations"):
        batch_course.draw(Selected([untold], style.order))
    other = record_of(replace(one, system=chosen("system", "orca_paged")), ServedTrace(0, True, served, iterations))
    both = Selected([told, untold, other], style.order)
    charts, _ = plot.draw_all(both, ["batch_course"], EAGER, ())
    assert list(charts) == ["batch_course-1", "batch_course-2"]
    assert "batch_course" in plot.usual(Selected([told, untold])) and "batch_course" not in plot.usual(both)
