"""How near the kernels that serve are to the rate at which a GPU copies: attention of a batch, products of one token.

python tests/benchmarks/benchmark_serving.py [--attention] [--products] [--all] [--processes N]

Rates are of the bytes that a kernel has to read: keys and values, or weights. Each call of a CUDA graph has others, so that
none are in a cache. --all tries every cut of CANDIDATES, or of WITH_PROMPTS where there are prompts, and every strip of
STRIPS, and not those that are in use alone; N processes compile them. Each is compared with PyTorch's operators first.
Needs a CUDA device.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product as combinations
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch
import triton
from torch import Tensor, nn
from torch.nn import functional

from scripts.arguments import Parser
from systems.kernels.gemv import Strip
from systems.serving import gemv
from systems.serving.attention import fused
from systems.serving.attention.fused import Cut
from systems.serving.batch import Batch, Row
from systems.serving.layout import Layout, LayoutBuffer
from systems.serving.request import Sampling
from systems.serving.slots import Region

HEADS, SIZE = 40, 128  # of the 13B model
HIDDEN = HEADS * SIZE
CASES = ((1, 160), (1, 2000), (8, 300), (16, 1000), (64, 300), (128, 300), (32, 2000))  # increments, filled places of each
MIXED = ((0, 0, 2), (8, 300, 1), (62, 300, 2), (126, 300, 2), (60, 300, 4))  # and prompts beside them, of PROMPT tokens
PROMPT = 272
SHAPES = {"qkv": (3 * HIDDEN, HIDDEN), "out": (HIDDEN, HIDDEN), "up": (4 * HIDDEN, HIDDEN), "down": (HIDDEN, 4 * HIDDEN)}
CANDIDATES = tuple(
    Cut(keys, splits, warps, stages, is_by_products, least_part=keys)
    for (keys, warps, stages, is_by_products), splits in combinations(
        (
            *((32, 4, 3, True), (64, 4, 2, True), (64, 4, 3, True), (64, 2, 3, True), (128, 4, 2, True), (128, 8, 2, True)),
            *((16, 4, 4, False), (32, 4, 3, False), (64, 8, 2, False)),
        ),
        (1, 2, 4, 8, 16),
    )
)
WITH_PROMPTS = tuple(
    Cut(keys, 1, warps, stages, True) for keys, warps, stages in combinations((32, 64, 128), (4, 8), (1, 2, 3, 4))
)
COLUMNS = ((512, 1), (512, 2), (1024, 2), (1024, 4), (2048, 8))  # of a strip, and its warps
STRIPS = tuple(Strip(rows, columns, warps) for rows in (1, 2, 4, 8) for columns, warps in COLUMNS)
CACHE_BYTES = 2**28  # that a graph's calls read at least, several times what a GPU's cache holds
GB, REPEATS = 1e9, 5
TOLERANCE = 3e-3  # of fp16, by norm
EARLY = ", launched early"
LIBRARY = "a library, the product alone"
BEGIN = perf_counter()


def say(line: str) -> None:
    print(f"{perf_counter() - BEGIN:6.1f} s  {line}", flush=True)


def seconds_of(call: Callable[[int], object], count: int) -> float:
    """Of one call, the median of REPEATS replays of a graph that has `count` of them."""
    for i in range(2):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(i)
    times = []
    for _ in range(REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / count)
    return median(times[1:])


def check(output: Tensor, expected: Tensor, what: str) -> None:
    """End the program over a kernel that computes something else."""
    error = float((output - expected).float().norm() / expected.float().norm())
    if not error < TOLERANCE:
        sys.exit(f"{what} is wrong: its error is {error:.1e}")


def copy_rate() -> float:
    """Bytes a second, read and written, by a kernel."""
    source = torch.zeros(2**28, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda i: torch.neg(source, out=target), 4)


@dataclass(frozen=True)
class Attention:
    """Rows of a batch: queries, the caches of several layers, the layout, and of each row its places and tokens."""

    q: Tensor
    caches: list[Tensor]
    layout: Layout
    rows: tuple[tuple[int, int], ...]

    @property
    def num_bytes(self) -> int:
        """Of the keys and values that are read."""
        return sum(places for places, _ in self.rows) * 4 * HIDDEN

    def attend(self, cut: Cut | None, i: int) -> Tensor:
        return fused.attend(self.q, self.caches[i % len(self.caches)], self.layout, cut)

    def expected(self) -> Tensor:
        """Of the first cache, a call for each row."""
        outputs, token, slot = [], 0, 0
        for places, tokens in self.rows:
            query = self.q[token : token + tokens].transpose(0, 1)  # [heads, tokens, head size]
            key, value = self.caches[0][:, slot : slot + places].transpose(1, 2)  # each [heads, places, head size]
            outputs.append(functional.scaled_dot_product_attention(query, key, value, is_causal=tokens > 1).transpose(0, 1))
            token, slot = token + tokens, slot + places
        return torch.cat(outputs)


def attention_of(num_increments: int, num_places: int, num_prompts: int = 0) -> Attention:
    """Rows of one token, and prompts of PROMPT behind them."""
    sizes = ((num_places, 1),) * num_increments + ((PROMPT, PROMPT),) * num_prompts
    rows, slots, num_tokens = [], 0, 0
    for i, (places, tokens) in enumerate(sizes):
        region = Region((slots,), places, places)
        rows.append(Row(i, region, places - tokens, (0,) * tokens, 0, tokens, 0, Sampling()))
        slots, num_tokens = slots + places, num_tokens + tokens
    num_layers = max(2, -(-CACHE_BYTES // (slots * 4 * HIDDEN)))
    layout = LayoutBuffer(torch.device("cuda"), slots, 1, 0).of(Batch(0, tuple(rows)))
    caches = [torch.randn(2, slots + 1, HEADS, SIZE, device="cuda", dtype=torch.float16) for _ in range(num_layers)]
    return Attention(torch.randn(num_tokens, HEADS, SIZE, device="cuda", dtype=torch.float16), caches, layout, sizes)


@dataclass(frozen=True)
class Products:
    """One product of a block: a token, the weights of several layers, and what is computed before and after."""

    x: Tensor
    linears: list[nn.Linear]
    norm: nn.LayerNorm | None
    addend: Tensor | None
    is_gelu: bool

    def by_library(self, i: int) -> Tensor:
        linear = self.linears[i % len(self.linears)]
        return functional.linear(self.x, linear.weight, linear.bias)

    def own(self, strip: Strip | None, is_early: bool, i: int) -> Tensor:
        linear = self.linears[i % len(self.linears)]
        return gemv.product(self.x, linear, self.norm, self.addend, self.is_gelu, is_early, strip)

    def expected(self) -> Tensor:
        """Of the first layer."""
        output = self.linears[0](self.norm(self.x) if self.norm is not None else self.x)
        output = functional.gelu(output, approximate="tanh") if self.is_gelu else output
        return output if self.addend is None else output + self.addend


def products_of(name: str, num_layers: int) -> Products:
    num_rows, width = SHAPES[name]
    like = {"device": "cuda", "dtype": torch.float16}
    linears = [nn.Linear(width, num_rows, **like).requires_grad_(False) for _ in range(num_layers)]  # type: ignore[arg-type]
    norm = nn.LayerNorm(width, **like).requires_grad_(False) if name in ("qkv", "up") else None  # type: ignore[arg-type]
    addend = torch.randn(1, num_rows, **like) if norm is None else None  # type: ignore[call-overload]
    return Products(torch.randn(1, width, **like), linears, norm, addend, name == "up")  # type: ignore[call-overload]


def attention(case: Attention, what: str, cuts: tuple[Cut | None, ...]) -> None:
    """A line for each cut, the fastest first; None stands for the table's."""
    results = []
    for cut in cuts:
        try:
            output = case.attend(cut, 0)
        except triton.OutOfResources as error:
            say(f"{what}: {cut}: {error}")
            continue
        check(output, case.expected(), f"attention by {cut}")
        seconds = seconds_of(partial(case.attend, cut), max(8, len(case.caches)))
        used = fused.cut_of(len(case.layout.tile_rows) * HEADS, case.layout.has_prompts)
        results.append((seconds, cut or used, cut is None))
    results.sort(key=lambda result: result[0])
    for seconds, cut, is_tables in [*results[:6], *(result for result in results[6:] if result[2])]:
        rate = case.num_bytes / seconds / GB
        say(f"{what}: {seconds * 1e6:.1f} us, {rate:.0f} GB/s by {cut}{' (table)' * is_tables}")


def products(strips: tuple[Strip | None, ...]) -> None:
    """A line for each product of a block, by a library and by each strip, the fastest first."""
    for name, (num_rows, width) in SHAPES.items():
        num_bytes = num_rows * width * 2
        case = products_of(name, max(2, -(-CACHE_BYTES // num_bytes)))
        results = [(seconds_of(case.by_library, 8), LIBRARY)]
        width = case.x.shape[1]
        for strip, is_early in combinations(strips, (False, True)):
            check(case.own(strip, is_early, 0), case.expected(), f"{name} by {strip}")
            seconds = seconds_of(partial(case.own, strip, is_early), 8)
            results.append((seconds, f"{strip or gemv.strip_of(width, case.norm is not None)}{EARLY * is_early}"))
        results.sort(key=lambda result: result[0])
        for seconds, what in [*results[:6], *(result for result in results[6:] if result[1] == LIBRARY)]:
            say(f"{name}: {seconds * 1e6:.1f} us, {num_bytes / seconds / GB:.0f} GB/s by {what}")


@torch.inference_mode()
def compile_part(part: int, num_parts: int) -> None:
    """Launch what the timed loops launch, one of `num_parts` shares of it: kernels lie in Triton's cache then."""
    for case, candidates in ((attention_of(*CASES[0]), CANDIDATES), (attention_of(*MIXED[1]), WITH_PROMPTS)):
        for cut in candidates[part::num_parts]:
            with suppress(triton.OutOfResources):  # the timed loop says so
                case.attend(cut, 0)
    for name in SHAPES:
        one = products_of(name, 1)
        for strip, is_early in [*combinations(STRIPS, (False, True))][part::num_parts]:
            one.own(strip, is_early, 0)
    torch.cuda.synchronize()


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--attention", action="store_true")
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--all", action="store_true", help="every candidate, and not those in use alone")
    parser.add_argument("--processes", type=int, default=0, metavar="N", help="that compile the candidates beforehand")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device: what is measured are kernels for a GPU")
    if arguments.all and arguments.processes:
        with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
            count = arguments.processes
            list(pool.map(compile_part, range(count), [count] * count))
        say(f"{arguments.processes} processes have compiled every candidate")
    say(f"copies reach {copy_rate() / GB:.0f} GB/s on {torch.cuda.get_device_name()}")
    with torch.inference_mode():
        if arguments.attention or not arguments.products:
            for count, places in CASES:
                case = attention_of(count, places)
                attention(case, f"{count} x {places}", (None, *CANDIDATES) if arguments.all else (None,))
            for count, places, prompts in MIXED:
                case, what = attention_of(count, places, prompts), f"{count} x {places} beside {prompts} prompts"
                attention(case, what, (None, *WITH_PROMPTS) if arguments.all else (None,))
        if arguments.products or not arguments.attention:
            products(STRIPS if arguments.all else (None,))


if __name__ == "__main__":
    main()
