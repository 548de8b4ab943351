"""The tables of weave: of its own records, of networks of today, and of further batches and precisions."""

from operator import truediv
from pathlib import Path
from statistics import median

import pytest
from reports import REFERENCE

from results.selection import by_setting
from results.selection import read as records_of
from scripts.charts.style import order
from scripts.page import content
from scripts.readme import LEVEL, SEARCHED, TODAY, read
from scripts.tables import needed
from scripts.weave_tables import beside_all, searched


def test_a_ratio_is_that_of_the_milliseconds_beside_it() -> None:
    """To what medians over rounds and medians of rounds differ by."""
    _, _, *lines = searched(read(SEARCHED)).markdown().splitlines()
    rows = [[entry.strip() for entry in line.strip("|").split("|")] for line in lines]
    assert {row[0] for row in rows} >= {"googlenet", "nasnet", "randwire"}
    num_ratios = 0
    for _, before, fused, weave, over_before, over_fused, *_ in rows:
        for slower, ratio in ((before, over_before), (fused, over_fused)):
            if slower == "–":
                assert ratio == "–"
                continue
            num_ratios += 1
            assert abs(float(ratio.split("x")[0]) / (float(slower) / float(weave)) - 1) < 0.05
    assert num_ratios >= 2 * len(rows) - 1


def test_a_limit_is_the_least_of_a_models_systems() -> None:
    groups = read(SEARCHED)
    _, _, *lines = searched(groups).markdown().splitlines()
    by_model = {row[0].strip(): row for row in (line.strip("|").split("|") for line in lines)}
    differs = 0
    for group in groups:
        limits = [needed(record.limits).executed for record in group.records.values()]
        row = by_model[group.group.model.label]
        for at, values in ((-3, [each.critical_path_ms for each in limits]), (-2, [each.sm_area_ms for each in limits])):
            assert float(row[at]) == pytest.approx(min(map(needed, values)), abs=5e-4)
        of_weave = next(r for r in group.records.values() if r.cell.system.choice == "weave")
        differs += needed(needed(of_weave.limits).executed.critical_path_ms) > min(
            needed(e.critical_path_ms) for e in limits
        )
    assert differs  # on some models another system's kernels have the shorter path


@pytest.mark.parametrize(
    ("pack", "schedulers"), [(TODAY, ("nimble", "opara", "ios")), (LEVEL, ("nimble_fused", "opara_fused", "ios_fused"))]
)
def test_the_fastest_others_are_those_of_the_rounds(pack: Path, schedulers: tuple[str, ...]) -> None:
    """Worked out from every round's median here; from outside is none of this project's schedulers."""
    groups = read(pack)
    _, _, *lines = beside_all(groups).markdown().splitlines()
    rows = [[entry.strip() for entry in line.strip("|").split("|")] for line in lines]
    assert len(rows) == len(groups) >= 1
    for group, row in zip(groups, rows, strict=True):
        medians = {
            record.cell.system.choice: [median(one) for one in record.comparison.rounds]
            for record in group.records.values()
            if record.comparison is not None
        }
        weave = medians.pop("weave")
        over = {name: median(map(truediv, times, weave)) for name, times in medians.items()}
        outside = {name: ratio for name, ratio in over.items() if name not in schedulers}
        assert row[0] == group.group.model.name and len(outside) >= 2 and len(over) == len(outside) + 3
        for entry, ratios in ((row[5], over), (row[6], outside)):
            name = min(ratios, key=lambda name: ratios[name])
            assert entry.startswith(f"{ratios[name]:.2f}x [") and entry.endswith(f"] {name}")


def test_the_report_shows_what_decisions_gained_and_what_bounds_each_cell() -> None:
    (measured,) = by_setting(records_of([REFERENCE / "weave.jsonl.gz"]), order).values()
    gains, (cells,) = content.gains(measured), content.cells(measured, measured.systems[0]).values()
    newest = {(r.cell.model.label, r.cell.system.label): r for r in measured.records if r.schedule and r.is_ok}
    own = [row for row in gains.rows if row[0].text == "darts"]
    record = newest["darts", "weave"]
    assert record.schedule is not None and record.limits is not None
    decided = record.schedule.decided("weave")
    assert len(own) == len(decided) > 1 and [row[3].text for row in own] == [row.pattern for row in decided]
    for row, decision in zip(own, decided, strict=True):
        assert row[4].value == decision.milliseconds["before"] and row[6].value == decision.gain
    headings = [column.heading for column in cells.columns]
    (cell,) = [row for row in cells.rows if [entry.text for entry in row[:3]] == ["darts", "1", "weave"]]
    bound = cell[headings.index("bounded by")]
    assert bound.value == max(record.limits.executed.bounds.values()) and "launch" in bound.title
