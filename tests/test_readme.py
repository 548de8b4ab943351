"""The README says what the committed results say, and names commands that are there."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def cells_of(table: str) -> list[dict[str, str]]:
    """The rows of a Markdown table, each by the names of its columns."""
    head, _, *rows = ([cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines())
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_table_and_chart_are_what_the_results_give() -> None:
    run = subprocess.run(
        [sys.executable, "scripts/readme.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_changed_figure_is_noticed(tmp_path: Path) -> None:
    import scripts.readme as readme
    import scripts.tables as tables

    records = list(readme.Store(readme.RESULTS).read().records.values())
    table = tables.table(tables.groups(records))
    assert table in (ROOT / "README.md").read_text(encoding="utf-8")
    for record in records:
        if record["config"]["model"]["name"] == "nasnet" and record["status"] == "ok":
            record["latency"]["statistics"]["host"]["median"] *= 2
    assert tables.table(tables.groups(records)) not in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_tuned_tvm_stands_beside_the_other_with_what_tuning_took() -> None:
    import scripts.readme as readme
    import scripts.tables as tables

    measured = [*readme.read(readme.ZOO), *readme.read(readme.TUNED)]
    rows = cells_of(tables.tuned(measured))
    groups = [group for group in measured if "tvm_tuned" in group]
    assert len(rows) == len(groups) == len({row["model"] for row in rows}) >= 4
    for group, cells in zip(groups, rows, strict=True):
        assert cells["model"] == tables.name_of(group)
        spent = group["tvm_tuned"]["compilation"]
        tuned = f"{spent['tuned']} of {spent['functions']}"
        found = [cells[name] for name in ("trials", "seconds of tuning", "functions tuned")]
        assert found == [str(spent["trials"]), f"{spent['tuning_s']:.0f}", tuned]
        fastest = min(float(cells[system]) for system in tables.TUNED if cells[system] != "–")
        ratio = float(cells["nimble over the fastest tvm"].split("x")[0])
        assert ratio == pytest.approx(fastest / float(cells["nimble"]), rel=0.1)


def test_the_fastest_schedule_stands_over_the_fastest_compiler() -> None:
    import scripts.readme as readme
    import scripts.tables as tables

    measured = readme.read(readme.ZOO)
    rows = cells_of(tables.compilers(measured))
    assert len(rows) == len(measured)
    for cells in rows:
        ratio, _, pair = cells["fastest schedule over fastest compiler"].partition(" (")
        schedule, compiled = pair.rstrip(")").split(" over ")
        for fastest, among in ((schedule, tables.SCHEDULES), (compiled, tables.COMPILERS)):
            assert float(cells[fastest]) == min(float(cells[system]) for system in among if cells[system] != "–")
        wanted = float(cells[compiled]) / float(cells[schedule])
        assert float(ratio.split("x")[0]) == pytest.approx(wanted, rel=0.15), cells["model"]


def test_the_fastest_variant_of_torch_compile_stands_with_what_finding_it_took() -> None:
    import scripts.readme as readme
    import scripts.tables as tables

    measured = readme.read(readme.BEST)
    rows = cells_of(tables.best(measured))
    assert len(rows) == len(measured) > 0
    for group, cells in zip(measured, rows, strict=True):
        found = group["torch_compile_best"]["compilation"]
        ran = [entry for entry in found["tried"] if entry["latency_ms"] is not None]
        fastest = min(ran, key=lambda entry: entry["latency_ms"])
        assert cells["variant"].split(", ")[0] == fastest["mode"] and ("frozen" in cells["variant"]) == fastest["freezing"]
        assert ("channels_last" in cells["variant"]) == (fastest["layout"] == "channels_last")
        tried = len(found["tried"])
        wanted = f"{tried} of {tried + found['not_tried']}" + (f", {tried - len(ran)} in vain" if tried > len(ran) else "")
        assert cells["variants tried"] == wanted
        ratio, _, pair = cells["fastest fused schedule over fastest compiler"].partition(" (")
        schedule, compiled = pair.rstrip(")").split(" over ")
        assert float(cells[schedule]) == min(float(cells[system]) for system in tables.FUSED)
        assert float(cells[compiled]) == min(float(cells[system]) for system in tables.TUNED_COMPILERS)
        assert float(ratio.split("x")[0]) == pytest.approx(float(cells[compiled]) / float(cells[schedule]), rel=0.15)


def test_what_products_take_each_way_is_told_with_what_the_choice_saves() -> None:
    import scripts.readme as readme
    import scripts.tables as tables

    rows = cells_of(tables.products(readme.read(readme.BEST)))
    assert {row["model"] for row in rows} == {"bert", "gpt2"}
    for row in rows:
        us = {way: float(row[f"µs: {way}"]) for way in tables.WAYS}
        assert us[row["chosen"]] == min(us.values())
        saved = int(row["count"]) * (us["library"] - us[row["chosen"]])
        assert float(row["saved in all, µs"]) == pytest.approx(saved, abs=0.1 * int(row["count"]) + 1)


def test_a_model_with_fused_reductions_stands_beside_the_one_without() -> None:
    import scripts.readme as readme
    import scripts.tables as tables

    measured = readme.read(readme.REDUCED)
    rows = cells_of(tables.reductions(measured))
    assert {row["model"] for row in rows} == {"bert", "gpt2", "t5"}
    for row in rows:
        assert int(row["kernels with"]) < int(row["kernels without"])
        ratio = float(row["milliseconds without"]) / float(row["milliseconds with"])
        assert float(row["with over without"].split("x")[0]) == pytest.approx(ratio, rel=0.1)


def test_cudnns_choices_are_told_of_each_process() -> None:
    import scripts.tables as tables

    sweeps = [tables.groups([_timed(1.0), _chosen(2.0)]), tables.groups([_timed(3.0), _chosen(2.0)])]
    (row,) = cells_of(tables.algorithms(sweeps))
    assert (row["timed"], row["heuristic"]) == ("1.000, 3.000", "2.000, 2.000")
    assert row["mean of timed over mean of heuristic"] == "1.00x"


def _timed(ms: float, algorithms: str = "timed") -> dict[str, Any]:
    config = {"model": {"name": "m"}, "system": {"name": "cuda_graph"}, "runner": {"name": "latency"}, "batch": 1}
    config |= {"device": "cuda", "precision": "tf32", "layout": "contiguous", "seed": 0, "algorithms": algorithms}
    return {"config": config, "latency": {"host_ms": [ms]}}


def _chosen(ms: float) -> dict[str, Any]:
    return _timed(ms, "heuristic")


def test_of_launch_orders_the_first_records_of_a_cell_make_its_row() -> None:
    import scripts.readme as readme
    import scripts.tables as tables

    new, old = readme.read(readme.ORDERED), readme.read(readme.LAUNCHED)

    def rows(measured: list[dict[str, dict[str, Any]]]) -> dict[tuple[str, ...], dict[str, str]]:
        return {(c["model"], c["batch"], c["algorithms"]): c for c in cells_of(tables.launch_orders(measured))}

    zoo = readme.read(readme.ZOO)
    alone, both = rows(new), rows([*new, *old, *zoo])
    assert alone.keys() | rows(old).keys() == both.keys() and {algorithms for *_, algorithms in both} == {
        "heuristic",
        "timed",
    }
    elsewhere = {tables.name_of(group): f"{tables.in_rounds(group['opara']):.3f}" for group in reversed(zoo)}
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
