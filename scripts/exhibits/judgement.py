"""From findings to a verdict: computed, with the figures that explain it."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from conf.text import counted
from results.agreement import Lengths
from results.finding import (
    CANNOT,
    DIRECTION,
    DOES_NOT_HOLD,
    EXCEEDS,
    HOLDS,
    IN_PART,
    IN_WORDS,
    INTERVALS,
    NOT_COMPARABLE,
    NOT_RUN,
    NOT_SHOWN,
    OF_RATIOS,
    RULES,
    UNDECIDED,
    VERDICTS,
    Finding,
    overall,
)
from results.selection import Selection
from results.setting import SIMULATED
from results.verdict import Verdict
from scripts.agreement import standing

from .evidence import Evidence
from .preset import Preset

COUNTED = "any machine: its figures are counted"  # where nothing has to be run for any of them
MOST = 4  # figures that a reason names
SEVERAL = {
    HOLDS: "hold",
    EXCEEDS: "exceed",
    IN_PART: "hold in part",
    DIRECTION: "have the direction only",
    DOES_NOT_HOLD: "do not hold",
    UNDECIDED: "are undecided",
    NOT_COMPARABLE: "are not comparable",
    CANNOT: "were not measured",
}
ONE = {verdict: verdict for verdict in SEVERAL} | {
    DIRECTION: "has the direction only",
    UNDECIDED: "is undecided",
    NOT_COMPARABLE: "is not comparable",
    CANNOT: "was not measured",
}
UNJUDGED_FIGURES = {NOT_COMPARABLE: "Not comparable", CANNOT: "Not measured"}
BY_EYE = "≈"  # before a number that was read off a figure


def judge(
    preset: Preset,
    evidence: Evidence,
    findings: Sequence[Finding],
    small: bool,
    changes: Mapping[str, str] | None = None,
) -> Verdict:
    """By the rules of results.finding. What is about a GPU cannot be run on a CPU, whatever a CPU gave. What is simulated
    is not shown where scripts/agreement.py refuses its costs.

    Args:
        preset: the exhibit, with the user's changes.
        evidence: what was measured of it.
        findings: its figures.
        small: whether its small settings apply.
        changes: what the user has changed of what it measures, as run.py takes it.
    """
    verdict, reason = overall(findings), _reason(findings)
    if not stands(preset, evidence):
        settings = "a CPU with small settings" if small else "a CPU"
        taken = sum(finding.ours is not None for finding in findings)
        if taken:
            reason = f"It is about a GPU; {taken} of its {counted(len(findings), 'figure')} could be taken on {settings}"
        elif evidence.place:
            reason = f"It is about a GPU, and this was {settings}. {reason}"
        verdict = CANNOT
    place = evidence.place or (COUNTED if all(finding.ours is not None for finding in findings) else "")
    if not place:
        verdict = NOT_RUN
    reason = ". ".join([reason, *notes(preset, evidence)])
    measured = [finding for finding in findings if finding.ours is not None]
    judged = sum(finding.is_judged for finding in findings)
    for costs, lengths in simulated_by(evidence.measured) if evidence.measured is not None else ():
        is_near, how_near = standing(costs, lengths)
        if not is_near:
            verdict, reason, measured, judged = NOT_SHOWN, f"Not shown: {how_near}", [], 0
            break
    words = ["python", "scripts/reproduce.py", preset.name, *(f"{key}={value}" for key, value in (changes or {}).items())]
    words += ["+size=small"] * small
    return Verdict(
        exhibit=preset.name,
        claim=preset.claim,
        published=_figures(findings, "published"),
        measured=_figures(measured, "ours") if measured else "",
        verdict=verdict,
        reason=reason,
        command=shlex.join(words),
        place=place,
        judged=judged,
        figures=len(findings),
    )


def simulated_by(measured: Selection) -> list[tuple[str, Lengths]]:
    """The costs of iterations by which records were simulated, with the lengths of their requests."""
    records = [record for record in measured.records if record.cell.runner.name == SIMULATED and record.is_ok]
    pairs = {(str(record.cell.runner.get("costs")), Lengths.of(record.cell)) for record in records}
    return sorted(pairs, key=str)


def stands(preset: Preset, evidence: Evidence) -> bool:
    """Whether what was measured says how the paper's figures stand: a CPU does not say it of a GPU's."""
    return preset.needs != "gpu" or evidence.on_gpu


def rules(findings: Sequence[Finding]) -> list[str]:
    """Those that these findings stand by."""
    rules = [RULES[rule] for rule in dict.fromkeys(finding.rule for finding in findings)]
    return rules + [INTERVALS] * any(finding.rule in OF_RATIOS for finding in findings)


def published(finding: Finding) -> str:
    """The paper's figure: "4.32x"; "≈52 s" where it was read off a figure, "1.62x (released)" where the authors' output
    alone has it, its words where these stand for a number, "in words" where there is none.
    """
    if finding.rule in IN_WORDS:
        return "in words"
    if finding.words:
        return finding.words
    text = (BY_EYE if finding.is_by_eye else "") + number(finding.published, finding.unit)
    return f"{text} (released)" if finding.is_released else text


def number(value: float, unit: str) -> str:
    """ "4.32x", "91 %", "12 operators", "+0.0123" """
    if unit == "AUC":
        return f"{value:+.4f}"
    if unit == "tau":
        return f"tau {value:+.2f}"
    if unit == "x":
        return f"{value:.2f}x"
    text = f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
    return f"{text} {unit}".strip() if unit != "count" else text


def interval(finding: Finding) -> str:
    """Our value with the interval that it is judged by, or a dash."""
    if finding.ours is None:
        return "–"
    text = number(finding.ours, finding.unit)
    low, high = finding.bounds
    if low == high:
        return text
    digits = "+.4f" if finding.unit == "AUC" else ".2f"
    return f"{text} [{low:{digits}}, {high:{digits}}]"


def tally(findings: Sequence[Finding]) -> str:
    """How many figures stand how: "Of 3 figures 2 hold, 1 was not measured"."""
    counts = [f"{n} {(ONE if n == 1 else SEVERAL)[v]}" for v in VERDICTS if (n := sum(f.verdict == v for f in findings))]
    return f"Of {counted(len(findings), 'figure')} {', '.join(counts)}"


def how_it_stands(finding: Finding, stands: bool) -> str:
    """Its verdict, and what has to be known of it.

    Args:
        stands: as the function of that name has it of the exhibit.
    """
    how = finding.verdict if stands or finding.rule == "count" else "not on a GPU"  # a count is the graph's
    if finding.ours is None and finding.is_comparable:  # of one figure that may be for want of asking
        how = "not measured"
    return f"{how}: {finding.reason}" if finding.reason else how


def notes(preset: Preset, evidence: Evidence) -> list[str]:
    """What has to be known of an exhibit beside its figures: the preset's remark, and how near its simulations are."""
    if (measured := evidence.measured) is None:
        return [preset.remark] * bool(preset.remark)
    systems = [system.choice for system in measured.systems]
    near = [f"With {Path(file).name} {standing(file, lengths, systems)[1]}" for file, lengths in simulated_by(measured)]
    return [preset.remark] * bool(preset.remark) + near


def _reason(findings: Sequence[Finding]) -> str:
    """How many figures stand how, the worst first, why some are missing, and a few that hold."""
    sentences = [tally(findings)] if len(findings) > 1 else []
    for verdict in (DOES_NOT_HOLD, DIRECTION, IN_PART, UNDECIDED):
        worst = [f for f in findings if f.verdict == verdict]
        named = [_sentence(f) for f in worst[:MOST]]
        if named:
            more = f" and {len(worst) - MOST} more" if len(worst) > MOST else ""
            sentences.append(f"{verdict.capitalize()}: {'; '.join(named)}{more}")
    for verdict, words in UNJUDGED_FIGURES.items():
        sentences += _unjudged([f for f in findings if f.verdict == verdict], words)
    holding = [f for f in findings if f.verdict in (EXCEEDS, HOLDS)]
    if sentences and 0 < len(holding) <= MOST:
        named = [f"{f.what} {_figure(f, 'ours')}{_beside(f)}" for f in holding]
        sentences.append(f"{'Holds' if len(holding) == 1 else 'Hold'}: {'; '.join(named)}")
    return ". ".join(sentences) or _sentence(findings[0])


def _unjudged(findings: Sequence[Finding], words: str) -> list[str]:
    """A sentence for each reason, with what was measured beside."""
    by_reason: dict[str, list[Finding]] = {}
    for finding in findings:
        by_reason.setdefault(finding.reason, []).append(finding)
    sentences = []
    for reason, alike in list(by_reason.items())[:MOST]:
        first = alike[0].what + (f" {interval(alike[0])}" if alike[0].ours is not None else "")
        sentences.append(f"{words}: {first}{f' and {len(alike) - 1} more' if len(alike) > 1 else ''} ({reason})")
    if len(by_reason) > MOST:
        sentences.append(f"And {sum(map(len, list(by_reason.values())[MOST:]))} more")
    return sentences


def _sentence(finding: Finding) -> str:
    """Ours with its interval, what has to be known of it, and the paper's."""
    known = f" ({finding.reason})" if finding.reason else ""
    return f"{finding.what} {interval(finding)}{known}{_beside(finding)}"


def _beside(finding: Finding) -> str:
    """The paper's number, where it has one."""
    if finding.rule in IN_WORDS:
        return ""
    return f", {'released' if finding.is_released else 'published'} {published(finding).removesuffix(' (released)')}"


def _figures(findings: Sequence[Finding], which: str) -> str:
    """The figures in a line: all of a few, or the range of many in each unit."""
    shown = [f for f in findings if not (which == "published" and f.rule in IN_WORDS)]
    if not shown:
        return "in words alone"
    if len(shown) <= MOST:
        return "; ".join(f"{f.what} {_figure(f, which)}" for f in shown)
    ranges = []
    for unit in dict.fromkeys(f.unit for f in shown):
        alike = sorted((f for f in shown if f.unit == unit), key=lambda f: getattr(f, which))  # type: ignore[no-any-return]
        ranges.append(f"{_figure(alike[0], which)} to {_figure(alike[-1], which)} ({len(alike)} figures)")
    return "; ".join(ranges)


def _figure(finding: Finding, which: str) -> str:
    return published(finding) if which == "published" else number(finding.ours or 0.0, finding.unit)
