"""The README says what the committed results say, and names commands that are there."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


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

    measured = [*readme.read(readme.ZOO), *readme.read(readme.COMPILED)]
    head, _, *rows = tables.beside_tvm(measured).splitlines()
    names = [name.strip() for name in head.strip("|").split("|")]
    assert len(rows) == len(measured) and any("tvm_tuned" in group for group in measured)
    for group, row in zip(measured, rows, strict=True):
        cells = dict(zip(names, (cell.strip() for cell in row.strip("|").split("|")), strict=True))
        assert cells["model"] == tables.name_of(group)
        found = [cells[name] for name in ("tvm_tuned", "trials", "seconds of tuning", "functions tuned")]
        if "tvm_tuned" not in group:
            assert found == ["–"] * 4
            continue
        spent = group["tvm_tuned"]["compilation"]
        tuned = f"{spent['tuned']} of {spent['functions']}"
        assert found[1:] == [str(spent["trials"]), f"{spent['tuning_s']:.0f}", tuned]
        assert float(found[0]) < float(cells["tvm"])
        ratio = float(cells["nimble over the faster tvm"].split("x")[0])
        assert ratio == pytest.approx(float(found[0]) / float(cells["nimble"]), rel=0.1)


def test_of_launch_orders_the_first_records_of_a_cell_make_its_row() -> None:
    import scripts.readme as readme
    import scripts.tables as tables

    new, old = readme.read(readme.ORDERED), readme.read(readme.LAUNCHED)

    def rows(measured: list[dict[str, dict[str, Any]]]) -> dict[tuple[str, str], list[str]]:
        cells = [row.strip("| ").split(" | ") for row in tables.launch_orders(measured).splitlines()[2:]]
        return {(model, batch): further for model, batch, *further in cells}

    alone, both = rows(old), rows([*new, *old])
    assert ("googlenet", "1") in alone and alone.keys() < both.keys()
    opara, elsewhere = 1 + tables.LAUNCH_ORDERS.index("opara"), 1 + len(tables.LAUNCH_ORDERS)
    for (model, batch), row in both.items():
        critical_path = row[1 + tables.LAUNCH_ORDERS.index("critical_path")]
        assert (critical_path == row[-1] == "–") == (batch != "1"), model
    assert both["googlenet", "1"][elsewhere] == alone["googlenet", "1"][opara] != both["googlenet", "1"][opara]
    assert both["googlenet", "2"] == alone["googlenet", "2"] and both["googlenet", "2"][elsewhere] == "–"


def test_the_two_commands_stand_at_the_top_and_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make bench" in text[:1500] and "make test" in text[:1500]
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (ROOT / target).exists(), target
