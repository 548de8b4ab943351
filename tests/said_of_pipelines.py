"""What WindTunnel's page says in sentences, with what prints it: AUC, seconds and microseconds."""

import csv
from collections.abc import Sequence
from functools import cache

from conftest import ROOT
from sentences import H200, PERCENT, REFERENCE, US, N, Said, cells_of, numbers, part

from results.siblings import siblings
from results.store import Store
from scripts import pipeline_tables

PIPELINES, WINDTUNNEL = "results/reference/PIPELINES.md", "systems/windtunnel/README.md"


@cache
def cells(sweep: str) -> list[dict[str, str]]:
    """Rows of h200.csv."""
    with (REFERENCE / "h200.csv").open(encoding="utf-8", newline="") as lines:
        return [row for row in csv.DictReader(lines) if row["sweep"] == sweep]


def auc(pipeline: str, system: str = "windtunnel", options: str = "") -> float:
    model = f"nycflights13_{pipeline} (form=whole{options})"
    (row,) = (row for row in cells("windtunnel") if (row["model"], row["system"]) == (model, system))
    return float(row["value"])


def gains(options: str = "") -> list[float]:
    """Over the pipeline, by its name."""
    rows = part(ROOT / PIPELINES, "pipelines")
    tuned = (row for row in rows if row["system"] == "windtunnel" and row["model"].endswith(f"(form=whole{options})"))
    return [numbers(row["over its pipeline"])[0] for row in tuned]


def of_few_rows() -> list[float]:
    """Shares of the training rows, percent, with level 4 above level 2 on the smaller one; on the other it is not."""
    above = {}
    for share in (0.01, 0.1):
        systems = (f"windtunnel (batch_size=256{level})" for level in ("", ", level=2"))
        four, two = (auc("pre2_pipe2", system, f", training_share={share}") for system in systems)
        above[PERCENT * share] = four - two
    (few, gain), (more, none) = above.items()
    assert none <= 0
    return [few, gain, more]


def tuning() -> list[float]:
    (row,) = (
        row
        for row in part(ROOT / PIPELINES, "pipelines")
        if (row["model"], row["system"]) == ("nycflights13_pre2_pipe2 (form=whole)", "windtunnel")
    )
    fit, tune = float(row["fit s"]), float(row["tune s"])
    return [tune, fit, tune / fit]


def predicting(rows: Sequence[dict[str, str]]) -> dict[str, list[list[float]]]:
    """Of 4,096 rows by table: the pipeline's, the translation's and nimble's microseconds, each with the host's part."""
    systems = ("pipeline", "translation", "translation (executor=nimble)")
    return {row["table"]: [numbers(row[name]) for name in systems] for row in rows if row["batch"] == "4096"}


def times_as_fast(rows: Sequence[dict[str, str]]) -> list[float]:
    of_tables = predicting(rows)
    return [us[0][0] / one[0] for us in (of_tables["values"], of_tables["categories"]) for one in us[1:]]


def on_the_host() -> list[float]:
    of_tables = predicting(part(ROOT / PIPELINES, "predictions"))
    return [us / US for table in ("values", "categories") for us in reversed(of_tables[table][2])]


def again() -> list[float]:
    records = siblings(Store(H200 / "windtunnel-speed-again.jsonl.gz").read().records.values())
    return times_as_fast(cells_of(pipeline_tables.predictions(records).markdown()))


def translated(batch: int, *systems: str) -> list[float]:
    in_turn = {(row["batch"], row["system"]): float(row["in_turn_ms"]) for row in cells("translated")}
    return [in_turn[str(batch), system] for system in systems]


SAID = [
    Said(
        WINDTUNNEL,
        rf"from {N} AUC \(Pre3, Pipe1\) to {N} \(Pre1, Pipe1\)",
        lambda: [min(gains()), max(gains())],
    ),
    Said(
        WINDTUNNEL,
        rf"Of Pre2 and Pipe2: the pipeline {N}, GBDT2NN {N}, WindTunnel {N}, a cold start {N}, DeepGBM {N}\.",
        lambda: [auc("pre2_pipe2", s) for s in ("pipeline", "gbdt2nn", "windtunnel", "windtunnel_cold", "deepgbm")],
    ),
    Said(
        WINDTUNNEL,
        rf"Level 4 is {N} above level 2 on all rows, level 3 {N}\.",
        lambda: [
            auc("pre2_pipe2", system) - auc("pre2_pipe2", "windtunnel (level=2)")
            for system in ("windtunnel", "windtunnel (level=3)")
        ],
    ),
    Said(
        WINDTUNNEL, rf"On {N} % of them level 4 is {N} above level 2, with 0 .*? and on {N} % it gains nothing", of_few_rows
    ),
    Said(
        WINDTUNNEL,
        rf"Of Pre3 and Pipe2: {N}, {N}, {N}, and {N} cold\.",
        lambda: [auc("pre3_pipe2", s) for s in ("pipeline", "gbdt2nn", "windtunnel", "windtunnel_cold")],
    ),
    Said(WINDTUNNEL, rf"Tuning Pre2 and Pipe2 takes {N} s over {N} s of fitting: {N} times,", tuning),
    Said(
        WINDTUNNEL,
        rf"TabM {N}, above WindTunnel's {N}, and FT-Transformer {N}\.",
        lambda: [auc("pre2_pipe2", system) for system in ("tabm", "windtunnel", "ft_transformer")],
    ),
    Said(WINDTUNNEL, rf"Pre3 with Pipe2: {N}\), and four have 0", lambda: [min(gains(", split=order"))]),
    Said(
        WINDTUNNEL,
        rf"answers {N} rows {N} times as fast, with nimble as its executor {N} times; where the table's categories are "
        rf"numbers into a list, {N} and {N} times\.",
        lambda: [4096, *times_as_fast(part(ROOT / PIPELINES, "predictions"))],
    ),
    Said(WINDTUNNEL, rf"makes the inputs in {N} of nimble's {N} ms, in {N} of {N} for a list", on_the_host),
    Said(WINDTUNNEL, rf"one process each\) says {N} and {N} times, and with lists {N} and {N}\.", again),
    Said(
        WINDTUNNEL,
        rf"Of {N} rows weave takes {N} ms, nimble {N}, opara {N}, cuda_graph {N} and torch_compile {N};",
        lambda: [64, *translated(64, "weave", "nimble", "opara", "cuda_graph", "torch_compile")],
    ),
    Said(
        WINDTUNNEL,
        rf"of one row nimble takes {N} and cuda_graph {N}; of {N} rows {N} and {N}\.",
        lambda: [*translated(1, "nimble", "cuda_graph"), 4096, *translated(4096, "nimble", "cuda_graph")],
    ),
]

# Figures that no command prints of what is committed, by words around them.
ELSEWHERE = {
    (WINDTUNNEL, r"no GPU makes the first 20 times as fast"): "it follows from an eighth",
}
