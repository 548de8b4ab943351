"""What the host does between two increment iterations, in microseconds a part, and what it comes to beside an iteration.

python tests/benchmarks/benchmark_host.py [--requests N] [--iterations N] [--block-size N] [--asynchronous]

The scheduler, the loop's work and the packing of a layout are the engine's own; no model computes and nothing is copied to a
device, so it runs on any machine. It says what of an iteration the GPU would wait for, were nothing in flight meanwhile. The
first number of a part is its tenth percentile, which other processes of the machine change least.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch

from runners.serving.wire import tokens_body
from scripts.arguments import Parser
from systems.serving.batch import Batch
from systems.serving.iteration_level import IterationLevel
from systems.serving.layout import Layout, LayoutBuffer
from systems.serving.message import from_bytes, to_bytes
from systems.serving.request import Request
from systems.serving.slots import ContiguousSlots, PagedSlots

PROMPT = 300  # tokens of each request
WARM = 20  # iterations before the timed ones
T = TypeVar("T")


class Times:
    """Seconds of each part, by its name."""

    def __init__(self) -> None:
        self.by_part: dict[str, list[float]] = {}

    def of(self, part: str, work: Callable[[], T]) -> T:
        begin = perf_counter()
        result = work()
        self.by_part.setdefault(part, []).append(perf_counter() - begin)
        return result


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--requests", type=int, default=64, metavar="N", help="of a batch")
    parser.add_argument("--iterations", type=int, default=300, metavar="N", help="that are timed")
    parser.add_argument("--block-size", type=int, default=0, metavar="N", help="of the K/V manager; 0: a run a request")
    parser.add_argument("--asynchronous", action="store_true", help="two batches in flight")
    arguments = parser.parse_args()
    count, num_new = arguments.requests, arguments.iterations + WARM + 2
    length = PROMPT + num_new
    num_slots = count * (length + (arguments.block_size or 1))
    block_size = arguments.block_size
    slots = PagedSlots.all_free(num_slots, block_size) if block_size else ContiguousSlots.all_free(num_slots)
    scheduler = IterationLevel(slots, count, is_asynchronous=arguments.asynchronous)
    for number in range(count):
        scheduler.add(Request(number, tuple(range(PROMPT)), num_new))
    layouts = LayoutBuffer(torch.device("cpu"), num_slots, -(-length // block_size) if block_size else 1, block_size)
    times, flying = Times(), list[Batch]()
    prepared: Layout | None = None
    tokens = [7] * count
    for iteration in range(num_new - 1):
        if iteration == WARM:
            times = Times()
        while (batch := times.of("selection", scheduler.next_batch)) is not None:
            if prepared is None or batch.num_tokens > count:
                numbers, sizes = layouts.packed(batch, count)
                prepared = layouts.layout(torch.from_numpy(numbers), sizes)
            else:
                times.of("layout", partial(layouts.refill, prepared, batch))
            message = times.of("message", partial(to_bytes, batch))
            times.of("message read", partial(from_bytes, message))
            flying.append(batch)
        deliveries = times.of("tokens back", partial(scheduler.take_back, flying.pop(0), tokens))
        times.of("delivery", partial(tokens_body, deliveries))
    by_part = {}
    for part, seconds in times.by_part.items():
        taken = sorted(seconds)[-arguments.iterations :]  # a full scheduler selects nothing, in no time
        by_part[part] = taken[len(taken) // 10]
        print(f"{part}: {by_part[part] * 1e6:.0f} us, median {median(taken) * 1e6:.0f}")
    local = sum(seconds for part, seconds in by_part.items() if not part.startswith("message"))
    print(f"{count} requests, selection and message: {(by_part['selection'] + by_part['message']) * 1e6:.0f} us; ", end="")
    print(f"all that an engine of one process does: {local * 1e6:.0f} us an iteration")


if __name__ == "__main__":
    main()
