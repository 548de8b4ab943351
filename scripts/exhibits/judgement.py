"""From findings to a verdict: computed, with the figures that explain it."""

from collections.abc import Sequence
from statistics import median

from results.comparison import disturbed
from results.finding import CANNOT, DOES_NOT_HOLD, HOLDS, IN_PART, IN_WORDS, NOT_RUN, RULES, VERDICTS, Finding, overall
from results.record import samples
from results.verdict import Verdict
from scripts.charts.limits import limits_of
from scripts.charts.measured import Measured, Row
from scripts.charts.style import short

from .evidence import Evidence
from .preset import Preset

MOST = 4  # figures that a reason names
SEVERAL = {HOLDS: "hold", IN_PART: "hold in part", DOES_NOT_HOLD: "do not hold", CANNOT: "were not measured"}
ONE = {HOLDS: HOLDS, IN_PART: IN_PART, DOES_NOT_HOLD: DOES_NOT_HOLD, CANNOT: "was not measured"}


def judge(preset: Preset, evidence: Evidence, findings: Sequence[Finding], small: bool) -> Verdict:
    """By the rules of results.finding. What is about a GPU cannot be run on a CPU, whatever a CPU gave."""
    verdict, reason = overall(findings), _reason(findings)
    if not stands(preset, evidence):
        settings = "a CPU with small settings" if small else "a CPU"
        taken = sum(finding.ours is not None for finding in findings)
        if taken:
            reason = f"It is about a GPU; {taken} of its {len(findings)} figures could be taken on {settings}"
        elif evidence.place:
            reason = f"It is about a GPU, and this was {settings}. {reason}"
        verdict = CANNOT
    if not evidence.place:
        verdict = NOT_RUN
    if preset.remark:
        reason += f". {preset.remark}"
    measured = [finding for finding in findings if finding.ours is not None]
    return Verdict(
        exhibit=preset.name,
        claim=preset.claim,
        published=_figures(findings, "published"),
        measured=_figures(measured, "ours") if measured else "",
        verdict=verdict,
        reason=reason,
        command=f"python scripts/reproduce.py {preset.name}" + (" +size=small" if small else ""),
        place=evidence.place,
    )


def stands(preset: Preset, evidence: Evidence) -> bool:
    """Whether what was measured says how the paper's figures stand: a CPU does not say it of a GPU's."""
    return preset.needs == "nothing" or evidence.on_gpu


def rules(findings: Sequence[Finding]) -> list[str]:
    """Those that these findings stand by."""
    return [RULES[rule] for rule in dict.fromkeys(finding.rule for finding in findings)]


def extent(verdict: Verdict, findings: Sequence[Finding]) -> str:
    """The verdict, and of how many figures it is where not all were measured: "holds; 2 of 10 figures measured"."""
    taken = sum(finding.ours is not None for finding in findings)
    return verdict.verdict + (f"; {taken} of {len(findings)} figures measured" if taken < len(findings) else "")


def number(value: float, unit: str) -> str:
    """ "4.32x", "91 %", "12 operators" """
    if unit == "x":
        return f"{value:.2f}x"
    text = f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
    return f"{text} {unit}".strip() if unit != "count" else text


def interval(finding: Finding) -> str:
    """Our value with its interval, or a dash."""
    if finding.ours is None:
        return "–"
    text = number(finding.ours, finding.unit)
    if finding.low is None or finding.high is None or finding.low == finding.high:
        return text
    return f"{text} [{finding.low:.2f}, {finding.high:.2f}]"


def explanation(measured: Measured | None) -> list[str]:
    """What lies behind the ratios, a line for each model and batch: the kernels' times and the latency of each system."""
    if measured is None:
        return []
    return [line for row in measured.rows if (line := _behind(measured, row))]


def _behind(measured: Measured, row: Row) -> str:
    told = []
    limits = limits_of(measured, row)
    if limits is not None and measured.setting.device == "cuda":
        told.append(f"kernels take {limits[1]:.2f} ms, {limits[0]:.2f} ms on the critical path")
    latencies = []
    for system in measured.systems:
        record = measured.record(row, system, "latency")
        if record is None or record["status"] != "ok":
            continue
        text = f"{short(system)} {record['latency']['statistics']['host']['median']:.2f} ms"
        kernels = record.get("kernels") or {}
        if kernels.get("covered_ms") is not None:
            text += f" (kernels run for {kernels['covered_ms']:.2f} ms of it, {kernels['sum_ms']:.2f} ms added up)"
        efficiency = record.get("sm_efficiency") or {}
        if efficiency.get("value") is not None:
            text += f" (SMs {100 * efficiency['value']:.0f} % {efficiency['source']})"
        occupancy = ((record.get("schedule") or {}).get("search") or {}).get("occupancy")
        if occupancy is not None:
            text += f" (occupancy {100 * occupancy:.0f} %)"
        latencies.append(text)
    if latencies:
        told.append("a call: " + ", ".join(latencies))
    told += _most(measured, row, limits[0] if limits is not None else None)
    return f"{row[0]}, batch {row[1]}: {'; '.join(told)}" if told else ""


def _most(measured: Measured, row: Row, critical_path_ms: float | None) -> list[str]:
    """How many times as fast as eager the same kernels could be: all those at once that may be, or one after the other.

    By eager's time in the rounds, where the ratios come from those.
    """
    record = measured.record(row, "eager", "latency")
    if record is None or record["status"] != "ok" or measured.setting.device != "cuda":
        return []
    in_turn = [] if disturbed(record) else [call for turn in samples(record) for call in turn]
    call = median(in_turn or record["latency"]["host_ms"])
    if critical_path_ms:
        return [f"the kernels of the critical path alone would be {call / critical_path_ms:.2f} times as fast as eager"]
    if back_to_back := (record.get("kernels") or {}).get("covered_ms"):
        return [f"eager's kernels back to back would be {call / back_to_back:.2f} times as fast"]
    return []


def _reason(findings: Sequence[Finding]) -> str:
    """How many figures stand how, the worst first, and why some are missing."""
    counts = [f"{n} {(ONE if n == 1 else SEVERAL)[v]}" for v in VERDICTS if (n := sum(f.verdict == v for f in findings))]
    told = [f"Of {len(findings)} figures {', '.join(counts)}"] if len(findings) > 1 else []
    for verdict in (DOES_NOT_HOLD, IN_PART):
        worst = [f for f in findings if f.verdict == verdict]
        named = [_told(f) for f in worst[:MOST]]
        if named:
            more = f" and {len(worst) - MOST} more" if len(worst) > MOST else ""
            told.append(f"{verdict.capitalize()}: {'; '.join(named)}{more}")
    missing: dict[str, list[str]] = {}
    for finding in findings:
        if finding.verdict == CANNOT:
            missing.setdefault(finding.reason, []).append(finding.what)
    for reason, what in list(missing.items())[:MOST]:
        told.append(f"Not measured: {what[0]}{f' and {len(what) - 1} more' if len(what) > 1 else ''} ({reason})")
    if len(missing) > MOST:
        told.append(f"And {sum(map(len, list(missing.values())[MOST:]))} more were not measured")
    return ". ".join(told) or _told(findings[0])


def _told(finding: Finding) -> str:
    """Ours with its interval, what has to be known of it, and the paper's."""
    known = f" ({finding.reason})" if finding.reason else ""
    paper = "" if finding.rule in IN_WORDS else f", published {number(finding.published, finding.unit)}"
    return f"{finding.what} {interval(finding)}{known}{paper}"


def _figures(findings: Sequence[Finding], which: str) -> str:
    """The figures in a line: all of a few, or the range of many in each unit."""
    shown = [f for f in findings if not (which == "published" and f.rule in IN_WORDS)]
    if not shown:
        return "in words alone"
    if len(shown) <= MOST:
        return "; ".join(f"{f.what} {number(getattr(f, which), f.unit)}" for f in shown)
    told = []
    for unit in dict.fromkeys(f.unit for f in shown):
        values = sorted(getattr(f, which) for f in shown if f.unit == unit)
        told.append(f"{number(values[0], unit)} to {number(values[-1], unit)} ({len(values)} figures)")
    return "; ".join(told)
