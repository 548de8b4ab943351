"""What the pages of Orca and of serving say in sentences, with what prints it: ratios of rows of tables."""

import re
from statistics import median

from conftest import ROOT
from sentences import PERCENT, N, Said, numbers, part

from results import agreement

ORCA, SERVING = "results/reference/ORCA.md", "systems/serving/README.md"


def served(name: str, system: str, at_once: int) -> list[float]:
    """Requests a second of each trace."""
    rows = [row for row in part(ROOT / ORCA, name) if (row["system"], row["at once"]) == (system, str(at_once))]
    return numbers(rows[0]["requests a second (of each trace)"])[1:]


def ragged() -> list[float]:
    ratios = []
    for name, at_once in (("requests at once, h100", 512), ("requests at once", 256)):
        pair = (served(name, system, at_once) for system in ("orca", "request_level_ragged (max_batch_size=64)"))
        ratios.append(median(one / other for one, other in zip(*pair, strict=True)))
    return ratios


def over_transformers() -> list[float]:
    own, theirs = (served("requests at once", name, 64) for name in ("orca", "transformers_continuous_batching"))
    return [theirs[0], theirs[1], theirs[2], own[1] / theirs[1], own[2] / theirs[2]]


def increments(name: str) -> dict[tuple[str, str, str], float]:
    """Milliseconds of an increment iteration by model, system and requests."""
    rows = part(ROOT / ORCA, name)
    return {(r.get("model", ""), r["system"], r["requests"]): float(r["increment iteration ms"]) for r in rows}


def control(name: str) -> list[float]:
    """By how many percent a message of its own shortens an increment iteration, at least and at most."""
    ms = increments(name)
    by_nccl = [row for row in ms if "control=nccl" in row[1]]
    shares = [ms[model, system.replace("control=nccl, ", ""), n] / ms[model, system, n] for model, system, n in by_nccl]
    return [PERCENT * (1 - max(shares)), PERCENT * (1 - min(shares))]


def in_halves() -> list[float]:
    ms = increments("two GPUs, iterations")
    halves = ("orca (tensor_parallel=2)", "orca (reductions=nccl, tensor_parallel=2)")
    return [ms["", system, "1"] / ms["", "orca", "1"] for system in halves]


def azure() -> list[float]:
    """The speed of the trace in the command, and how much of what is served at most then comes, percent."""
    (speed,) = re.findall(r"runner\.trace_speed=([\d.]+)", (ROOT / ORCA).read_text(encoding="utf-8"))
    at_most, comes = (
        next(numbers(row[column])[0] for row in part(ROOT / ORCA, name) if row["system"] == "orca_chunked")
        for name, column in (("azure at once", "requests a second (of each trace)"), ("azure at a rate", "req/s that come"))
    )
    return [float(speed), PERCENT * comes / at_most]


def chunks() -> list[float]:
    p99 = {row["system"]: numbers(row["between tokens ms, p50, p99"])[1] for row in part(ROOT / ORCA, "azure at a rate")}
    return [p99["orca_chunked"] / p99["orca_paged"]]


SAID = [
    Said(ORCA, rf"is {N}x on one H100 and {N}x on an H200, the medians over traces", ragged),
    Said(
        ORCA,
        rf"first trace \({N} requests a second\) than in the next two \({N} and {N}\): `orca` is {N}x and {N}x in those",
        over_transformers,
    ),
    Said(ORCA, rf"takes {N} of one GPU's, by NCCL's sums {N}\.", in_halves),
    Said(ORCA, rf"faster in every row, by {N} to {N} %", lambda: control("two GPUs, iterations")),
    Said(ORCA, rf"shortens each increment iteration by {N} to {N} %", lambda: control("four GPUs, iterations")),
    Said(ORCA, rf"from the 191st on, {N} times as fast, which is {N} % of what the first table serves", azure),
    Said(ORCA, rf"shorten the p99 between tokens to {N}x,", chunks),
    Said(
        ORCA,
        rf"by more than {N} % of a throughput, or {N} % of a latency",
        lambda: [PERCENT * agreement.THROUGHPUT, PERCENT * agreement.LATENCY],
    ),
    Said(
        SERVING,
        rf"of such lengths are within {N} % and {N} %\.",
        lambda: [PERCENT * agreement.THROUGHPUT, PERCENT * agreement.LATENCY],
    ),
]
