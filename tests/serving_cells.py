"""Small cells that serve: their options, their servers, and their sessions."""

from __future__ import annotations

import torch
from test_serving_engine import MODULE, NUM_SLOTS, SHAPE

import systems
from models.gpt import GPT, made
from results.cell import Cell, Conditions, choose
from runners.serving.session import ServingSession
from systems.serving.engine import LocalEngine
from systems.serving.iteration_level import IterationLevel
from systems.serving.slots import ContiguousSlots
from systems.serving.system import Server, ServingSystem

OPTIONS = {
    **{"prompt_tokens": "4-12", "new_tokens": "1-6", "requests": 8, "rate": 50.0, "burstiness": 1.0},
    **{"concurrency": 0, "trace": None, "trace_speed": 1.0, "shared_tokens": 0, "slo_ms": 0.0, "repeats": 1},
}


def server(max_batch_size: int = 3) -> Server:
    scheduler = IterationLevel(ContiguousSlots.all_free(NUM_SLOTS), max_batch_size)
    return Server(scheduler, LocalEngine(MODULE, NUM_SLOTS), (NUM_SLOTS, SHAPE.positions, SHAPE.vocabulary))


def small(name: str = "orca", **options: object) -> tuple[GPT, Server]:
    decoder = made(SHAPE, "cpu", torch.float32)
    system = systems.load(name, **{"slots": NUM_SLOTS, **options})  # type: ignore[arg-type]
    assert isinstance(system, ServingSystem)
    return decoder, system.prepare_serving(decoder)


def of_cell(
    runner: str, session: type[ServingSession], batch: int = 1, choice: str = "orca", **options: object
) -> ServingSession:
    """A session of a small cell, prepared. options: of the runner, and "system_options"."""
    small = {"prompt_tokens": 6, "new_tokens": 3, "samples": 2} if runner == "engine" else OPTIONS
    model = choose("model", "gpt", layers=1, positions=256)
    system_options = {"slots": options.pop("slots", 400), "max_batch_size": 4, **options.pop("system_options", {})}  # type: ignore[dict-item]
    system = choose("system", choice, **system_options)  # type: ignore[arg-type]
    made = Cell(model, system, choose("runner", runner, **small | options), Conditions(batch, "cpu", "fp32"))  # type: ignore[arg-type]
    prepared = session(made, "0", lambda phase: None)
    prepared.before_preparing()
    prepared.prepare()
    return prepared
