"""What sums over the parts of a stage take, measured between processes: `measured` starts them, and is what they run.

A ring of d GPUs sends 2 (d - 1) / d of a tensor's bytes through each of its links; a GPU that sums by itself reads a
tensor's bytes d - 1 times. So sums over more GPUs than were there are taken for those of a tensor that loads a link as much.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from bisect import bisect_right
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from .parts import REDUCTIONS, Parts, environment

NUM_BYTES = tuple(2**power for power in range(12, 27, 2))  # of the tensors that are timed
SAMPLES, CALLS = 5, 20
LIMIT_S = 120.0


@dataclass(frozen=True)
class Reductions:
    """Seconds of a sum over `degree` processes, by the tensor's bytes, ascending; between them on a line.

    kind: one of parts.REDUCTIONS, or gloo, which CPUs have.
    """

    degree: int
    num_bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    kind: str = "nccl"

    def __call__(self, num_bytes: int, degree: int) -> float:
        """Over another number of processes."""
        share, measured_share = ((d - 1) / d for d in (degree, self.degree))
        count = num_bytes * share / measured_share
        if self.kind == "direct":  # beyond what goes so, it is a ring's again: the longer of both
            count = max(count, num_bytes * (degree - 1) / (self.degree - 1))
        at = min(max(bisect_right(self.num_bytes, count), 1), len(self.num_bytes) - 1)
        (low, begin), (high, end) = ((self.num_bytes[i], self.seconds[i]) for i in (at - 1, at))
        return max(begin + (end - begin) * (count - low) / (high - low), min(self.seconds))


def measured(device: str, degree: int, kind: str = REDUCTIONS[0]) -> Reductions:
    """Between `degree` processes on as many GPUs, or CPUs. Raises RuntimeError where one of them fails.

    kind: one of REDUCTIONS.
    """
    module = f"{(__package__ or '').removesuffix('systems.serving')}systems.serving.reductions"
    with tempfile.TemporaryFile() as meeting:  # nothing is left of it if this process dies
        rendezvous = f"/proc/self/fd/{meeting.fileno()}"
        processes = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", module, device, str(degree), str(rank), rendezvous, kind],
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                pass_fds=[meeting.fileno()],
                env=environment(1),
            )
            for rank in range(degree)
        ]
        try:
            output, _ = processes[0].communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"sums over {degree} processes took more than {LIMIT_S:.0f} s") from None
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if not output:
        raise RuntimeError(f"a process of {degree} that sum ended with status {processes[0].returncode}")
    answer = json.loads(output)
    return Reductions(degree, NUM_BYTES, tuple(answer["seconds"]), answer["kind"])


def timed(device: str, degree: int, rank: int, rendezvous: str, kind: str) -> tuple[str, list[float]]:
    """What sums, and seconds for each of NUM_BYTES, as one of the processes.

    On GPUs calls are of a CUDA graph, as in an engine.
    """
    from .link import Link

    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    limit = timedelta(seconds=LIMIT_S)
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=degree, timeout=limit)
    link = Link(Parts(1, degree), rank, dist.group.WORLD)
    if kind == "direct":
        link.reach(torch.device("cuda", rank) if on_gpu else torch.device("cpu"), torch.float32)
    seconds = []
    for count in NUM_BYTES:
        tensor = torch.zeros(count // 4, device=device)
        for _ in range(3):
            link.sum(tensor)
        graph = torch.cuda.CUDAGraph() if on_gpu else None
        if graph is not None:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                for _ in range(CALLS):
                    link.sum(tensor)
        times = []
        for _ in range(SAMPLES):
            dist.barrier()
            if on_gpu:
                torch.cuda.synchronize()
            begin = perf_counter()
            if graph is not None:
                graph.replay()
                torch.cuda.synchronize()
            else:
                for _ in range(CALLS):
                    link.sum(tensor)
            times.append((perf_counter() - begin) / CALLS)
        seconds.append(median(times))
    return "gloo" if not on_gpu else "nccl" if link.direct is None else "direct", seconds


if __name__ == "__main__":
    made_by, seconds = timed(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
    print(json.dumps({"kind": made_by, "seconds": seconds}), flush=True)
    os._exit(0)  # the end of a process group waits for others, which may be gone
