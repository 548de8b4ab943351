"""Keys of a load that nothing reads beside the others: which are refused, and that nothing committed asks for one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from sentences import pages

import conf
from conf import Value
from results.cell import choose
from results.pack import read_pack
from runners.checks import BadRequest
from runners.measurements.base import names_of
from runners.measurements.registry import plan
from runners.serving.options import SimulationOptions
from scripts.exhibits.evidence import parts

LOADS = ("serving", "capacity", "simulation", "simulated")  # runners that send requests
FILE, CLOSED, NO_FILE = "runner.trace has arrivals", "runner.concurrency sends", "runner.trace, and there is none"
COSTS = {"costs": "gpt_13b-h200"}
EXPERIMENTS = ROOT / "conf" / "experiment"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of as many requests as any preset takes."""
    file = tmp_path_factory.mktemp("trace") / "trace.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{second},9,9\n" for second in range(1000)))
    return str(file)


def check(runner: str, options: Mapping[str, Value], trace: str) -> None:
    """Raises BadRequest as a request does. trace: the file in the place of any that is named."""
    files: dict[str, Value] = {"trace": trace, "costs": "gpt_13b-h200", "reductions": "gpt_13b-h200"}
    plan(choose("runner", runner, **{key: files.get(key, value) if value else value for key, value in options.items()}))


@pytest.mark.parametrize(
    ("runner", "options", "key", "why"),
    [
        *[("serving", {"trace": "FILE"}, key, FILE) for key in ("rate", "burstiness", "prompt_tokens", "new_tokens")],
        *[("serving", {"concurrency": 64}, key, CLOSED) for key in ("rate", "burstiness")],
        ("serving", {"concurrency": 64, "trace": "FILE"}, "trace_speed", CLOSED),
        *[(runner, COSTS if runner == "simulated" else {}, "trace_speed", NO_FILE) for runner in LOADS],
        ("simulation", {"trace": "FILE"}, "rate", FILE),
        ("simulation", {}, "slo_ms", "runner=simulation has no goodput"),
        ("simulated", COSTS | {"trace": "FILE"}, "burstiness", FILE),
        ("simulated", COSTS, "steps", "runner.measurements has no capacity"),
    ],
)
def test_a_key_that_nothing_reads_is_refused(runner: str, options: dict[str, Value], key: str, why: str, trace: str) -> None:
    """Where it was changed: with the value of its file it may stand there."""
    default = conf.options("runner", runner)[key]
    value: Value = "7" if isinstance(default, str) else 7
    check(runner, options | {key: default}, trace)
    with pytest.raises(BadRequest, match=f"^nothing reads runner.{key}=7: [^\n]*{re.escape(why)}"):
        check(runner, options | {key: value}, trace)


@pytest.mark.parametrize(
    ("runner", "options"),
    [
        ("serving", {"concurrency": 64, "trace": "FILE"}),
        ("serving", {"trace": "FILE", "trace_speed": 2.0, "shared_tokens": 9, "slo_ms": 50.0, "repeats": 2}),
        ("serving", {"concurrency": 64, "prompt_tokens": "3-9", "new_tokens": 4, "shared_tokens": 9}),
        ("capacity", {"rate": 8.0, "burstiness": 0.5, "slo_ms": 50.0, "steps": 1}),
        ("simulation", {"rate": 8.0, "rates": "9 10", "burstiness": 0.5}),
        ("simulated", COSTS | {"rate": 8.0, "steps": 5, "measurements": "serving capacity", "slo_ms": 50.0}),
    ],
)
def test_what_is_read_may_be_changed(runner: str, options: dict[str, Value], trace: str) -> None:
    check(runner, options, trace)


def test_a_capacity_refuses_another_load_before_what_that_does_not_read() -> None:
    with pytest.raises(BadRequest, match=r"takes neither runner\.concurrency"):
        plan(choose("runner", "capacity", concurrency=8, rate=4.0))


@pytest.mark.slow
def test_no_committed_record_has_a_key_that_nothing_reads(trace: str) -> None:
    packs = (ROOT / "results" / "reference").rglob("serving*.jsonl.gz")
    runners = {record.cell.runner for pack in packs for record in read_pack(pack).records}
    runners = {runner for runner in runners if runner.name in LOADS}
    assert {runner.name for runner in runners} == set(LOADS)
    for runner in runners:
        check(runner.choice, {key: value for key, value in runner.options.items() if key in runner.changed}, trace)


def asked(request: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Value]]]:
    """Each runner of a request that sends requests, with every combination of its options."""
    texts = {key.removeprefix("runner."): parts(text) for key, text in request.items() if key.startswith("runner.")}
    for runner in parts(request.get("runner", "")):
        if runner in LOADS:
            for values in product(*texts.values()):
                yield runner, dict(zip(texts, map(yaml.safe_load, values), strict=True))


def requests() -> Iterator[tuple[str, dict[str, str]]]:
    """What presets and the pages' commands ask for, and where each stands."""
    for file in sorted(EXPERIMENTS.rglob("*.yaml")):
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
        sweep = document.get("hydra", {}).get("sweeper", {}).get("params", {})
        exhibit = document.get("exhibit", {})
        for change in ({}, *exhibit.get("also", []), exhibit.get("small", {})):
            yield str(file), {key: str(value) for key, value in (sweep | change).items()}
    for page in pages():
        for line in re.findall(r"^python run\.py (.*)", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            words = [word.partition("=") for word in shlex.split(line, comments=True)]
            yield str(page), {key: value for key, equal, value in words if equal}


@pytest.mark.parametrize(("changed", "rates"), [({}, (1.0,)), ({"trace_speed": 4.0}, (4.0,)), ({"requests": 1}, (2.0,))])
def test_a_simulation_of_a_file_is_at_the_rate_of_its_requests(
    changed: dict[str, Value], rates: tuple[float, ...], trace: str
) -> None:
    options = conf.options("runner", "simulation") | {"trace": trace, "requests": 5} | changed
    assert SimulationOptions(**{key: options[key] for key in names_of(SimulationOptions)}).all_rates == rates


def test_no_preset_and_no_command_of_a_page_has_a_key_that_nothing_reads(trace: str) -> None:
    places: dict[str, int] = {}
    for place, request in requests():
        for runner, options in asked(request):
            check(runner, options, trace)
            suffix = Path(place).suffix
            places[suffix] = places.get(suffix, 0) + 1
    assert places[".yaml"] > 20 and places[".md"] > 10
