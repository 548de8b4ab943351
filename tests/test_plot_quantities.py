"""Charts and columns of quantities that nothing in scripts/ knows the name of."""

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Run
from drawn_charts import EAGER, Selection, check_words, drawn
from made_records import cell, chosen, record

from results.cell import Cell, Conditions
from results.quantity import Measured, Quantity
from results.record import Record
from results.selection import NoResults
from results.store import Store
from scripts import plot
from scripts.charts import quantity, style
from scripts.page import content
from scripts.table import DASH

pytestmark = pytest.mark.usefixtures("closed_figures")


def energetic() -> list[Record]:
    """Records of an energy that describes itself; of one system it has no value."""
    made = []
    for model in ("nasnet", "vgg16"):
        for system, joules in (("eager", 5.0), ("nimble", 3.5), ("ios", None)):
            ends = (None, None) if joules is None else (joules - 0.5, joules + 0.5)
            reason = "no counter here" if joules is None else None
            energy = Quantity("per_call", "energy of a call", "mJ", joules, *ends, source="NVML", reason=reason)
            made.append(record(of=cell(system, model), measured={"energy": Measured((energy,))}))
    return made


def test_a_quantity_without_a_unit_is_drawn_with_none() -> None:
    share = Quantity("idle_share", "share of time", "", 0.25)
    chart = quantity.draw(Selection([record(measured={"engine": Measured((share,))})]), "engine.idle_share")
    assert "share of time" in drawn(chart.figure) and chart.caption.startswith("Share of time; less is better")


def test_bars_compare_cells_and_medians() -> None:
    """What one cell of several has is in no chart, nor is a distribution's tail; a cell that is alone has all but tails."""
    nimble_cell = cell()
    eager_cell = replace(nimble_cell, system=chosen("system", "eager"))

    def of(one: Cell, *names: str) -> Record:
        numbers = tuple(Quantity(name, name, "ms", 1.0) for name in names)
        return record(of=one, measured={"serving": Measured(numbers)})

    two_cells = Selection(
        [
            of(nimble_cell, "wait_p50_ms", "wait_p99_ms", "at_8", "use_p99"),
            of(eager_cell, "wait_p50_ms", "wait_p99_ms", "use_p99"),
        ]
    )
    assert [name for name in plot.usual(two_cells) if "." in name] == ["serving.use_p99", "serving.wait_p50_ms"]
    one_cell = Selection([of(nimble_cell, "wait_p50_ms", "wait_p99_ms", "at_8")])
    assert [name for name in plot.usual(one_cell) if "." in name] == ["serving.at_8", "serving.wait_p50_ms"]


def test_a_single_bar_stands_in_no_chart_beside_other_batches() -> None:
    nimble_cell = cell()
    eager_cell = replace(nimble_cell, system=chosen("system", "eager"))
    larger_cell = replace(nimble_cell, conditions=Conditions(8, nimble_cell.device))
    part = Measured((Quantity("wait_ms", "wait", "ms", 1.0),))
    records = [record(of=one, measured={"serving": part}) for one in (nimble_cell, eager_cell, larger_cell)]
    assert [suffix for suffix, _ in plot.per_batch("serving.wait_ms", Selection(records))] == ["-b1"]
    assert [suffix for suffix, _ in plot.per_batch("serving.wait_ms", Selection(records[1:]))] == ["-b1", "-b8"]


def test_a_quantity_is_drawn_by_its_name_with_its_unit() -> None:
    shown = Selection(energetic())
    assert list(shown.quantities()) == ["energy.per_call"]
    charts, refused = plot.draw_all(shown, ["energy.per_call"], EAGER, ())
    assert not refused
    figure = charts["energy.per_call"].figure
    words = drawn(figure)
    assert "energy of a call, mJ" in words and words.count("not measured") == 2
    (axes,) = figure.axes
    assert sorted(patch.get_height() for patch in axes.patches) == [3.5, 3.5, 5.0, 5.0]  # type: ignore[attr-defined]
    with style.house():
        check_words(figure)
    with pytest.raises(NoResults, match=r"no record holds a value of energy.beauty$"):
        quantity.draw(shown, "energy.beauty")
    with pytest.raises(NoResults, match=r"no record holds a value of energy.per_call: no counter here$"):
        quantity.draw(shown.only(systems=["ios"]), "energy.per_call")


def test_the_command_draws_a_quantity_and_names_the_nearest(tmp_path: Path, script: Run) -> None:
    store = Store(tmp_path / "runs")
    store.make()
    for one in energetic():
        store.write(one)
    done = script("plot", "energy.per_call", "--results", str(tmp_path / "runs"), "--output", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["energy.per_call.png", "energy.per_call.svg"]
    done = script("plot", "energy.per_cal", "--results", str(tmp_path / "runs"))
    assert done.returncode == 2 and "did you mean energy.per_call?" in done.stderr


def test_a_quantity_has_a_column_in_the_report() -> None:
    tables = content.cells(Selection(energetic()), EAGER)
    (table,) = tables.values()
    (place,) = [i for i, column in enumerate(table.columns) if column.heading == "energy of a call, mJ"]
    texts = {row[2].text: row[place].text for row in table.rows}
    assert texts == {"eager": "5 [4.5, 5.5]", "nimble": "3.5 [3, 4]", "ios": DASH}
