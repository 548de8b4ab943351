"""Presets against what there is: the papers' figures, the options of models and systems, schedule files."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from judged_exhibits import NIMBLE, OPARA, judged
from made_records import cell, record

import conf
from models.table_options import DATASETS, PIPELINES
from results.cell import named
from results.document import cell_to_json
from results.files import read_json
from results.published.values import everything
from results.schedule_file import ScheduleFile, read_cells
from results.selection import Selection
from results.timeline import COMPUTE, Bar, Timeline
from scripts.charts.style import short
from scripts.exhibits import accuracy, findings, overrides, preset, quantities, recorded, running
from scripts.exhibits.evidence import Evidence, parts
from scripts.exhibits.pictures import OWN
from scripts.exhibits.preset import NoPreset, Preset, names
from scripts.exhibits.running import CannotRun, Refused, Run, cells, quoted, system_of
from scripts.exhibits.without import ALIASES, WITHOUT_PRESET
from scripts.plot import CHARTS

ISSUED = {
    "nimble": [
        "figure2a",
        "figure2b",
        "figure2c",
        "figure7",
        "figure8",
        "figure8_imagenet",
        "supplement_figure1",
        "supplement_figure2",
        "table1",
    ],
    "ios": [
        *("schedules", "frameworks", "batch_sizes", "pruning", "specialization", "active_warps", "blockwise"),
        *("table1", "table2", "autotune", "figure14", "figure15", "resnet"),
        *("figure1", "figure2", "figure10"),
    ],
    "orca": [
        *(
            "table4.1",
            "figure4.6",
            "figure4.7a",
            "figure4.7b",
            "figure4.7c",
            "figure4.8",
            "figure4.8a",
            "figure4.8b",
            "figure4.8c",
            "figure4.9",
        ),
        *(
            "figure4.8_simulated",
            "figure4.8a_simulated",
            "figure4.8b_simulated",
            "figure4.8c_simulated",
            "figure4.9_simulated",
        ),
        *(
            "attention",
            "azure_trace",
            "batching_ladder",
            "extensions",
            "increments",
            "microbatches",
            "preemption",
            "prefetch",
        ),
    ],
    "opara": [
        "figure1",
        "figure2",
        "figure5",
        "figure6",
        "figure7",
        "figure8",
        "figure9",
        "table1",
        "prototype",
        "profiling",
    ],
    "windtunnel": [
        *("table5.2", "table5.3_flight", "table5.3_avazu", "table5.3_criteo", "table5.4", "table5.5", "table5.6"),
        *(f"table5.{number}_nycflights13" for number in (3, 4, 5, 6)),
    ],
}
# Systems of optional packages, which a preset may name before they are installed.
OPTIONAL = {"tvm", "tvm_tuned", "tensorrt", "onnxruntime", "xla"}


def test_every_exhibit_has_a_preset() -> None:
    assert sorted(names()) == sorted(f"{paper}/{exhibit}" for paper, exhibits in ISSUED.items() for exhibit in exhibits)


@pytest.mark.parametrize("name", names())
def test_a_preset_asks_for_what_there_is(name: str) -> None:
    read = Preset.read(name)
    assert read.title and read.claim and read.figures and read.small
    for sweep in (read.sweep, *({**read.sweep, **change} for change in read.also), {**read.sweep, **read.small}):
        assert set(parts(sweep["model"])) <= set(conf.choices("model"))
        assert set(parts(sweep["system"])) <= set(conf.choices("system")) | OPTIONAL
        assert sweep.get("runner", "bench") in conf.choices("runner")
        for key in sweep:
            group, _, option = key.partition(".")
            for choice in parts(sweep[group]) if option else []:
                assert option in conf.options(group, choice), (key, choice)
    quantity_charts = {chart for chart in read.charts if "." in chart}
    assert {chart.partition(".")[0] for chart in quantity_charts} <= {read.sweep.get("runner", "bench")}
    assert set(read.charts) - quantity_charts <= {*CHARTS, *OWN}
    # Every figure has a quantity here, and a model, a system and a batch that the sweep asks for.
    models = set(parts(read.sweep["model"]))
    batches = set(parts(read.sweep.get("batch", "1")))
    for value, _ in read.figures:
        metric = value.metric
        if metric in accuracy.METRICS:  # of a table, and of a system beside a pipeline
            assert accuracy.Table.of(value.model).dataset in DATASETS
            sides = [accuracy.Side.of(text) for text in (value.system, value.baseline) if text]
            assert all(side.choice in conf.choices("system") and side.pipeline in PIPELINES for side in sides)
            continue
        of_one = quantities.RATIOS.keys() | quantities.PLAIN.keys() | quantities.TRENDS.keys()
        assert metric in of_one or (metric in quantities.COMPARED and read.ratio)
        ours = read.models[value.model].choice if value.model in read.models else value.zoo_model
        assert (
            ours is None or value.model in read.absent or ours in models | {change.get("model", "") for change in read.also}
        ), ours
        assert not value.batch.isdigit() or value.batch in batches
    if read.ratio and read.sweep.get("runner") != "accuracy":
        (other,) = read.ratio.values()
        assert any(value.system == other for value, _ in read.figures)


@pytest.mark.parametrize("name", names())
def test_every_value_of_a_preset_is_one_that_its_key_takes(name: str) -> None:
    """Whole, with each further sweep, and small: run.py would refuse the others, and the exhibit could not be run."""
    read = Preset.read(name)
    for sweep in (read.sweep, *(read.sweep | change for change in read.also), read.sweep | read.small):
        for group in ("model", "system", "runner"):
            for choice in parts(sweep.get(group, "")) if sweep.get(group) else ():
                options = conf.options(group, choice)
                values = {key.removeprefix(f"{group}."): text for key, text in sweep.items() if key.startswith(f"{group}.")}
                for key, texts in values.items():
                    for text in parts(texts):
                        assert conf.mistake(group, options, {key: yaml.safe_load(text)}) is None, (choice, key, text)


def test_a_variant_of_a_system_has_every_option_of_it() -> None:
    """run.py refuses a system whose file lacks one."""
    for choice in conf.choices("system"):
        options = conf.options("system", choice)
        assert set(options) == set(conf.options("system", str(options["name"]))), choice


def test_the_published_values_of_the_papers_are_all_in_some_preset() -> None:
    used = {value for name in names() for value in Preset.read(name).rows}
    assert not set(WITHOUT_PRESET) & set(names())
    assert {value for value in everything() if value.name not in WITHOUT_PRESET} == used


def test_every_figure_and_table_of_the_papers_is_listed() -> None:
    """By its number, in the name or, as "IOS, figure 7: ...", in the title; the dissertation's chapter 3 by its own."""
    titles = " ".join(Preset.read(name).title for name in names())
    listed = {*names(), *WITHOUT_PRESET, *ALIASES}
    numbered: dict[str, list[str]] = {
        "nimble": ["figure1", "figure2a", "figure2b", "figure2c", *(f"figure{n}" for n in range(3, 9)), "table1"],
        "ios": [*(f"figure{n}" for n in range(1, 17)), "table1", "table2", "table3"],
        "opara": [*(f"figure{n}" for n in range(1, 10)), "table1"],
        "dissertation": [*(f"figure2.{n}" for n in range(1, 6)), *(f"figure3.{n}" for n in range(1, 10)), "table3.1"],
        "orca": [*(f"figure4.{n}" for n in (*range(1, 7), "7a", "7b", "7c", "8a", "8b", "8c", 9)), "table4.1"],
        "windtunnel": ["figure5.1", "figure5.2", "figure5.3", *(f"table5.{n}" for n in range(1, 7))],
    }
    written_as = {"ios": "IOS", "opara": "Opara", "windtunnel": "WindTunnel"}
    for paper, exhibits in numbered.items():
        for name in exhibits:
            number = name.replace("figure", "figure ").replace("table", "table ")
            title = f"{written_as.get(paper, paper)}, {number}:"
            assert f"{paper}/{name}" in listed or title in titles, f"{paper}/{name}"
    assert all(name in {*names(), *WITHOUT_PRESET} for name in ALIASES.values()) and not {*ALIASES} & {*names()}


def test_no_figure_of_a_preset_is_left_out_but_the_other_sides_of_ratios() -> None:
    for name in names():
        read, _, exhibit_findings = judged(name)
        sides = [v for v, _ in read.figures if read.ratio and v.metric in quantities.COMPARED]
        others = [v for v in sides if v.system in read.ratio.values()]
        # Of AUC the pipelines, and the cold starts, which others are compared with.
        over = read.ratio.get("over")
        of_tables = [accuracy.Side.of(v.system) for v, _ in read.figures if v.metric == accuracy.AUC]
        others += [side for side in of_tables if over in (side.name, *side.options)]  # type: ignore[misc]
        assert len(exhibit_findings) == len(read.figures) - len(others), name


def test_changes_of_a_preset(tmp_path: Path) -> None:
    plain = Run(Preset.read("ios/pruning"), {"model": "squeezenet"}, tmp_path, tmp_path / "out", small=False)
    assert plain.preset.sweep["model"] == plain.schedules["model"] == "squeezenet"
    assert len(list(cells(plain.schedules))) == 6
    small = Run(Preset.read("ios/pruning"), {}, tmp_path, tmp_path / "out", small=True)
    assert small.preset.sweep["device"] == small.schedules["device"] == "cpu" and small.folder.name == "ios-pruning-small"
    assert [system_of(cell).label for cell in cells(small.schedules)] == [
        "ios (exhaustive=true, r=1)",
        "ios (exhaustive=true)",
    ]
    both = Run(Preset.read("opara/figure1"), {"batch": "1"}, tmp_path, tmp_path / "out", small=False)
    assert [sweep["model"] for sweep in both.sweeps] == ["googlenet,inception_v3", "bert"]
    assert [sweep["batch"] for sweep in both.sweeps] == ["1", "1"] and both.sweeps[1]["model.sequence"] == "32"
    one = Run(Preset.read("opara/figure1"), {"model": "googlenet"}, tmp_path, tmp_path / "out", small=False)
    assert [sweep["model"] for sweep in one.sweeps] == ["googlenet"]
    other = {"runner.samples": "9", "force": "true", "gpus": "all"}
    figure_run = Run(Preset.read("opara/figure6"), other, tmp_path, tmp_path / "out", small=False)
    assert (
        figure_run.force
        and figure_run._trace != Run(figure_run.preset, {"model": "bert"}, tmp_path, tmp_path / "out", False)._trace
    )
    assert figure_run._trace == Run(Preset.read("opara/figure6"), {}, tmp_path, tmp_path / "out", False)._trace
    recoloured = Run(Preset.read("opara/figure6"), {"runner.classify": "measured"}, tmp_path, tmp_path / "out", False)
    assert recoloured._trace != figure_run._trace  # an option of the timeline's own runner, which it is asked with
    elsewhere = Run(Preset.read("ios/specialization"), {}, tmp_path, tmp_path / "out", small=False)
    schedules = parts(elsewhere.preset.sweep["system.schedule"])
    assert [Path(file).parent for file in schedules] == [elsewhere.folder] * 3
    assert [system.options["schedule"] for system in elsewhere.preset.systems.values()] == schedules
    assert short(named("system", "ios", schedule="a/b@ios@b1.schedule.json")) == "ios (schedule=b@ios@b1)"
    assert short(named("system", "ios", r=1)) == "ios (r=1)"
    assert quoted("a b (c)'s") == "'a b (c)\\'s'"


@pytest.mark.parametrize(
    ("exhibit", "message"),
    [
        ({"title": "t", "claim": "c", "colour": "red"}, "an exhibit has no colour"),
        ({"title": "t", "claim": "c", "needs": "luck"}, "needs is luck"),
        ({"title": "t", "claim": "c", "claims": [{"metric": "speedup", "rule": "maybe"}]}, "rule is maybe"),
        ({"title": "t", "claim": "c", "claims": [{"metrics": "speedup"}]}, "no metrics"),
    ],
)
def test_a_preset_that_is_not_as_it_should_be_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exhibit: dict[str, Any], message: str
) -> None:
    (tmp_path / "nimble").mkdir()
    document = {"exhibit": exhibit, "hydra": {"sweeper": {"params": {"model": "vgg16", "system": "eager"}}}}
    (tmp_path / "nimble" / "figure0.yaml").write_text(yaml.safe_dump(document))
    monkeypatch.setattr(preset, "EXPERIMENTS", tmp_path)
    with pytest.raises(NoPreset, match=message):
        Preset.read("nimble/figure0")


@pytest.mark.parametrize("name", names())
def test_what_a_preset_asks_for_a_user_may_ask_for(name: str) -> None:
    """And what says how its sweeps are run."""
    read = Preset.read(name)
    how = {"gpus": "[0,1]", "timeout": "1e4", "memory_gib": "8", "max_load": "1", "force": "True", "hydra/launcher": "ray"}
    for sweep in (read.sweep, *(read.sweep | change for change in read.also), read.small, read.schedules, read.timeline):
        assert overrides.mistake(sweep | how, [read]) is None


@pytest.mark.parametrize("name", ["ios/table2", "opara/figure2"])
def test_run_py_takes_a_preset_too(name: str) -> None:
    """As far as the first thing that is wrong with a cell that was composed from it."""
    command = [sys.executable, "run.py", f"experiment={name}", "batch=0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "batch=0 is not a positive integer" in done.stderr, done.stderr


def test_a_network_that_was_not_asked_for_is_told_as_such(tmp_path: Path) -> None:
    one = Run(Preset.read("ios/table2"), {"model": "randwire"}, tmp_path, tmp_path / "out", small=False)
    reasons = {f.what.partition(":")[0]: f.reason for f in findings.findings(one.preset, one.evidence([]))}
    assert "asked" not in reasons.pop("randwire")
    assert reasons == {
        model: f"{model} was not asked for" for model in ("inception_v3", "nasnet_large", "squeezenet_bypass")
    }


def test_streams_of_a_timeline_are_those_that_its_schedule_has() -> None:
    bars = tuple(Bar(stream, "conv2d", 0.0, 1.0, COMPUTE) for stream in range(3))
    scheduled = {"nimble": None, "opara": 7}
    timelines = [Timeline(cell(name, "t5", device="cuda"), "x", bars, number) for name, number in scheduled.items()]
    seen = [quantities.streams(Evidence(timelines=timelines), ("t5", 1), system) for system in (NIMBLE, OPARA)]
    assert seen == [3.0, 7.0]


def test_schedule_files_are_known_by_their_cell_and_older_ones_by_their_name(tmp_path: Path) -> None:
    older = recorded.SCHEDULES / "ios-pruning" / "inception_v3@ios (r=1, s=3)@b1.schedule.json.gz"
    (tmp_path / older.name).write_bytes(older.read_bytes())
    own = cell("opara", "t5", "schedule", batch=4)
    document = read_json(older) | {"cell": cell_to_json(own), "of_a_later_version": 1}
    (tmp_path / "any name.schedule.json").write_text(json.dumps(document))
    evidence = Evidence(schedules=read_cells(tmp_path))
    assert evidence.schedule(("t5", 4), OPARA) == evidence.schedule(("inception_v3", 1), named("system", "ios", r=1, s=3))
    assert len(evidence.schedules) == 2 and own in evidence.schedules
    assert evidence.schedule(("t5", 4), NIMBLE) is None


def test_a_schedule_of_other_conditions_is_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the name tells, and what changes no schedule, leaves the file where it was."""
    written: list[Path] = []

    def written_by(arguments: list[str], _: object = None) -> None:
        precision = next((word.partition("=")[2] for word in arguments if word.startswith("precision=")), "tf32")
        (file,) = [Path(word.partition("=")[2].strip("'")) for word in arguments if word.startswith("output=")]
        model, system = (next(w.partition("=")[2] for w in arguments if w.startswith(f"{g}=")) for g in ("model", "system"))
        one = cell(system, model, "schedule", precision=precision)
        document = {key: [] for key in ("operators", "edges", "waits")} | {"streams": len(written), "width": 1}
        about = {"model": model, "system": system, "batch": 1, "device": "cpu", "cell": cell_to_json(one)}
        file.parent.mkdir(exist_ok=True)  # as run.py does
        file.write_text(json.dumps(document | about))
        written.append(file)

    monkeypatch.setattr(running, "_run_py", written_by)

    def run(*changes: str) -> Run:
        asked = dict(word.split("=") for word in ("model=googlenet", "system=opara", *changes))
        one = Run(Preset.read("opara/table1"), asked, tmp_path, tmp_path / "out", small=False)
        one.run()
        return one

    def streams(one: Run) -> list[int]:
        return [file.streams for file in one.evidence([]).schedules.values()]

    usual = run()
    assert [file.parent for file in written] == [usual.folder] and streams(usual) == [0]
    for same in ("device=cpu", "timeout=9", "batch=1"):
        assert streams(run(same)) == [0] and len(written) == 1
    half = run("precision=fp16")
    assert streams(half) == [1] and written[1] != written[0] and streams(usual) == [0]
    assert streams(run("model.weights=none")) == [2] and streams(run("device=cuda")) == [3]
    both = run("precision=tf32,fp16")
    assert streams(both) == [4, 1] and len(written) == 5
    # The sweep that reads schedules reads those of its own request.
    reads = Run(Preset.read("ios/specialization"), {"precision": "fp16"}, tmp_path, tmp_path / "out", small=False)
    (folder,) = {Path(file).parent for file in parts(reads.preset.sweep["system.schedule"])}
    assert folder == reads.folder / written[1].parent.name


def test_the_schedule_of_a_cell_is_of_the_device_and_the_precision_of_the_records() -> None:
    """Two of each, of which the records are of one."""
    schedules = {}
    for streams, (device, precision) in enumerate([("cpu", "tf32"), ("cuda", "fp16"), ("cuda", "tf32")]):
        one = cell("opara", "nasnet", "schedule", device=device, precision=precision)
        schedules[one] = ScheduleFile("nasnet", "opara", 1, device, (), (), (), streams, 1)
    measured = Selection([record(of=cell("opara", "nasnet", device="cuda"))])
    file = Evidence(measured, schedules).schedule(("nasnet", 1), OPARA)
    assert file is not None and file.streams == 2
    first = Evidence(schedules=schedules).schedule(("nasnet", 1), OPARA)
    assert first is not None and first.streams == 0


@pytest.mark.parametrize(
    ("ends", "raised"),
    [
        ("sys.exit(0)", None),
        ("sys.exit(1)", None),  # a cell failed, and its record says so
        ("sys.exit(2)", Refused),
        ("sys.exit(3)", CannotRun),
        ("os.kill(os.getpid(), 9)", CannotRun),
        ("sys.exit(130)", KeyboardInterrupt),
    ],
)
def test_an_end_of_run_py_is_told_by_its_status(
    monkeypatch: pytest.MonkeyPatch, ends: str, raised: type[BaseException] | None
) -> None:
    monkeypatch.setattr(running, "RUN", ("-c", f"import os, sys; {ends}"))
    if raised is None:
        running._run_py([])
        return
    with pytest.raises(raised) as error:
        running._run_py([])
    if raised is CannotRun:
        assert not isinstance(error.value, Refused) and str(error.value).startswith("run.py ended with status ")
