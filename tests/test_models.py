"""Loading a model: names, options, weights, inputs and placement."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import test_models_counts
import torch
from conftest import environment, records
from torch import nn

import conf
import models
from models import loading, registry
from models.calibration import calibrate

ROOT = Path(__file__).parent.parent


def test_names_come_without_torch() -> None:
    program = "import models, sys; names = models.names(); assert 'torch' not in sys.modules; print(*names)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == models.names() == sorted(models.names())


def test_every_name_is_registered_where_the_table_says() -> None:
    for name in models.names():
        registry.find(name)
    assert sorted(registry._entries) == models.names()


def test_conf_has_one_entry_for_each_model_with_its_options() -> None:
    files = {choice: conf.options("model", choice) for choice in conf.choices("model")}
    assert files.pop("custom") == {"name": "custom", "factory": None}
    pipelines = {choice for choice, options in files.items() if options["name"] == registry.PIPELINE}
    tables = {f"nycflights13_pre{i}_pipe{j}" for i in (1, 2, 3) for j in (1, 2, 3)}
    assert pipelines == {"pipeline", *tables} and all(set(files[c]) == set(files["pipeline"]) for c in tables)
    files = {choice: options for choice, options in files.items() if choice not in pipelines}
    assert files.pop("hf") == {"name": "hf", "path": None}
    served = {choice: files.pop(choice) for choice in list(files) if files[choice]["name"] in registry.SERVED}
    assert {str(options["name"]) for options in served.values()} == {*registry.SERVED} - {"hf"}
    for options in served.values():  # each size has the options of the smallest
        assert set(options) == set(served[str(options["name"])])
    presets = {choice: options for choice, options in files.items() if choice != options["name"]}
    assert presets.pop("squeezenet_bypass") == {"name": "squeezenet", "bypass": "complex"}
    assert all(choice.startswith("gpt_") and options["name"] == "gpt" for choice, options in presets.items())
    own = {choice: options for choice, options in files.items() if choice == options["name"]}
    assert own == {name: {"name": name} | registry.find(name).options({}) for name in models.names()}


@pytest.mark.parametrize(
    ("name", "batch", "options", "message"),
    [
        ("resnet5", 1, {}, "no model 'resnet5'; did you mean resnet50"),
        ("nasnet_mobile", 1, {}, "did you mean nasnet"),
        ("qqq", 1, {}, "there is amoebanet, bert, clip_vit_b32, convnext_t, custom, darts"),
        ("pipeline", 1, {}, "a pipeline over a table is no network that could be called: runner=accuracy"),
        ("qwen3", 1, {}, "model qwen3 is served, token by token: runner=serving"),
        ("resnet50", 0, {}, "batch must be a positive integer, not 0"),
        ("resnet50", True, {}, "batch must be a positive integer"),
        ("resnet50", 1, {"size": 3}, "model resnet50 has no option 'size'; it takes no options"),
        ("bert", 1, {"sequnce": 3}, "model bert has no option 'sequnce'; did you mean sequence?"),
        ("bert", 1, {"sequence": "long"}, "option sequence of model bert must be an integer (default 128), not 'long'"),
        ("bert", 1, {"sequence": 0}, "option sequence of model bert must be at least 1, not 0"),
        ("gpt", 1, {"positions": 32}, "must be at most positions (32), not 64: set model.sequence too"),
        ("bert", 1, {"hidden": 100}, "must be a multiple of heads (12), not 100"),
        ("randwire", 1, {"size": "huge"}, "model.size=huge is not one of small, large"),
        ("squeezenet", 1, {"bypass": "long"}, "model.bypass=long is not one of none, simple, complex"),
    ],
)
def test_a_bad_request_is_one_line(name: str, batch: int, options: dict[str, object], message: str) -> None:
    with pytest.raises(models.BadModel) as caught:
        models.load(name, batch, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_and_inputs_are_the_same_each_time_and_leave_the_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second = models.load("squeezenet", 1), models.load("squeezenet", 3)
    assert torch.equal(torch.rand(3), expected)
    for a, b in zip(first.module.state_dict().values(), second.module.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert first.inputs[0].shape == (1, 3, 224, 224)
    assert second.inputs[0].shape == (3, 3, 224, 224)


def test_what_is_built_ahead_is_the_model_that_is_loaded_then_and_once() -> None:
    plain = models.load("squeezenet", 1, bypass="simple")
    models.build_ahead("squeezenet", bypass="simple")
    (ahead,) = loading._ahead.values()
    for other in ({}, {"training": True, "bypass": "simple"}, {"device": "meta", "bypass": "simple"}):
        assert models.load("squeezenet", 1, **other).module is not ahead
    state = torch.random.get_rng_state()
    loaded = models.load("squeezenet", 2, bypass="simple")
    assert loaded.module is ahead and not loaded.module.training and torch.equal(state, torch.random.get_rng_state())
    assert all(
        torch.equal(a, b) for a, b in zip(plain.module.state_dict().values(), ahead.state_dict().values(), strict=True)
    )
    assert models.load("squeezenet", 1, bypass="simple").module is not ahead


def test_calibration_sets_the_statistics_and_nothing_else() -> None:
    model = models.load("resnet18", 1)
    norm = model.module.layer1[0].bn1
    assert not any(module.training for module in model.module.modules())
    assert norm.momentum == 0.1
    assert not torch.equal(norm.running_var, torch.ones_like(norm.running_var))
    again = models.load("resnet18", 4).module.layer1[0].bn1
    assert torch.equal(norm.running_mean, again.running_mean)


def test_meta_allocates_nothing() -> None:
    model = models.load("vgg16", 1, device="meta")
    assert {value.device.type for value in [*model.module.parameters(), *model.inputs]} == {"meta"}


def test_fresh_inputs_are_new_values_of_the_same_kind() -> None:
    images = models.load("squeezenet", 2)
    (a,), (b,), (again,) = (images.fresh_inputs(seed) for seed in (1, 2, 1))
    assert torch.equal(a, again)
    assert not torch.equal(a, b)
    assert not torch.equal(a, images.inputs[0])
    assert a.shape == images.inputs[0].shape

    tokens = models.load("bert", 2, sequence=8, layers=1)
    (ids,) = tokens.fresh_inputs(3)
    assert ids.shape == (2, 8)
    assert ids.dtype == torch.int64
    assert 0 <= ids.min() <= ids.max() < 30522


def test_place_converts_module_and_inputs() -> None:
    model = models.load("mobilenet_v2_cifar10", 2)
    same = models.place(model, device="cpu", precision="tf32", layout="contiguous")
    assert {value.dtype for value in same.module.parameters()} == {torch.float32}
    placed = models.place(model, device="cpu", precision="bf16", layout="channels_last")
    state = placed.module.state_dict()
    assert {value.dtype for value in state.values() if value.is_floating_point()} == {torch.bfloat16}
    assert placed.inputs[0].dtype == torch.bfloat16
    assert placed.inputs[0].is_contiguous(memory_format=torch.channels_last)
    assert state["features.1.conv.1.weight"].is_contiguous(memory_format=torch.channels_last)
    (fresh,) = placed.fresh_inputs(0)
    assert fresh.dtype == torch.bfloat16
    assert fresh.is_contiguous(memory_format=torch.channels_last)
    assert placed.module(fresh).isfinite().all()

    tokens = models.place(models.load("bert", 1, sequence=4, layers=1), device="cpu", precision="fp16", layout="contiguous")
    assert tokens.inputs[0].dtype == torch.int64


def test_place_refuses_what_it_does_not_know() -> None:
    model = models.load("squeezenet", 1, device="meta")
    with pytest.raises(ValueError, match="no precision 'fp8'; there is fp32"):
        models.place(model, device="meta", precision="fp8", layout="contiguous")
    with pytest.raises(ValueError, match="no layout 'blocked'"):
        models.place(model, device="meta", precision="fp32", layout="blocked")


def test_bypasses_of_squeezenet_add_what_a_fire_module_reads() -> None:
    """Around four modules of eight where they keep the number of channels, around the others through a convolution."""
    plain, *bypassed = (models.load("squeezenet", 1, bypass=bypass).module for bypass in ("none", "simple", "complex"))
    parameters = [sum(p.numel() for p in module.parameters()) for module in (plain, *bypassed)]
    pairs = [(96, 128), (128, 256), (256, 384), (384, 512)]
    assert parameters == [1_248_424, 1_248_424, 1_248_424 + sum(i * o + o for i, o in pairs)]
    for module, count in zip(bypassed, (4, 8), strict=True):
        around = [layer for layer in module.features if hasattr(layer, "bypass")]
        assert len(around) == count
        for layer in around:
            x = torch.randn(1, layer.fire.squeeze.in_channels, 5, 5)
            with torch.no_grad():
                assert torch.equal(layer(x), layer.fire(x) + layer.bypass(x))


def test_calibration_times_no_algorithms_and_leaves_the_caller_its_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    norm, seen = nn.BatchNorm2d(3).eval(), []
    norm.register_forward_pre_hook(lambda *_: seen.append((torch.backends.cudnn.benchmark, norm.training)))
    calibrate(norm, (torch.randn(4, 3, 5, 5),))
    assert seen == [(False, True)] and torch.backends.cudnn.benchmark and not norm.training


def blocks(page: Path) -> list[str]:
    """The code blocks of a page, without their indentation."""
    return [
        textwrap.dedent(block).strip("\n") for block in re.findall(r"( *```\w+\n.*?)\n *```", page.read_text(), re.DOTALL)
    ]


@pytest.mark.slow
def test_the_pages_steps_add_a_model(tmp_path: Path) -> None:
    """The steps of models/README.md on a copy of the project: two files, a row that is checked, a command that is run."""
    steps = [block.partition("\n")[2] for block in blocks(ROOT / "models" / "README.md")]
    files = dict(
        re.findall(r"^# (\S+/\S+\.(?:py|yaml))\n(.*)", step, re.DOTALL)[0] for step in steps if step.startswith("# ")
    )
    (row,) = [step for step in steps if step.startswith("Figure(")]
    command = steps[-1].split()
    assert set(files) == {"models/small.py", "conf/model/squeezenet_1_1.yaml"} and command[:2] == ["python", "run.py"]

    unwanted = shutil.ignore_patterns("__pycache__", "reference", "runs", "cache")
    for room in ("conf", "hydra_plugins", "models", "results", "runners", "systems"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=unwanted if room == "results" else None)
    shutil.copy(ROOT / "run.py", tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    figure = eval(row, vars(test_models_counts))
    exec(files["models/small.py"], {})  # imports no model of the copy, but registers one here
    entry = registry._entries.pop(figure.model)
    with torch.device("meta"):
        counts = models.count(entry.build(False).eval(), (torch.empty(1, *entry.inputs()[0].shape),))
    assert test_models_counts.close(counts.parameters, figure.parameters), row
    assert test_models_counts.close(counts.macs, figure.macs), row

    settings = environment(TMPDIR=str(tmp_path))
    run = subprocess.run(
        [sys.executable, *command[1:]], cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr
    (record,) = records(tmp_path / "results" / "runs").values()
    assert record["status"] == "ok" and record["cell"]["model"]["options"] == {"classes": 1000}


def test_a_shape_takes_no_compiler() -> None:
    """Its import takes seconds, and filling a tensor on no device would bring it."""
    code = (
        "import sys; from models.decoders import load_decoder; from models.loading import load;"
        "load('gpt', 1, device='meta'); load_decoder('gpt', 'cpu', 'fp32', layers=1, hidden=64, heads=2);"
        "assert not {'sympy', 'torch._dynamo'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
