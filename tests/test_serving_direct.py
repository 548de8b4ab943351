"""Sums by the GPUs of a host from each other's memory."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from torch import Tensor

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def memory_of(degree: int, half: int, device: str, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Of each GPU, for parts and for counts. Parts are what no sum may have in it."""
    from systems.serving.direct import BLOCKS

    parts = tuple(torch.full((2 * half,), torch.nan, device=device, dtype=dtype) for _ in range(degree))
    return parts, tuple(torch.zeros(BLOCKS * degree, device=device, dtype=torch.int32) for _ in range(degree))


def one_of_three() -> float:
    """The largest error of the first GPU's sums, where the others have put their parts there: in Triton's interpreter."""
    from systems.serving.direct import BLOCKS, WIDTH, launch_sum

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
    return max(errors)


def test_sums_are_of_all_parts_in_tritons_interpreter() -> None:
    program = "import json, test_serving_direct as test; print(json.dumps(test.one_of_three()))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT / "tests",
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) < 1e-5


@pytest.mark.parametrize("degree", [pytest.param(number, marks=GPU) for number in (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_sums_go_on_in_any_sizes(degree: int, dtype: torch.dtype) -> None:
    """Streams of one GPU take the places of GPUs. Some are late, and none waits for the host."""
    from systems.serving.direct import WIDTH, launch_sum

    half = 300 * WIDTH
    parts, counts = memory_of(degree, half, "cuda", dtype)
    for count in counts:
        count.fill_(2**31 - 20)  # begins anew from the least number in between
    streams = [torch.cuda.Stream() for _ in range(degree)]
    generator = torch.Generator().manual_seed(degree)
    sizes = [int(torch.randint(1, half, (), generator=generator)) for _ in range(40)] + [1, half, WIDTH, 5120] * 3
    xs = [[torch.randn(size, generator=generator).to("cuda", dtype) for _ in range(degree)] for size in sizes]
    addends = [torch.randn(size, generator=generator).to("cuda", dtype) if i % 2 else None for i, size in enumerate(sizes)]
    expected = [
        sum(x.double() for x in each) + (0 if addend is None else addend.double())
        for each, addend in zip(xs, addends, strict=True)
    ]
    for alone in range(degree):  # compiled and loaded, with nobody to wait for
        done = tuple(torch.full_like(count, 7) for count in counts)
        done[alone].view(-1, degree)[:, alone] = 0
        for addend in (None, torch.zeros(WIDTH * 16, device="cuda", dtype=dtype)):
            for size in (WIDTH * 16, 1, 7):
                launch_sum(
                    torch.zeros(size, device="cuda", dtype=dtype),
                    None if addend is None else addend[:size],
                    parts,
                    done,
                    alone,
                )
    torch.cuda.synchronize()
    for i, each in enumerate(xs):
        for rank in range(degree):
            with torch.cuda.stream(streams[rank]):
                if (i + rank) % 5 == 0:
                    torch.cuda._sleep(200_000)
                launch_sum(each[rank], addends[i], parts, counts, rank)
    torch.cuda.synchronize()
    for each, total in zip(xs, expected, strict=True):
        assert isinstance(total, Tensor)
        tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
        for x in each:
            assert torch.equal(x, each[0])
            torch.testing.assert_close(x.double(), total, rtol=tolerance, atol=tolerance)
