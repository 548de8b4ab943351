"""runner=placement, and what of a model fits which GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

import conf
import systems
from results.cell import Cell, Choice, Conditions, choose
from runners.checks import BadRequest
from runners.request.request import Request, SweepOptions
from runners.serving.parted import parted
from runners.showings.registry import showing
from systems.base import BadOption, Unsupported
from systems.serving.parts import Parts
from systems.serving.system import ServingSystem

PLACED = {"66b": (1, 4), "101b": (1, 8), "175b": (2, 4), "341b": (2, 4)}


def place(model: str, pipeline: int, tensor: int, **options: float) -> int:
    """Run runner=placement in this process."""
    return placed(model, choose("system", "orca", pipeline_parallel=pipeline, tensor_parallel=tensor), **options)


def placed(model: str, system: Choice, **options: float) -> int:
    """The same, of any system."""
    runner = choose("runner", "placement", **options)
    cell = Cell(choose("model", model), system, runner, Conditions(1, "cpu", "fp16"))
    return showing(runner).run(Request((cell,), cast(SweepOptions, None)))


@pytest.mark.parametrize("size", PLACED)
def test_placement_is_printed_and_adds_up(
    size: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On GPUs of 139.8 GiB: ranks, weights and slots of the chapter's models, by arithmetic of this test's own."""
    monkeypatch.setenv("COLUMNS", "200")
    pipeline, tensor = PLACED[size]
    assert place(f"gpt_{size}", pipeline, tensor) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.replace("│", " ").split() for line in lines if line.startswith("│")]
    assert [int(row[0]) for row in rows] == list(range(pipeline * tensor))
    options = conf.options("model", f"gpt_{size}")
    layers, hidden = int(str(options["layers"])), int(str(options["hidden"]))
    assert sum(float(row[-4]) for row in rows) == pytest.approx(12 * layers * hidden**2 * 2 / 2**30, rel=0.05)
    slot_bytes = 4 * layers * hidden / (pipeline * tensor)
    slots = [int(row[-1].replace(",", "")) for row in rows]
    for row, count in zip(rows, slots, strict=True):
        assert float(row[-2]) * 1024 == pytest.approx(slot_bytes, rel=0.01)
        room = (139.8 - float(row[-4]) - float(row[-3])) * 0.95 * 2**30
        assert count == pytest.approx(room / slot_bytes, rel=0.01)
    assert lines[-1].startswith(f"{min(slots):,} K/V slots")


def test_placement_shows_every_digit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert place("gpt", 1, 1) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert f" {last.partition(' ')[0]} │" in table[-2] and max(map(len, table)) <= 80


@pytest.mark.parametrize(
    ("model", "pipeline", "tensor", "options", "says"),
    [
        (
            "gpt_341b",
            1,
            8,
            {"memory_gib": 79.2},
            r"^gpt_341b does not fit: rank 0 of 8 \(stage 0, part 0\) needs 94\.\d GiB",
        ),
        ("gpt_66b", 1, 4, {"gpus": 2}, "^pipeline_parallel=1, tensor_parallel=4 needs 4 GPUs, and runner.gpus=2$"),
        ("gpt_13b", 1, 3, {}, "^40 heads cannot make 3 parts of as many each"),
        ("gpt_101b", 3, 2, {}, "^80 layers cannot make 3 stages of as many each"),
        ("gpt_101b", 0, 1, {}, "^system.pipeline_parallel=0 is not an integer of at least 1$"),
        ("resnet50", 1, 2, {}, "^model resnet50 has no parts: model=gpt has"),
    ],
)
def test_what_cannot_be_placed_is_refused_in_one_line(
    model: str, pipeline: int, tensor: int, options: dict[str, float], says: str
) -> None:
    with pytest.raises(BadRequest, match=says):
        place(model, pipeline, tensor, **options)


def test_a_placement_takes_the_slots_that_an_engine_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that there is beside weights, where they are asked for; what an iteration computes is the asker's to know."""
    memory_bytes = int(24.5 * 2**30)
    cell = Cell(
        choose("model", "gpt_13b"), choose("system", "orca"), choose("runner", "serving"), Conditions(1, "cuda", "fp16")
    )
    (weights,) = parted(cell, Parts()).weights(1, 1)
    most = (memory_bytes - weights) // (2 * 40 * 5120 * 2)
    with pytest.raises(BadRequest, match=r"^gpt_13b does not fit: rank 0 of 1 .* needs 29\.3 GiB"):
        placed("gpt_13b", choose("system", "orca"), memory_gib=24.5)
    assert placed("gpt_13b", choose("system", "orca", slots=most), memory_gib=24.5) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{most:,} K/V slots: as many as are asked for"
    with pytest.raises(BadRequest, match=f"^system.slots={most + 1} take .* there is room for {most} at most$"):
        placed("gpt_13b", choose("system", "orca", slots=most + 1), memory_gib=24.5)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memory_bytes))
    loaded = systems.load("orca", pipeline_parallel=2, slots=50000)
    assert isinstance(loaded, ServingSystem)
    with pytest.raises(BadOption, match=r"^system.slots=50000 take .* there is room for ") as of_engine:
        loaded.engine(parted(cell, loaded.parts))
    with pytest.raises(BadRequest) as of_placement:
        placed("gpt_13b", choose("system", "orca", pipeline_parallel=2, slots=50000), memory_gib=24.5)
    assert str(of_placement.value) == str(of_engine.value)


@pytest.mark.parametrize(
    ("system", "says"),
    [
        (choose("system", "request_level", slots=100), "^system.slots=100: .* a request holds 2048 K/V slots, and 100 are"),
        (choose("system", "orca", slots=50, block_size=100), "^system.block_size=100 is more than the 50 K/V slots$"),
        (choose("system", "transformers_generate"), "^transformers_generate places its model itself"),
    ],
)
def test_what_a_scheduler_refuses_is_not_placed(system: Choice, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        placed("gpt_13b", system)


def test_more_parts_than_gpus_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Than a request names, and than a process sees."""
    system = choose("system", "orca", pipeline_parallel=2, tensor_parallel=2)
    cell = Cell(choose("model", "gpt", heads=8), system, choose("runner", "serving"), Conditions(1, "cuda", "fp16"))
    options = SimpleNamespace(gpus=(3, 1))
    line = r"^system.pipeline_parallel and tensor_parallel need 4 GPUs, and gpus=\[3, 1\] names 2$"
    with pytest.raises(BadRequest, match=line):
        Request((cell,), cast(SweepOptions, options)).num_gpus  # noqa: B018
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    loaded = systems.load("orca", **system.options)
    assert isinstance(loaded, ServingSystem)
    with pytest.raises(Unsupported, match=r"^pipeline_parallel=2, tensor_parallel=2 needs 4 GPUs, and 3 are there$"):
        loaded.engine(SimpleNamespace(device=torch.device("cuda")))  # type: ignore[arg-type]
