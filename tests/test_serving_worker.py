"""One worker of an engine: its slots, its weights, its settings, and the messages that it takes."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import systems
from models.gpt import Shape, made
from models.gpt_part import Part, made_part
from models.qwen3 import Qwen3, Qwen3Shape
from results.cell import Cell, Conditions, choose
from runners.serving.parted import parted
from systems.serving import control as control_module
from systems.serving import parallel
from systems.serving.batch import Batch, Row
from systems.serving.control import PipeControl, Wiring
from systems.serving.engine import LocalEngine
from systems.serving.link import Link
from systems.serving.message import from_bytes, to_bytes
from systems.serving.parts import SHARE, Parts, rooms
from systems.serving.parts import environment as environment_of
from systems.serving.request import Sampling
from systems.serving.slots import Region
from systems.serving.system import ServingSystem
from systems.serving.worker import Spec, Worker


def test_buffers_of_communicators_come_before_slots_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker alone, in this process."""
    notes = []
    connect = Link.connect
    monkeypatch.setattr(Link, "connect", lambda link, device: (notes.append("connected"), connect(link, device)))
    monkeypatch.setattr(Worker, "_slots_that_fit", lambda worker, decoder: notes.append("counted") or 20)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    rendezvous, maker = str(tmp_path / "rendezvous"), "serving_parts:telling_part"
    spec = Spec(Parts(), 0, "cpu", rendezvous, maker, "", 0, 0, 0, "split", False, 4, "nccl")
    read, write = os.pipe()
    try:
        assert Worker(spec, Wiring(read, (), None)).num_slots == 20
    finally:
        torch.distributed.destroy_process_group()
        os.close(write)
    assert notes == ["connected", "counted"]


GROUPED = Qwen3Shape(4, 32, heads=8, kv_heads=2, head_size=8, inner=48, positions=64, vocabulary=50)


@pytest.mark.parametrize(("tensor", "kv_heads"), [(1, 2), (2, 1), (4, 1)])
def test_a_slot_has_the_heads_of_keys_and_values_alone(tensor: int, kv_heads: int) -> None:
    """Queries have four times as many heads. Parts beyond those of keys and values share one."""
    cache = LocalEngine(Qwen3(replace(GROUPED, layers=2, kv_heads=kv_heads)), 99).cache
    (room, *_) = rooms(GROUPED, Parts(2, tensor), [0], 4, 0, 2**31)
    assert room.slot == cache.numel() * 4 / 100


def test_a_worker_counts_the_slots_that_fit_by_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Qwen3(GROUPED)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**20, 2**21))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda count, how: None)
    counting = SimpleNamespace(spec=SimpleNamespace(spare_bytes=0), device="cpu")
    num_slots = Worker._slots_that_fit(counting, decoder)  # type: ignore[arg-type]
    slot = LocalEngine(decoder, 99).cache.numel() * 4 // 100
    assert num_slots == int(2**20 * SHARE) // slot


class Recorded:
    """Stands for an engine of several processes, which it does not start."""

    num_workers, num_slots = 1, 100

    def __init__(self, specs: list[Spec], vocabulary: int, is_prefetching: bool):
        self.specs, self.is_prefetching = specs, is_prefetching


@pytest.mark.parametrize("attention", ["auto", "split"])
def test_split_attention_has_no_graphs_in_any_number_of_processes(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "ParallelEngine", Recorded)
    system = systems.load("orca", attention=attention, cuda_graphs=True, tensor_parallel=2, prefetch=attention == "split")
    assert isinstance(system, ServingSystem)
    cell = Cell(choose("model", "gpt"), choose("system", "orca"), choose("runner", "serving"), Conditions(1, "cpu", "fp32"))
    engine = system.prepare_serving(parted(cell, Parts(1, 2))).engine  # type: ignore[arg-type]
    assert isinstance(engine, Recorded) and engine.is_prefetching == (attention == "split")
    assert {(spec.attention, spec.uses_graphs) for spec in engine.specs} == {("split", False)}


def test_nccl_supports_graphs_beside_other_calls_where_they_may_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "NCCL_GRAPH_MIXING_SUPPORT"
    monkeypatch.delenv(name, raising=False)
    assert environment_of(1)[name] == "0" and name not in environment_of(2)
    monkeypatch.setenv(name, "1")
    assert environment_of(1)[name] == "1", "whoever sets it is asked first"


INTEGERS = st.integers(-(2**63), 2**63 - 1)
ROWS = st.builds(
    Row,
    request_id=INTEGERS,
    region=st.builds(Region, st.lists(INTEGERS, min_size=1).map(tuple), INTEGERS, INTEGERS),
    begin=INTEGERS,
    tokens=st.lists(INTEGERS, min_size=1).map(tuple),
    num_padding=INTEGERS,
    num_useful=INTEGERS,
    draw=INTEGERS,
    sampling=st.builds(Sampling, st.floats(0, 5), st.floats(0.1, 1), INTEGERS),
    num_source=INTEGERS,
)


@given(st.builds(Batch, st.integers(0, 2**40), st.lists(ROWS, max_size=5).map(tuple)), st.booleans())
def test_a_message_is_the_batch(batch: Batch, keeps_logits: bool) -> None:
    assert from_bytes(to_bytes(batch, keeps_logits)) == (batch, keeps_logits)


def test_a_message_of_increments_is_small() -> None:
    row = Row(2**40, Region((70_000,), 640, 640), 300, (50_000,), 0, 1, 100, Sampling(seed=2**62))
    assert len(to_bytes(Batch(1, (row,) * 128))) <= 2**14


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_parts_have_the_weights_of_the_whole(degree: int) -> None:
    shape = Shape(layers=2, hidden=64, heads=8, positions=16, vocabulary=50)
    whole = made(shape, "cpu", torch.float32)
    parts = [made_part(shape, Part(0, 1, rank, degree), "cpu", torch.float32) for rank in range(degree)]
    for name, weight in whole.named_parameters():
        pieces = [dict(part.named_parameters())[name] for part in parts]
        if pieces[0].shape == weight.shape:
            assert all(torch.equal(piece, weight) for piece in pieces)
        else:
            dim = next(d for d in range(weight.dim()) if pieces[0].shape[d] != weight.shape[d])
            assert torch.equal(torch.cat(pieces, dim), weight), name


def test_a_worker_looks_for_messages_and_falls_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does what it has to meanwhile, for as long as there is more of that, and a message comes before either."""
    monkeypatch.setattr(control_module, "AWAKE_S", 0.05)
    read, write = os.pipe()
    control = PipeControl(Wiring(read, (), None))
    num_looks = 0

    def meanwhile() -> bool:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 50:
            Connection(os.dup(write), readable=False).send_bytes(b"a message")
        return num_looks < 40

    assert control.receive(meanwhile) == b"a message" and num_looks == 50
    threading.Timer(0.3, lambda: Connection(os.dup(write), readable=False).send_bytes(b"another")).start()
    looks_at: list[float] = []

    def noted() -> bool:
        looks_at.append(time.monotonic())
        return False

    begin = time.monotonic()
    assert control.receive(noted) == b"another"
    assert time.monotonic() - begin >= 0.25 > looks_at[-1] - begin  # it slept until that came
