"""Runs any schedule on a GPU: real streams and events, captured into one CUDA Graph, replayed by every call."""

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

import torch
from cuda.bindings import runtime as cudart
from torch import Tensor

from systems.preparing import collector_off, one_at_a_time
from systems.scheduling.graph.program import Program
from systems.scheduling.graph.stateful_program import StatefulProgram
from systems.scheduling.plans.schedule import Schedule, sequential
from systems.scheduling.plans.shared_streams import shared_streams
from systems.scheduling.plans.verify import verify

from .arena import Arena
from .context_switch import switch_contexts
from .cuda_memory import (
    REQUESTS,
    SPARE,
    AllocationMismatch,
    PoolAllocator,
    Recorded,
    record_requests,
    refusal,
    storages,
)
from .cuda_random import GraphRandomness
from .cuda_streams import Event, Stream, Streams, begin_capture, checked, pool_bytes
from .graph_copies import GraphCopies
from .memory_plan import ALIGNMENT, plan_memory
from .node_priorities import NodePriorities
from .scheduled import Scheduled

# What programs ask for memory, by how libraries were told to compute: another schedule of a program asks for the same.
_recorded_by_program: weakref.WeakKeyDictionary[Program, dict[tuple[bool, ...], Recorded]] = weakref.WeakKeyDictionary()


class CudaExecutor(Scheduled):
    """A schedule captured into one CUDA Graph over one arena of planned memory.

    The graph copies a call's inputs into static buffers, and outputs out of the arena, so that a result stays valid after
    the next call. Calls of one executor must not overlap: they share the arena. Preparing runs the program, and undoes what
    it changes.

    Args:
        program: What to run.
        schedule: Of that program.
        arena: Where its memory comes from, if other executors that never run at the same time use it too.

    Raises:
        InvalidSchedule: The schedule or the memory plan fails verification.
        Unsupported: An operator cannot be captured: it waits for the device, say.
    """

    is_captured = True

    def __init__(self, program: Program, schedule: Schedule, arena: Arena | None = None):
        verify(program.graph, schedule)
        self.program, self.schedule = program, schedule
        self.device = program.device
        self.index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        self.graph_exec: Any = None
        self.shared = arena or Arena()
        self.arena: Tensor | None = None
        self.outputs: list[Any] = []
        self.copies = GraphCopies(self.device)
        self.stateful = program if isinstance(program, StatefulProgram) else None
        self.randomness = GraphRandomness(self.device) if self.stateful and self.stateful.random else None
        with one_at_a_time, torch.no_grad(), torch.cuda.device(self.device):
            self.inputs = [torch.empty_like(x).copy_(x) for x in program.examples]
            self._prepare()

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by name.

        Returns:
            arena: Planned for this schedule.
            workspaces: cuBLAS's, of the streams that this schedule, or all that share its arena, have products on.
            sequential_arena: By the same plan on one stream.
            keep_all: Without reuse.
            inputs: The static inputs.
        """
        return {
            "arena": self.plan.size,
            "workspaces": self.shared.streams(self.device).workspace_bytes,
            "sequential_arena": plan_memory(self.requests, sequential(self.program.graph).happens_before()).size,
            "keep_all": self.plan.keep_all,
            "inputs": sum(x.untyped_storage().nbytes() for x in self.inputs),
        }

    def __call__(self, *inputs: Tensor) -> Any:
        if torch.is_grad_enabled():  # a static input that took part in a gradient would hold on to the caller's graph
            with torch.no_grad():
                return self(*inputs)
        if self.graph_exec is None:
            raise RuntimeError("this executor is closed")
        if self.program.changed:  # a second launch would change them twice
            self.program.check(inputs)
            self.program.derived.refresh()
        outputs = self.copies.run(inputs, self._launch_fresh)
        self.check_module(self._is_busy)  # last: it costs no time meanwhile
        return self.program.unflatten(outputs)

    def without_copies(self, *inputs: Tensor) -> Callable[[], object]:
        self(*inputs)
        return self.replay

    def replay(self) -> None:
        """Launch the graph's operators on the current stream, on what lies in the static inputs."""
        self.copies.turn_off()
        self._launch()

    def _launch_fresh(self) -> None:
        """Launch the graph on what tensors that were written since the last call now derive to."""
        self._launch()
        if self.program.changed:  # a launch passes autograd by, which counts who writes a tensor
            torch.autograd.graph.increment_version(self.program.changed)
        # Asked while the GPU is busy, so that it costs no time; on the rare yes all is done again.
        if self.program.derived.refresh():
            self._launch()

    def _launch(self) -> None:
        if self.randomness:
            self.randomness.advance()
        checked(cudart.cudaGraphLaunch(self.graph_exec, torch._C._cuda_getCurrentRawStream(self.index)))

    def _is_busy(self) -> bool:
        """Has the GPU still work on the current stream? Of one that is being captured it cannot be asked."""
        if torch.cuda.is_current_stream_capturing():
            return True
        (status,) = cudart.cudaStreamQuery(torch._C._cuda_getCurrentRawStream(self.index))
        return bool(status == cudart.cudaError_t.cudaErrorNotReady)

    def close(self) -> None:
        if self.graph_exec is not None:
            torch.cuda.synchronize(self.device)
            self.destroyed()
            self.graph_exec = None
            self.arena, self.outputs, self.inputs, self.shared = None, [], [], Arena()
            self.copies.close()
            self.randomness = None

    def _prepare(self) -> None:
        gc.collect()
        with collector_off():
            self._plan_and_capture(self._recorded_once())
        if self.randomness:
            self.randomness.check()
        switch_contexts(self.device)

    def _recorded_once(self) -> Recorded:
        """What memory the operators ask for; of a program without state as an earlier schedule of it has shown."""
        recorded_by_arithmetic = {} if self.stateful else _recorded_by_program.setdefault(self.program, {})
        arithmetic = _arithmetic()
        if arithmetic not in recorded_by_arithmetic:
            with closing(Streams(self.device)) as streams:
                recorded_by_arithmetic[arithmetic] = self._recorded(streams.take([True])[0])
        return recorded_by_arithmetic[arithmetic]

    def _recorded(self, side: Stream) -> Recorded:
        """What memory the operators ask for, after a warm-up."""
        side.torch.wait_stream(torch.cuda.current_stream(self.device))
        is_changing = self.stateful or self.program.changed
        undone = self.program.undone() if is_changing else torch.random.fork_rng(devices=[self.device])
        pool = torch.cuda.MemPool()
        with torch.cuda.stream(side.torch):
            with undone:
                rewind = self.program.rewinding()
                self.program.run(self.inputs)  # loads kernels and lets cuDNN choose its algorithms, with memory for that
                rewind()
                with torch.cuda.use_mem_pool(pool, self.device):
                    self.program.run(self.inputs)
            torch.cuda.synchronize(self.device)
            scratch = pool_bytes(pool.id) + SPARE
            del pool
            # Recorded under capture, as it will run: some operators (attention) ask for other memory then. The graph is
            # thrown away; nothing of it has run.
            allocator = PoolAllocator(self.device, scratch, REQUESTS * (len(self.program.graph) + 1))
            with closing(allocator), self._drawing():
                discard = begin_capture(side.handle)
                try:
                    return record_requests(self.program, self.inputs, allocator, side)
                except RuntimeError as error:
                    raise refusal(error) from error
                finally:
                    discard()

    def _drawing(self) -> AbstractContextManager[None]:
        return self.randomness.counting() if self.randomness else nullcontext()

    def _plan_and_capture(self, recorded: Recorded) -> None:
        before = self.schedule.happens_before()
        self.requests, self.plan = recorded.requests, plan_memory(recorded.requests, before)
        verify(self.program.graph, self.schedule, self.plan.buffers)
        # Set off by one unit: no buffer may have the arena's own address, by which torch knows the arena.
        self.arena = self.shared.take(self.plan.size + 2 * ALIGNMENT, self.device)
        base = -(-self.arena.data_ptr() // ALIGNMENT) * ALIGNMENT + ALIGNMENT
        addresses = [base + buffer.start for buffer in self.plan.buffers]
        next_address = iter(addresses)
        placed = [[(size, next(next_address)) for size in sizes] for sizes in recorded.segments]
        with_product = {s for s, has in zip(self.schedule.streams, recorded.has_product, strict=True) if has}
        count = self.schedule.stream_count
        # The streams of products stay this graph's, or that of all which share its arena; the others are for the capture.
        places = shared_streams(self.schedule, with_product, before)
        own = sorted(set(places.values()))
        products = dict(zip(own, self.shared.streams(self.device).take([True] * len(own)), strict=True))
        with closing(Streams(self.device)) as borrowed:
            others = iter(borrowed.take([False] * (count - len(with_product))))
            streams = [products[places[s]] if s in places else next(others) for s in range(count)]
            self._capture(streams, placed, [{addresses[i] for i in places} for places in recorded.looks_into])

    def _capture(
        self, streams: Sequence[Stream], placed: Sequence[Sequence[tuple[int, int]]], outputs: Sequence[set[int]]
    ) -> None:
        """Args:
        streams: By their numbers in the schedule.
        placed: For each operator its segments as (bytes, address).
        outputs: For each operator the addresses that its output may lie at.
        """
        events: dict[int, Event] = {}
        fork = Event()
        allocator = PoolAllocator(self.device)
        priorities = NodePriorities(self.schedule.priorities)
        origin = streams[self.schedule.streams[self.schedule.order[0]]].handle
        try:
            with self._drawing():
                discard = begin_capture(origin)
                try:
                    self.copies.capture_inputs(self.inputs, origin)
                    fork.record(origin)
                    self._launch_all(streams, events, fork, origin, allocator, priorities, placed, outputs)
                    self.copies.capture_outputs(self.outputs, lambda x: self._in_arena(x.data_ptr()), origin)
                except BaseException:
                    discard()
                    raise
                graph = checked(cudart.cudaStreamEndCapture(origin))
            try:
                self.graph_exec = checked(cudart.cudaGraphInstantiate(graph, priorities.give(graph)))
            except BaseException:
                checked(cudart.cudaGraphDestroy(graph))
                raise
            self.destroyed = weakref.finalize(self, _destroy, self.graph_exec, graph)
            self.destroyed.atexit = False
            self.copies.bind(graph, self.graph_exec)
        finally:
            allocator.close()
            for event in (fork, *events.values()):
                event.close()

    def _launch_all(
        self,
        streams: Sequence[Stream],
        events: dict[int, Event],
        fork: Event,
        origin: Any,
        allocator: PoolAllocator,
        priorities: NodePriorities,
        placed: Sequence[Sequence[tuple[int, int]]],
        outputs: Sequence[set[int]],
    ) -> None:
        program, schedule = self.program, self.schedule
        values: list[Any] = [None] * len(program.graph)
        waits: dict[int, list[int]] = {}
        for u, v in schedule.waits:
            waits.setdefault(v, []).append(u)
        signalled = {u for u, _ in schedule.waits}
        readers = [len(s) for s in program.graph.consumers]
        outliving = program.kept_operators()
        started: set[int] = set()
        last: dict[int, int] = {}
        for v in schedule.order:
            s = schedule.streams[v]
            handle = streams[s].handle
            if s not in started and handle is not origin and v not in waits:
                fork.block(handle)  # brings the stream into the capture
            started.add(s)
            for u in waits.get(v, ()):
                events[u].block(handle)
            with (
                torch.cuda.stream(streams[s].torch),
                allocator.operator(program.graph.label(v), placed[v]),
                priorities.operator(v, handle),
            ):
                values[v] = self._captured(v, values)
            if any(self._in_arena(address) and address not in outputs[v] for address in storages(values[v])):
                raise AllocationMismatch(f"{program.graph.label(v)} lies in a segment that was planned for something else")
            if v in signalled:
                events[v] = Event()
                events[v].record(handle)
            last[s] = v
            # Dropped once launched: an address may be given out again only when torch no longer knows a tensor there.
            for u in program.graph.producers[v]:
                readers[u] -= 1
            for u in (*program.graph.producers[v], v):
                if readers[u] == 0 and u not in outliving:
                    values[u] = None
        for s, v in last.items():
            if streams[s].handle is not origin and v not in signalled:
                join = events[v] = Event()
                join.record(streams[s].handle)
                join.block(origin)
        self.outputs = [self._static(o) for o in program.result(values, self.inputs)]

    def _captured(self, v: int, values: Sequence[Any]) -> Any:
        try:
            return self.program.execute(v, values, self.inputs)
        except torch.cuda.OutOfMemoryError:  # how the planned allocator refuses
            raise
        except RuntimeError as error:
            raise refusal(error, f"operator {self.program.graph.label(v)}") from error

    def _in_arena(self, address: int) -> bool:
        return self.arena is not None and 0 <= address - self.arena.data_ptr() < self.arena.numel()

    def _static(self, output: Any) -> Any:
        """The output as a tensor over the arena, which outlives the pools that the capture ran under."""
        if not isinstance(output, Tensor) or self.arena is None or not self._in_arena(output.data_ptr()):
            return output  # no tensor, or an input or parameter handed through
        offset = output.data_ptr() - self.arena.data_ptr()
        storage = self.arena.untyped_storage()
        start = offset // output.element_size()
        return torch.empty(0, dtype=output.dtype, device=self.device).set_(storage, start, output.shape, output.stride())


def _destroy(graph_exec: Any, graph: Any) -> None:
    checked(cudart.cudaGraphExecDestroy(graph_exec))
    checked(cudart.cudaGraphDestroy(graph))


def _arithmetic() -> tuple[bool, ...]:
    """What the choice of a library's algorithm depends on beside the operator."""
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    halves = products.allow_fp16_reduced_precision_reduction, products.allow_bf16_reduced_precision_reduction
    return cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, products.allow_tf32, *map(bool, halves)
