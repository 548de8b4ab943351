"""Which operators are memory-intensive and which compute-intensive, by the paper's table or by arithmetic intensity."""

import math
from collections.abc import Callable, Iterable
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch.fx import Node
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from systems.base import Unsupported
from systems.scheduling.graph.effects import is_view
from systems.scheduling.graph.fused_kernel import FusedKernel
from systems.scheduling.graph.program import Program

from .measurements import Measurements

# Opara classifies by an "offline-collected operator table" (Section 3.3), which the paper does not print. It names Conv,
# Sgemm, Embedding and Arange as compute-intensive, and Relu, Add, To and Ones as memory-intensive. The released prototype
# counts activations, elementwise arithmetic, normalisation, pooling, and operators that only move or lay out data as
# memory-intensive, and everything else as compute-intensive. This is that rule in aten's names.
_TABLE = """
    abs add addcmul ceil clamp div eq exp floor ge gt le log lt max maximum min minimum mul ne neg pow reciprocal rsqrt sqrt
    sub where
    elu gelu hardsigmoid hardswish hardtanh leaky_relu relu sigmoid silu softmax _softmax tanh
    batch_norm group_norm instance_norm layer_norm _native_batch_norm_legit_no_training native_layer_norm
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool2d avg_pool1d avg_pool2d max_pool1d max_pool2d
    max_pool2d_with_indices mean _adaptive_avg_pool2d
    _to_copy alias cat chunk clone constant_pad_nd contiguous copy detach dropout expand flatten pad permute reshape select
    slice split split_with_sizes squeeze stack to transpose t unbind unsafe_view _unsafe_view unsqueeze view
    full full_like ones ones_like zeros zeros_like
"""
MEMORY_INTENSIVE = frozenset(_TABLE.split())
RESIDUAL_SECOND = ("mkldnn._convolution_pointwise.binary",)  # what it adds stands before its weight
PRODUCT_NAMES = ("addmm", "linear", "matmul", "mm")  # also where a kernel of this project stands for one
# Operators that read some rows of their first argument.
LOOKUPS = frozenset({"embedding", "embedding_bag", "_embedding_bag", "index", "index_select", "gather", "take"})
METHODS = ("measured", "table")
MATRIX_SIZE = {"cuda": 4096, "cpu": 1024}  # rows and columns of the products that measure peak arithmetic
COPIED_BYTES = {"cuda": 1 << 29, "cpu": 1 << 27}  # of the copy that measures bandwidth, beyond any cache
WORK: dict[tuple[torch.device, str], tuple[int, int]] = {}  # of operators, by device and signature
WARM_UP_SECONDS = 0.1  # an idle device clocks up
REPEATS = 5


def memory_intensive(program: Program, method: str) -> list[bool]:
    """For each operator, whether it is memory-intensive rather than compute-intensive.

    Args:
        method: `table` decides by the operator's name, as the paper's table does; elementwise operators and reductions that
            are fused into one are memory-intensive. `measured` compares the arithmetic intensity with the device's ridge
            point, from which on arithmetic rather than memory limits an operator.

    Raises:
        Unsupported: `measured`, on a device that cannot be measured.
    """
    if method == "table":
        pairs = zip(program.graph.operators, program.calls, strict=True)
        return [in_table(o.name) or isinstance(call.function, FusedKernel) for o, call in pairs]
    return [_is_memory_intensive(program, v) for v in range(len(program.graph))]


def _is_memory_intensive(program: Program, v: int) -> bool:
    """As measured. The work of an operator is counted once in a process: a search asks for the same ones again and again."""
    key = program.device, program.signature(v)
    if key not in WORK:
        WORK[key] = work(program, v)
    operations, moved = WORK[key]
    ridge = ridge_point(program.device, _arithmetic(program, v), _uses_tf32(program, v)) if operations else math.inf
    return operations < ridge * moved or not operations


def in_table(name: str) -> bool:
    """Does the paper's table call the operator of this name (aten's, without overload) memory-intensive?"""
    return name in MEMORY_INTENSIVE


def work(program: Program, v: int) -> tuple[int, int]:
    """Floating-point operations and bytes of operator `v`; their ratio is its arithmetic intensity. A view has neither.

    Operations are what torch.utils.flop_counter counts, or two for each multiplication and addition of a convolution or a
    product that it does not know. Any other operator counts one for each element that it reads or writes, since memory
    limits it in any case. The bytes are the sum of `moved_bytes`.
    """
    call = program.calls[v]
    read, written = _moved(program, v)
    moved = num_bytes(read) + num_bytes(written)
    if not any(t.is_floating_point() for t in written):
        return 0, moved
    name = program.graph.operators[v].name
    operations = 0
    if "scaled_dot_product" in name:  # the library's, or a kernel of our own
        operations = _attention(*(program.value(argument) for argument in call.args[:3]))
    elif "grouped_mm" in name and len(written) == 1 and (weight := program.value(call.args[1])).dim() == 3:  # as those
        rows = written[0].numel() // max(1, written[0].shape[-1])
        operations = 2 * rows * weight[0].numel()  # each row by the weight of its group
    elif isinstance(call.function, torch._ops.OpOverload):
        operations = _counted(program, v)
    if not operations and ("conv" in name or name in PRODUCT_NAMES) and len(call.args) > 1:
        weight = program.value(call.args[2 if str(call.function) in RESIDUAL_SECOND else 1])
        if isinstance(weight, Tensor):
            operations = 2 * written[0].numel() * weight[0].numel()
    return operations or sum(map(_num_elements, (*read, *written))), moved


def moved_bytes(program: Program, v: int) -> tuple[int, int]:
    """Bytes that operator `v` reads and writes: its distinct arguments and its outputs, each moved once; (0, 0) for a view.

    An expanded dimension holds one element. A tensor whose shape the capture does not know is left out.
    """
    read, written = _moved(program, v)
    return num_bytes(read), num_bytes(written)


def tables_of(program: Program, v: int) -> list[Any]:
    """The arguments of operator `v` of which it reads some rows: those that lookups alone read, where it is a group."""
    call = program.calls[v]
    if not isinstance(call.function, FusedKernel):
        return call.leaves()[:1] if program.graph.operators[v].name in LOOKUPS else []
    placeholders = call.function.module.graph.find_nodes(op="placeholder")
    return [a for a, p in zip(call.args, placeholders, strict=True) if all(_looks_up(user, p) for user in p.users)]


def _looks_up(node: Node, table: Node) -> bool:
    """Is this operator a lookup in `table`?"""
    name = getattr(node.target, "__name__", "").partition(".")[0]  # aten's, without its overload
    return name in LOOKUPS and node.args[0] is table


def _moved(program: Program, v: int) -> tuple[list[Tensor], list[Tensor]]:
    """The distinct tensors that an operator reads, and those that it writes; none for a view."""
    call = program.calls[v]
    if is_view(call.function):
        return [], []
    arguments = (program.value(a) for a in tree_leaves((call.args, call.kwargs)))
    read = {id(t): t for t in arguments if isinstance(t, Tensor)}
    return [*read.values()], [t for t in tree_leaves(call.produces) if isinstance(t, Tensor)]


def _counted(program: Program, v: int) -> int:
    """What torch's counter says, on tensors without data; 0 of an operator that it does not know."""
    device = program.device

    def fake(argument: Any) -> Any:
        value = program.value(argument)
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

    with FakeTensorMode():
        call = program.calls[v].map(fake)
        with FlopCounterMode(display=False) as counter:
            try:
                call.function(*call.args, **call.kwargs)
            except UnsupportedOperatorException:  # it runs on tensors with data alone
                return 0
    return int(counter.get_total_flops())


def _attention(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Operations of both products of attention, [B, heads, S, D] each; keys and values may have fewer heads.

    torch 2.11 counts no attention on a CPU, and none whose keys have fewer heads.
    """
    num_scores = query[..., 0].numel() * key.shape[-2]
    return 2 * num_scores * (query.shape[-1] + value.shape[-1])


def _num_elements(tensor: Tensor) -> int:
    """The elements that lie in memory: an expanded dimension holds one."""
    return math.prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Of all of them; an expanded dimension holds one element."""
    return sum(_num_elements(t) * t.element_size() for t in tensors)


def _arithmetic(program: Program, v: int) -> torch.dtype:
    outputs = [t for t in tree_leaves(program.calls[v].produces) if isinstance(t, Tensor) and t.is_floating_point()]
    return outputs[0].dtype


def _uses_tf32(program: Program, v: int) -> bool:
    if program.device.type != "cuda":
        return False
    is_convolution = "conv" in program.graph.operators[v].name
    return torch.backends.cudnn.allow_tf32 if is_convolution else torch.backends.cuda.matmul.allow_tf32


@cache
def ridge_point(device: torch.device, dtype: torch.dtype, tf32: bool = False) -> float:
    """Operations a byte at which peak arithmetic and peak bandwidth of `device` meet.

    Both are measured once and kept in the cache: the best of a few matrix products in `dtype`, and of a few copies.

    Args:
        tf32: The products round float32 to TF32.

    Raises:
        Unsupported: Nothing runs on this device.
    """
    if device.type not in MATRIX_SIZE:
        raise Unsupported(f"arithmetic intensity is measured against the device's ridge point, and nothing runs on {device}")
    cache, name = Measurements("opara", device), f"ridge point of {dtype}{' as TF32' if tf32 else ''}"
    if name not in cache:
        cache.add({name: _measured_ridge_point(device, dtype, tf32)})
    return cache.number(name)


@torch.no_grad()
def _measured_ridge_point(device: torch.device, dtype: torch.dtype, tf32: bool) -> float:
    n = MATRIX_SIZE[device.type]
    matrix = torch.ones(n, n, dtype=dtype, device=device)  # [n, n]
    product = torch.empty_like(matrix)  # [n, n]
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        operations = 2 * n**3 / _best_seconds(lambda: torch.mm(matrix, matrix, out=product), device)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    return operations / bandwidth(device)


@cache
def bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy within memory reads and writes, the best of a few; measured once and kept in the cache."""
    known, name = Measurements("opara", device), "bandwidth"
    if name not in known:
        source = torch.ones(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        known.add({name: 2 * source.numel() / _best_seconds(lambda: target.copy_(source), device)})
    return known.number(name)


def _best_seconds(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of REPEATS calls, after some to warm up."""

    def seconds() -> float:
        start = perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return perf_counter() - start

    begin = perf_counter()
    while perf_counter() - begin < WARM_UP_SECONDS:
        seconds()
    return min(seconds() for _ in range(REPEATS))
