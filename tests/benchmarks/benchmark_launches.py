"""What a chain of small kernels takes in a CUDA graph: launched in turn, launched early, or as one persistent kernel.

python tests/benchmarks/benchmark_launches.py [--steps N]

Each step multiplies and adds, and reads what other blocks wrote in the step before. The persistent kernel has a barrier of
all its blocks between two steps, and as many blocks as were fastest of BLOCKS; its time includes that of setting the
barrier's count to zero. Microseconds a step, the median over replays; each way's result is compared with PyTorch's operators
first. Needs a GPU that launches kernels early.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch
import triton
import triton.language as tl
from torch import Tensor

from scripts.arguments import Parser
from systems.kernels.kernel import launches_early
from systems.kernels.tile import let_consumers_launch, wait_for_producers

SIZES = 8192, 65536, 262144  # numbers that a step reads and writes
ELEMENTS = 1024  # of a block
BLOCKS = 8, 16, 32, 66, 132  # of the persistent kernel; all have to run at once
SHIFT = 4097  # places: a step reads what another block wrote
ROUNDS, REPLAYS = 30, 5


@triton.jit
def one_step(source, target, count, SHIFT: tl.constexpr, ELEMENTS: tl.constexpr, IS_EARLY: tl.constexpr):
    """target[i] = source[(i + SHIFT) % count] * 0.999 + 0.5; both [count] fp32."""
    places = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    wait_for_producers(IS_EARLY)
    x = tl.load(source + (places + SHIFT) % count, mask=places < count)
    let_consumers_launch(IS_EARLY)
    tl.store(target + places, x * 0.999 + 0.5, mask=places < count)


@triton.jit
def all_steps(one, other, arrived, count, steps, SHIFT: tl.constexpr, ELEMENTS: tl.constexpr):
    """`steps` of `one_step` in one launch, from `one` to `other` and back; arrived [1] int32, zero, counts blocks."""
    for step in range(steps):
        source = one if step % 2 == 0 else other
        target = other if step % 2 == 0 else one
        for start in range(tl.program_id(0) * ELEMENTS, count, tl.num_programs(0) * ELEMENTS):
            places = start + tl.arange(0, ELEMENTS)
            x = tl.load(source + (places + SHIFT) % count, mask=places < count, volatile=True)
            tl.store(target + places, x * 0.999 + 0.5, mask=places < count)
        tl.debug_barrier()
        tl.atomic_add(arrived, 1, sem="acq_rel")
        while tl.atomic_add(arrived, 0, sem="acquire") < (step + 1) * tl.num_programs(0):
            pass
        tl.debug_barrier()


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=int, default=64, metavar="N", help="of a chain, an even number")
    steps = parser.parse_args().steps
    if steps < 2 or steps % 2:
        parser.error(f"--steps is {steps}, and has to be even and at least 2")
    if not torch.cuda.is_available() or not launches_early(torch.device("cuda")):
        print("no GPU that launches kernels early", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, chains of {steps}, microseconds a step")
    print(f"{'numbers':>8} {'in turn':>8} {'early':>8} {'persistent':>10} {'its blocks':>10}")
    for count in SIZES:
        one, other = torch.rand(count, device="cuda"), torch.empty(count, device="cuda")
        begin, expected = one.clone(), one
        for _ in range(steps):
            expected = expected.roll(-SHIFT) * 0.999 + 0.5

        def microseconds(
            launch: Callable[[], None], one: Tensor = one, begin: Tensor = begin, out: Tensor = expected
        ) -> float:
            graph = captured(launch)
            one.copy_(begin)
            graph.replay()
            torch.testing.assert_close(one, out)
            return replayed(graph) / steps

        in_turn, early = (microseconds(chain(one, other, steps, is_early)) for is_early in (False, True))
        persistent = {blocks: microseconds(at_once(one, other, steps, blocks)) for blocks in BLOCKS}
        blocks = min(persistent, key=persistent.__getitem__)
        print(f"{count:>8} {in_turn:>8.2f} {early:>8.2f} {persistent[blocks]:>10.2f} {blocks:>10}")
    return 0


def chain(one: Tensor, other: Tensor, steps: int, is_early: bool) -> Callable[[], None]:
    """A launch a step."""

    def launch() -> None:
        source, target = one, other
        for _ in range(steps):
            grid = (triton.cdiv(one.numel(), ELEMENTS),)
            one_step[grid](source, target, one.numel(), SHIFT, ELEMENTS, is_early, launch_pdl=is_early)
            source, target = target, source

    return launch


def at_once(one: Tensor, other: Tensor, steps: int, blocks: int) -> Callable[[], None]:
    """All steps in one launch."""
    arrived = torch.zeros(1, dtype=torch.int32, device="cuda")

    def launch() -> None:
        arrived.zero_()
        all_steps[(blocks,)](one, other, arrived, one.numel(), steps, SHIFT, ELEMENTS)

    return launch


def captured(launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of the launches, compiled before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


def replayed(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of a replay: the median over ROUNDS of REPLAYS each."""
    samples = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / REPLAYS)
    return median(samples)


if __name__ == "__main__":
    sys.exit(main())
