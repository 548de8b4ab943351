"""An engine runs iterations: it takes a batch, and gives back a token for each of its rows.

Invariant: batches come back in the order in which they were submitted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from systems.base import Prepared, Unsupported
from systems.kernels.kernel import launches_early

from .attention.choice import across_of, attention_of
from .batch import Batch
from .increments import Caches, Increments
from .layout import Layout, LayoutBuffer, Room
from .sampling import sampled

GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
PROMPT_SIZES = (64, 128, *range(144, 513, 16), *range(544, 769, 32))  # tokens; more take no longer without a graph
EXECUTED_SIZES = (1, 4, 16, 64, 256)  # fewer: a system may take minutes for each
NUM_COPIES = 3  # of a batch's numbers on the host: two batches in flight, and the next
REPLAYS = 20  # back to back, for the time of one
FEW_REPLAYS = 3  # for the time of each of many

Executor: TypeAlias = Callable[[nn.Module, tuple[Tensor, ...]], Prepared]  # as System.prepare


class DecoderShape(Protocol):
    """What an engine needs to know of a decoder's size."""

    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def positions(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...


class Decoder(Protocol):
    """A module whose operators, all but attention, take the tokens of any requests side by side: models.gpt.GPT is one.

    One that `takes_operators` has its others computed by an engine's kernels too: `hidden` has them as its last argument.
    """

    @property
    def shape(self) -> DecoderShape: ...
    @property
    def start_token(self) -> int | None:
        """What the stream of an encoder-decoder has after its prompt; None for what has a decoder alone."""

    def hidden(self, tokens: Tensor, places: Tensor, attention: Any) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Returned:
    """A batch that has come back. tokens: one for each row."""

    batch: Batch
    tokens: list[int]


class Engine(ABC):
    """Runs iterations.

    num_workers: stages of its pipeline, each of which has a batch.
    keeps_logits: logits of the batch submitted last are wanted.
    """

    num_workers = 1
    keeps_logits = False

    @property
    @abstractmethod
    def num_in_flight(self) -> int:
        """Batches that have not come back."""

    @abstractmethod
    def submit(self, batch: Batch) -> None:
        """Begin an iteration. It may return before the work is done."""

    @abstractmethod
    def has_returned(self) -> bool:
        """Would `collect` give a batch without waiting?"""

    @abstractmethod
    def collect(self) -> Returned:
        """The batch in flight that was submitted earliest, once it is done."""

    def close(self) -> None:
        """Give back memory and processes."""


@dataclass
class Flight:
    """A batch on the device. done: recorded behind its tokens, [R] on the host; None on a CPU."""

    batch: Batch
    tokens: Tensor
    done: torch.cuda.Event | None


@dataclass(frozen=True)
class Copy:
    """A layout's numbers on the host, pinned where a GPU is. ended: recorded behind their copy to it; None on a CPU."""

    numbers: Tensor
    layout: Layout
    ended: torch.cuda.Event | None


@dataclass(frozen=True)
class Graph:
    """An iteration that is prepared.

    Args:
        buffer: on the device, what its layout of N tokens lies in.
        num_tokens: N.
        copies: on the host, filled in turn: one may be on its way while the next is filled.
        run: computes what lies in the buffer; logits of its R rows, [R, vocabulary].
        room: for any batch; None where each row is an increment.
    """

    buffer: Tensor
    num_tokens: int
    copies: deque[Copy]
    run: Callable[[], Tensor]
    room: Room | None = None

    def takes(self, batch: Batch) -> bool:
        return len(batch.rows) <= self.num_tokens if self.room is None else self.room.takes(batch)

    def take(self, layouts: LayoutBuffer, batch: Batch) -> None:
        """Bring a batch to the device."""
        copy = self.copies[0]
        self.copies.rotate(-1)
        if copy.ended is not None:
            copy.ended.synchronize()
        if self.room is None:
            layouts.refill(copy.layout, batch)
        else:
            copy.numbers.numpy()[:] = layouts.filled_up(batch, self.room)[0]
        self.buffer.copy_(copy.numbers, non_blocking=True)
        if copy.ended is not None:
            copy.ended.record()


class LocalEngine(Engine):
    """The whole model in this process, on one device.

    Args:
        decoder: on its device, in its precision.
        num_slots: of the K/V cache, which is allocated here.
        block_size: slots of a block of the K/V manager; 0 where it reserves runs.
        attention: one of ATTENTIONS.
        uses_graphs: iterations are CUDA graphs: of increments alone for each of GRAPH_SIZES up to `max_batch_size`, with
            prompts for those of PROMPT_SIZES that no larger one is as fast as. An encoder's iterations are none.
        max_batch_size: rows of the largest graph.
        executor: prepares iterations of increments in the place of a CUDA graph, for each of EXECUTED_SIZES.
        agree: brings seconds, [n] on the device, to what every part of the model takes them for.
    """

    def __init__(
        self,
        decoder: Decoder,
        num_slots: int,
        block_size: int = 0,
        attention: str = "split",
        uses_graphs: bool = False,
        max_batch_size: int = 0,
        executor: Executor | None = None,
        agree: Callable[[Tensor], Tensor] | None = None,
    ):
        assert isinstance(decoder, nn.Module)
        weight = next(decoder.parameters())
        self.decoder: Decoder = decoder
        self.device, shape = weight.device, decoder.shape
        self.cache = torch.zeros(
            (shape.layers, 2, num_slots + 1, shape.kv_heads, shape.head_size), device=self.device, dtype=weight.dtype
        )
        max_blocks = -(-shape.positions // block_size) if block_size else 1
        self.layouts = LayoutBuffer(self.device, num_slots, max_blocks, block_size, shape.positions)
        self.attention = attention_of(attention)
        self.across = None if decoder.start_token is None else across_of(attention, shape.positions)
        self.operators: tuple[object, ...] = ()
        if self.device.type == "cuda" and weight.dtype != torch.float64 and getattr(decoder, "takes_operators", False):
            from .operators import KernelOperators  # it needs Triton

            self.operators = (KernelOperators(launches_early(self.device)),)
        self.flights: deque[Flight] = deque()
        self.logits: Tensor | None = None  # of the batch submitted last, [R, vocabulary]
        self.sampled: Tensor | None = None  # from them, [R]
        self.graphs: list[Graph] = []  # of increments, the smallest first
        self.prompt_graphs: list[Graph] = []  # of any batches, the smallest first
        self.prepared: list[Prepared] = []
        self.caches: list[Caches] = []  # of what is prepared, which knows them by number
        if executor is not None:
            self._execute_by(executor, [*(size for size in EXECUTED_SIZES if size < max_batch_size), max_batch_size])
        if uses_graphs and self.device.type == "cuda":
            self._capture(max_batch_size, agree or (lambda seconds: seconds))

    @property
    def num_in_flight(self) -> int:
        return len(self.flights)

    @torch.inference_mode()
    def launched(self, batch: Batch) -> Tensor:
        """Begin an iteration, and sample nothing; logits of each row's last token, [R, vocabulary], up to the next."""
        self.logits = self._replayed(batch)
        if self.logits is None:
            layout = self.layouts.of(batch)
            self._fill(layout.tokens, batch)
            self.logits = self._iteration(layout)
        return self.logits

    @torch.inference_mode()
    def submit(self, batch: Batch) -> None:
        tokens = self.sampled = sampled(self.launched(batch), batch.rows)
        done = None
        if self.device.type == "cuda":
            host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            tokens = host.copy_(tokens, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        self.flights.append(Flight(batch, tokens, done))

    def has_returned(self) -> bool:
        return bool(self.flights) and (self.flights[0].done is None or self.flights[0].done.query())

    def collect(self) -> Returned:
        flight = self.flights.popleft()
        if flight.done is not None:
            flight.done.synchronize()
        return Returned(flight.batch, flight.tokens.tolist())

    @torch.inference_mode()
    def replay_ms(self, batch: Batch) -> float | None:
        """Milliseconds of an iteration by the device alone: replays of its CUDA graph back to back, nothing sampled.

        batch: of increments; its keys and values are overwritten. None where no graph is for it.
        """
        if self.device.type != "cuda" or (graph := self._graph_with(batch)) is None:
            return None
        return _replay_ms(graph.run, REPLAYS)

    def close(self) -> None:
        self.graphs.clear()
        self.prompt_graphs.clear()
        for prepared in self.prepared:
            prepared.close()
        self.prepared.clear()
        self.caches.clear()
        self.cache = self.cache.new_empty(0)

    def _fill(self, tokens: Tensor, batch: Batch) -> None:
        """Put in what the batch before has sampled, where the batch feeds it. The host need not know it."""
        if batch.has_pending:
            assert self.sampled is not None, "a batch came before"
            before = self.sampled[(-1 - tokens).clamp(min=0)]
            tokens.copy_(torch.where(tokens < 0, before, tokens))

    def _iteration(self, layout: Layout) -> Tensor:
        """Logits of each row's last token, [R, vocabulary]."""

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.attention.store(k, v, self.cache[layer], layout)
            output: Tensor = self.attention.attend(q, self.cache[layer], layout)
            return output

        attending = attention if self.across is None else self.across(self.cache, layout)
        hidden = self.decoder.hidden(layout.tokens, layout.places, attending, *self.operators)
        return self.decoder.logits(hidden[layout.lasts])

    def _graph_with(self, batch: Batch) -> Graph | None:
        """The smallest graph that takes a batch, with the batch in its buffer; None where there is none."""
        graphs = self.graphs if batch.num_tokens == len(batch.rows) else self.prompt_graphs
        graph = next((graph for graph in graphs if graph.takes(batch)), None)
        if graph is not None:
            graph.take(self.layouts, batch)
            self._fill(graph.buffer[: graph.num_tokens], batch)
        return graph

    def _replayed(self, batch: Batch) -> Tensor | None:
        """The logits by a CUDA graph; None where no graph is for such a batch."""
        graph = self._graph_with(batch)
        return None if graph is None else graph.run()[: len(batch.rows)]

    def _execute_by(self, executor: Executor, sizes: list[int]) -> None:
        """Iterations of each size, as a system that executes modules has them. Raises Unsupported."""
        if self.decoder.start_token is not None:
            raise Unsupported("an encoder-decoder's iterations are scheduled by no system of modules")
        for size in sizes:
            buffer, parts, copies = self._dead(size)
            self.caches.append(Caches(self.cache, self.attention, self.layouts, parts))
            module = Increments(self.decoder, self.caches[-1]).eval()
            self.prepared.append(executor(module, (buffer,)))
            self.graphs.append(Graph(buffer, size, copies, partial(self.prepared[-1], buffer)))

    @torch.inference_mode()
    def _capture(self, most_rows: int, agree: Callable[[Tensor], Tensor]) -> None:
        """The graphs of PROMPT_SIZES, and those of increments where no executor has them.

        The largest comes first: all share one pool of memory. What has an encoder has graphs of increments alone.
        """
        pool = torch.cuda.graph_pool_handle()
        rooms = [Room.of(size, most_rows) for size in PROMPT_SIZES if self.across is None]
        graphs = [self._captured(room.tokens, room, pool) for room in reversed(rooms)][::-1]
        seconds = [_replay_ms(graph.run, FEW_REPLAYS) / 1e3 for graph in graphs]
        agreed_seconds = agree(torch.tensor(seconds, device=self.device)).tolist()
        self.prompt_graphs = [graphs[i] for i in indexes_faster_than_larger(agreed_seconds)]
        if not self.graphs:
            sizes = [*(size for size in GRAPH_SIZES if size < most_rows), most_rows]
            self.graphs = [self._captured(size, None, pool) for size in reversed(sizes)][::-1]

    def _captured(self, num_tokens: int, room: Room | None, pool: Any) -> Graph:
        """A graph of so many tokens."""
        buffer, parts, copies = self._dead(num_tokens, room)
        layout = self.layouts.layout(buffer, parts, has_prompts=room is not None)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._iteration(layout)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = self._iteration(layout)
        return Graph(buffer, num_tokens, copies, partial(_replay, graph, logits), room)

    def _dead(self, size: int, room: Room | None = None) -> tuple[Tensor, tuple[int, ...], deque[Copy]]:
        """What rows for nobody lie in: on the device, how much each part of a layout takes, and on the host."""
        dead = Batch(-1, (self.layouts.dead_row,))
        numbers, parts = self.layouts.packed(dead, size) if room is None else self.layouts.filled_up(dead, room)
        copies: deque[Copy] = deque()
        for _ in range(NUM_COPIES):
            host, ended = torch.from_numpy(numbers.copy()), None
            if self.device.type == "cuda":
                host, ended = host.pin_memory(), torch.cuda.Event()
            copies.append(Copy(host, self.layouts.layout(host, parts), ended))
        return torch.from_numpy(numbers).to(self.device), parts, copies


def indexes_faster_than_larger(seconds: Sequence[float]) -> list[int]:
    """The indexes, ascending, of graphs that are faster than every larger one. seconds: of graphs, the smallest first."""
    indexes: list[int] = []
    for i in reversed(range(len(seconds))):
        if not indexes or seconds[i] < seconds[indexes[-1]]:
            indexes.append(i)
    return indexes[::-1]


def _replay_ms(run: Callable[[], object], count: int) -> float:
    """Milliseconds of one of several replays back to back, by the device alone."""
    run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / count


def _replay(graph: torch.cuda.CUDAGraph, logits: Tensor) -> Tensor:
    graph.replay()
    return logits
