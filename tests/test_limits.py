"""How fast any schedule could be: the SM area of kernels, the traffic of a call, its launch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from modules import Lambda
from test_profiling import CPU, HOPPER
from torch import Tensor, nn

from systems.profiling import calibration, limits
from systems.profiling.profile import Kernel
from systems.profiling.timing import Timer
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.fused_kernel import fuse
from systems.scheduling.graph.rewrite import replace
from systems.scheduling.passes.rewriting import Rewriting

pytestmark = pytest.mark.usefixtures("cache_folder")


def test_the_sm_area_of_kernels() -> None:
    """HOPPER has 132 SMs: a kernel of one block holds one, of 33 resident twos 17 of them. Of many a last wave, of 38, has
    232 blocks and holds 116 SMs; of 265 the second wave has one."""
    one = Kernel("one", 2.0, (1, 1, 1), (128, 1, 1), 32, 0)
    many = Kernel("many", 3.0, (10_000, 1, 1), (1024, 1, 1), 32, 0)
    pairs = Kernel("pairs", 1.0, (33, 1, 1), (1024, 1, 1), 32, 0)
    one_more = Kernel("one more", 2.0, (265, 1, 1), (1024, 1, 1), 32, 0)
    assert HOPPER.resident_blocks(pairs) == 2
    area = [limits.sm_area([kernel], HOPPER) for kernel in (one, many, pairs, one_more)]
    assert area == pytest.approx([2.0 / 132, 3.0 * (37 + 116 / 132) / 38, 17 / 132, 2.0 * (1 + 1 / 132) / 2])
    assert limits.sm_area([one, many, pairs, one_more], HOPPER) == pytest.approx(sum(area)) and not limits.sm_area(
        [], HOPPER
    )


class Words(nn.Module):
    """A few rows of a table, a shared weight read twice, and one that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(1000, 8)
        self.shared, self.unread = torch.nn.Linear(8, 8), torch.nn.Linear(8, 100)

    def forward(self, words: Tensor) -> Tensor:
        return self.shared(self.shared(self.table(words)).relu())  # type: ignore[no-any-return]


def test_the_traffic_of_a_call_is_what_it_cannot_leave_out() -> None:
    module, words = Words().eval(), torch.zeros(1, 5, dtype=torch.long)
    program = capture(module, (words,))
    least = 8 * 5 + 4 * (8 * 8 + 8) + 4 * 5 * 8  # words, the shared weight with its bias, the output
    assert limits.traffic(module, program, 0) == least
    assert limits.traffic(module, program, 100) == least - 100 and limits.traffic(module, program, 10**6) == 0
    bags = torch.nn.EmbeddingBag(1000, 8, mode="sum").eval()
    assert limits.traffic(bags, capture(bags, (words,)), 0) == 8 * 5 + 4 * 8
    conv, norm = torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4)
    whole = torch.nn.Sequential(conv, norm).eval()
    folded, _ = Rewriting(fold_batch_norm=True).apply(capture(whole, (torch.randn(1, 3, 2, 2),)), Timer(CPU))
    assert limits.traffic(whole, folded, 0) == 4 * (3 * 4 + 4 + 4 * 3 + 4 * 4)  # derived: weight and bias; input, output


@pytest.mark.parametrize(("is_read_whole", "num_rows"), [(False, 0), (True, 1000)])
def test_the_traffic_of_a_fused_lookup_is_without_its_table(is_read_whole: bool, num_rows: int) -> None:
    """num_rows: of the table, that are counted."""
    table = nn.Embedding(1000, 8)

    def look_up(words: Tensor) -> Tensor:
        rows = table(words).relu()
        return rows + table.weight[:1].sum() if is_read_whole else rows

    module, words = Lambda(look_up).eval(), torch.zeros(1, 5, dtype=torch.long)
    module.table = table
    program = capture(module, (words,))
    fused, _ = replace(program, [fuse(program, range(len(program.graph)), "moves")])
    assert len(fused.graph) == 1
    assert limits.traffic(module, fused, 0) == limits.traffic(module, program, 0) == 8 * 5 + 4 * 8 * num_rows + 4 * 5 * 8


@given(st.integers(1, 300), st.integers(1, 300))
def test_the_launch_is_that_of_the_number_of_streams_that_takes_the_least(width: int, best: int) -> None:
    """By mocked times, which rise on both sides of `best` streams."""
    numbers_tried: list[int] = []

    def empty_graph_ms(_: torch.device, num_kernels: int, num_streams: int) -> float:
        assert num_kernels == 1000
        numbers_tried.append(num_streams)
        return 1.0 + abs(num_streams - best)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "empty_graph_ms", empty_graph_ms)
        least = calibration.least_empty_graph_ms(CPU, 1000, width)
    assert (
        {1, width} <= set(numbers_tried)
        and max(numbers_tried) == width
        and least == min(1.0 + abs(n - best) for n in numbers_tried)
    )
    if best <= width:
        assert least <= 1.0 + best / 2  # half or twice as many are among them


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpus_limits_by_traffic_and_launch() -> None:
    """A large product moves more than the cache holds, and as many empty kernels take less than the kernels."""
    module = torch.nn.Sequential(*(torch.nn.Linear(8192, 8192) for _ in range(3))).cuda().eval()
    with torch.no_grad():
        measured = limits.measure(module, (torch.randn(1, 8192, device="cuda"),))
    assert measured.traffic_ms is not None and 0.2 * measured.busy_ms < measured.traffic_ms < 1.1 * measured.busy_ms
    assert measured.launch_ms is not None and 0 < measured.launch_ms < measured.busy_ms


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpus_sm_area_lies_between_nothing_and_the_sum() -> None:
    module, x = torch.nn.Conv2d(8, 8, 3).cuda().eval(), torch.randn(1, 8, 16, 16, device="cuda")
    with torch.no_grad():
        measured = limits.measure(module, (x,))
    assert measured.sm_area_ms is not None and 0 < measured.sm_area_ms < measured.busy_ms
