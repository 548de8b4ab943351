"""Sums by the GPUs of a host from each other's memory."""

from collections.abc import Callable

import pytest
import torch
from interpreted import interpreted
from torch import Tensor

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def memory_of(degree: int, half: int, device: str, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Of each GPU, for parts and for counts. Parts are what no sum may have in it."""
    from systems.serving.direct import BLOCKS

    parts = tuple(torch.full((2 * half,), torch.nan, device=device, dtype=dtype) for _ in range(degree))
    return parts, tuple(torch.zeros(BLOCKS * degree, device=device, dtype=torch.int32) for _ in range(degree))


def one_of_three() -> list[float]:
    """The errors of the first GPU's sums, where the others have put their parts there: in Triton's interpreter."""
    from systems.serving.direct import BLOCKS, WIDTH, launch_sum

    torch.manual_seed(0)
    half = 2 * BLOCKS * WIDTH
    parts, counts = memory_of(3, half, "cpu", torch.float32)
    errors = []
    for i, (size, has_addend) in enumerate([(5, True), (WIDTH + 1, False), (half - 9, True)], 1):
        x, one, two, addend = (torch.randn(size) for _ in range(4))
        for rank, part in ((1, one), (2, two)):
            parts[rank][i % 2 * half :][:size] = part
            counts[0].view(BLOCKS, 3)[:, rank] = i
        expected = x + one + two + (addend if has_addend else 0)
        counts[0].view(BLOCKS, 3)[:, 0] = i - 1
        launch_sum(x, addend if has_addend else None, parts, counts, 0)
        errors.append(float((x - expected).abs().max()))
        num_blocks = min(BLOCKS, -(-size // WIDTH))
        for rank in range(3):  # each is told by every block there is, and by none else
            told = counts[rank].view(BLOCKS, 3)[:, 0]
            assert (told[:num_blocks] == i).all() and (told[num_blocks:] < i).all()
    return errors


def one_of_three_by_words() -> list[float]:
    """The same of few numbers."""
    from systems.serving.direct import BLOCKS, WIDTH, launch_sum_of_words

    torch.manual_seed(0)
    half = 2 * WIDTH
    errors = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        words = tuple(torch.full((2, 3, half), -1, dtype=torch.int64) for _ in range(3))
        counts = torch.zeros(BLOCKS, dtype=torch.int32)
        for i, (size, has_addend) in enumerate([(2 * WIDTH, True), (WIDTH + 2, False), (6, True)], 1):
            x, one, two, addend = (torch.randn(size).to(dtype) for _ in range(4))
            num_words = size * dtype.itemsize // 4
            for rank, part in ((1, one), (2, two)):
                words[0][i % 2, rank].view(torch.int32)[: 2 * num_words] = torch.stack(
                    [part.view(torch.int32), torch.full((num_words,), i, dtype=torch.int32)], 1
                ).view(-1)
            exact = x.double() + one + two + (addend if has_addend else 0)
            counts[:] = i - 1
            own = x.view(torch.int32).clone()
            launch_sum_of_words(x, addend if has_addend else None, words, counts, 0)
            errors.append(float(((x - exact).abs() / exact.abs().clamp_min(1)).max() / torch.finfo(dtype).eps))
            for rank in (1, 2):  # each has been given the words with their count
                given = words[rank][i % 2, 0].view(torch.int32).view(-1, 2)
                assert torch.equal(given[:num_words, 0], own) and (given[:num_words, 1] == i).all()
                assert (given[num_words:, 1] != i).all()
    return errors


@pytest.mark.parametrize("function", [one_of_three, one_of_three_by_words])
@pytest.mark.slow
def test_sums_are_of_all_parts_in_tritons_interpreter(function: Callable[[], list[float]]) -> None:
    errors = interpreted("test_serving_direct", f"test.{function.__name__}()")
    most = {one_of_three: 1e-5, one_of_three_by_words: 4.0}[function]
    assert errors and all(error < most for error in errors)  # and none is NaN


Sum = Callable[[Tensor, Tensor | None, int], None]


def sums_of(kind: str, degree: int, half: int, dtype: torch.dtype) -> tuple[Sum, Sum]:
    """The sums of GPUs whose places streams of one take: (x, addend, rank); the second waits for nobody, and is wrong."""
    from systems.serving.direct import BLOCKS, launch_sum, launch_sum_of_words

    late = 2**31 - 20  # counts begin anew from the least number in between
    if kind == "memory":
        parts, counts = memory_of(degree, half, "cuda", dtype)
        done = tuple(torch.full_like(count, 2**30) for count in counts)
        for rank, count in enumerate(counts):
            count.fill_(late)
            done[rank].view(BLOCKS, degree)[:, rank] = 0
        return (
            lambda x, addend, rank: launch_sum(x, addend, parts, counts, rank),
            lambda x, addend, rank: launch_sum(x, addend, parts, done, rank),
        )
    words = tuple(torch.full((2 * degree * half,), 7, dtype=torch.int64, device="cuda") for _ in range(degree))
    each = [torch.full((BLOCKS,), late, dtype=torch.int32, device="cuda") for _ in range(degree)]
    before = torch.full((BLOCKS,), -1, dtype=torch.int32, device="cuda")  # a count of 0 is there already
    return (
        lambda x, addend, rank: launch_sum_of_words(x, addend, words, each[rank], rank),
        lambda x, addend, rank: launch_sum_of_words(x, addend, words, before.clone(), rank),
    )


@pytest.mark.parametrize("kind", ["memory", "words"])
@pytest.mark.parametrize("degree", [pytest.param(number, marks=GPU) for number in (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_sums_go_on_in_any_sizes(kind: str, degree: int, dtype: torch.dtype) -> None:
    """Some are late, and none waits for the host."""
    from systems.serving.direct import WIDTH

    most = 300 * WIDTH if kind == "memory" else 20 * WIDTH
    sum_parts, alone = sums_of(kind, degree, most, dtype)
    streams = [torch.cuda.Stream() for _ in range(degree)]
    generator = torch.Generator().manual_seed(degree)
    sizes = [2 * int(torch.randint(1, most // 2, (), generator=generator)) for _ in range(40)] + [2, most, WIDTH, 5120] * 3
    xs = [[torch.randn(size, generator=generator).to("cuda", dtype) for _ in range(degree)] for size in sizes]
    addends = [torch.randn(size, generator=generator).to("cuda", dtype) if i % 2 else None for i, size in enumerate(sizes)]
    expected = [
        torch.stack(each).double().sum(0) + (0 if addend is None else addend.double())
        for each, addend in zip(xs, addends, strict=True)
    ]
    for rank in range(degree):  # compiled and loaded
        for size in (WIDTH * 16, 2, 6):
            for addend in (None, torch.zeros(size, device="cuda", dtype=dtype)):
                alone(torch.zeros(size, device="cuda", dtype=dtype), addend, rank)
                torch.cuda.synchronize()
    for i, each in enumerate(xs):
        for rank in range(degree):
            with torch.cuda.stream(streams[rank]):
                if (i + rank) % 5 == 0:
                    torch.cuda._sleep(200_000)
                sum_parts(each[rank], addends[i], rank)
    torch.cuda.synchronize()
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    for each, total in zip(xs, expected, strict=True):
        for x in each:
            assert torch.equal(x, each[0])
            torch.testing.assert_close(x.double(), total, rtol=tolerance, atol=tolerance)
