"""Kernels that do nothing but keep a GPU busy in a known way, to measure the GPU itself with."""

import triton
import triton.language as tl


@triton.jit
def spin(out, passes, ELEMENTS: tl.constexpr):
    """Each block multiplies and adds ELEMENTS numbers `passes` times, each time on the result of the last; out [ELEMENTS].

    With one element a thread a pass takes the latency of one instruction; with more, arithmetic limits it.
    """
    x = tl.arange(0, ELEMENTS).to(tl.float32)
    for _ in range(passes):
        x = x * 0.999 + 0.5
    tl.store(out + tl.arange(0, ELEMENTS), x)


@triton.jit
def copy(source, target, count, ELEMENTS: tl.constexpr):
    """target[:count] = source[:count], the blocks taking turns at ELEMENTS of them."""
    for start in range(tl.program_id(0) * ELEMENTS, count, tl.num_programs(0) * ELEMENTS):
        places = start + tl.arange(0, ELEMENTS)
        inside = places < count
        tl.store(target + places, tl.load(source + places, mask=inside), mask=inside)
