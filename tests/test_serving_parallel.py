"""A model in several processes: the tokens are those of one process, and no worker outlives another."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError

import psutil
import pytest
import torch
from conftest import ROOT, command, environment
from hypothesis import given
from hypothesis import strategies as st
from serving_parts import LONG, SHAPE, amplify
from test_serving_engine import alone, requests_of, served

import systems
from models.gpt import GPT, Shape, made
from models.gpt_part import Part, made_part
from models.qwen3 import Qwen3, Qwen3Shape
from results.cell import Cell, Conditions, choose
from runners.serving.bridge import Bridge, Stopped
from runners.serving.parted import parted
from systems.serving import control as control_module
from systems.serving import parallel
from systems.serving.batch import Batch, Row
from systems.serving.control import PipeControl, Wiring
from systems.serving.engine import PROMPT_SIZES, LocalEngine
from systems.serving.iteration_level import IterationLevel
from systems.serving.link import Link
from systems.serving.message import from_bytes, to_bytes
from systems.serving.parallel import EngineEnded, ParallelEngine
from systems.serving.parts import SHARE, Parts, rooms
from systems.serving.parts import environment as environment_of
from systems.serving.prefix_cache import CachedSlots
from systems.serving.request import Request as ServedRequest
from systems.serving.request import Sampling
from systems.serving.slots import ContiguousSlots, Region
from systems.serving.system import Server, ServingSystem
from systems.serving.worker import LOST_ANOTHER, OUT_OF_MEMORY, Spec, Worker, told

NUM_SLOTS = 120


def telling(shape: Shape = SHAPE, device: str = "cpu") -> GPT:
    """A GPT whose next token depends on all before it, on the host. Weights of a seed differ between a GPU and a host."""
    module = made(shape, device, torch.float64)
    amplify(module)
    return module.cpu()


MODULE = telling()


def started(
    parts: Parts,
    control: str = "pipe",
    maker: str = "serving_parts:telling_part",
    arguments: str = "",
    block_size: int = 0,
) -> ParallelEngine:
    specs = [
        Spec(parts, rank, "cpu", "", maker, arguments, NUM_SLOTS, 0, block_size, "split", False, 4, control)
        for rank in range(parts.num_ranks)
    ]
    return ParallelEngine(specs, SHAPE.vocabulary)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(str(ROOT / "tests"))


SIZES = [(5, 6), (12, 3), (2, 6), (7, 5), (1, 1)]


def check_tokens(engine: ParallelEngine, module: GPT = MODULE) -> None:
    """They are those of one process, also where stop tokens end requests."""
    for sizes, apart, num_stops in ((SIZES, 1, 0), (SIZES[::-1], 0, 12)):
        scheduler = IterationLevel(ContiguousSlots.all_free(NUM_SLOTS), 2, num_workers=engine.num_workers)
        requests = requests_of(sizes, num_stops=num_stops)
        tokens = served(scheduler, engine, requests, apart)
        assert tokens == {request.id: alone(module, request) for request in requests}
        assert scheduler.num_reserved == 0 and any(len(tokens[r.id]) < r.max_new_tokens for r in requests) == (num_stops > 0)


def check_logits(engine: ParallelEngine, module: GPT = MODULE, tolerance: float = 1e-7) -> None:
    """They come where they are kept. tolerance: of their error, relative and absolute."""
    engine.keeps_logits = True
    request = requests_of([(6, 1)])[0]
    row = Row(0, Region((3,), 10, 10), 0, request.prompt, 0, 6, 0, Sampling())
    engine.submit(Batch(0, (row,)))
    expected = module(torch.tensor([request.prompt]))[0, -1:]
    torch.testing.assert_close(engine.logits, expected, rtol=tolerance, atol=tolerance)
    assert engine.num_in_flight == 1 and engine.has_returned()
    assert engine.collect().tokens == [int(expected.argmax())] and engine.num_in_flight == 0


def check_end(engine: ParallelEngine, rank: int) -> None:
    """One worker is killed: all end within ten seconds, and whoever waits is told in one line."""
    row = Row(0, Region((3,), 10, 10), 0, (1, 2), 0, 2, 0, Sampling())
    os.kill(engine.workers[rank].process.pid, signal.SIGKILL)
    begin = time.monotonic()
    stage, part = divmod(rank, engine.parts.tensor)
    line = rf"^rank {rank} of \d \(stage {stage}, part {part}\) was killed by signal 9$"
    with pytest.raises(EngineEnded, match=line):
        for _ in range(1000):
            engine.submit(Batch(0, (row,)))
            engine.collect()
    assert not any(psutil.pid_exists(worker.process.pid) for worker in engine.workers)
    assert time.monotonic() - begin < 10


@pytest.mark.slow
def test_two_stages_of_two_parts_are_one_process_until_one_is_killed() -> None:
    engine = started(Parts(2, 2))
    try:
        check_tokens(engine)
        check_logits(engine)
        check_end(engine, 3)
    finally:
        engine.close()


ONE_ROW = Batch(0, (Row(0, Region((3,), 10, 10), 0, (1, 2), 0, 2, 0, Sampling()),))


def check_silence(engine: ParallelEngine, line: str) -> None:
    """No answer comes to a batch: within seconds all workers end, and whoever looks for its return is told."""
    engine.submit(ONE_ROW)
    deadline = time.monotonic() + 10
    while not engine.has_returned():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(EngineEnded, match=line):
        engine.collect()
    assert not any(psutil.pid_exists(worker.process.pid) for worker in engine.workers)


@pytest.mark.slow
def test_an_error_of_the_device_ends_all() -> None:
    """It comes to light in the thread that answers."""
    engine = started(Parts(1, 2), maker="serving_parts:failing_part")
    try:
        check_silence(
            engine, r"^rank 0 of 2 .* ended with status 1: RuntimeError: CUDA error: an illegal memory access was \w+$"
        )
    finally:
        engine.close()


@pytest.mark.parametrize("is_cause_ended", [True, False])
def test_the_cause_is_told_and_not_who_lost_it(is_cause_ended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the worker that lost another has ended before it; where the other lives on, what is known is told."""
    monkeypatch.setattr(parallel, "CAUSE_S", 5.0 if is_cause_ended else 0.1)
    engine = ParallelEngine.__new__(ParallelEngine)
    engine.parts, engine.has_ended, engine.is_out_of_memory, engine.end = Parts(1, 2), threading.Event(), False, ""
    ends = [f"import time; time.sleep({0.5 if is_cause_ended else 60}); exit('no room')", f"exit({LOST_ANOTHER})"]
    files = [tempfile.TemporaryFile() for _ in ends]  # noqa: SIM115 - of this test alone
    engine.workers = [
        parallel.Process(rank, subprocess.Popen([sys.executable, "-c", end], stderr=file), file)
        for rank, (end, file) in enumerate(zip(ends, files, strict=True))
    ]
    threads = [threading.Thread(target=engine._watch, args=(worker,)) for worker in engine.workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    line = r"rank 0 of 2 \(.*\) ended with status 1: no room" if is_cause_ended else rf"rank 1 .* status {LOST_ANOTHER}"
    assert re.fullmatch(line, engine.end), engine.end


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EOFError(), LOST_ANOTHER),
        (BrokenPipeError(), LOST_ANOTHER),
        (RuntimeError("Read error [127.0.0.1]:42131: Connection reset by peer"), LOST_ANOTHER),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), 1),
        (MemoryError(), OUT_OF_MEMORY),
    ],
)
def test_a_worker_says_whether_it_lost_another(error: Exception, status: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert told(error) == status and capfd.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_a_worker_that_hangs_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(Parts(1, 2))
    try:
        engine.submit(ONE_ROW)
        assert len(engine.collect().tokens) == 1
        monkeypatch.setattr(parallel, "LIMIT_S", 1.0)
        time.sleep(2.5)  # nothing is in flight: an idle engine is no engine that hangs
        os.kill(engine.workers[1].process.pid, signal.SIGSTOP)
        check_silence(engine, "^an iteration was not back after 1 s: a worker hangs, or its GPU has failed$")
    finally:
        engine.close()


def test_a_worker_that_is_never_ready_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "START_S", 1.0)  # none has imported PyTorch by then
    with pytest.raises(EngineEnded, match=r"^one was not ready after 1 s: a worker hangs, or its GPU has failed$"):
        started(Parts(1, 2))


@pytest.mark.slow
def test_an_idle_engine_lives_longer_than_torch_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers wait for control messages as long as nobody asks for anything, however long groups wait by default."""
    short = "from torch.distributed import distributed_c10d\ndistributed_c10d.default_pg_timeout /= 900  # 2 seconds\n"
    (tmp_path / "sitecustomize.py").write_text(short)
    monkeypatch.syspath_prepend(str(tmp_path))
    engine = started(Parts(1, 2), "nccl")
    try:
        for idle_s in (0, 4):
            time.sleep(idle_s)
            engine.submit(ONE_ROW)
            assert len(engine.collect().tokens) == 1
    finally:
        engine.close()


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "tensor", "control"),
    [(1, 2, "pipe"), (2, 1, "pipe"), (2, 4, "pipe"), (1, 8, "pipe"), (4, 1, "nccl"), (2, 2, "nccl")],
)
def test_any_split_is_one_process(pipeline: int, tensor: int, control: str) -> None:
    engine = started(Parts(pipeline, tensor), control)
    try:
        check_tokens(engine)
        check_logits(engine)
    finally:
        engine.close()
    assert not any(psutil.pid_exists(worker.process.pid) for worker in engine.workers)


@pytest.mark.slow
def test_three_stages_are_one_process() -> None:
    """Three batches are in flight."""
    engine = started(Parts(3, 1), arguments="3")
    try:
        check_tokens(engine, telling(replace(SHAPE, layers=3)))
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "tensor"), [(1, 2), (2, 1)])
def test_chunks_of_prompts_that_begin_alike_in_blocks_are_one_process(pipeline: int, tensor: int) -> None:
    """Paged K/V with prefixes, of which later requests find two blocks there, in chunks of 3, 5 and 8 tokens."""

    def requests() -> list[ServedRequest]:
        first, *others = requests_of([(12, 4), (12, 3), (9, 5)])
        return [first, *(replace(r, prompt=first.prompt[:8] + r.prompt[8:]) for r in others)]

    engine = started(Parts(pipeline, tensor), block_size=4)
    try:
        for chunk in (3, 5, 8):
            scheduler = IterationLevel(
                CachedSlots.all_free(NUM_SLOTS, 4), 2, num_workers=engine.num_workers, max_num_batched_tokens=chunk
            )
            tokens = served(scheduler, engine, requests(), 1)
            assert tokens == {r.id: alone(MODULE, r) for r in requests()}
            assert scheduler.num_reserved == 0
    finally:
        engine.close()


TWO_GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


@pytest.mark.parametrize(
    ("pipeline", "tensor", "control", "reductions"),
    [
        pytest.param(*split, marks=TWO_GPUS)
        for split in (
            (1, 2, "pipe", "direct"),
            (1, 2, "pipe", "nccl"),
            (1, 2, "nccl", "direct"),
            (2, 1, "pipe", "direct"),
            (2, 1, "nccl", "direct"),
        )
    ],
)
def test_two_gpus_are_one_process(pipeline: int, tensor: int, control: str, reductions: str) -> None:
    """With CUDA graphs of increments and of prompts, of whose sizes both agree."""
    parts, maker = Parts(pipeline, tensor), "serving_parts:telling_part_of_32_bits"
    specs = [
        Spec(parts, rank, "cuda", "", maker, "", NUM_SLOTS, 0, 0, "fused", True, 4, control, reductions)
        for rank in range(parts.num_ranks)
    ]
    engine = ParallelEngine(specs, SHAPE.vocabulary)
    try:
        module = telling(device="cuda")
        check_tokens(engine, module)
        check_logits(engine, module, tolerance=1e-3)
    finally:
        engine.close()
    assert not any(psutil.pid_exists(worker.process.pid) for worker in engine.workers)


def check_long(
    parts: Parts, device: str, precision: str, attention: str, control: str = "pipe", is_prefetching: bool = False
) -> None:
    """Prompts of more tokens than any graph has come while others have increments, and as many batches fly as may."""
    options = "serving_parts:long_part", precision, 4000, 0, 0, attention, attention == "fused", 4, control
    specs = [Spec(parts, rank, device, "", *options) for rank in range(parts.num_ranks)]
    engine = ParallelEngine(specs, LONG.vocabulary, is_prefetching)
    requests = requests_of([(900, 5), (20, 30), (900, 3), (3, 30), (20, 30), (9, 4), (850, 4)])
    batches: list[Batch] = []
    most_in_flight = 0

    class Noted(SimpleNamespace):
        """The engine, whose batches are noted."""

        num_in_flight = property(lambda self: engine.num_in_flight)
        collect = staticmethod(engine.collect)

        def submit(self, batch: Batch) -> None:
            nonlocal most_in_flight
            engine.submit(batch)
            batches.append(batch)
            most_in_flight = max(most_in_flight, engine.num_in_flight)

    try:
        scheduler = IterationLevel(ContiguousSlots.all_free(4000), 2, parts.pipeline, is_prefetching)
        tokens = served(scheduler, Noted(), requests, 0)  # type: ignore[arg-type]
    finally:
        engine.close()
    mixed = [[len(row.tokens) for row in batch.rows] for batch in batches if batch.num_tokens > PROMPT_SIZES[-1]]
    assert len(mixed) == 3 and any(1 in sizes for sizes in mixed) and most_in_flight == parts.pipeline + is_prefetching
    module = telling(LONG, device)
    tolerance = 1e-5 if precision == "float32" else 3e-2
    for request in requests:
        new = torch.tensor(tokens[request.id])
        stream = torch.tensor([[*request.prompt, *tokens[request.id][:-1]]])
        with torch.inference_mode():
            logits = module(stream)[0, -len(new) :]
        below = logits.max(-1).values - logits.gather(-1, new[:, None])[:, 0]
        assert len(new) == request.max_new_tokens and float(below.max()) <= tolerance * float(logits.abs().max())


@pytest.mark.parametrize(
    ("pipeline", "tensor", "is_prefetching"),
    [(2, 1, True), *(pytest.param(*split, marks=pytest.mark.slow) for split in ((2, 1, False), (1, 2, True)))],
)
def test_long_prompts_come_between_increments_in_flight(pipeline: int, tensor: int, is_prefetching: bool) -> None:
    check_long(Parts(pipeline, tensor), "cpu", "float32", "split", is_prefetching=is_prefetching)


@pytest.mark.parametrize(
    ("pipeline", "tensor", "attention", "control", "is_prefetching"),
    [
        pytest.param(*options, marks=TWO_GPUS)
        for options in (
            (2, 1, "fused", "pipe", False),
            (2, 1, "fused", "nccl", True),
            (1, 2, "fused", "pipe", True),
            (1, 2, "split", "pipe", False),
        )
    ],
)
def test_long_prompts_come_between_increments_in_flight_on_two_gpus(
    pipeline: int, tensor: int, attention: str, control: str, is_prefetching: bool
) -> None:
    """Iterations that no graph is for are launched while graphs run."""
    check_long(Parts(pipeline, tensor), "cuda", "float16", attention, control, is_prefetching)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_whichever_worker_is_killed_ends_all(rank: int) -> None:
    check_end(started(Parts(2, 2)), rank)


@pytest.mark.slow
def test_workers_end_with_the_process_that_started_them_and_leave_no_file(tmp_path: Path) -> None:
    script = (
        "import os, sys; sys.path[:0] = ['.', 'tests']; from test_serving_parallel import *; "
        "e = started(Parts(1, 2)); print(json.dumps([w.process.pid for w in e.workers]), flush=True); "
        "os.kill(os.getpid(), 9)"
    )
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, env=variables)
    pids = json.loads(done.stdout)
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not list(tmp_path.iterdir())


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_a_worker_without_memory_is_told_as_such() -> None:
    with pytest.raises(MemoryError, match=r"^rank 1 of 2 .* ended with status 3: out of memory: too large$"):
        started(Parts(1, 2), maker="serving_parts:no_part")


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


@pytest.mark.slow
def test_every_request_is_answered_where_a_worker_ends(folder: Path, tmp_path: Path) -> None:
    """A client whose answer is under way gets an error, and the server ends in one line."""
    options = ["model.heads=8", "system=orca", "system.tensor_parallel=2", "device=cpu", "runner.port=0"]
    process = subprocess.Popen(
        command("runner=serve", "model=gpt", *options), cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if "listening on" in line)
        address = line.split()[-1]
        body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 2000, "ignore_eos": True}).encode()
        waiting = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
        workers = [
            p
            for p in psutil.Process(process.pid).children(recursive=True)
            if "systems.serving.worker" in " ".join(p.cmdline())
        ]
        assert len(workers) == 2
        with ThreadPoolExecutor(3) as pool:
            answers = [pool.submit(urllib.request.urlopen, waiting, timeout=60) for _ in range(3)]
            time.sleep(1)  # into their iterations
            begin = time.monotonic()
            workers[1].kill()
            for answer in answers:
                with pytest.raises(HTTPError) as error:
                    answer.result()
                message = json.loads(error.value.read())["error"]["message"]
                assert error.value.code == 500 and "was killed by signal 9" in message
        assert process.wait(10) == 1 and time.monotonic() - begin < 10
        rest = process.stderr.read().splitlines()
        assert len(rest) == 1 and "the engine has stopped: EngineEnded: rank" in rest[0], rest
        assert not any(worker.is_running() for worker in workers)
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_of_a_thousand_requests_none_is_lost_silently() -> None:
    """Clients go away at any moment, and a worker is killed midway: each other has all its tokens, or the reason."""
    draw = random.Random(0)
    sizes = [(draw.randint(1, 12), draw.randint(1, 6)) for _ in range(1000)]
    patiences = [draw.choice([None, None, None, 0, 1, 3]) for _ in sizes]  # tokens that a client takes; None: all
    gone = "it went away"

    async def answers() -> list[str | int]:
        engine = started(Parts(1, 2))
        scheduler = IterationLevel(ContiguousSlots.all_free(NUM_SLOTS), 4)
        ends: list[BaseException | None] = []
        bridge = Bridge(Server(scheduler, engine, (NUM_SLOTS, SHAPE.positions, SHAPE.vocabulary)), ends.append)
        num_whole = 0

        async def answer(request: ServedRequest, patience: int | None) -> str | int:
            nonlocal num_whole
            queue, count = bridge.submit(request), 0
            while patience is None or count < patience:
                delivery = await asyncio.wait_for(queue.get(), 60)
                if isinstance(delivery, Stopped):
                    return str(delivery)
                count += len(delivery.tokens)
                if delivery.is_last:
                    num_whole += 1
                    if num_whole == 300:
                        engine.workers[1].process.kill()
                    return count
            bridge.give_up(request.id)
            return gone

        outcomes = await asyncio.gather(*map(answer, requests_of(sizes), patiences))
        assert len(ends) == 1 and isinstance(ends[0], EngineEnded) and not bridge.answers
        assert not any(psutil.pid_exists(worker.process.pid) for worker in engine.workers)
        return outcomes

    outcomes = asyncio.run(answers())
    whole = [(outcome, new) for outcome, (_, new) in zip(outcomes, sizes, strict=True) if isinstance(outcome, int)]
    assert 300 <= len(whole) < 500 and all(outcome == new for outcome, new in whole)
    assert all(patience is not None for outcome, patience in zip(outcomes, patiences, strict=True) if outcome == gone)
    reasons = {outcome for outcome in outcomes if isinstance(outcome, str)}
    assert reasons == {gone, "the engine has stopped: rank 1 of 2 (stage 0, part 1) was killed by signal 9"}


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
