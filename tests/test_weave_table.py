"""The table of weave's records."""

from scripts.readme import SEARCHED, read
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
