"""The kernel of a product of groups of rows: against PyTorch, and in the programs in which the pass puts it."""

from importlib import import_module

import pytest
import torch
from drawing import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from rewriting import Function
from torch import Tensor, nn
from torch.nn import functional
from triton_cases import ACTS, device_with_kernels, favour

import models
from systems.base import Unsupported
from systems.kernels.binaries import Library, Stored
from systems.kernels.kernel import Kernel
from systems.profiling.intensity import work
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.part import part
from systems.scheduling.graph.program import Program
from systems.scheduling.passes.context import Context
from systems.scheduling.passes.select_grouped import LIBRARY, select_grouped

device = device_with_kernels


def takes_fp32() -> bool:
    """PyTorch's product of groups, which torch 2.11 has of bf16 alone."""
    x, weight, ends = (torch.empty(size, device="meta") for size in ((16, 16), (4, 16, 16), (4,)))
    try:
        torch._grouped_mm(x, weight, offs=ends.int())
    except RuntimeError:
        return False
    return True


IS_COMPUTED = takes_fp32()  # by Triton's interpreter, which multiplies no bf16
DTYPES = {"cpu": torch.float32 if IS_COMPUTED else torch.bfloat16, "cuda": torch.bfloat16}
CLOSE = {"cpu": 1e-4, "cuda": 3e-2}
OWN = Context(favour("opweave"), favour("opweave"))


def by_groups(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """In fp64; rows behind the last group are NaN."""
    out = torch.full((len(x), weight.shape[2]), torch.nan, dtype=torch.float64, device=x.device)
    begin = 0
    for end, own in zip(ends.tolist(), weight.double(), strict=True):
        out[begin:end] = x[begin:end].double() @ own
        begin = end
    return out


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), gate=st.sampled_from(["", *sorted(ACTS)]), is_fetching=st.booleans(), is_by_rows=st.booleans())
@pytest.mark.slow
def test_it_computes_what_pytorch_does(
    device: str, data: st.DataObject, gate: str, is_fetching: bool, is_by_rows: bool
) -> None:
    """Of empty groups, of groups of several tiles, of numbers of rows from behind, and with rows that no group has."""
    draw = data.draw
    dense, grouped = import_module("systems.kernels.dense"), import_module("systems.kernels.grouped")
    groups, features, outputs, m = (draw(st.integers(1, most)) for most in (9, 40, 30, 70))
    cuts = sorted(draw(st.lists(st.integers(0, m), min_size=groups, max_size=groups)))
    ends = torch.tensor(cuts, dtype=torch.int32, device=device)
    random = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    columns = 2 * outputs if gate else outputs
    weight = torch.randn(groups, *((features, columns) if is_by_rows else (columns, features)), generator=random).to(device)
    weight = weight if is_by_rows else weight.transpose(1, 2)
    x = torch.randn(13 if is_fetching else m, features, generator=random).to(device)
    rows = torch.randint(-13, 13, (m,), generator=random).to(device) if is_fetching else None
    tile = draw(st.sampled_from(grouped.tiles_of(m, groups, outputs, features)))
    launch = grouped.Grouped(gate, dense.THRICE, tile).launch(x, weight, ends, rows)
    out = launch.out.fill_(torch.nan)
    launch.function[launch.grid](*launch.arguments, **launch.options)
    expected = by_groups(x if rows is None else x[rows], weight, ends)
    if gate:
        first, second = expected.chunk(2, dim=1)
        expected = ACTS[gate](first) * second
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-3, equal_nan=True)


def test_there_are_as_many_blocks_as_the_most_tiles() -> None:
    """Each group may end with a tile that is not full; groups without rows have none."""
    from systems.kernels.grouped import FEW, Grouped

    for m, groups in ((1, 5), (7, 3), (64, 4), (100, 100), (512, 32)):
        launch = Grouped("", "tf32", tile := FEW[0]).launch(
            torch.empty(m, 16, device="meta"),
            torch.empty(groups, 16, 32, device="meta"),
            torch.empty(groups, dtype=torch.int32, device="meta"),
            None,
        )
        # Rows spread so that as many groups as there can be begin a tile of a single row.
        most, left = 0, m
        for _ in range(min(groups, m)):
            most, left = most + 1, left - 1
        assert launch.grid[0] >= most + left // tile.rows


class Experts(nn.Module):
    """As a mixture of experts dispatches: rows by their numbers, halves that gate each other, and a second product."""

    def __init__(self, device: str, is_gated: bool = True) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        first, second = torch.randn(4, 32, 16, generator=random), torch.randn(4, 8, 32, generator=random)
        self.first = nn.Parameter(first.to(device, DTYPES[device]))
        self.second = nn.Parameter(second[:, :, : 16 if is_gated else 32].contiguous().to(device, DTYPES[device]))
        self.is_gated = is_gated

    def forward(self, x: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        y = torch._grouped_mm(x[rows], self.first.transpose(1, 2), offs=ends)
        if self.is_gated:
            first, second = y.chunk(2, dim=-1)
            y = second * functional.silu(first)
        return torch._grouped_mm(y, self.second.transpose(1, 2), offs=ends)


def arguments(device: str) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(10, 16, generator=random).to(DTYPES[device])
    rows, ends = torch.randint(0, 10, (24,), generator=random), torch.tensor([5, 5, 20, 24], dtype=torch.int32)
    return x.to(device), rows.to(device), ends.to(device)


@pytest.mark.parametrize("is_gated", [True, False])
def test_experts_take_what_stands_around_them_where_that_is_faster(device: str, is_gated: bool) -> None:
    module = Experts(device, is_gated).eval()
    captured = capture(module, arguments(device))
    program, decisions = select_grouped(captured, OWN)
    around = "index + _grouped_mm" + (" + split + silu + mul" if is_gated else "")
    assert [d.pattern.partition(" of ")[0] for d in decisions] == [around, "_grouped_mm"]
    assert all(d.chosen != LIBRARY for d in decisions)
    assert {operator.name for operator in program.graph.operators} <= {"_grouped_mm", "transpose"}
    if device == "cuda" or IS_COMPUTED:
        (got,), (expected,) = program.run(arguments(device)), captured.run(arguments(device))
        torch.testing.assert_close(got, expected, rtol=CLOSE[device], atol=CLOSE[device] * float(expected.abs().max()))
        assert got.stride() == expected.stride()
    kept, decisions = select_grouped(captured, Context(favour("aten"), favour("aten")))
    assert kept.calls == captured.calls and {d.chosen for d in decisions} == {LIBRARY}


@pytest.mark.parametrize(
    "forward",
    [
        lambda p, x, w, rows, ends: (y := torch._grouped_mm(x, w, offs=ends), y.relu()),  # another reads the product
        lambda p, x, w, rows, ends: (y := torch._grouped_mm(x, w, offs=ends).chunk(2, 1))[0].sigmoid() * y[0],
        lambda p, x, w, rows, ends: (y := torch._grouped_mm(x, w, offs=ends).chunk(2, 1))[0].sigmoid() + y[1],
        lambda p, x, w, rows, ends: (y := torch._grouped_mm(x, w, offs=ends).split(24, 1))[0][:, :8].sigmoid() * y[1],
        lambda p, x, w, rows, ends: (z := x[rows], torch._grouped_mm(z, w, offs=ends)),  # or what it reads
    ],
)
def test_what_others_read_is_computed_apart(device: str, forward: object) -> None:
    x, rows, ends = arguments(device)
    weight = torch.randn(4, 32, 16, dtype=DTYPES[device], device=device).transpose(1, 2)
    inputs = x.repeat(3, 1)[:24], weight, rows, ends
    _, (decision,) = select_grouped(capture(Function(forward).eval(), inputs), OWN)  # type: ignore[arg-type]
    assert len(decision.operators) == 1 and decision.chosen != LIBRARY


def test_what_no_kernel_takes_stays(device: str) -> None:
    """Groups of features in the place of groups of rows, and batches of products."""
    x, y, batch = (torch.randn(*s, dtype=DTYPES[device], device=device) for s in ((16, 32), (16, 32), (4, 16, 16)))
    ends = torch.tensor([8, 16], dtype=torch.int32, device=device)

    def forward(p: object, x: Tensor, y: Tensor, batch: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        return torch._grouped_mm(x.t(), y, offs=ends), torch._grouped_mm(batch, batch.transpose(1, 2))

    captured = capture(Function(forward).eval(), (x, y, batch, ends))
    program, decisions = select_grouped(captured, OWN)
    assert program.calls == captured.calls and not decisions


def test_a_product_that_no_graph_holds_takes_a_kernel_of_our_own(device: str) -> None:
    """As PyTorch's of fp16: its time is not known, and the record says why."""

    def cost(program: Program) -> float:
        if any("aten._grouped_mm" in operator.target for operator in program.graph.operators):
            raise Unsupported("it waits for the device")
        return 1.0

    captured = capture(Experts(device).eval(), arguments(device))
    _, decisions = select_grouped(captured, Context(cost, cost))
    assert all(d.chosen != LIBRARY and d.milliseconds[LIBRARY] is None for d in decisions)
    assert {d.reasons[LIBRARY] for d in decisions} == {"it waits for the device"}


def test_a_part_has_groups_of_equal_length(device: str) -> None:
    """By the library and by a kernel of our own: empty groups, as of zeros, would cost nothing."""
    captured = capture(Experts(device).eval(), arguments(device))
    own, _ = select_grouped(captured, OWN)
    for program in (captured, own):
        for v, operator in enumerate(program.graph.operators):
            if operator.name == "_grouped_mm":
                ends = [t.tolist() for t in part(program, [v]).examples if t.dtype is torch.int32]
                assert ends == [[6, 12, 18, 24]]
    kernel = next(call.function for call in own.calls if isinstance(call.function, Kernel))
    assert Stored(kernel, Library()).is_grouped, "as a plan launches it"


def test_its_work_is_that_of_each_row_by_one_weight(device: str) -> None:
    """Which torch's counter does not know, of the library's and of a kernel of our own alike."""
    captured = capture(Experts(device).eval(), arguments(device))
    own, _ = select_grouped(captured, OWN)
    for program in (captured, own):
        operations = [work(program, v)[0] for v, o in enumerate(program.graph.operators) if o.name == "_grouped_mm"]
        assert operations == [2 * 24 * 16 * 32, 2 * 24 * 16 * 8]
    batch = capture(
        Function(lambda p, x: torch._grouped_mm(x, x.mT)).eval(), (torch.zeros(4, 8, 16, device=device).bfloat16(),)
    )
    (v,) = (v for v, operator in enumerate(batch.graph.operators) if operator.name == "_grouped_mm")
    assert work(batch, v)[0] == 2 * 4 * 8 * 8 * 16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_mixture_of_experts_computes_the_same() -> None:
    model = models.load("qwen3_moe", 1, device="cuda", size="small")
    module = model.module.eval().to(torch.bfloat16)
    captured = capture(module, model.inputs)
    program, decisions = select_grouped(captured, OWN)
    assert decisions and all(d.chosen != LIBRARY for d in decisions)
    (got,), (expected,) = program.run(model.inputs), captured.run(model.inputs)
    torch.testing.assert_close(got, expected, rtol=5e-2, atol=5e-2)
