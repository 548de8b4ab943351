"""How long a model's CUDA Graph takes from its capture on, and after the GPU has run another context's work.

python scripts/benchmark_context_switch.py MODEL ... [--batch 1] [--calls 100]

Captures the model's eager execution on one stream by PyTorch's own means, times replays by events on the GPU, switches
contexts (systems/scheduling/context_switch.py), and times again: medians, in milliseconds. Needs a GPU.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console
from rich.table import Table

import models
from runners.arithmetic import set_precision
from scripts.arguments import Parser
from systems.scheduling.context_switch import switch_contexts

WARM_UP_CALLS = 20


def milliseconds(call: Callable[[], None], calls: int) -> float:
    samples = []
    for _ in range(WARM_UP_CALLS + calls):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end))
    return median(samples[WARM_UP_CALLS:])


def captured(model: models.Model) -> torch.cuda.CUDAGraph:
    for _ in range(3):
        model.module(*model.inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.module(*model.inputs)
    return graph


@torch.no_grad()
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("models", nargs="+", choices=models.names(), metavar="MODEL")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--calls", type=int, default=100, help="replays that are timed each time")
    arguments = parser.parse_args()
    for option in ("batch", "calls"):
        if getattr(arguments, option) < 1:
            parser.error(f"--{option} {getattr(arguments, option)} is not an integer of at least 1")
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    set_precision("tf32")
    table = Table(title=f"{torch.cuda.get_device_name(device)}, batch {arguments.batch}")
    for column in ("model", "captured, ms", "after a context switch, ms", "ratio", "the switch took, ms"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name in arguments.models:
        graph = captured(models.load(name, arguments.batch, device="cuda"))
        before = milliseconds(graph.replay, arguments.calls)
        start = perf_counter()
        if not switch_contexts(device):
            parser.error("the GPU has no room for another context")
        took = (perf_counter() - start) * 1e3
        after = milliseconds(graph.replay, arguments.calls)
        table.add_row(name, f"{before:.3f}", f"{after:.3f}", f"{before / after:.3f}", f"{took:.0f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
