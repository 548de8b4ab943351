"""What the simulator's page says in sentences, with what prints it: probes of GPUs, records, benchmarks."""

import os
import re
import subprocess
import sys
from functools import cache
from statistics import median

from conftest import ROOT
from sentences import H200, PERCENT, REFERENCE, US, N, Said, numbers

from results.advice import STREAM_MS
from results.files import read_json
from results.store import Store
from systems.weave import search

SIMULATE = "systems/scheduling/simulate/README.md"


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


SAID = [
    Said(
        SIMULATE,
        rf"{N} us between dispatches at best, {N} TB/s by a copy of {N} MiB; {N} us a kernel in a chain of {N} empty ones",
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

# What two scripts print in some seconds.
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
        rf"takes {N} \({N} to {N}\) of the latency by measured ones on inception_v3, and {N} \({N} to {N}\) on randwire\. "
        rf"On nasnet_large it takes {N} \({N} to {N}, its first round\)",
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
    (SIMULATE, r"kernels of 1 to 2 us,"): "sizes of single kernels, in the profiles",
    (SIMULATE, r"- bert at 8, 12 %:"): "the benchmark prints the worst ten",
    (SIMULATE, r"measured: 2 to 3 % longer"): "two kernels beside each other on an H200",
    (SIMULATE, r"chains of kernels of 1 to 4 us"): "sizes of single kernels, in the profiles",
    (SIMULATE, r"mean error of 3\.0 % on the training models"): "--fit takes minutes",
    (SIMULATE, r"predicts [\d.]+ % within 10 %:|whether the best exceeds 5 %|, all near 5 %"): "the question, not an answer",
    (
        SIMULATE,
        r"Of 156 gains of calls .* 90\.4 % are within 10 %\. .* has 20 s to search|models 90\.4 and 88\.9 %",
    ): "without --quick: 10 minutes and more",
    (SIMULATE, r"at 8, qwen3_moe, near 5 %"): "the question, not an answer",
    (SIMULATE, r"forecast of nasnet_large takes 13 to 20 ms"): "of the machine that it ran on",
    (SIMULATE, r"1,000 operators take 1\.2 ms|Python takes 7\.9, 184, 4\.8 and 29 ms"): "of the machine that they ran on",
}
