"""Ends of engines of several processes: who failed is told in one line, and no worker outlives another."""

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
from pathlib import Path
from urllib.error import HTTPError

import psutil
import pytest
from conftest import ROOT, command, environment
from parallel_engines import NUM_SLOTS, ONE_ROW, check_end, started
from serving_parts import SHAPE
from test_serving_engine import requests_of

from runners.serving.bridge import Bridge, Stopped
from systems.serving import parallel
from systems.serving.iteration_level import IterationLevel
from systems.serving.parallel import EngineEnded, ParallelEngine
from systems.serving.parts import Parts
from systems.serving.request import Request as ServedRequest
from systems.serving.slots import ContiguousSlots
from systems.serving.system import Server
from systems.serving.worker import LOST_ANOTHER, OUT_OF_MEMORY, told


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(str(ROOT / "tests"))


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


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_whichever_worker_is_killed_ends_all(rank: int) -> None:
    check_end(started(Parts(2, 2)), rank)


@pytest.mark.slow
def test_workers_end_with_the_process_that_started_them_and_leave_no_file(tmp_path: Path) -> None:
    script = (
        "import os, sys; sys.path[:0] = ['.', 'tests']; from test_serving_ends import *; "
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
