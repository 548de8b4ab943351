"""A worker: one process a GPU, with one part of the model (section 4.3.1).

The controller of a stage is its part 0. A control message goes from the engine to the first stage's controller, and from
each controller to the next stage's and to the other parts of its own, before the controller launches anything. So no message
waits for kernels. The last stage's controller alone waits for them, and answers with tokens: in a thread of its own, or
between two looks for a message where one batch is in flight at most.

Processes, and not threads as in the chapter: Python runs one thread at a time.

Invariant: all parts run the same batches in the same order.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conf.text import first_line
from systems.preparing import collector_spared, lacks_memory

from .control import END, Control, PipeControl, TensorControl, Wiring
from .engine import Decoder, LocalEngine
from .link import Link
from .message import from_bytes
from .parts import REDUCTIONS, SHARE, Parts, slot_bytes
from .sampling import sampled

FOREVER = timedelta(days=1)  # a server may be idle for long; the engine sees to workers that end
OUT_OF_MEMORY = 3  # exit status
LOST_ANOTHER = 4  # exit status of one that another's end has ended
OF_ANOTHER = ("by peer", "remote process exited")  # in what Gloo and NCCL say then


@dataclass(frozen=True)
class Spec:
    """What a worker is to be.

    Args:
        parts: how the model is split.
        rank: which part it has.
        device: "cpu" or "cuda", of which it takes the one of its rank's number.
        rendezvous: path of an empty file, or of none yet, by which workers meet.
        maker: "module:function" that makes a part: (its arguments, rank, parts, device) -> a Decoder with `join`.
        arguments: of the maker, as JSON.
        num_slots: of the K/V cache; 0 is all that fit on every GPU.
        spare_bytes: of a GPU, for what an iteration computes.
        block_size, attention, uses_graphs, max_batch_size: as LocalEngine has them.
        control: one of parts.CONTROLS.
        reductions: one of parts.REDUCTIONS; NCCL's where GPUs do not reach each other's memory.
        is_single: a server has one batch in flight at most, so that whatever a worker takes is waited for.
    """

    parts: Parts
    rank: int
    device: str
    rendezvous: str
    maker: str
    arguments: str
    num_slots: int
    spare_bytes: int
    block_size: int
    attention: str
    uses_graphs: bool
    max_batch_size: int
    control: str
    reductions: str = REDUCTIONS[0]
    is_single: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Spec:
        fields = json.loads(text)
        return cls(**fields | {"parts": Parts(**fields["parts"])})


@dataclass(frozen=True)
class Answer:
    """What the engine is sent of a batch, once `done`, all of it on the host.

    Args:
        tokens: [R].
        logits: [R, vocabulary] float64, where they are wanted.
        done: recorded behind their copies; None on a CPU.
    """

    tokens: Tensor
    logits: Tensor | None
    done: torch.cuda.Event | None

    @property
    def is_due(self) -> bool:
        return self.done is None or self.done.query()

    def to_bytes(self) -> bytes:
        """The tokens, and the logits."""
        if self.done is not None:
            self.done.synchronize()
        tokens = array("q", self.tokens.tolist()).tobytes()
        return tokens if self.logits is None else tokens + self.logits.numpy().tobytes()


class Worker:
    """One part, from its start to its end.

    Args:
        spec: what it is to be.
        wiring: its pipes.
    """

    def __init__(self, spec: Spec, wiring: Wiring):
        self.spec, self.parts = spec, spec.parts
        self.device = torch.device(f"cuda:{spec.rank}" if spec.device == "cuda" else "cpu")
        if spec.device == "cuda":
            torch.cuda.set_device(self.device)
        store = f"file://{spec.rendezvous}"
        backend = "nccl" if spec.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=store, rank=spec.rank, world_size=spec.parts.num_ranks, timeout=FOREVER)
        tensors, messages = self._stage_group(), self._stage_group()  # every worker makes every group
        everyone = dist.new_group(timeout=FOREVER)
        self.control: Control = (
            PipeControl(wiring) if spec.control == "pipe" else self._by_tensors(wiring, everyone, messages)
        )
        self.answers = None if wiring.answers is None else Connection(wiring.answers, readable=False)
        module, function = spec.maker.split(":")
        decoder = getattr(import_module(module), function)(spec.arguments, spec.rank, spec.parts, self.device)
        link = Link(spec.parts, spec.rank, tensors)
        decoder.join(link)
        self.control.connect()
        link.connect(self.device)
        if spec.reductions == "direct":
            link.reach(self.device, next(decoder.parameters()).dtype)
        dist.barrier()  # NCCL's buffers are there now, and no slot takes their place
        self.num_slots = spec.num_slots or self._slots_that_fit(decoder)
        settings = spec.block_size, spec.attention, spec.uses_graphs, spec.max_batch_size
        self.engine = LocalEngine(decoder, self.num_slots, *settings, agree=_most)
        self.unanswered: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self.pending: Answer | None = None  # of them, the one that is looked at
        # A thread beside one that never sleeps would wait for the interpreter.
        self.is_awake = spec.is_single and spec.control == "pipe" and spec.device == "cuda" and has_cores(spec.parts)

    def _stage_group(self) -> dist.ProcessGroup:
        groups = []
        for stage in range(self.parts.pipeline):
            begin = stage * self.parts.tensor
            ranks = list(range(begin, begin + self.parts.tensor))
            groups.append(dist.new_group(ranks, timeout=FOREVER))  # a group has not the timeout of all processes
        return groups[self.parts.place(self.spec.rank)[0]]

    def _by_tensors(self, wiring: Wiring, everyone: dist.ProcessGroup, stage: dist.ProcessGroup) -> Control:
        return TensorControl(wiring, self.parts, self.spec.rank, self.device, (everyone, stage))

    def _slots_that_fit(self, decoder: Decoder) -> int:
        """On every GPU."""
        assert isinstance(decoder, nn.Module)
        shape, item_bytes = decoder.shape, next(decoder.parameters()).element_size()
        torch.cuda.empty_cache()
        free_bytes = torch.cuda.mem_get_info()[0] - self.spec.spare_bytes
        count = torch.tensor([int(free_bytes * SHARE) // slot_bytes(shape, item_bytes)], device=self.device)
        dist.all_reduce(count, dist.ReduceOp.MIN)
        if (num_slots := int(count)) < 1:
            raise MemoryError("beside the weights there is room for no K/V slot")
        return num_slots

    @torch.inference_mode()
    def run(self) -> None:
        """Until the message that is the last."""
        dist.barrier()
        if self.answers is not None:
            self.answers.send_bytes(array("q", [self.num_slots]).tobytes())  # this worker is ready, as all others
        thread = threading.Thread(target=self._answer_all, name="answers")
        if not self.is_awake:
            thread.start()
        with collector_spared():
            while message := self.control.receive(self._answer_due if self.is_awake else None):
                self.control.forward(message)  # before anything is launched
                batch, wants_logits = from_bytes(message)
                logits = self.engine.launched(batch)
                if self.answers is not None:
                    self.unanswered.put(self._answer_of(logits, batch.rows, wants_logits))
        self.control.forward(END)
        if self.is_awake:
            while self._answer_due():
                pass
        else:
            self.unanswered.put(None)
            thread.join()

    def _answer_of(self, logits: Tensor, rows: Sequence[object], wants_logits: bool) -> Answer:
        tokens = sampled(logits, cast("tuple", rows))
        shown, done = logits.double().clone() if wants_logits and self.device.type == "cpu" else None, None
        if self.device.type == "cuda":
            host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            tokens = host.copy_(tokens, non_blocking=True)
            if wants_logits:  # now, since whoever answers must launch nothing: it would wait for messages behind tensors
                shown = torch.empty(logits.shape, dtype=torch.float64, pin_memory=True).copy_(
                    logits.double(), non_blocking=True
                )
            done = torch.cuda.Event()
            done.record()
        return Answer(tokens, shown, done)

    def _answer_all(self) -> None:
        """Send what the engine waits for, of all batches.

        An error of the device comes to light here, where its work is waited for. It ends the process.
        """
        try:
            while (answer := self.unanswered.get()) is not None:
                assert self.answers is not None
                self.answers.send_bytes(answer.to_bytes())
        except BaseException as error:
            os._exit(told(error))

    def _answer_due(self) -> bool:
        """Send what the engine waits for, of the batch that comes next where it is done. Was there one to look at?"""
        if self.pending is None and not self.unanswered.empty():
            self.pending = self.unanswered.get()
        if self.pending is None:
            return False
        if self.pending.is_due:
            assert self.answers is not None
            self.answers.send_bytes(self.pending.to_bytes())
            self.pending = None
        return True


def _most(seconds: Tensor) -> Tensor:
    """Of all workers, each number's most."""
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds


def end_with_engine() -> None:
    """Ends the process where the engine's has ended: nothing comes by the standard input but its end."""
    sys.stdin.buffer.read()
    os._exit(1)


def has_cores(parts: Parts) -> bool:
    """Are there enough for processes that never sleep?"""
    return len(os.sched_getaffinity(0)) > 2 * parts.num_ranks


def told(error: BaseException) -> int:
    """Print what ends a worker, in one line; returns the exit status."""
    is_out_of_memory = lacks_memory(error)
    kind = "out of memory" if is_out_of_memory else type(error).__name__
    print(f"{kind}: {first_line(error)}", file=sys.stderr, flush=True)
    if is_out_of_memory:
        return OUT_OF_MEMORY
    is_aftermath = isinstance(error, EOFError | BrokenPipeError) or any(words in str(error) for words in OF_ANOTHER)
    return LOST_ANOTHER if is_aftermath else 1


def main(spec: Spec, wiring: Wiring) -> int:
    """The exit status."""
    threading.Thread(target=end_with_engine, daemon=True).start()
    try:
        Worker(spec, wiring).run()
    except (Exception, KeyboardInterrupt) as error:
        return told(error)
    return 0


if __name__ == "__main__":
    fields = json.loads(sys.argv[2])
    status = main(Spec.from_json(sys.argv[1]), Wiring(fields["messages"], tuple(fields["forwards"]), fields["answers"]))
    os._exit(status)  # the end of a process group waits for others, which may be gone
