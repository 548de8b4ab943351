"""scripts/reproduce.py as a person runs it, without a GPU: one exhibit of each paper, and what it refuses."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import dropwhile, takewhile
from pathlib import Path

import pytest
import torch
from conftest import ROOT, environment, gpu_environment
from conftest import Run as Script

from conf.text import counted
from results.finding import CANNOT, HOLDS, JUDGED, NOT_COMPARABLE, NOT_RUN, NOT_SHOWN, UNJUDGED, VERDICTS
from results.store import Store
from results.verdict import Verdict, read_verdicts
from scripts.arguments import Parser
from scripts.exhibits import running
from scripts.exhibits.preset import OUTPUT, Preset, names
from scripts.exhibits.running import Run
from scripts.exhibits.without import ALIASES, WITHOUT_PRESET
from scripts.reproduce import keep, with_costs

Done = subprocess.CompletedProcess[str]


def reproduce(*arguments: str, **more: str) -> Done:
    command = [sys.executable, str(ROOT / "scripts" / "reproduce.py"), *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment(**more), capture_output=True, text=True, timeout=280, check=False
    )


def small(folder: Path, *arguments: str) -> Done:
    """With a folder of its own for everything, what is measured and kept as well."""
    own = {"TMPDIR": str(folder), "OPWEAVE_CACHE": str(folder / "cache")}
    places = f"results={folder / 'runs'}", "--output", str(folder / "out")
    return reproduce(*arguments, "+size=small", "max_load=1", *places, **own)  # other tests run beside


def test_a_small_run_takes_no_whole_runs_place(tmp_path: Path) -> None:
    file, command = tmp_path / "verdicts.json", "python scripts/reproduce.py nimble/figure7"
    whole = Verdict("nimble/figure7", "a claim", "2x", "2x", HOLDS, "a reason", command, "a GPU", 1, 2)
    small_run = replace(whole, verdict=CANNOT, command=f"{command} +size=small", place="a CPU")
    changed = replace(whole, command=f"{command} model=googlenet")
    nothing, of_files = replace(whole, verdict=NOT_RUN, place=""), replace(whole, command=f"{command} 'model.path=/a b'")
    kept = [(nothing, nothing), (small_run, small_run), (nothing, small_run), (changed, changed), (small_run, small_run)]
    kept += [(whole, whole), *((other, whole) for other in (small_run, changed, nothing)), (of_files, of_files)]
    for verdict, expected in kept:
        keep(file, verdict)
        assert read_verdicts(file) == [expected]


@pytest.mark.slow
def test_the_command_of_a_verdict_holds_what_was_changed(script: Script, tmp_path: Path) -> None:
    """And not how its sweeps are run, or where the records are."""
    turns = "results=results/reference/h200/turns.jsonl.gz", "--output", str(tmp_path)
    command = "python scripts/reproduce.py nimble/figure2a"
    for changes in ("system=eager model=resnet50", ""):
        done = script("reproduce", "nimble/figure2a", *changes.split(), "force=true", "max_load=1", "--judge", *turns)
        assert done.returncode == 0, done.stderr
        (verdict,) = read_verdicts(tmp_path / "verdicts.json")
        assert verdict.command == f"{command} {changes}".strip()
    assert script("reproduce", "nimble/figure2a", "model=resnet50", "--judge", *turns).returncode == 0
    assert read_verdicts(tmp_path / "verdicts.json") == [verdict]


@pytest.mark.parametrize("how", ["--recorded", "--judge"])
def test_what_cannot_be_kept_is_told_before_anything_is_judged(script: Script, tmp_path: Path, how: str) -> None:
    arguments = "reproduce", "ios/frameworks", how, "--output", str(tmp_path)
    file = tmp_path / "verdicts.json"
    file.write_text("{")
    done = script(*arguments)
    assert done.returncode == 2 and done.stderr.startswith(f"reproduce.py: {file}: ") and done.stderr.count("\n") == 1
    file.unlink()
    (tmp_path / "ios-frameworks").touch()
    done = script(*arguments)
    assert done.returncode == 2 and f"{tmp_path / 'ios-frameworks'} is not a folder" in done.stderr
    assert done.stderr.count("\n") == 1 and not done.stdout and not file.exists()


@pytest.mark.slow
def test_a_figure_of_nimble(tmp_path: Path) -> None:
    """Two systems of Figure 7 on a small network of its: records, pictures and figures, and no verdict on a GPU's claim."""
    request = "nimble/figure7", "system=eager,nimble", "runner=latency"  # of what it measures, what gives a ratio
    done = small(tmp_path, *request)
    assert done.returncode == 0, done.stderr
    records = Store(tmp_path / "runs").read().records.values()
    assert sorted(r.cell.system.label for r in records) == ["eager", "nimble"]
    assert {(r.status, r.cell.device) for r in records} == {("ok", "cpu")}
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(" mobilenet_v2: nimble over eager")]
    assert "9.99x" in line and "not on a GPU" in line
    assert "1 of its 12 figures could be taken on a CPU with small settings" in done.stdout
    folder = tmp_path / "out" / "nimble-figure7-small"
    for name in ("speedup.png", "speedup.svg", "claims.png", "claims.svg"):
        assert (folder / name).stat().st_size > 5000
    (verdict,) = read_verdicts(tmp_path / "out" / "verdicts.json")
    assert verdict.exhibit == "nimble/figure7" and verdict.verdict == CANNOT and verdict.command.endswith("+size=small")
    # The same command again measures nothing.
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").iterdir()}
    again = small(tmp_path, *request)
    assert again.returncode == 0 and "measured before" in again.stderr
    assert before == {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").iterdir()}


@pytest.mark.slow
def test_a_table_of_ios_and_one_of_opara(tmp_path: Path) -> None:
    """Both need no GPU, so that their figures stand or fall; and each is seen to go on where it stopped."""
    done = small(tmp_path, "ios/table1", "opara/table1")
    assert done.returncode == 0, done.stderr
    assert "[1/2] ios/table1" in done.stderr and "[2/2] opara/table1" in done.stderr
    (search,) = (tmp_path / "out" / "ios-table1-small").glob("*.schedule.json")
    largest = max(json.loads(search.read_text())["search"]["parts"], key=lambda part: part["transitions"])
    lines = done.stdout.splitlines()
    (line,) = [line for line in lines if line.startswith(" squeezenet_bypass: ios") and "transitions" in line]
    assert line.split()[-2:] == [str(largest["transitions"]), "holds"] and largest["transitions"] == 51
    seconds_by_system = {}
    for file in (tmp_path / "out" / "opara-table1-small").glob("googlenet@*.schedule.json"):
        schedule = json.loads(file.read_text())
        seconds_by_system[schedule["system"]] = schedule["search"].get("allocation_seconds", schedule["search"]["seconds"])
    (line,) = [line for line in lines if line.startswith(" googlenet: opara over nimble_released, stream assignment time")]
    assert f"{seconds_by_system['nimble'] / seconds_by_system['opara']:.2f}x" in line and "21.48x" in line
    verdicts = {verdict.exhibit: verdict for verdict in read_verdicts(tmp_path / "out" / "verdicts.json")}
    assert set(verdicts) == {"ios/table1", "opara/table1"}
    assert all(verdict.place == "cpu" for verdict in verdicts.values())
    assert verdicts["ios/table1"].verdict in JUDGED and verdicts["ios/table1"].extent == "3 of 6"
    assert verdicts["opara/table1"].verdict == UNJUDGED and verdicts["opara/table1"].extent == "1 of 4"  # of one network
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*.schedule.json")}
    assert small(tmp_path, "ios/table1", "opara/table1").returncode == 0
    assert before == {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*.schedule.json")}


@pytest.mark.slow
def test_verdicts_from_records_that_are_there(tmp_path: Path) -> None:
    """--judge runs nothing; on the committed records its verdicts are those of the page, and a report takes them."""
    here = "results=results/reference/h200/overview.jsonl.gz", "--output", str(tmp_path / "out")
    before = sorted((ROOT / "results" / "reference" / "h200").iterdir())
    done = reproduce("nimble/figure7", "nimble/figure2a", "--judge", *here)
    assert done.returncode == 0, done.stderr
    verdicts = {v.exhibit: v for v in read_verdicts(tmp_path / "out" / "verdicts.json")}
    pages_of_exhibits = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "results" / "reference").glob("*.md"))
    idle, speed = verdicts["nimble/figure2a"], verdicts["nimble/figure7"]
    assert {verdict.place for verdict in verdicts.values()} == {"NVIDIA H200"}
    assert f"figure 2a: idle time of the GPU ({idle.verdict}: {idle.extent_in_words})" in pages_of_exhibits
    assert f" `overview` ({speed.verdict}, {speed.extent_in_words})" in pages_of_exhibits  # another pack comes first
    lines = [line for line in done.stdout.splitlines() if line.startswith(" largest: eager")]
    assert len(lines) == 1 and f"| {lines[0].strip().split('  ')[-1].strip()} |" in pages_of_exhibits
    assert sorted((ROOT / "results" / "reference" / "h200").iterdir()) == before
    page = tmp_path / "report.html"
    arguments = ["--results", "results/reference/h200/overview.jsonl.gz", "--output", str(page), "--models", "resnet18"]
    arguments += ["--verdicts", str(tmp_path / "out" / "verdicts.json")]
    command = [sys.executable, "scripts/report.py", *arguments]
    report = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert report.returncode == 0, report.stderr
    assert "nimble/figure2a" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nimble/figure7"], "nimble/figure7: needs a GPU, and none is visible here; +size=small runs it on the CPU"),
        (["nimble/figure77"], "no exhibit is named 'nimble/figure77': did you mean nimble/figure7?"),
        (["figure7"], "no exhibit is named 'figure7': did you mean nimble/figure7, opara/figure7?"),
        (["orca/figure4.7"], "did you mean orca/figure4.7a, orca/figure4.7b, orca/figure4.7c?"),
        (
            ["orca/figure4.9_simulated", "runner.costs=gpt_175b-h100"],
            "costs of iterations that are not there; on a GPU this measures them: python run.py ",
        ),
        (
            ["orca/microbatches", "runner.costs=gpt_13b-pp2-h100"],
            "system.pipeline_parallel=2 system=orca runner=iteration_costs output=results/reference/sim",
        ),
        (["opara/"], "did you mean opara/figure1, opara/figure2, opara/figure5, opara/figure6, opara/figure7,"),
        (["nimble/figure7", "+size=tiny"], "+size=tiny is neither small nor full"),
        (["nimble/figure7", "+batch=1"], "+batch= is nothing that a preset can be given: did you mean batch?"),
        (["nimble/figure7", "+sise=small"], "+sise= is nothing that a preset can be given: did you mean +size?"),
        (["nimble/figure7", "sise=small"], "there is no key 'sise': did you mean +size?"),
        (
            ["nimble/figure7", "experiment=x"],
            "experiment= is nothing that a preset can be given: there is +size, algorithms, ",
        ),
        ([], "name an exhibit, or all"),
        (["ios/table1", "+size=small", "--output", "README.md/x"], "README.md is not a folder"),
        (["ios/table1", "--judge", "results=nowhere"], "nowhere is not there"),
        (["ios/table1", "--judge", "results="], "results=: an empty text is no path"),
        (["ios/table1", "--judge", "--output", ""], "--output: an empty text is no path"),
        (["ios/table1", "--judge", "--output", "/proc/x"], "/proc/x cannot be written"),  # not even by root
        (["ios/table1", "--judge", "model=gpt_13c"], "no model is named 'gpt_13c': did you mean gpt_13b?"),
        (["ios/table1", "+size=small", "system=ios,nimbel"], "no system is named 'nimbel': did you mean nimble?"),
        (["ios/table1", "--judge", "runner="], "no runner is named ''"),
        (["ios/table1", "--judge", "batch=abc"], "batch=abc is not an integer of at least 1"),
        (["ios/table1", "--judge", "batch=1,0"], "batch=0 is not an integer of at least 1"),
        (["ios/table1", "--judge", "bach=1"], "there is no key 'bach': did you mean batch?"),
        (["ios/table1", "--judge", "precision=fp8"], "precision=fp8 is not one of fp32, tf32,"),
        (["ios/table1", "--judge", "timeout=long"], "timeout=long is not a number"),
        (["ios/table1", "--judge", "system.s=[1"], "system.s=[1 is no value"),
        (["ios/table1", "--judge", "system.s=few"], "system.s=few is not an integer"),
        (["opara/table1", "--judge", "system.ss=1"], "there is no key 'system.ss' with system=nimble_released,opara"),
        (["opara/table1", "--judge", "system=ios", "system.rr=1"], "there is no key 'system.rr' with system=ios"),
    ],
)
def test_a_bad_request_is_a_line_and_status_2(script: Script, arguments: list[str], message: str) -> None:
    done = script("reproduce", *arguments) if arguments else reproduce()  # one of them in a process of its own
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1 and not done.stdout


@pytest.mark.slow
def test_what_run_py_refuses_is_told_by_it_and_the_others_go_on(tmp_path: Path) -> None:
    places = f"results={tmp_path / 'runs'}", "--output", str(tmp_path / "out")
    done = reproduce("ios/table2", "opara/figure6", "+size=small", "timeout=0", *places)
    assert done.returncode == 2 and done.stderr.count("timeout=0 is not a positive number of seconds") == 2
    assert "[2/2] opara/figure6" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_what_needs_no_gpu_of_orca_is_run_whole(tmp_path: Path) -> None:
    """The parts of 341 billion parameters on 32 GPUs that are not here, and two schedulers under a virtual clock."""
    places = f"results={tmp_path / 'runs'}", "--output", str(tmp_path / "out")
    done = reproduce("orca/table4.1", "orca/figure4.6", *places)
    assert done.returncode == 0, done.stderr
    assert "measured on: any machine: its figures are counted" in done.stdout
    verdicts = read_verdicts(tmp_path / "out" / "verdicts.json")
    assert {v.exhibit: v.verdict for v in verdicts} == {"orca/table4.1": HOLDS, "orca/figure4.6": HOLDS}


@pytest.mark.slow
def test_a_figure_of_orca_finds_rates_of_a_small_model(tmp_path: Path) -> None:
    """The search ends on a short trace too, whether a system keeps the SLO or not."""
    done = small(tmp_path, "orca/figure4.9")
    assert done.returncode == 0, done.stderr
    records = list(Store(tmp_path / "runs").read().records.values())
    rates = [record.measured["capacity"].quantity("slo_rate") for record in records]
    assert len(rates) == 2 and {record.status for record in records} == {"ok"}
    assert any(rate is not None and rate.value is not None for rate in rates)
    assert (tmp_path / "out" / "orca-figure4.9-small" / "serving.svg").stat().st_size > 5000


@pytest.mark.slow
def test_all_says_at_once_what_it_leaves_out_without_a_gpu(tmp_path: Path) -> None:
    """Judged alone, so that nothing runs: every exhibit is gone through, and the last lines sum up."""
    (tmp_path / "none").mkdir()
    done = reproduce("all", "--judge", f"results={tmp_path / 'none'}", "--output", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()[-len(names()) :]] == names()
    verdicts = {v.exhibit: v.verdict for v in read_verdicts(tmp_path / "out" / "verdicts.json")}
    assert verdicts.pop("orca/table4.1") == HOLDS and set(verdicts.values()) == {NOT_RUN}  # its sizes are counted
    refused = reproduce("all", "timeout=0", f"results={tmp_path / 'none'}", "--output", str(tmp_path / "out"))
    first = refused.stderr.splitlines()[0]
    assert (
        "no GPU is visible here, so these are left out" in first and "nimble/figure7" in first and "ios/table2" not in first
    )
    free = [name for name in names() if Preset.read(name).needs not in ("gpu", "files")]
    place = 1 + free.index("opara/table1")
    assert f"[{place}/{len(free)}] opara/table1" in refused.stderr and refused.returncode == 2


def test_all_leaves_out_what_lacks_costs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A figure that is asked for by its name ends with the command that measures them."""
    runs = [
        Run(Preset.read(name), {}, Path("results"), Path(OUTPUT), small=False)
        for name in ("orca/table4.1", "orca/figure4.8b_simulated", "orca/figure4.8_simulated")
    ]
    monkeypatch.setattr(running, "are_there", lambda costs: costs == "gpt_13b-h200")
    assert [run.preset.name for run in with_costs(Parser(""), runs, is_all=True)] == [
        "orca/table4.1",
        "orca/figure4.8_simulated",
    ]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("costs of iterations are not there for these, so they are left out: orca/figure4.8b_simulated")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_figures_of_a_gpu_stand_or_fall(tmp_path: Path) -> None:
    """Figure 2a of Nimble on one network, and the warps that a captured and an uncaptured call keep active."""
    places = f"results={tmp_path / 'runs'}", "--output", str(tmp_path / "out")
    gpu = gpu_environment()
    done = reproduce("nimble/figure2a", "model=squeezenet", "system=eager", *places, **gpu)
    assert done.returncode == 0, done.stderr
    (verdict,) = read_verdicts(tmp_path / "out" / "verdicts.json")
    assert verdict.verdict in JUDGED and verdict.place == torch.cuda.get_device_name()
    done = reproduce("ios/active_warps", "model=squeezenet", "system=eager,sequential", *places, **gpu)
    assert done.returncode == 0, done.stderr
    measurements = [warps for r in Store(tmp_path / "runs").read().records.values() if (warps := r.active_warps) is not None]
    properties = torch.cuda.get_device_properties(0)
    most = properties.multi_processor_count * properties.max_threads_per_multi_processor / 32
    assert len(measurements) == 2 and all(0 < (warps.value or 0) <= most for warps in measurements), measurements
    assert all(warps.estimated_course and 0 < max(warps.estimated_course.warps) <= most for warps in measurements)
    assert (tmp_path / "out" / "ios-active_warps" / "active_warps.svg").exists(), done.stdout


@pytest.mark.slow
def test_exhibits_are_listed(script: Script) -> None:
    done = script("reproduce", "--list")
    assert done.returncode == 0
    lines = dict(line.split(": ", maxsplit=1) for line in done.stdout.splitlines())
    assert list(lines) == [*names(), *WITHOUT_PRESET, *ALIASES]
    assert all(lines[alias].split(": ")[-1] == lines[name].split(": ")[-1] for alias, name in ALIASES.items())
    for name in names():
        verdict, judged, figures = re.fullmatch(r".*: ([a-z ]+), (?:(\d+) of )?(\d+) figures?", lines[name]).groups()  # type: ignore[union-attr]
        assert verdict in VERDICTS and int(judged or 0) <= int(figures), lines[name]
        assert (verdict == NOT_RUN) == (judged is None)
    assert "(needs a GPU)" in lines["nimble/figure7"] and "(needs a GPU)" not in lines["ios/table1"]
    assert lines["nimble/figure1"].startswith("no preset: an illustration")


def test_an_exhibit_answers_to_its_number_in_the_dissertation(script: Script, tmp_path: Path) -> None:
    done = script("reproduce", "dissertation/table3.1", "--recorded", "--output", str(tmp_path))
    assert done.returncode == 0 and "nimble/table1: Nimble, table 1" in done.stdout
    assert (tmp_path / "nimble-table1" / "verdict.json").exists()


@pytest.mark.slow
def test_all_recomputes_every_verdict_from_the_committed_records(tmp_path: Path) -> None:
    """Nothing runs, and what it writes is what --list says and the page of exhibits shows."""
    done = reproduce("all", "--output", str(tmp_path))
    assert done.returncode == 0 and "no GPU is visible here, so verdicts are by the committed records" in done.stderr
    verdicts = {v.exhibit: v for v in read_verdicts(tmp_path / "verdicts.json")}
    assert list(verdicts) == names()
    listed = {line.partition(":")[0]: line.rpartition(": ")[2] for line in reproduce("--list").stdout.splitlines()}
    pages_of_exhibits = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "results" / "reference").glob("*.md"))
    for name, verdict in verdicts.items():
        if verdict.verdict == NOT_RUN:
            assert listed[name] == f"{NOT_RUN}, {counted(verdict.figures, 'figure')}"
            continue
        assert listed[name] == f"{verdict.verdict}, {verdict.extent_in_words}"
        heading = f"## {Preset.read(name).title} ({verdict.verdict}: {verdict.extent_in_words})\n"
        assert pages_of_exhibits.count(heading) == 1
        section = re.split(r"\n## |<!-- end of", pages_of_exhibits.partition(heading)[2])[0]
        lines = iter(section.splitlines())
        first_table = takewhile(lambda line: line.startswith("|"), dropwhile(lambda line: not line.startswith("|"), lines))
        rows = [line for line in first_table if line.startswith("| ")]
        is_shown = verdict.verdict != NOT_SHOWN
        assert len(rows) == verdict.figures + 1 if is_shown else f"{verdict.reason}." in section  # under a row of names
    assert list((tmp_path / "nimble-figure7").glob("*.svg"))


def test_committed_records_are_shown_as_they_are(script: Script, tmp_path: Path) -> None:
    done = script("reproduce", "ios/frameworks", "--recorded", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (verdict,) = read_verdicts(tmp_path / "verdicts.json")
    assert (verdict.verdict, verdict.extent) == (NOT_COMPARABLE, "0 of 25")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(" inception_v3: ios over tvm ")]
    assert "x [" in line and "not comparable: TVM runs its own untuned kernels here" in line  # shown, and not judged
    for more in (["batch=1"], ["--judge"], ["+size=small"]):
        refused = script("reproduce", "ios/frameworks", "--recorded", *more)
        assert refused.returncode == 2 and "--recorded goes by the committed records alone" in refused.stderr


def test_help_is_the_docstring() -> None:
    assert "+size=small" in reproduce("--help").stdout and os.path.exists(
        ROOT / "conf" / "experiment" / "ios" / "table1.yaml"
    )
