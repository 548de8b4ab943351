"""Runs any schedule on a CPU with real concurrency: one worker thread a stream."""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from systems.preparing import as_captured
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.verify import verify

from .scheduled import Scheduled


class MissingDependency(RuntimeError):
    """An operator ran before its producer had finished: the schedule lacks a wait."""


class _Run:
    """The state of one call: slots for values, events, and what is left to do."""

    def __init__(self, executor: "CpuExecutor", inputs: tuple[Tensor, ...]):
        self.executor, self.inputs = executor, inputs
        self.values: list[Any] = [_UNWRITTEN] * len(executor.program.graph)
        self.finished = {u: threading.Event() for u in executor.signalled}
        self.readers = list(executor.reader_counts)
        self.running = threading.Semaphore(0)  # released once by each stream
        self.lock = threading.Lock()
        self.error: BaseException | None = None


def _laid_out(x: Tensor, example: Tensor) -> Tensor:
    """x with the strides that its kernels may be compiled for."""
    return x if x.stride() == example.stride() else torch.empty_like(example).copy_(x)


def _work(queue: "SimpleQueue[_Run | None]", stream: int, intra_op_threads: int) -> None:
    """What the thread of a stream does."""
    torch.set_num_threads(intra_op_threads)  # a setting of this thread alone
    with torch.no_grad():
        while (run := queue.get()) is not None:
            run.executor._run_stream(run, stream)
            del run  # and with it what the call returned


def _end(queues: "Sequence[SimpleQueue[_Run | None]]") -> None:
    for queue in queues:
        queue.put(None)


_UNWRITTEN = object()  # no operator returns it


class CpuExecutor(Scheduled):
    """One worker thread a stream runs that stream's operators in launch order; an event stands for a wait.

    Nothing orders two operators but their stream and the schedule's waits, so that a schedule that lacks a wait fails here
    (MissingDependency) as it would give a wrong answer on a GPU. The thread of each operator calls `observe(operator, begin,
    end)` after it, where that is set, in perf_counter's seconds.

    Several threads may call it at once, and `close` it meanwhile. A fork leaves its threads behind, and its calls raise.

    Invariant: all queues hold the same runs in the same order, and nothing after the end. Else two streams might each wait
    for the other in different runs. No thread holds the executor between calls, so that one which nobody closes is freed.

    Args:
        program: What to run.
        schedule: Of that program.
        delay: Called before each operator, so that a test can stretch the races.
        unverified: Tests run wrong schedules by this.

    Raises:
        InvalidSchedule: The schedule fails verification.
    """

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        *,
        delay: Callable[[int], None] | None = None,
        unverified: bool = False,
    ):
        if not unverified:
            verify(program.graph, schedule)
        self.program, self.schedule, self.delay = program, schedule, delay
        self.observe: Callable[[int, float, float], None] | None = None
        self.streams: list[list[int]] = [[] for _ in range(schedule.stream_count)]
        for v in schedule.order:
            self.streams[schedule.streams[v]].append(v)
        self.waits: dict[int, list[int]] = {}
        for u, v in schedule.waits:
            self.waits.setdefault(v, []).append(u)
        self.signalled = {u for u, _ in schedule.waits}
        outliving = program.kept_operators()
        # An output of the model has one reader more, which never comes.
        self.reader_counts = [len(s) + (v in outliving) for v, s in enumerate(program.graph.consumers)]
        # Operators of concurrent streams share the cores.
        self.intra_op_threads = max(1, (os.cpu_count() or 1) // min(program.graph.width, schedule.stream_count))
        self.queues: list[SimpleQueue[_Run | None]] = []
        self.threads: list[threading.Thread] = []
        self.closed, self.lock = False, threading.Lock()
        # One stream alone is the caller's own thread: a second pool of OpenMP threads on the same cores makes both wait.
        if len(self.streams) > 1:
            self.operator_threads = self.intra_op_threads
            self.queues = [SimpleQueue() for _ in self.streams]
            for s, queue in enumerate(self.queues):
                work = (queue, s, self.intra_op_threads)
                self.threads.append(threading.Thread(target=_work, args=work, name=f"stream-{s}", daemon=True))
                self.threads[s].start()
        self.end = weakref.finalize(self, _end, self.queues)

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> Any:
        self.program.check(inputs)
        self.check_module()
        inputs = tuple(map(_laid_out, inputs, self.program.examples))
        run = _Run(self, inputs)
        with self.lock:
            if self.closed:
                raise RuntimeError("this executor is closed")
            if self.threads and not self.threads[0].is_alive():
                raise RuntimeError("a fork left the threads of this executor behind: prepare in the new process")
            self.program.derived.refresh()
            for queue in self.queues:
                queue.put(run)
        if not self.threads:
            with as_captured("cpu"):
                self._run_stream(run, 0)
        for _ in self.streams:
            run.running.acquire()
        if run.error is not None:
            raise run.error
        return self.program.unflatten(self.program.result(run.values, inputs))

    def close(self) -> None:
        """As every system's, once the calls of other threads have ended."""
        with self.lock:
            self.closed = True
            self.end()
        for thread in self.threads:
            thread.join()

    def _run_stream(self, run: _Run, stream: int) -> None:
        try:
            for v in self.streams[stream]:
                self._execute(run, v)
        except BaseException as error:  # handed to the caller, who raises it
            run.error = run.error or error
            for event in run.finished.values():  # let the other streams run out
                event.set()
        finally:
            run.running.release()

    def _execute(self, run: _Run, v: int) -> None:
        for u in self.waits.get(v, ()):
            run.finished[u].wait()
        if run.error is not None:
            return
        graph = self.program.graph
        if self.delay is not None:
            self.delay(v)
        for u in graph.predecessors[v]:
            if run.values[u] is _UNWRITTEN:
                if u in graph.producers[v]:
                    why = f"reads the output of {graph.label(u)} before it is written"
                else:
                    why = f"begins before {graph.label(u)}, which touches the same state, has ended"
                raise MissingDependency(f"operator {graph.label(v)} {why}")
        begin = perf_counter()
        run.values[v] = self.program.execute(v, run.values, run.inputs)
        if self.observe is not None:
            self.observe(v, begin, perf_counter())
        for u in graph.producers[v]:
            with run.lock:
                run.readers[u] -= 1
                dead = run.readers[u] == 0
            if dead:
                run.values[u] = None
        if v in self.signalled:
            run.finished[v].set()
