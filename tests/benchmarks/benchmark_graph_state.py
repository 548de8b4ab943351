"""What a call of a captured schedule takes in each state that its CUDA graph may be in.

python tests/benchmarks/benchmark_graph_state.py [--model NAME] [--batch N] [--precision NAME] [--system NAME] [--busy N]

`kernels` launches the graph with its copies off. `call` is a call of the executor whose result is dropped, so that the
next one has the same place; `kept` holds each result until the next call, so that outputs lie elsewhere every time; `moved`
has other inputs every time. `unchecked` is `call` without a look at the module's members, `bare` launches the graph with its
copies and looks at nothing. `by calls` copies before and after a launch of the kernels alone. Each state is measured as the
one before it has left the graph (`as it is`), and after the GPU has run another context's work (`switched`), which makes a
graph faster that was just captured. `--busy` has as many processes compute meanwhile. Host milliseconds to the end of a
synchronisation: the median, the tenth and the ninetieth percentile. Needs a GPU.
"""

import multiprocessing
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import numpy as np
import torch
from torch import Tensor

import models
import systems
from results.cell import choose
from runners.cell.arithmetic import set_arithmetic
from scripts.arguments import Parser
from systems.scheduling.execution.context_switch import switch_contexts
from systems.scheduling.execution.cuda_executor import CudaExecutor

CALLS = 150
TIMES = 2  # that all states are gone through


def spin() -> None:
    """Compute, and write memory, until killed."""
    torch.set_num_threads(1)
    a = torch.rand(1 << 22)
    while True:
        a.mul_(1.0001)


def ways(executor: CudaExecutor, sets: list[tuple[Tensor, ...]]) -> dict[str, Callable[[], object]]:
    turn, held = count(), [torch.empty(0)]

    def kept() -> None:
        held[0] = executor(*sets[0])

    def unchecked() -> None:
        members, executor.module_members = executor.module_members, None
        executor(*sets[0])
        executor.module_members = members

    def by_calls() -> list[Tensor]:
        for static, x in zip(executor.inputs, sets[0], strict=True):
            static.copy_(x, non_blocking=True)
        executor.replay()
        return [output.clone() for output in executor.outputs]

    return {
        "kernels": executor.replay,
        "call": lambda: executor(*sets[0]),
        "kept": kept,
        "moved": lambda: executor(*sets[next(turn) % 2]),
        "unchecked": unchecked,
        "bare": lambda: executor.copies.run(sets[0], executor._launch),
        "by calls": by_calls,
    }


def milliseconds(call: Callable[[], object]) -> str:
    taken = []
    for _ in range(CALLS):
        torch.cuda.synchronize()
        begin = perf_counter()
        call()
        torch.cuda.synchronize()
        taken.append((perf_counter() - begin) * 1e3)
    low, middle, high = np.percentile(taken, (10, 50, 90))
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


@torch.no_grad()
def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--model", default="nasnet", metavar="NAME", help="of the zoo")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="samples of a call")
    parser.add_argument("--precision", default="tf32", metavar="NAME", help="of the arithmetic")
    parser.add_argument("--system", default="nimble_fused", metavar="NAME", help="one that executes a schedule")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="processes that compute meanwhile")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU", file=sys.stderr)
        return 2
    set_arithmetic(arguments.precision, "heuristic")
    loaded = models.load(arguments.model, arguments.batch, device="cuda")
    placed = models.place(loaded, device="cuda", precision=arguments.precision, layout="contiguous")
    sets = [placed.fresh_inputs(seed) for seed in range(2)]
    system = choose("system", arguments.system)
    executor = systems.load(system.name, **system.options).prepare(placed.module, sets[0])
    assert isinstance(executor, CudaExecutor), f"{arguments.system} executes no schedule"
    busy = [multiprocessing.get_context("spawn").Process(target=spin, daemon=True) for _ in range(arguments.busy)]
    for process in busy:
        process.start()
    setting = f"{arguments.model}, batch {arguments.batch}, {arguments.precision}, {arguments.system}"
    print(f"{torch.cuda.get_device_name()}, {setting}, {arguments.busy} processes beside")
    print(f"{'as prepared':>20}: {milliseconds(executor.replay)}")
    for _ in range(TIMES):
        for name, call in ways(executor, sets).items():
            before = milliseconds(call)
            switch_contexts(executor.device)
            print(f"{name:>20}: as it is {before}, switched {milliseconds(call)}", flush=True)
    for process in busy:
        process.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
