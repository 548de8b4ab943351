"""The figures of the pages' own sentences against what their commands print of the committed records, and of the settings.

A sentence is told by a pattern, whose groups are its figures. Tables that stand between markers are no sentences:
`python scripts/readme.py --check` compares those.
"""

import csv
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

import pytest
from conftest import ROOT
from sentences import FIGURE, cells_of, pages, part, prose, sections

import conf
from results import agreement, finding
from results.advice import STREAM_MS
from results.files import read_json
from results.siblings import siblings
from results.store import Store
from scripts import pipeline_tables
from systems.scheduling.passes import select_products
from systems.weave import search

REFERENCE = ROOT / "results" / "reference"
H200 = REFERENCE / "h200"
COMPILERS, LATENCY, ORCA, PIPELINES, SCHEDULERS = (
    f"results/reference/{name}.md" for name in ("COMPILERS", "LATENCY", "ORCA", "PIPELINES", "SCHEDULERS")
)
ABOUT, SIMULATE, WINDTUNNEL, SERVING, WEAVE = (
    "results/reference/README.md",
    "systems/scheduling/simulate/README.md",
    "systems/windtunnel/README.md",
    "systems/serving/README.md",
    "systems/weave/README.md",
)
PERCENT, US = 100, 1000


def numbers(text: str) -> list[float]:
    """Those of a cell of a table: [0.0479, 0.0432, 0.0526] of "+0.0479 [+0.0432, +0.0526]"."""
    return [float(number.replace(",", "")) for number in re.findall(r"[+-]?\d[\d,]*(?:\.\d+)?", text)]


@cache
def cells(sweep: str) -> list[dict[str, str]]:
    """Rows of h200.csv."""
    with (REFERENCE / "h200.csv").open(encoding="utf-8", newline="") as lines:
        return [row for row in csv.DictReader(lines) if row["sweep"] == sweep]


def without_branches() -> list[float]:
    """Nimble over a CUDA Graph, the median over networks that are chains."""
    rows = [
        row for row in part(ROOT / LATENCY, "results") if row["model"] in ("vgg16", "mobilenet_v2", "mobilenet_v2_cifar10")
    ]
    return [median(numbers(row["Nimble over CUDA Graph"])[0] for row in rows)]


# --- Orca: ratios of rows of the tables, which have each trace. ---


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


# --- WindTunnel: AUC, seconds and microseconds. ---


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


# --- The simulator: probes of GPUs, and records. ---


@cache
def probes(gpu: str) -> dict[tuple[str, str], tuple[float, int]]:
    """Microseconds and kernels by name and sizes."""
    document = read_json(REFERENCE / "calibration" / f"{gpu}.json.gz")
    assert isinstance(document, dict)
    return {(p["name"], str(p["sizes"])): (p["microseconds"], p["kernels"]) for p in document["probes"]}


def bounds_of_constants() -> list[float]:
    """us between dispatches, TB/s of a copy, us a kernel in a chain."""
    size = 2**28
    forks = [us / kernels for (name, _), (us, kernels) in probes("h200").items() if name == "fork and join"]
    copy_us, copies = probes("h200")["copy warm", str({"bytes": size, "blocks": 2112})]
    chain_us, kernels = probes("h200")["chain", str({"kernels": 1024})]
    return [min(forks), 2 * size * copies / copy_us / 1e6, size / 2**20, chain_us / kernels, kernels]


def of_another_gpu() -> list[float]:
    """An H100's probes over an H200's, the medians of each kind: the least, the most, and a large copy."""
    ratios: dict[str, list[float]] = {}
    for (name, sizes), (us, _) in probes("h100").items():
        ratios.setdefault(name, []).append(us / probes("h200")[name, sizes][0])
    kinds = ("long chain", "chains beside each other", "fork and join", "pair", "waves")
    medians = [median(ratios[kind]) for kind in kinds]
    return [min(medians), max(medians), median(ratios["copy cold"])]


def width_and_launch_us() -> list[float]:
    records = Store(H200 / "today.jsonl.gz").read().all
    limits = [
        record.limits for record in records if record.cell.model.name == "dlrm" and record.cell.batch == 1 and record.limits
    ]
    (found,) = {(limit.width, US * limit.launch_ms) for limit in limits if limit.launch_ms is not None}
    return list(found)


def searches() -> list[float]:
    """Seconds of nasnet_large's by simulated costs, and by measured ones."""
    records = Store(H200 / "ios-costs.jsonl.gz").read().all
    seconds = {
        record.cell.system.label: record.schedule.search.seconds
        for record in records
        if record.cell.model.label == "nasnet_large" and record.schedule is not None
    }
    return [seconds["ios (costs=simulated)"] or 0.0, seconds["ios"] or 0.0]


def torch_compile_budget_s() -> list[float]:
    systems = [record.cell.system for record in Store(H200 / "best.jsonl.gz").read().all]
    return sorted({float(str(s.options["budget_s"])) for s in systems if s.name == "torch_compile" and s.options["best"]})


def setting(group: str, choice: str, key: str) -> Callable[[], list[float]]:
    return lambda: [float(str(conf.options(group, choice)[key]))]


def timeout() -> list[float]:
    (seconds,) = re.findall(r"^timeout: ([\d.]+)", (conf.FOLDER / "config.yaml").read_text(encoding="utf-8"), re.MULTILINE)
    return [float(seconds)]


@dataclass(frozen=True)
class Said:
    """A sentence of a page: a pattern whose groups are its figures, and what is printed of them."""

    page: str
    words: str
    printed: Callable[[], Sequence[float]]


N = r"([+-]?\d[\d,]*(?:\.\d+)?)"
SAID = [
    Said(COMPILERS, rf"that it finds within {N} s\.", torch_compile_budget_s),
    Said(COMPILERS, rf"weave searches for {N} s\.", setting("system", "weave", "budget_s")),
    Said(COMPILERS, rf"MetaSchedule for {N} s,", setting("system", "tvm_tuned", "budget_s")),
    Said(SCHEDULERS, rf"after a search of {N} s,", setting("system", "weave", "budget_s")),
    Said("systems/compilers/README.md", rf"`timeout` \({N} s unless given\)", timeout),
    Said(
        "systems/scheduling/README.md",
        rf"if it is faster by {N} %\.",
        lambda: [PERCENT * (select_products.MIN_GAIN - 1)],
    ),
    Said(ABOUT, rf"Its {N} % interval is over", lambda: [PERCENT * finding.CONFIDENCE]),
    Said(ABOUT, rf"another process may differ by {N} %", lambda: [PERCENT * finding.ONE_PROCESS]),
    Said(
        LATENCY,
        rf"the rows near {N}x\.",
        without_branches,
    ),
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
        rf"off by more than {N} % of a throughput or {N} % of a latency",
        lambda: [PERCENT * agreement.THROUGHPUT, PERCENT * agreement.LATENCY],
    ),
    Said(
        SERVING,
        rf"of such lengths are within {N} % and {N} %\.",
        lambda: [PERCENT * agreement.THROUGHPUT, PERCENT * agreement.LATENCY],
    ),
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
    Said(
        SIMULATE,
        rf"{N} us between dispatches at best, {N} TB/s by a copy of {N} MiB, {N} us a kernel in a chain of {N} empty ones",
        bounds_of_constants,
    ),
    Said(
        SIMULATE,
        rf"take {N} to {N} times as long in the median, copies from memory {N} times",
        of_another_gpu,
    ),
    Said(SIMULATE, rf"as dlrm's, in {N} chains, takes {N} us by the host", width_and_launch_us),
    Said(SIMULATE, rf"`runner=advise` says so of less than {N} us a stream", lambda: [1e3 * STREAM_MS]),
    Said(SIMULATE, rf"simulated as less than {N} % slower than the best", lambda: [PERCENT * (search.SLOW - 1)]),
    Said(SIMULATE, rf"nasnet_large's search takes {N} s and no GPU, that by measured costs {N} s of one", searches),
]

# --- What two scripts print in some seconds. ---


@cache
def output(*command: str) -> str:
    environment = os.environ | {"COLUMNS": "400"}
    run = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=600
    )
    return run.stdout


def benchmark(words: str) -> list[float]:
    """The groups of what the simulator's benchmark prints."""
    (found,) = re.findall(words, output("tests/benchmarks/benchmark_simulator.py"))
    return numbers(" ".join(found) if isinstance(found, tuple) else found)


def largest_gap() -> list[float]:
    shown = output("tests/benchmarks/benchmark_simulator.py")
    return [max(float(gap) for gap in re.findall(r"^│ \w+ \d+ +│ \d+ +│ [\d.]+x +│ (\d+)%", shown, flags=re.MULTILINE))]


def rule_spares() -> list[float]:
    shown = output("tests/benchmarks/benchmark_simulator.py")
    pairs = [(int(one), int(of)) for one, of in re.findall(r"spares (\d+) of (\d+) schedules and loses 0\.0%", shown)]
    return [end(values) for values in zip(*pairs, strict=True) for end in (min, max)]


def gains_of(models: str) -> list[float]:
    """In the sets: gains, those within 10 %, right ones, settings, and the shares were none ever predicted."""
    shown = output("tests/benchmarks/benchmark_advice.py", "--quick")
    (row,) = re.findall(rf"^│ sets +│ profiles +│ {models} +│(.*)│$", shown, flags=re.MULTILINE)
    settings, gained, within, _, right, none_within, none_right = numbers(row)
    return [gained, within, right, settings, none_within, none_right]


COSTS = r"IOS by simulated over measured costs (.*)"
PRINTED = [
    Said(
        SIMULATE,
        rf"With all kernels warm the mean of the other models is {N} %, with all cold {N} %, with times in sequence {N} %:",
        lambda: [benchmark(rf"in state {state}: mean ([\d.]+)%")[0] for state in ("warm", "cold", "sequence")],
    ),
    Said(SIMULATE, rf"no step is above {N} % of the range", largest_gap),
    Said(SIMULATE, rf"weave's rule spares {N} to {N} of {N} to {N} and loses nothing", rule_spares),
    Said(
        SIMULATE,
        rf"takes {N} \({N} to {N}\) of the latency by measured ones on inception_v3, {N} \({N} to {N}\) on randwire and {N} "
        rf"\({N} to {N}, its first round\)",
        lambda: [n for model in ("inception_v3", "randwire", "nasnet_large") for n in benchmark(rf"{model}: {COSTS}")],
    ),
    Said(SIMULATE, rf"Of {N} gains over one stream in the sets it predicts {N} % within 10 %:", lambda: gains_of("all")[:2]),
    Said(SIMULATE, rf"rightly for {N} % of {N} settings whether the best exceeds 5 %", lambda: gains_of("all")[2:4]),
    Said(SIMULATE, rf"were none ever predicted: {N} and {N} %\)", lambda: gains_of("all")[4:]),
    Said(SIMULATE, rf"Without the training models it is {N} and {N} %\.", lambda: gains_of("others")[1:3]),
]

# Figures that no command prints of what is committed, by words around them.
ELSEWHERE = {
    (SIMULATE, r"within some 2 to 12 %"): "of others' papers",
    (ABOUT, r"such as 1\.25x"): "an example",
    (SIMULATE, r"kernels of 1 to 2 us,"): "sizes of single kernels, in the profiles",
    (SIMULATE, r"- bert at 8, 12 %:"): "the benchmark prints the worst ten",
    (SIMULATE, r"measured: 2 to 3 % longer"): "two kernels beside each other on an H200",
    (SIMULATE, r"chains of kernels of 1 to 4 us"): "sizes of single kernels, in the profiles",
    (SIMULATE, r"mean error of 3\.0 % on the training models"): "--fit takes minutes",
    (SIMULATE, r"predicts [\d.]+ % within 10 %:|whether the best exceeds 5 %|, all near 5 %"): "the question, not an answer",
    (
        SIMULATE,
        r"Of 129 gains of calls .* 93\.8 % are within 10 %, .* has 20 s to search|models 93\.5 and 91\.7 %",
    ): "without --quick: 19 minutes",
    (SIMULATE, r"resnet50_cifar10, near 5 %"): "the question, not an answer",
    (SIMULATE, r"forecast of nasnet_large takes 13 to 20 ms"): "of the machine that it ran on",
    (SIMULATE, r"1,000 operators take 1\.2 ms|Python takes 7\.9, 184, 4\.8 and 29 ms"): "of the machine that they ran on",
    (WINDTUNNEL, r"no GPU makes the first 20 times as fast"): "it follows from an eighth",
    (WEAVE, r"takes 1\.36 µs in a CUDA graph on an H100, and 0\.85 µs|takes 1\.40 µs"): "it needs an H100",
}


def text_of(page: str) -> str:
    return " ".join(prose(text) for _, text in sections(ROOT / page))


def as_said(value: float, figure: str) -> str:
    """A number with the digits and the sign that a sentence gives it."""
    decimals = len(figure.partition(".")[2])
    text = f"{value:,.{decimals}f}" if "," in figure else f"{value:.{decimals}f}"
    return f"+{text}" if figure.startswith("+") else text


def compare(said: Said) -> None:
    """Raises AssertionError where a page says otherwise than what is printed."""
    (match,) = re.finditer(said.words, text_of(said.page))
    printed = [as_said(value, figure) for value, figure in zip(said.printed(), match.groups(), strict=True)]
    assert printed == list(match.groups()), match[0]


@pytest.mark.parametrize("said", SAID, ids=lambda said: f"{said.page}: {said.words[:40]}")
def test_a_sentence_says_what_its_command_prints(said: Said) -> None:
    compare(said)


@pytest.mark.slow
@pytest.mark.parametrize("said", PRINTED, ids=lambda said: f"{said.page}: {said.words[:40]}")
def test_a_sentence_says_what_the_simulators_benchmarks_print(said: Said) -> None:
    compare(said)


def test_a_sentence_with_another_figure_is_noticed() -> None:
    (tuned,) = (said for said in SAID if said.printed is tuning)
    with pytest.raises(AssertionError, match="Tuning Pre2"):
        compare(Said(tuned.page, tuned.words, lambda: [4.0, 1.8, 2.1]))
    assert [as_said(*pair) for pair in ((0.03, "+0.0"), (4096, "4,096"), (0.65, "1"))] == ["+0.0", "4,096", "1"]


def test_no_figure_of_a_sentence_is_left_out() -> None:
    """Of the first page, those of the systems and those of the committed records: whoever adds a figure adds it here."""
    known: dict[str, list[str]] = {}
    for page, words in [*((said.page, said.words) for said in (*SAID, *PRINTED)), *ELSEWHERE]:
        known.setdefault(page, []).append(words)
    checked = 0
    for path in pages():
        page = str(path.relative_to(ROOT))
        if page != "README.md" and not page.startswith(("systems/", "results/reference/")):
            continue
        text = text_of(page)
        spans = [match.span() for words in known.get(page, []) for match in re.finditer(words, text)]
        for figure in FIGURE.finditer(text):
            around = text[max(0, figure.start() - 60) : figure.end() + 20]
            assert any(begin <= figure.start() < end for begin, end in spans), f"{page}: {around}"
            checked += 1
    assert checked > 40 and len(SAID) >= 20
    assert all(re.search(words, text_of(page)) for page, words in ELSEWHERE), "a figure that is gone"
