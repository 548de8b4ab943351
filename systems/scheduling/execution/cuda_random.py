"""Random numbers in a captured graph: drawn from torch's generator, in eager's order, other ones at every replay."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .cuda_streams import Streams


class GraphRandomness:
    """Has torch's default generator of a device count what operators under a raw stream capture draw, and move on with each
    replay, so that a replay gives the numbers of an eager run from the same state.

    torch does both for a torch.cuda.CUDAGraph alone: while one is being captured, a kernel is told how many numbers the
    capture has taken before it, and where in memory it will find the generator's seed and offset; before a replay those two
    are written there, and the generator moves on by what the whole graph takes. Our graphs are captured on streams of our
    own, into memory of our own. So an empty CUDAGraph is captured for as long as ours is, on a stream beside; it is the one
    that counts, and launching it before ours writes the two numbers. The launch order of ours has to be eager's wherever
    random numbers are drawn, which the graph's state sees to.

    That serves a torch in which a generator counts for any capture (2.11). Where it counts for each by itself, the operator
    that draws raises RuntimeError under capture.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.streams = Streams(device)
        self.stream = self.streams.take([False])[0].torch
        self.companion: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Within, captures of this thread may draw; what the last such captured is what `advance` moves on by."""
        previous = self.companion  # the memory of seed and offset lives as long as one of them does
        self.companion = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            self.companion.capture_begin(capture_error_mode="thread_local")
        try:
            yield
        finally:
            with torch.cuda.stream(self.stream), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it is empty on purpose
                self.companion.capture_end()
            del previous

    def advance(self) -> None:
        """Before a replay, on the stream of that."""
        assert self.companion is not None, "nothing was captured"
        self.companion.replay()

    def check(self) -> None:
        """Raise RuntimeError where the generator did not count: each replay would draw the same numbers."""
        with torch.random.fork_rng(devices=[self.device]):
            generator = torch.cuda.default_generators[self.stream.device_index]
            before = generator.get_offset()
            self.advance()
            if generator.get_offset() == before:
                raise RuntimeError("this torch does not count random numbers drawn under a raw stream capture")
