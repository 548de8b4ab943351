"""An engine of several processes: tensor and pipeline parallelism (section 4.3.1).

Invariant: when one worker ends, all do, and whoever waits for the engine is told which one and why. Where a worker hangs,
all are ended after LIMIT_S.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import IO

import torch
from torch import Tensor

from .batch import Batch
from .control import END, Wiring
from .engine import Engine, Returned
from .message import to_bytes
from .parts import environment
from .worker import LOST_ANOTHER, OUT_OF_MEMORY, Spec

END_S = 10.0  # for workers to end once they are told to
START_S = 3600.0  # until all are ready: weights of hundreds of gigabytes are made or read
LIMIT_S = 900.0  # for an iteration: the first on a GPU may compile kernels for minutes, and none computes for as long
LOOK_S = 1.0  # between two looks at that
CAUSE_S = 3.0  # for the worker that another has lost to end
PACKAGE = (__package__ or "").removesuffix("systems.serving")  # "opweave." in a wheel, nothing in a checkout


class EngineEnded(RuntimeError):
    """A worker has ended, and with it the engine."""


@dataclass(frozen=True)
class Process:
    """A worker. errors: what it wrote there."""

    rank: int
    process: subprocess.Popen[bytes]
    errors: IO[bytes]

    def why(self) -> str:
        """How it ended, and the last line that it wrote."""
        status = self.process.returncode
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"{how}{f': {lines[-1]}' if lines else ''}"


class ParallelEngine(Engine):
    """The parts of a model in processes of their own.

    Args:
        specs: of the workers, by rank.
        vocabulary: columns of the logits.
        is_prefetching: a batch more than there are stages may be in flight.
    """

    def __init__(self, specs: Sequence[Spec], vocabulary: int, is_prefetching: bool = False):
        """Start the workers and wait until all are ready. Raises MemoryError, EngineEnded."""
        self.parts, self.vocabulary = specs[0].parts, vocabulary
        self.num_workers = self.parts.pipeline
        most_batches = self.num_workers + is_prefetching
        self.environment, self.is_single = environment(most_batches), most_batches == 1
        self.batches: deque[tuple[Batch, bool]] = deque()
        self.due_s = time.monotonic() + START_S  # when the earliest of them, or that all are ready, has to have come
        self.is_starting = True
        self.received: deque[Returned] = deque()
        self._logits: Tensor | None = None
        self.is_closing, self.is_out_of_memory, self.end = False, False, ""
        self.has_ended = threading.Event()
        self.meeting = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close; nothing is left of it if this process dies
        self.first, self.answers, wirings = self._pipes(specs[0].control)
        self.workers = [self._started(spec, wiring) for spec, wiring in zip(specs, wirings, strict=True)]
        for wiring in wirings:
            for descriptor in _descriptors(wiring):
                os.close(descriptor)
        self.threads = [threading.Thread(target=self._watch, args=(worker,), daemon=True) for worker in self.workers]
        for thread in self.threads:
            thread.start()
        threading.Thread(target=self._watch_time, daemon=True).start()
        (self.num_slots,) = array("q", self._answer())
        self.is_starting = False

    def _pipes(self, control: str) -> tuple[Connection, Connection, list[Wiring]]:
        """The engine's ends of the pipes of messages and of answers, and all others by rank."""
        parts = self.parts
        reads: list[int | None] = [None] * parts.num_ranks
        writes: list[list[int]] = [[] for _ in range(parts.num_ranks)]
        reads[0], first = os.pipe()
        for rank in range(1, parts.num_ranks if control == "pipe" else 1):
            stage, part = parts.place(rank)
            before = stage * parts.tensor if part else rank - parts.tensor
            reads[rank], write = os.pipe()
            writes[before].insert(0 if not part else len(writes[before]), write)  # to the next stage first
        answers, last = os.pipe()
        replier = (parts.pipeline - 1) * parts.tensor
        wirings = [
            Wiring(reads[rank], tuple(writes[rank]), last if rank == replier else None) for rank in range(parts.num_ranks)
        ]
        return Connection(first, readable=False), Connection(answers, writable=False), wirings

    def _started(self, spec: Spec, wiring: Wiring) -> Process:
        meeting = self.meeting.fileno()
        spec = replace(spec, rendezvous=f"/proc/self/fd/{meeting}", is_single=self.is_single)
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close
        variables = dict(self.environment)
        if spec.device == "cpu":
            variables.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.parts.num_ranks)))
        module = f"{PACKAGE}systems.serving.worker"
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, spec.to_json(), json.dumps(asdict(wiring))],
            stdin=subprocess.PIPE,
            stderr=errors,
            pass_fds=[*_descriptors(wiring), meeting],
            env=variables,
            start_new_session=True,  # what interrupts the engine lets it finish
        )
        return Process(spec.rank, process, errors)

    def _watch(self, worker: Process) -> None:
        """Wait for the end of one worker, and end the others with it. One that lost another waits for its end first."""
        if worker.process.wait() == LOST_ANOTHER:
            self.has_ended.wait(CAUSE_S)
        if not self.has_ended.is_set():
            self.is_out_of_memory = worker.process.returncode == OUT_OF_MEMORY
            self._end(f"{self.parts.named(worker.rank)} {worker.why()}")

    def _watch_time(self) -> None:
        """End all workers where an answer does not come: one hangs, or waits for what another's device has failed to send.

        No worker but the one that answers waits for its device, so an error of another's is not told by its process.
        """
        while not self.has_ended.wait(LOOK_S):
            is_awaited = self.is_starting or self.batches
            if is_awaited and time.monotonic() > self.due_s and not self.answers.poll():
                what, limit_s = (
                    ("one was not ready", START_S) if self.is_starting else ("an iteration was not back", LIMIT_S)
                )
                self._end(f"{what} after {limit_s:.0f} s: a worker hangs, or its GPU has failed")

    def _end(self, why: str) -> None:
        """All at once; whoever waits for an answer or for a pipe hears of it."""
        self.end = why
        self.has_ended.set()
        self._kill()

    def _kill(self) -> None:
        for worker in self.workers:
            worker.process.kill()

    @property
    def num_in_flight(self) -> int:
        return len(self.batches) + len(self.received)

    @property
    def logits(self) -> Tensor | None:
        """Of the batch submitted last, [R, vocabulary] float64, where they are kept."""
        while self.batches:
            self.received.append(self._received())
        return self._logits

    def submit(self, batch: Batch) -> None:
        if not self.batches:
            self.due_s = time.monotonic() + LIMIT_S
        self.batches.append((batch, self.keeps_logits))
        try:
            self.first.send_bytes(to_bytes(batch, self.keeps_logits))
        except BrokenPipeError:
            raise self._ended() from None

    def has_returned(self) -> bool:
        return bool(self.received) or (bool(self.batches) and (self.answers.poll() or self.has_ended.is_set()))

    def collect(self) -> Returned:
        return self.received.popleft() if self.received else self._received()

    def _received(self) -> Returned:
        numbers = self._answer()
        self.due_s = time.monotonic() + LIMIT_S
        batch, has_logits = self.batches.popleft()
        size = 8 * len(batch.rows)
        if has_logits:
            self._logits = torch.frombuffer(bytearray(numbers[size:]), dtype=torch.float64).view(-1, self.vocabulary)
        return Returned(batch, array("q", numbers[:size]).tolist())

    def _answer(self) -> bytes:
        try:
            return self.answers.recv_bytes()
        except EOFError:
            raise self._ended() from None

    def _ended(self) -> Exception:
        """What to raise where nothing more comes."""
        self.has_ended.wait(END_S)
        end = self.end or "a worker closed its pipe"
        self.close()
        return MemoryError(end) if self.is_out_of_memory else EngineEnded(end)

    def close(self) -> None:
        """End the workers, those that do not end by themselves by force."""
        if self.is_closing:
            return
        self.is_closing = True
        self.has_ended.set()
        with suppress(OSError):  # the first worker may be gone
            self.first.send_bytes(END)
        for thread in self.threads:
            thread.join(END_S / len(self.threads))
        self._kill()
        for worker, thread in zip(self.workers, self.threads, strict=True):
            thread.join()
            assert worker.process.stdin is not None
            worker.process.stdin.close()
            worker.errors.close()
        self.first.close()
        self.answers.close()
        self.meeting.close()


def _descriptors(wiring: Wiring) -> list[int]:
    return [number for number in (wiring.messages, *wiring.forwards, wiring.answers) if number is not None]
