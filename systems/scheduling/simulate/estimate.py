"""An operator that no profile knows, by a roofline rule: an estimate, which never stands beside measurements unlabelled.

An operator is one kernel of T equal tiles. On S multiprocessors it takes

    t = start + max(ceil(T / S) * operations / T / (share * rate / S), bytes / (share_of_bandwidth * bandwidth))

with the GPU's peak rate in the operator's arithmetic. Tiles are of a product's output, or rows of an attention's queries; a
product of few tiles splits each into several blocks, and is hardly faster for it. Any other operator's tiles are elements of
its output, and memory alone limits it. A lookup moves what it returns.

A recurrent operator is a chain of kernels, one for each step of each layer and direction. Each is a product of the batch at
that step with its layer's weights, which it reads anew. What else a step computes is left out, and none runs beside another.

`start` and both shares are of a kind of operators. They are fitted on the profiles of five models on an H200 at batch 1, 8
and 32 (tests/benchmarks/benchmark_advice.py --fit), all in tf32: its shares stand in for those of fp16 and bf16.
"""

from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from systems.profiling.intensity import LOOKUPS, moved_bytes, num_bytes, work
from systems.profiling.profile import Kernel, OperatorProfile
from systems.scheduling.graph.effects import is_view, named
from systems.scheduling.graph.partial_writes import WRITE_PARTS, writes_of
from systems.scheduling.graph.program import Program

from .gpu import Gpu

TILE, ROWS = 64, 64  # of a product's output, in each dimension; of an attention's queries
DEPTH = 128  # of a product at least, that a block adds up: few tiles are split along it, as far as SMs are free
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Rule:
    """What is fitted of a kind of operators.

    Args:
        start_us: Of a kernel that does next to nothing.
        share: Of peak arithmetic that it reaches; None where memory alone limits it.
        bandwidth: Share of memory's that it reaches.
        threads, registers, shared_memory: Of a block: typical ones, not fitted.
        elements: Of the output, that a block computes; of those alone that memory limits.
    """

    start_us: float
    share: float | None
    bandwidth: float
    threads: int = 128
    registers: int = 32
    shared_memory: int = 0
    elements: int = 1024


RULES = {
    "product": Rule(2.75, 0.62, 1.0, 256, 128, 32768),  # outside matrix units
    "matrix": Rule(3.25, 0.22, 0.7, 256, 128, 49152),  # by matrix units
    "depthwise": Rule(3.0, None, 0.2),
    "attention": Rule(8.0, 0.6, 0.2, 128, 128, 32768),
    "pooling": Rule(2.5, None, 0.25, elements=256),
    "reduction": Rule(1.75, None, 0.55, elements=256),
    "lookup": Rule(1.5, None, 0.95),
    "elementwise": Rule(1.0, None, 1.0),
}
PRODUCTS = frozenset({"linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "einsum", "_grouped_mm"})
RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})  # over all steps; one step is a "_cell"
REDUCTIONS = ("norm", "softmax", "mean", "sum", "amax", "argmax", "var", "cumsum", "topk", "sort")


@dataclass(frozen=True)
class Demand:
    """What an operator asks of a GPU.

    Args:
        kind: One of RULES.
        blocks: Of each of its kernels.
        arithmetic_us: By peak arithmetic, at most one block an SM at a time; 0 where memory alone limits it.
        memory_us: By peak bandwidth.
        bytes_read, bytes_written: As a profile has them; a recurrent operator reads its weights in each step.
        kernels: One after the other, equal ones.
    """

    kind: str
    blocks: int
    arithmetic_us: float
    memory_us: float
    bytes_read: int
    bytes_written: int
    kernels: int = 1

    def microseconds(self, rule: Rule) -> float:
        """That it takes alone."""
        arithmetic_us = self.arithmetic_us / rule.share if rule.share else 0.0
        return self.kernels * rule.start_us + max(arithmetic_us, self.memory_us / rule.bandwidth)


def estimated(program: Program, v: int, gpu: Gpu) -> OperatorProfile:
    """Operator `v` alone on a GPU; a view takes no time."""
    if is_view(program.calls[v].function):
        return OperatorProfile(0.0)
    demand = demand_of(program, v, gpu)
    rule = RULES[demand.kind]
    milliseconds = demand.microseconds(rule) / 1e3
    grid, block = (demand.blocks, 1, 1), (rule.threads, 1, 1)
    of_each = milliseconds / demand.kernels
    kernel = Kernel(f"estimated {demand.kind}", of_each, grid, block, rule.registers, rule.shared_memory)
    return OperatorProfile(milliseconds, (kernel,) * demand.kernels, demand.bytes_read, demand.bytes_written)


def demand_of(program: Program, v: int, gpu: Gpu) -> Demand:
    """Of an operator that is no view; one whose output is empty asks for a launch alone."""
    kind, output = kind_of(program, v, gpu), _output(program, v)
    elements = 1 if output is None else output.numel()
    if not elements:
        return Demand(kind, 1, 0.0, 0.0, 0, 0)
    if _is_recurrent(program, v):
        return _chain(program, v, gpu, kind)
    (read, written), operations = moved_bytes(program, v), 0
    if kind == "lookup":
        read = written
    tiles = blocks = max(1, ceil(elements / RULES[kind].elements))
    if RULES[kind].share is not None and output is not None:
        operations, rows = work(program, v)[0], _rows(program, v, output)
        if kind == "attention":
            tiles = blocks = prod(output.shape[:-2]) * ceil(output.shape[-2] / ROWS)
        else:
            columns = _columns(program, v, output)
            tiles = ceil(rows / TILE) * ceil(columns / TILE) * max(1, elements // max(1, rows * columns))
            blocks = _split(tiles, operations // max(1, 2 * elements), gpu)
    arithmetic_us = _arithmetic_us(program, v, gpu, operations, tiles)
    is_written = program.calls[v].function is WRITE_PARTS
    kernels = 1 + len(list(writes_of(_argument(program, v, "parts", [])))) if is_written else 1
    return Demand(kind, blocks, arithmetic_us, _memory_us(gpu, read + written), read, written, kernels)


def _chain(program: Program, v: int, gpu: Gpu, kind: str) -> Demand:
    """Of a recurrent operator: a chain of products, one for each step of each layer and direction."""
    call = program.calls[v]
    source, state = (program.value(a) for a in (call.args[0], tree_leaves(_argument(program, v, "hx", None))[0]))
    values = (program.value(a) for a in tree_leaves(call.args[2:]))
    weights = [value for value in values if isinstance(value, Tensor) and value.dim() == 2]
    num_weights = sum(weight.numel() for weight in weights)
    inputs, batch, columns = prod(source.shape[:-1]), state.shape[-2], weights[0].shape[0]
    steps = ceil(inputs / batch)
    layers = _argument(program, v, "num_layers", 1) * (2 if _argument(program, v, "bidirectional", False) else 1)
    read, written = moved_bytes(program, v)
    read += (steps - 1) * num_bytes(weights)
    tiles = ceil(batch / TILE) * ceil(columns / TILE)
    blocks = _split(tiles, num_weights // (layers * columns), gpu)
    arithmetic_us = _arithmetic_us(program, v, gpu, 2 * inputs * num_weights, tiles)
    return Demand(kind, blocks, arithmetic_us, _memory_us(gpu, read + written), read, written, steps * layers)


def _arithmetic_us(program: Program, v: int, gpu: Gpu, operations: int, tiles: int) -> float:
    rate = _peak(program, v, gpu) * 1e6  # operations a microsecond
    return ceil(tiles / gpu.multiprocessors) * operations / tiles / (rate / gpu.multiprocessors)


def _memory_us(gpu: Gpu, moved: int) -> float:
    return moved / (gpu.bandwidth_gb_s * 1e3)


def kind_of(program: Program, v: int, gpu: Gpu) -> str:
    """One of RULES."""
    name = program.graph.operators[v].name
    if "attention" in name:
        return "attention"
    if name in LOOKUPS:
        return "lookup"
    if "conv" in name:
        source, weight = (program.value(a) for a in program.calls[v].args[:2])
        if source.shape[1 - weight.dim()] == _argument(program, v, "groups", 1) > 1:
            return "depthwise"
    if "conv" in name or name in PRODUCTS or _is_recurrent(program, v):
        return "matrix" if _peak(program, v, gpu) > gpu.fp32_tflops else "product"
    if "pool" in name:
        return "pooling"
    return "reduction" if any(part in name for part in REDUCTIONS) else "elementwise"


def _peak(program: Program, v: int, gpu: Gpu) -> float:
    """Arithmetic in 1e12 operations a second."""
    name, output = program.graph.operators[v].name, _output(program, v)
    if output is not None and output.dtype in HALF:
        return gpu.half_tflops
    if "conv" in name or name in RECURRENT:
        return gpu.tf32_tflops if torch.backends.cudnn.allow_tf32 else gpu.fp32_tflops
    is_product = name in PRODUCTS or _is_recurrent(program, v)
    return gpu.tf32_tflops if is_product and torch.backends.cuda.matmul.allow_tf32 else gpu.fp32_tflops


def _split(tiles: int, depth: int, gpu: Gpu) -> int:
    """The blocks of a product, of which few tiles are split along what they add up."""
    return tiles * max(1, min(depth // DEPTH, gpu.multiprocessors // tiles))


def _is_recurrent(program: Program, v: int) -> bool:
    return program.graph.operators[v].name.removesuffix("_cell") in RECURRENT


def _argument(program: Program, v: int, name: str, default: Any) -> Any:
    """Of an operator of PyTorch, by its name; the default where it was not passed."""
    call = program.calls[v]
    arguments = named(call.function, call.args, call.kwargs) if isinstance(call.function, OpOverload) else call.kwargs
    return arguments.get(name, default)


def _output(program: Program, v: int) -> Tensor | None:
    return next((t for t in tree_leaves(program.calls[v].produces) if isinstance(t, Tensor)), None)


def _columns(program: Program, v: int, output: Tensor) -> int:
    """Of a product's output as a matrix: the channels of a group of a convolution, or the last dimension."""
    if "conv" not in program.graph.operators[v].name:
        return output.shape[-1] if output.dim() else 1
    source, weight = (program.value(a) for a in program.calls[v].args[:2])
    channels = output.shape[1]
    return max(1, channels * weight.shape[1] // source.shape[1])


def _rows(program: Program, v: int, output: Tensor) -> int:
    """Of a product's output as a matrix; of a batch of products those of one."""
    if "conv" in program.graph.operators[v].name:
        return output.numel() // max(1, output.shape[1])
    is_batched = program.graph.operators[v].name in ("bmm", "baddbmm")
    return output.shape[-2] if is_batched else output.numel() // max(1, output.shape[-1] if output.dim() else 1)
