"""What a call of a small CUDA graph takes, by who copies its inputs in and its output out.

python tests/benchmarks/benchmark_copies.py [--kernels N]

`none` launches the graph alone. `calls` copies by calls of their own, before and after the launch. `nodes` has the copies
within the graph, as systems/scheduling/execution/graph_copies.py does. A call sets the other end of a copy where it lies
elsewhere than last time: of the output alone, or (`moved`) of the inputs too. Microseconds on the host, to the end of a
synchronisation, the median over calls in turn; each way's result is compared with PyTorch's operators first. Needs a GPU.
"""

import sys
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch
from cuda.bindings import runtime as cudart
from torch import Tensor

from scripts.arguments import Parser
from systems.scheduling.execution.cuda_streams import begin_capture, checked

INPUTS = {"a recommender's row": ((1, 13), (1, 1, 26)), "an image": ((1, 3, 224, 224),)}
CALLS = 2000
MEMCPY = cudart.cudaGraphNodeType.cudaGraphNodeTypeMemcpy
ON_DEVICE = cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice


class Chain:
    """A graph of small kernels from static inputs to a static output.

    Args:
        inputs: examples.
        kernels: how many.
        has_copies: the graph copies from the inputs and to an output of its own.
    """

    def __init__(self, inputs: Sequence[Tensor], kernels: int, has_copies: bool):
        self.static = [x.clone() for x in inputs]
        self.zeros = torch.zeros(1024, device="cuda")
        self.steps = [torch.empty_like(self.zeros) for _ in range(2)]
        self.out = torch.empty(8, device="cuda")
        self.addresses = [x.data_ptr() for x in inputs] + [self.out.data_ptr()]
        self.last = self.steps[(kernels + 1) % 2][:8]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(inputs, kernels, has_copies)  # loads the kernels
            stream.synchronize()
            begin_capture(stream.cuda_stream)
            self._run(inputs, kernels, has_copies)
        self.graph = checked(cudart.cudaStreamEndCapture(stream.cuda_stream))
        self.exec = checked(cudart.cudaGraphInstantiate(self.graph, 0))
        _, number = checked(cudart.cudaGraphGetNodes(self.graph, 0))
        nodes, _ = checked(cudart.cudaGraphGetNodes(self.graph, number))
        self.copies = [node for node in nodes if checked(cudart.cudaGraphNodeGetType(node)) == MEMCPY]
        assert len(self.copies) == (len(inputs) + 1 if has_copies else 0)

    def _run(self, inputs: Sequence[Tensor], kernels: int, has_copies: bool) -> None:
        if has_copies:
            for static, x in zip(self.static, inputs, strict=True):
                static.copy_(x, non_blocking=True)
        torch.add(self.zeros, self.static[0].view(-1)[0], out=self.steps[1])
        for i in range(kernels):
            torch.add(self.steps[(i + 1) % 2], 1.0, out=self.steps[i % 2])
        if has_copies:
            self.out.copy_(self.last, non_blocking=True)

    def launch(self) -> None:
        checked(cudart.cudaGraphLaunch(self.exec, torch.cuda.current_stream().cuda_stream))

    def by_calls(self, inputs: Sequence[Tensor]) -> Tensor:
        for static, x in zip(self.static, inputs, strict=True):
            static.copy_(x, non_blocking=True)
        self.launch()
        return self.last.clone()

    def by_nodes(self, inputs: Sequence[Tensor]) -> Tensor:
        out = torch.empty_like(self.out)
        for i, (x, static) in enumerate(zip(inputs, self.static, strict=True)):
            self._set(i, x, static.data_ptr(), x.data_ptr())
        self._set(len(inputs), out, out.data_ptr(), self.last.data_ptr())
        self.launch()
        return out

    def _set(self, i: int, moving: Tensor, target: int, source: int) -> None:
        """Set copy i's addresses, where the end that calls decide is not where it was."""
        if moving.data_ptr() != self.addresses[i]:
            self.addresses[i] = moving.data_ptr()
            setting = self.exec, self.copies[i], target, source, moving.nbytes, ON_DEVICE
            checked(cudart.cudaGraphExecMemcpyNodeSetParams1D(*setting))


def microseconds(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The median call of each way, in turn."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(CALLS):
        for name, call in ways.items():
            torch.cuda.synchronize()
            begin = perf_counter()
            call()
            torch.cuda.synchronize()
            taken[name].append((perf_counter() - begin) * 1e6)
    return {name: median(times[CALLS // 4 :]) for name, times in taken.items()}


@torch.no_grad()
def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--kernels", type=int, default=12, metavar="N", help="of the graph")
    kernels = parser.parse_args().kernels
    if kernels < 1:
        parser.error(f"--kernels is {kernels}, and has to be at least 1")
    if not torch.cuda.is_available():
        print("no GPU", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, {kernels} kernels, microseconds a call")
    for name, shapes in INPUTS.items():
        sets = [[torch.rand(shape, device="cuda") for shape in shapes] for _ in range(2)]
        plain, copying, moving = (Chain(sets[0], kernels, has_copies) for has_copies in (False, True, True))
        turn = count()
        for inputs in sets:
            expected = (inputs[0].view(-1)[0] + kernels).expand(8)
            for out in (plain.by_calls(inputs), copying.by_nodes(inputs), moving.by_nodes(inputs)):
                torch.testing.assert_close(out, expected)
        ways: dict[str, Callable[[], object]] = {
            "none": plain.launch,
            "calls": lambda plain=plain, sets=sets: plain.by_calls(sets[0]),  # type: ignore[misc]
            "nodes": lambda copying=copying, sets=sets: copying.by_nodes(sets[0]),  # type: ignore[misc]
            "moved": lambda moving=moving, sets=sets, turn=turn: moving.by_nodes(sets[next(turn) % 2]),  # type: ignore[misc]
        }
        print(f"{name:>20}: " + ", ".join(f"{way} {us:.1f}" for way, us in microseconds(ways).items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
