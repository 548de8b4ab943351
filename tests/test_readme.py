"""The README says what the committed results say, and names commands that are there."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from made_records import cell, latency, record

from results.record import Record
from results.siblings import Siblings, siblings
from results.store import Store
from scripts import readme, tables
from scripts.table import Column, Entry, Table, escaped

ROOT = Path(__file__).parent.parent


def cells_of(table: str) -> list[dict[str, str]]:
    """The rows of a Markdown table, each by the names of its columns."""
    head, _, *rows = ([cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines())
    return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.mark.slow
def test_table_and_chart_are_what_the_results_give() -> None:
    run = subprocess.run(
        [sys.executable, "scripts/readme.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_changed_figure_is_noticed() -> None:
    records = list(Store(readme.RESULTS).read().records.values())
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert tables.overview(siblings(records)).markdown() in text

    def slower(one: Record) -> Record:
        if one.cell.model.name != "nasnet" or one.latency is None:
            return one
        host = replace(one.latency.host, median=2 * one.latency.host.median)
        return replace(one, latency=replace(one.latency, host=host))

    assert tables.overview(siblings(map(slower, records))).markdown() not in text


def test_a_table_is_written_as_markdown() -> None:
    shown = Table([Column("name", number=False), Column("ms")], [[Entry("a | b"), Entry("1.0", 1.0)]])
    assert shown.markdown() == "| name | ms |\n|---|---:|\n| a \\| b | 1.0 |"
    assert cells_of(shown.markdown().replace("\\|", "/")) == [{"name": "a / b", "ms": "1.0"}]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a | b\n# c", "a \\| b # c"),
        ("<b>x</b> & y", "\\<b\\>x\\</b\\> \\& y"),
        ("[x](http://y)", "\\[x](http://y)"),
        ("__a__ *b* `c`", "\\_\\_a\\_\\_ \\*b\\* \\`c\\`"),
        ("# x", "\\# x"),
        ("torch_compile: 1.25x [1.20, 1.31] *", "torch_compile: 1.25x [1.20, 1.31] *"),
    ],
)
def test_a_text_is_no_markup(text: str, shown: str) -> None:
    assert escaped(text) == shown


def test_a_tuned_tvm_stands_beside_the_other_with_what_tuning_took() -> None:
    measured = [*readme.read(readme.ZOO), *readme.read(readme.TUNED)]
    rows = cells_of(tables.tuned(measured).markdown())
    groups = [group for group in measured if tables.TVM_TUNED in group]
    assert len(rows) == len(groups) == len({row["model"] for row in rows}) >= 4
    for group, cells in zip(groups, rows, strict=True):
        assert cells["model"] == group.group.model.label
        spent = group[tables.TVM_TUNED].compilation
        assert spent is not None
        texts = [cells[name] for name in ("trials", "seconds of tuning", "functions tuned")]
        assert texts == [str(spent.trials), f"{spent.tuning_s:.0f}", f"{spent.tuned} of {spent.functions}"]
        fastest = min(float(cells[s.label]) for s in tables.TUNED if cells[s.label] != "–")
        ratio = float(cells["nimble over the fastest tvm"].split("x")[0])
        assert ratio == pytest.approx(fastest / float(cells["nimble"]), rel=0.1)


def test_the_fastest_schedule_stands_over_the_fastest_compiler() -> None:
    measured = readme.read(readme.ZOO)
    rows = cells_of(tables.compilers(measured).markdown())
    assert len(rows) == len(measured)
    for cells in rows:
        ratio, _, pair = cells["fastest schedule over fastest compiler"].partition(" (")
        schedule, compiled = pair.rstrip(")").split(" over ")
        for fastest, among in ((schedule, tables.SCHEDULES), (compiled, tables.COMPILERS)):
            assert float(cells[fastest]) == min(float(cells[s.label]) for s in among if cells[s.label] != "–")
        wanted = float(cells[compiled]) / float(cells[schedule])
        assert float(ratio.split("x")[0]) == pytest.approx(wanted, rel=0.15), cells["model"]


def test_the_fastest_variant_of_torch_compile_stands_with_what_finding_it_took() -> None:
    measured = readme.read(readme.BEST)
    rows = cells_of(tables.best(measured).markdown())
    assert len(rows) == len(measured) > 0
    for group, cells in zip(measured, rows, strict=True):
        compilation = group[tables.BEST].compilation
        assert compilation is not None
        (decision,) = compilation.decisions
        ran = {name: ms for name, ms in decision.milliseconds.items() if ms is not None}
        fastest = min(ran, key=lambda name: ran[name])
        assert cells["variant"].split(", ")[0] == fastest.split(", ")[0] == compilation.mode
        assert ("frozen" in cells["variant"]) == ("frozen" in fastest)
        assert ("channels_last" in cells["variant"]) == ("channels_last" in fastest)
        tried = len(decision.milliseconds)
        wanted = f"{tried} of {tried + (compilation.num_untried or 0)}"
        wanted += f", {tried - len(ran)} in vain" if tried > len(ran) else ""
        assert cells["variants tried"] == wanted
        ratio, _, pair = cells["fastest fused schedule over fastest compiler"].partition(" (")
        schedule, compiled = pair.rstrip(")").split(" over ")
        assert float(cells[schedule]) == min(float(cells[s.label]) for s in tables.FUSED)
        assert float(cells[compiled]) == min(float(cells[s.label]) for s in tables.TUNED_COMPILERS)
        assert float(ratio.split("x")[0]) == pytest.approx(float(cells[compiled]) / float(cells[schedule]), rel=0.15)


def test_what_products_take_each_way_is_told_with_what_the_choice_saves() -> None:
    rows = cells_of(tables.products(readme.read(readme.BEST)).markdown())
    assert {row["model"] for row in rows} == {"bert", "gpt2"}
    for row in rows:
        us = {name.removeprefix("µs: "): float(text) for name, text in row.items() if name.startswith("µs: ")}
        assert len(us) == 4
        assert us[row["chosen"]] == min(us.values())
        saved = int(row["count"]) * (us["library"] - us[row["chosen"]])
        assert float(row["saved in all, µs"]) == pytest.approx(saved, abs=0.1 * int(row["count"]) + 1)


def test_a_model_with_fused_reductions_stands_beside_the_one_without() -> None:
    measured = readme.read(readme.REDUCED)
    rows = cells_of(tables.reductions(measured).markdown())
    assert {row["model"] for row in rows} == {"bert", "gpt2", "t5"}
    for row in rows:
        assert int(row["kernels with"]) < int(row["kernels without"])
        ratio = float(row["milliseconds without"]) / float(row["milliseconds with"])
        assert float(row["with over without"].split("x")[0]) == pytest.approx(ratio, rel=0.1)


def test_cudnns_choices_are_told_of_each_process() -> None:
    sweeps = [siblings([timed(1.0), chosen(2.0)]), siblings([timed(3.0), chosen(2.0)])]
    (row,) = cells_of(tables.algorithms(sweeps).markdown())
    assert (row["timed"], row["heuristic"]) == ("1.000, 3.000", "2.000, 2.000")
    assert row["mean of timed over mean of heuristic"] == "1.00x"


def timed(ms: float, algorithms: str = "timed") -> Record:
    return record(of=cell("cuda_graph", runner="latency", algorithms=algorithms), latency=latency(ms))


def chosen(ms: float) -> Record:
    return timed(ms, "heuristic")


def test_of_launch_orders_the_first_records_of_a_cell_make_its_row() -> None:
    new, old = readme.read(readme.ORDERED), readme.read(readme.LAUNCHED)

    def rows(measured: list[Siblings]) -> dict[tuple[str, ...], dict[str, str]]:
        text = tables.launch_orders(measured).markdown()
        return {(c["model"], c["batch"], c["algorithms"]): c for c in cells_of(text)}

    zoo = readme.read(readme.ZOO)
    alone, both = rows(new), rows([*new, *old, *zoo])
    assert alone.keys() | rows(old).keys() == both.keys() and {algorithms for *_, algorithms in both} == {
        "heuristic",
        "timed",
    }
    elsewhere = {group.group.model.label: f"{tables.in_rounds(group[tables.OPARA]):.3f}" for group in reversed(zoo)}
    for (model, batch, algorithms), row in both.items():
        assert (row["critical_path"] == "–") == (algorithms == "timed")
        if algorithms == "heuristic":
            of_zoo = elsewhere[model] if batch == "1" else "–"
            assert row == alone[model, batch, algorithms] | {"opara in other rounds": of_zoo}


def test_the_two_commands_stand_at_the_top_and_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make bench" in text[:1500] and "make test" in text[:1500]
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (ROOT / target).exists(), target
