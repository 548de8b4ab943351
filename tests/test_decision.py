"""Decisions: their gain, equal ones as a row, rows as JSON, and the table that shows them."""

import json

import pytest
from rich.console import Console

from results.limits import Limits
from runners.showings.schedule import bounds_text, decision_table, gain_table
from systems.scheduling.decision import Decision, DecisionRow, rows


def merge(v: int, chosen: str = "merged", pattern: str = "1x8") -> Decision:
    return Decision("merge_linears", pattern, (v, v + 1), {"in turn": 0.3, "at once": None, "merged": 0.1}, chosen)


FOLD = Decision("fold_batch_norm", "conv2d + batch_norm", (0, 1), {}, "folded")


def test_the_gain_is_over_the_first_alternative() -> None:
    assert merge(0).gain == pytest.approx(3) and merge(0, "in turn").gain == 1
    assert merge(0, "at once").gain is None  # it failed
    assert FOLD.gain is None
    assert Decision("k", "p", (), {"first": None, "second": 1.0}, "second").gain is None


def test_equal_decisions_are_one_row_in_the_order_of_the_first() -> None:
    decisions = [merge(0), FOLD, merge(4), merge(8, "in turn"), merge(12, pattern="1x9"), FOLD, merge(16)]
    table = rows(decisions)
    assert [(r.kind, r.pattern, r.chosen, r.count, r.num_operators) for r in table] == [
        ("merge_linears", "1x8", "merged", 3, 6),
        ("fold_batch_norm", "conv2d + batch_norm", "folded", 2, 4),
        ("merge_linears", "1x8", "in turn", 1, 2),
        ("merge_linears", "1x9", "merged", 1, 2),
    ]
    assert len(rows([merge(0), Decision("merge_linears", "1x8", (4, 5), {"in turn": 0.3, "merged": 0.1}, "merged")])) == 2


def test_rows_are_json() -> None:
    (row,) = rows([Decision("k", "p", (0,), {"a": 0.123456789, "b": None}, "a", {"b": "no kernel"})])
    document = json.loads(json.dumps(row.to_json()))
    assert document == {
        "kind": "k",
        "pattern": "p",
        "count": 1,
        "num_operators": 1,
        "chosen": "a",
        "milliseconds": {"a": 0.12346, "b": None},
        "reasons": {"b": "no kernel"},
    }
    assert DecisionRow.from_json(document) == row
    for wrong in ({**document, "more": 1}, {"kind": "k"}):
        with pytest.raises(ValueError, match="not a decision"):
            DecisionRow.from_json(wrong)


def test_one_table_shows_decisions_of_any_kind(capsys: pytest.CaptureFixture[str]) -> None:
    mine = Decision("mine", "x", (0,), {"a": 1.0, "b": 2.0}, "a")
    alone = Decision("ios", "conv2d", (0,), {"in turn": 1.0}, "in turn")  # nothing else could have been chosen
    table = decision_table(rows([merge(0), merge(4), FOLD, mine, alone]))
    assert table.row_count == 3 and decision_table(rows([alone])).row_count == 0
    Console(width=100).print(table)
    lines = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["merge_linears", "1x8", "2", "merged", "3.00x"] in lines
    assert ["fold_batch_norm", "conv2d", "+", "batch_norm", "1", "folded", "–"] in lines
    assert ["mine", "x", "1", "a", "1.00x"] in lines


def test_what_gained_in_the_whole_has_a_table_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    kept = Decision("weave", "stream plan: sequential", (), {"before": 0.5, "after": 0.4}, "after")
    taken = rows([FOLD, kept, merge(0)])
    assert decision_table(taken).row_count == 2 and gain_table(taken).row_count == 1
    Console(width=100).print(gain_table(taken))
    lines = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["stream", "plan:", "sequential", "0.500", "0.400", "1.250x"] in lines
    words = bounds_text(Limits(0.2, 1.0, sm_area_ms=0.3))
    assert words.endswith("faster than their SM area 0.300 ms, critical path 0.200 ms")
