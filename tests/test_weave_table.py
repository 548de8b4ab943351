"""The table of weave's records."""

import pytest

from scripts.readme import SEARCHED, read
from scripts.tables import needed
from scripts.weave_table import searched


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
