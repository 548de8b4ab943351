"""scripts/today.py: the page of where streams help and where fusion does, of committed records and of made ones."""

import re
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from conftest import ROOT, Run

import conf
from results.cell import named
from results.limits import Limits
from results.selection import NoResults, Selection, by_setting, read
from results.siblings import siblings
from scripts.standing import GAIN, SECTIONS, Standing, standings
from scripts.today import drawn, page

ZOO = ROOT / "results" / "reference" / "h200" / "zoo.jsonl.gz"
NIMBLE, XLA, WEAVE = (named("system", name) for name in ("nimble", "xla", "weave"))
STANDING = Standing(("dlrm", 1), "fp16", (1.5, NIMBLE), (1.2, XLA), None, Limits(0.2, 0.8, width=26, sm_area_ms=0.1), 0.9)


@pytest.fixture(scope="module")
def measured() -> Selection:
    (selection,) = by_setting(record for record in read([ZOO]) if record.cell.runner.name == "bench").values()
    return selection


def test_every_model_stands_in_one_section_by_its_rounds(measured: Selection) -> None:
    """Ratios are those of the groups that were measured in turn, worked out from them here."""
    one_stream = named("system", "cuda_graph")
    by_group = {(g.group.model.label, g.group.conditions.batch): g for g in siblings(measured.records)}
    rows = standings([measured])
    assert len(rows) == len(by_group) == 26
    for row in rows:
        group = by_group[row.row]
        ratios = {s: r.ratio for s in group.records if (r := group.over(s, one_stream)) is not None}
        of_schedulers = {ratio for s, ratio in ratios.items() if s.choice in ("nimble", "opara", "ios")}
        others = {r for s, r in ratios.items() if s.choice.split("_")[0] in ("torch", "onnxruntime", "tvm")}
        assert row.streams is not None and row.streams[0] == max(of_schedulers)
        assert row.fusion is not None and row.fusion[0] == max(others)
        best = max(of_schedulers | others)
        assert row.section == SECTIONS[2 if best <= GAIN else max(of_schedulers) < max(others)]
    text = page([measured], rows, [])
    assert sum(map(int, re.findall(r": (\d+) of 26 models", text))) == 26
    assert all(text.count(f"- {row.name}:") == 1 for row in rows)


@pytest.mark.parametrize(
    ("standing", "section", "words"),
    [
        (STANDING, 0, "1.50x (nimble), 1.20x (xla); width 26, critical path 25% of the kernels' time, one stream 4.5 times"),
        (replace(STANDING, streams=(1.1, NIMBLE)), 1, "1.10x (nimble), 1.20x (xla)"),
        (replace(STANDING, streams=(1.0, NIMBLE), fusion=None), 2, "1.00x (nimble); width 26"),
        (replace(STANDING, streams=None, fusion=(1.0, XLA), both=(1.3, WEAVE)), 1, "1.00x (xla), 1.30x (weave)"),
        (replace(STANDING, streams=(1.04, NIMBLE), fusion=(0.8, XLA), both=(1.3, WEAVE)), 1, "1.04x (nimble), 0.80x (xla)"),
        (replace(STANDING, limits=None), 0, "no limits"),
    ],
)
def test_a_section_and_its_reason(standing: Standing, section: int, words: str) -> None:
    assert standing.section == SECTIONS[section] and words in standing.text


def test_a_page_of_nothing_is_none(measured: Selection) -> None:
    with pytest.raises(NoResults, match="cuda_graph"):
        page([measured], [], [])


def test_a_chart_is_titled_by_what_it_is_of_and_then_by_its_setting(measured: Selection) -> None:
    figure = drawn(measured.only(models=["nasnet", "bert"], batches=[1]), "Networks of today")
    (legend,) = figure.legends
    title, setting = legend.get_title().get_text().split("\n")
    assert title == "Networks of today: speedup over a CUDA Graph of one stream"
    assert setting.startswith(measured.setting.place) and setting.endswith("batch 1")
    names = {tick.get_text() for axes in figure.axes for tick in axes.get_xticklabels()}
    assert {"NASNet-A (mobile)", "BERT"} <= names
    plt.close(figure)


@pytest.mark.slow
def test_the_script_writes_the_page_and_a_chart_a_batch(script: Run, tmp_path: Path) -> None:
    done = script("today", "--results", str(ZOO), "--output", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "README.md").read_text() == done.stdout
    charts = re.findall(r"\]\((.*\.svg)\)", done.stdout)
    assert len(charts) == 3 and all((tmp_path / "out" / chart).stat().st_size > 10_000 for chart in charts)
    for place, file in (("/proc/x", "/proc/x"), (str(tmp_path / "page"), "README.md")):  # not even root writes in /proc
        (tmp_path / "page" / "README.md").mkdir(parents=True, exist_ok=True)
        refused = script("today", "--results", str(ZOO), "--output", place)
        assert refused.returncode == 2 and f"{file} cannot be written: " in refused.stderr and not refused.stdout
        assert len(refused.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("results", "reason"),
    [
        ("nowhere", "nowhere is not there: results are in a folder"),
        ("README.md", "README.md is a file: results are in a folder"),
        ("scripts", "no record in scripts"),
        (str(ZOO.with_name("windtunnel.jsonl.gz")), "no record of runner=bench: python run.py experiment=reference/today"),
    ],
)
def test_results_that_hold_nothing_are_told_in_a_line(script: Run, results: str, reason: str) -> None:
    done = script("today", "--results", results)
    assert done.returncode == 2 and reason in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_the_page_says_how_many_are_measured_at_each_batch() -> None:
    pack = ROOT / "results" / "reference" / "h200" / "today.jsonl.gz"
    cells = [
        record.cell for record in read([pack]) if record.cell.system.choice == WEAVE.choice and record.latency is not None
    ]
    first, eighth = (len({cell.model for cell in cells if cell.conditions.batch == batch}) for batch in (1, 8))
    said = {13: "thirteen of them", 14: "All [fourteen](../../models/ZOO.md)"}
    text = " ".join((ROOT / "results" / "reference" / "TODAY.md").read_text().split())
    assert f"{said[first]} are measured at batch 1, {said[eighth]} at batch 8" in text


def test_the_preset_has_every_network_of_today() -> None:
    """models/ZOO.md lists them, above those of the papers."""
    listed = (ROOT / "models" / "ZOO.md").read_text().split("## Networks of the papers")[0]
    names = set(re.findall(r"^\| `(\w+)`", listed, re.MULTILINE))
    preset = (conf.FOLDER / "experiment" / "reference" / "today.yaml").read_text()
    (models,) = re.findall(r"model: (\S+)", preset)
    assert set(models.split(",")) == names and len(names) == 14
