"""What is estimated of an operator that was measured nowhere, against a roofline worked out here."""

import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from simulated import GPU
from torch import nn
from torch.nn.functional import embedding_bag

from systems.profiling.intensity import moved_bytes
from systems.scheduling.graph.program import Program
from systems.scheduling.simulate.estimate import RULES, demand_of, estimated
from systems.scheduling.simulate.gpu import load
from tests.modules import Lambda, captured

pytestmark = pytest.mark.usefixtures("arithmetic_of_torch")


def place(program: Program, name: str) -> int:
    return next(o.id for o in program.graph.operators if o.name == name)


@examples(6)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 700))
def test_a_product_takes_its_tiles_or_its_bytes(rows: int, depth: int, columns: int) -> None:
    """In fp32, outside matrix units: 132 SMs of 66.9 / 132 TFLOPS and 4.8 TB/s."""
    program = captured(nn.Linear(depth, columns), torch.zeros(rows, depth))
    demand = demand_of(program, place(program, "linear"), GPU)
    tiles = -(-rows // 64) * -(-columns // 64)
    of_a_tile = 2 * rows * depth * columns / tiles
    assert demand.kind == "product" and demand.blocks >= tiles
    assert demand.arithmetic_us == pytest.approx(-(-tiles // 132) * of_a_tile / (66.9e6 / 132))
    assert demand.memory_us == pytest.approx(4 * (rows * depth + (depth + 1) * columns + rows * columns) / 4.8e6)
    rule = RULES["product"]
    roofs_us = demand.arithmetic_us / (rule.share or 1), demand.memory_us / rule.bandwidth
    assert demand.microseconds(rule) == pytest.approx(rule.start_us + max(roofs_us))


@pytest.mark.parametrize("groups", [1, 4])
def test_a_convolution_is_a_product_of_each_group(groups: int) -> None:
    program = captured(nn.Conv2d(8, 280, 3, groups=groups, padding=1), torch.zeros(2, 8, 20, 20))
    demand = demand_of(program, place(program, "conv2d"), GPU)
    tiles = -(-2 * 20 * 20 // 64) * -(-280 // groups // 64) * groups
    operations = 2 * (2 * 20 * 20) * 280 * (8 // groups) * 9
    assert demand.kind == "matrix"  # by TF32, torch's default for convolutions
    assert demand.arithmetic_us == pytest.approx(operations / tiles / (494.7e6 / 132))
    assert tiles <= 132


@pytest.mark.parametrize("name", ["bmm", "baddbmm"])
def test_a_batch_of_products_has_tiles_of_each(name: str) -> None:
    """Of 5 products of 10 x 70, each of which fills 2 tiles of 64 x 64 in part."""
    x, weight, addend = torch.zeros(5, 10, 40), torch.zeros(5, 40, 70), torch.zeros(5, 10, 70)
    product = torch.bmm if name == "bmm" else lambda x, weight: torch.baddbmm(addend, x, weight)
    program = captured(Lambda(product), x, weight)
    demand = demand_of(program, place(program, name), GPU)
    of_a_tile = 2 * 5 * 10 * 70 * 40 / 10
    assert (demand.kind, demand.blocks) == ("product", 10)
    assert demand.arithmetic_us == pytest.approx(of_a_tile / (66.9e6 / 132))


def test_each_kind_is_told_from_the_others() -> None:
    x, image = torch.zeros(4, 6, 32, 64), torch.zeros(1, 16, 8, 8)
    attention = Lambda(lambda q: nn.functional.scaled_dot_product_attention(q, q, q))
    of_kind = {
        "attention": captured(attention, x),
        "depthwise": captured(nn.Conv2d(16, 16, 3, groups=16), image),
        "pooling": captured(nn.MaxPool2d(2), image),
        "reduction": captured(nn.LayerNorm(64), x),
        "elementwise": captured(nn.GELU(), x),
        "matrix": captured(nn.Linear(64, 64).half(), x.half()),
    }
    for kind, program in of_kind.items():
        assert demand_of(program, len(program.graph) - 1, GPU).kind == kind


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (nn.Conv2d(16, 16, 3, groups=16), "depthwise"),
        (nn.Conv2d(16, 32, 3, groups=16), "depthwise"),
        (nn.ConvTranspose2d(16, 16, 3, groups=16), "depthwise"),
        (nn.Conv2d(16, 16, 3, groups=8), "matrix"),
        (nn.Conv2d(16, 64, 7), "matrix"),
        (nn.Conv2d(1, 64, 7), "matrix"),
        (nn.ConvTranspose2d(16, 1, 3), "matrix"),
    ],
)
def test_a_convolution_is_depthwise_where_its_groups_have_one_channel_each(module: nn.Module, kind: str) -> None:
    channels = module.in_channels
    assert isinstance(channels, int)
    for shape in ((2, channels, 9, 9), (channels, 9, 9)):
        program = captured(module, torch.zeros(shape))
        v = place(program, "conv_transpose2d" if isinstance(module, nn.ConvTranspose2d) else "conv2d")
        assert demand_of(program, v, GPU).kind == kind


@pytest.mark.parametrize(
    ("module", "shape", "kind"),
    [
        (nn.Linear(4, 8), (0, 4), "product"),
        (nn.Linear(4, 0), (3, 4), "product"),
        (nn.Conv2d(3, 8, 3), (0, 3, 9, 9), "matrix"),
        (Lambda(lambda q: nn.functional.scaled_dot_product_attention(q, q, q)), (0, 2, 8, 16), "attention"),
        (nn.ReLU(), (0, 4), "elementwise"),
    ],
)
def test_an_empty_output_takes_a_launch(module: nn.Module, shape: tuple[int, ...], kind: str) -> None:
    program = captured(module, torch.zeros(shape))
    v = len(program.graph) - 1
    assert demand_of(program, v, GPU).kind == kind
    assert estimated(program, v, GPU).milliseconds == pytest.approx(RULES[kind].start_us / 1e3)


@pytest.mark.parametrize(
    ("module", "shape", "kernels", "num_weights"),
    [  # of an input of 5 steps, 3 sequences, 8 features
        (nn.LSTM(8, 16), (5, 3, 8), 5, 64 * (8 + 16)),
        (nn.LSTM(8, 16, 2, batch_first=True), (3, 5, 8), 10, 64 * (8 + 16 + 16 + 16)),
        (nn.LSTM(8, 16, proj_size=4), (5, 3, 8), 5, 64 * (8 + 4) + 4 * 16),
        (nn.GRU(8, 16, 2, bidirectional=True), (5, 3, 8), 20, 2 * 48 * (8 + 16 + 32 + 16)),
        (nn.RNN(8, 16, nonlinearity="relu", bias=False), (5, 3, 8), 5, 16 * (8 + 16)),
        (nn.LSTMCell(8, 16), (3, 8), 1, 64 * (8 + 16)),
    ],
)
def test_a_recurrent_operator_is_a_chain_of_products(
    module: nn.Module, shape: tuple[int, ...], kernels: int, num_weights: int
) -> None:
    program = captured(module, torch.zeros(shape))
    v = next(o.id for o in program.graph.operators if o.name.startswith(("lstm", "gru", "rnn")))
    demand, profile = demand_of(program, v, GPU), estimated(program, v, GPU)
    steps = 5 if len(shape) == 3 else 1
    tflops = 66.9 if isinstance(module, nn.LSTMCell) else 494.7  # cuDNN's are by TF32, as its convolutions
    assert (demand.kind, demand.kernels) == ("product" if tflops == 66.9 else "matrix", kernels)
    assert demand.arithmetic_us == pytest.approx(2 * 3 * steps * num_weights / (tflops * 1e6 / 132))  # one tile
    assert demand.bytes_read == moved_bytes(program, v)[0] + 4 * (steps - 1) * num_weights
    assert len(profile.kernels) == kernels and sum(k.milliseconds for k in profile.kernels) == pytest.approx(
        profile.milliseconds
    )
    assert profile.milliseconds > kernels * RULES[demand.kind].start_us / 1e3


def test_a_lookup_does_not_read_the_table_and_a_view_takes_no_time() -> None:
    rows, indices = 1_000_000, torch.zeros(4, 3, dtype=torch.int64)
    for module in (nn.Embedding(rows, 16), Lambda(lambda i: embedding_bag(i, torch.zeros(rows, 16)))):
        program = captured(module, indices)
        v = next(o.id for o in program.graph.operators if "embedding" in o.name)
        assert estimated(program, v, GPU).milliseconds < 0.003
    program = captured(Lambda(lambda x: x.view(4, 4).relu()), torch.zeros(16))
    assert [estimated(program, v, GPU).milliseconds > 0 for v in range(len(program.graph))] == [False, True]


@pytest.mark.parametrize(
    ("gpu", "dtype", "kind", "tflops"),
    [
        *[("v100", torch.float, "product", 15.7), ("v100", torch.half, "matrix", 125.0)],
        *[("titan_xp", torch.half, "product", 12.1), ("a100", torch.float, "matrix", 155.9)],
    ],
)
def test_a_gpu_without_matrix_units_of_a_type_computes_without(
    gpu: str, dtype: torch.dtype, kind: str, tflops: float
) -> None:
    """The V100 has them of fp16 and not of TF32."""
    program, of = captured(nn.Conv2d(64, 64, 1).to(dtype), torch.zeros(1, 64, 8, 8, dtype=dtype)), load(gpu)
    demand = demand_of(program, len(program.graph) - 1, of)
    assert demand.kind == kind
    assert demand.arithmetic_us == pytest.approx(2 * 64**3 / (tflops * 1e6 / of.multiprocessors))


def test_half_precision_is_faster_and_a_slower_gpu_slower() -> None:
    program, half = (
        captured(nn.Linear(4096, 4096).to(t), torch.zeros(4096, 4096, dtype=t)) for t in (torch.float, torch.half)
    )
    tiles = (4096 // 64) ** 2  # by matrix units, twice as fast as TF32
    demand = demand_of(half, 0, GPU)
    assert demand.arithmetic_us == pytest.approx(-(-tiles // 132) * 2 * 4096**3 / tiles / (989.4e6 / 132))
    by_precision = estimated(half, 0, GPU).milliseconds, estimated(program, 0, GPU).milliseconds
    assert by_precision[0] < by_precision[1] < estimated(program, 0, load("v100")).milliseconds
