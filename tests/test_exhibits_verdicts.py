"""Verdicts of exhibits: how much was measured, what lies behind, and where nothing can be said."""

from dataclasses import replace
from statistics import median
from typing import Any

import pytest
from judged_exhibits import EAGER, NIMBLE_PAPER, OF_THE_PAPER, RECORDS, judged
from made_records import rounds

from results.finding import CANNOT, IN_PART, NOT_COMPARABLE, NOT_RUN, UNJUDGED, VERDICTS
from results.limits import Limits
from results.occupation import Kernels
from results.record import Record
from results.selection import Selection
from results.warning import Warning
from scripts.exhibits import findings, judgement
from scripts.exhibits.behind import behind
from scripts.exhibits.evidence import Evidence
from scripts.exhibits.preset import Preset


def test_a_verdict_says_how_much_of_its_exhibit_was_measured() -> None:
    preset, evidence, exhibit_findings = judged("nimble/figure2a")
    verdict = judgement.judge(preset, evidence, exhibit_findings, small=False)
    assert (verdict.verdict, verdict.extent) == (IN_PART, "1 of 2") and exhibit_findings[0].reason.startswith("on ")
    unjudged = replace(exhibit_findings[0], is_comparable=False)
    verdict = judgement.judge(preset, evidence, [*exhibit_findings, unjudged], small=False)
    assert (verdict.verdict, verdict.extent) == (UNJUDGED, "1 of 3")
    # What was measured beside is shown with the reason why it is not judged.
    assert f"{unjudged.what} {judgement.interval(unjudged)}" in verdict.reason


@pytest.mark.parametrize("status", ["incorrect", "failed", "out_of_memory", "unsupported"])
def test_what_is_not_ok_gives_no_figure(status: str) -> None:
    wrong = {"status": status, "reason": "for a reason"}
    records = [replace(r, **wrong) if r.cell.system.key == NIMBLE_PAPER else r for r in OF_THE_PAPER]  # type: ignore[arg-type]
    read, evidence, exhibit_findings = judged("nimble/figure7", records)
    assert {f.verdict for f in exhibit_findings} == {CANNOT, NOT_COMPARABLE}
    assert any(f.reason == f"nimble_paper is {status}: for a reason" for f in exhibit_findings)
    assert judgement.judge(read, evidence, exhibit_findings, small=False).verdict == CANNOT
    nothing = Evidence()
    assert judgement.judge(read, nothing, findings.findings(read, nothing), small=False).verdict == NOT_RUN


def test_a_verdict_says_what_was_measured_and_why_it_is_so() -> None:
    read, evidence, exhibit_findings = judged("nimble/figure7", OF_THE_PAPER)
    verdict = judgement.judge(read, evidence, exhibit_findings, small=False)
    assert verdict.verdict in VERDICTS and verdict.place == "NVIDIA H200"
    assert verdict.command == "python scripts/reproduce.py nimble/figure7" and verdict.claim == read.claim
    assert "efficientnet_b5: nimble_paper over tvm" in verdict.reason and "two days" in verdict.reason


def test_what_lies_behind_the_ratios_is_a_table_of_calls_and_one_of_bounds() -> None:
    """Eager's time is of the rounds where the ratios are, and else of its calls alone."""
    _, evidence, _ = judged("nimble/figure7", OF_THE_PAPER)
    assert evidence.measured is not None
    (eager,) = [r for r in evidence.measured.records if (r.cell.model.name, r.cell.system.key) == ("nasnet", EAGER)]
    assert eager.latency is not None and eager.limits is not None and eager.limits.critical_path_ms is not None
    call, path = median(eager.latency.host_ms), eager.limits.critical_path_ms

    def rows(limits: Limits | None = None, **more: Any) -> list[dict[str, str]]:
        """Of nasnet's eager, and of its model; with kernels, and the limits of all if `limits` is None."""
        assert evidence.measured is not None
        records = [
            replace(r, kernels=Kernels(9.0, 3.0, 2.0), **(more if r is eager else {})) for r in evidence.measured.records
        ]
        if limits is None:
            records = [replace(r, limits=None) for r in records]
        found = []
        for one in behind(Selection(records)):
            headings = [column.heading for column in one.columns]
            texts = [dict(zip(headings, [entry.text for entry in row], strict=True)) for row in one.rows]
            found.append(next(row for row in texts if row["model"] == "nasnet" and row.get("system", "eager") == "eager"))
        return found

    comparison = rounds("g", [7 * call], [7 * call])
    of_call, of_model = rows(eager.limits, comparison=comparison, warnings=(Warning("profiled_before_timing"),))
    assert of_call["call alone, ms"] == f"{call:.2f}" and of_call["kernels run, ms"] == "2.00"
    assert of_call["kernels added up, ms"] == "3.00"
    assert (
        of_model["critical path, ms"] == f"{path:.2f}" and of_model["eager over the critical path"] == f"{call / path:.2f}x"
    )
    _, of_model = rows(eager.limits, comparison=comparison)
    assert of_model["eager in the rounds, ms"] == f"{7 * call:.2f}"
    assert of_model["eager over the critical path"] == f"{7 * call / path:.2f}x"
    _, of_model = rows(comparison=comparison)
    assert of_model["eager over its kernels back to back"] == f"{7 * call / 2.0:.2f}x"
    assert behind(None) == []


def test_a_claim_about_a_gpu_does_not_stand_or_fall_on_a_cpu() -> None:
    def on_cpu(record: Record) -> Record:
        return replace(record, cell=replace(record.cell, conditions=replace(record.cell.conditions, device="cpu")))

    records = [on_cpu(record) for record in RECORDS]
    read, evidence, exhibit_findings = judged("nimble/figure7", records)
    verdict = judgement.judge(read, evidence, exhibit_findings, small=True)
    assert verdict.verdict == CANNOT and "about a GPU" in verdict.reason and "8 of its 12 figures" in verdict.reason
    none = [replace(finding, ours=None, reason="it was not asked for") for finding in exhibit_findings]
    reason = judgement.judge(read, evidence, none, small=True).reason
    assert reason.startswith("It is about a GPU, and this was a CPU with small settings. ") and "not asked for" in reason


def test_what_is_counted_is_judged_on_any_machine_where_nothing_is_missing() -> None:
    """Without a record: of a figure that has to be measured nothing is said yet."""
    read = Preset.read("orca/table4.1")
    counted = findings.findings(read, Evidence())
    assert judgement.judge(read, Evidence(), counted, small=False).place == judgement.COUNTED
    one_missing = [replace(counted[0], ours=None, reason="not measured"), *counted[1:]]
    assert judgement.judge(read, Evidence(), one_missing, small=False).verdict == NOT_RUN
