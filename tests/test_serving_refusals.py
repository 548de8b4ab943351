"""Options, models and memory that no server can have: each is refused before anything is served."""

from __future__ import annotations

import json
import re
from pathlib import Path

import psutil
import pytest
from serving_cells import OPTIONS, small
from test_serving_engine import MODULE, SHAPE

import systems
from conf import Value
from models import BadModel
from models.decoders import load_decoder
from results.cell import Cell, Choice, Conditions, choose
from runners.serving.session import EngineSession, ServingSession
from systems.base import BadOption, Unsupported
from systems.serving.engine import LocalEngine
from systems.serving.loop import Listed, RealClock
from systems.serving.request import Request
from systems.serving.system import ServingSystem


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("orca", {"max_batch_size": 0}, "system.max_batch_size=0"),
        ("orca", {"slots": -1}, "system.slots=-1"),
        ("orca", {"attention": "fuse"}, "did you mean fused?"),
        ("orca", {"block_size": -1}, "system.block_size=-1"),
        ("orca", {"max_num_batched_tokens": -1}, "system.max_num_batched_tokens=-1"),
        ("request_level", {"batching": "pad"}, "padded"),
        ("request_level", {"microbatch_size": -1}, "system.microbatch_size=-1"),
    ],
)
def test_options_of_systems_that_cannot_be_are_refused(name: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(BadOption, match=words.replace("?", r"\?")):
        systems.load(name, **options)  # type: ignore[arg-type]


def test_blocks_larger_than_all_slots_are_refused() -> None:
    with pytest.raises(BadOption, match="block_size=500 is more than the 120 K/V slots"):
        small(block_size=500)


def test_requests_that_hold_all_positions_need_as_many_slots() -> None:
    """Of the system that is asked for them, or of the memory."""
    with pytest.raises(BadOption, match=r"^system.slots=39: .* a request holds 40 K/V slots, and 39 are there$"):
        small("request_level", slots=39)
    system = systems.load("request_level")
    assert isinstance(system, ServingSystem)
    with pytest.raises(MemoryError, match=r"a request holds 40 K/V slots, and 39 are there$"):
        system.server_of(LocalEngine(MODULE, 39), 39, SHAPE)
    for choice, slots in (("request_level", 40), ("request_level_padded", 12), ("request_level_ragged", 12)):
        _, server = small(choice, slots=slots)
        tokens: list[int] = []
        request = Request(0, (1, 2, 3), 4)
        server.serve(Listed([request]), lambda deliveries, now_s: tokens.extend(deliveries[0].tokens), RealClock())  # noqa: B023
        assert tokens == request.generated and len(tokens) == 4


def test_a_server_executes_no_module_and_a_model_may_generate_nothing() -> None:
    with pytest.raises(Unsupported, match="runner=serving"):
        systems.load("orca").prepare(MODULE, ())
    assert systems.load("orca", attention="fused").unsupported("cpu")
    with pytest.raises(BadModel, match="model resnet50 generates no tokens"):
        load_decoder("resnet50", "cpu", "fp32")
    with pytest.raises(MemoryError, match=r"take 634\.\d GiB in fp16"):
        load_decoder("gpt", "cpu", "fp16", layers=120, hidden=15360, heads=120, vocabulary=50257)


def test_a_request_that_no_slots_hold_is_refused_before_anything_is_served() -> None:
    runner = choose("runner", "serving", **OPTIONS)
    model, system = choose("model", "gpt", layers=1), choose("system", "orca", slots=10)
    session = ServingSession(Cell(model, system, runner, Conditions(1, "cpu", "fp32")), "0", lambda phase: None)
    with pytest.raises(BadOption, match="more than the 10 K/V slots"):
        session.prepare()


@pytest.mark.parametrize(
    ("model", "system", "changed"),
    [
        (choose("model", "gpt", layers=1), choose("system", "orca_paged", slots=33), ("system", "slots", 33)),
        (choose("model", "t5_small_generation", positions=60), choose("system", "orca"), ("model", "positions", 60)),
        pytest.param(
            choose("model", "t5_small_generation"),
            choose("system", "orca", slots=60),
            ("system", "slots", 60),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_a_refusal_advises_is_enough(model: Choice, system: Choice, changed: tuple[str, str, int]) -> None:
    """Slots come in blocks, and an encoder-decoder begins with a token of its own."""
    group, option, too_few = changed
    lengths = {"prompt_tokens": too_few - 4, "new_tokens": 4}

    def prepared(model: Choice, system: Choice) -> ServingSession:
        cell = Cell(model, system, choose("runner", "serving", **OPTIONS | lengths), Conditions(1, "cpu", "fp32"))
        session = ServingSession(cell, "0", lambda phase: None)
        session.prepare()
        return session

    with pytest.raises(BadOption, match=rf"{group}\.{option} has to be (\d+) or more") as caught:
        prepared(model, system)
    least = int(re.search(r"has to be (\d+)", str(caught.value))[1])  # type: ignore[index]
    more = {option: least}
    is_model = group == "model"
    of_model = choose("model", model.choice, **{k: model.options[k] for k in model.changed} | (more if is_model else {}))
    prepared(of_model, system if is_model else choose("system", system.choice, **more))


@pytest.mark.parametrize(
    ("model", "runner", "advice"),
    [
        (choose("model", "gpt", positions=9, sequence=9), "serving", "model.positions has to be 10 or more, or "),
        (choose("model", "gpt", positions=9, sequence=9), "engine", "model.positions has to be 10 or more, or "),
        (choose("model", "hf", path="FOLDER"), "serving", "the 9 positions: "),
    ],
)
def test_a_model_of_few_positions_is_told_before_anything_is_made(
    tmp_path: Path, model: Choice, runner: str, advice: str
) -> None:
    """With what can be set: a folder's model has its positions."""
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 9, "vocab_size": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if model.name == "hf":
        model = choose("model", "hf", path=str(tmp_path))
    lengths = {"prompt_tokens": 7, "new_tokens": 3}
    options = {"serving": OPTIONS | lengths, "engine": lengths}[runner]
    cell = Cell(model, choose("system", "orca"), choose("runner", runner, **options), Conditions(1, "cpu", "fp32"))
    session = {"serving": ServingSession, "engine": EngineSession}[runner]
    with pytest.raises(
        BadOption, match=r"^a request has 7 prompt tokens and 3 to generate, more than the 9 positions: "
    ) as e:
        session(cell, "0", lambda phase: None)
    assert f"{advice}runner.prompt_tokens or runner.new_tokens" in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("options", [{}, {"pipeline_parallel": 2}])
def test_more_slots_than_there_is_memory_for_are_told_beside_what_fits(options: dict[str, Value]) -> None:
    model, slots = choose("model", "gpt", layers=2), 2**31 - 1
    cell = Cell(
        model,
        choose("system", "orca", slots=slots, **options),
        choose("runner", "serving", **OPTIONS),
        Conditions(1, "cpu", "fp32"),
    )
    session = ServingSession(cell, "0", lambda phase: None)
    with pytest.raises(
        BadOption, match=rf"^system.slots={slots} take 4096.0 GiB, and .* are free: there is room for (\d+)"
    ) as e:
        session.prepare()
    most = int(re.search(r"room for (\d+)", str(e.value))[1])  # type: ignore[index]
    assert most * 2048 <= psutil.virtual_memory().total  # 2 layers of 2 x 128 numbers of 4 bytes a slot
