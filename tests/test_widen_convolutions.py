"""Convolutions over one dimension as images of one row: what they compute, and what lies between them."""

from collections.abc import Callable

import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from rewriting import COUNTING, DEVICES, Function, agrees, names, takes_new_weights
from torch import Tensor, nn
from torch.nn import functional

from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.scheduling.passes.widen_convolutions import widen_convolutions


def parts(forward: Callable[..., object]) -> Function:
    torch.manual_seed(0)
    first, second = nn.Conv1d(8, 8, 3, padding=1), nn.Conv1d(8, 6, 3, stride=2, padding=1)
    return Function(forward, a=first, b=second, norm=nn.BatchNorm1d(8), scale=nn.Linear(1, 8)).eval()


def sequence(device: str = "cpu") -> Tensor:
    return torch.randn(2, 8, 10, device=device)


def widened(module: nn.Module, x: Tensor) -> Program:
    return widen_convolutions(capture(module, (x,)), COUNTING)[0]


WIDENED: dict[str, tuple[Callable[..., object], list[str]]] = {
    "as Whisper begins": (
        lambda p, x: functional.gelu(p["b"](functional.gelu(p["a"](x)))).permute(0, 2, 1) + 1,
        ["unsqueeze", "conv2d", "gelu", "conv2d", "gelu", "squeeze", "permute", "add"],
    ),
    "a norm between": (
        lambda p, x: p["b"](p["norm"](p["a"](x)).relu()),
        ["unsqueeze", "conv2d", "batch_norm", "relu", "conv2d", "squeeze"],
    ),
    "others read it too": (
        lambda p, x: (y := p["a"](x).relu(), p["b"](y), y.sum(-1), y + x),
        ["unsqueeze", "conv2d", "relu", "conv2d", "squeeze", "squeeze", "sum", "add"],
    ),
    "a scale of each channel": (lambda p, x: p["a"](x) * p["scale"].weight, ["unsqueeze", "conv2d", "squeeze", "mul"]),
    "one input of two": (lambda p, x: p["a"](x) + p["a"](x), ["unsqueeze", "conv2d", "squeeze", "conv2d", "squeeze", "add"]),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pattern", WIDENED)
def test_sequences_become_images_of_one_row(pattern: str, device: str) -> None:
    forward, expected = WIDENED[pattern]
    module = parts(forward).to(device)
    program = widened(module, sequence(device))
    assert sorted(names(program)) == sorted(expected)
    agrees(module, program, sequence(device))


STRIDED: dict[str, Callable[..., object]] = {
    "a caller sees it": lambda p, x: p["a"](turned(x)),
    "a view reads it": lambda p, x: p["a"](turned(x * 2)).view(160) + 1,
    "two read one": lambda p, x: (p["a"](y := turned(x).relu()), p["b"](y)),
}


def turned(x: Tensor) -> Tensor:
    """The channels last in memory."""
    return x.view(2, 10, 8).transpose(1, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reader", STRIDED)
def test_a_sequence_with_its_channels_last_is_copied_as_by_pytorch_itself(reader: str, device: str) -> None:
    module = parts(STRIDED[reader]).to(device)
    program = widened(module, sequence(device))
    assert names(program).count("clone") == 1
    agrees(module, program, sequence(device))


def test_new_weights_are_taken() -> None:
    module = parts(lambda p, x: p["a"](x).relu())
    takes_new_weights(widened(module, sequence()), module, sequence(), "a.weight")


@pytest.mark.parametrize(
    "forward",
    [
        lambda p, x: functional.conv1d(x, p["a"].weight * 2),
        lambda p, x: p["a"](x[0]),
        lambda p, x: p["norm"](x).relu(),
        lambda p, x: functional.conv_transpose1d(x, p["a"].weight),
    ],
)
def test_what_is_no_convolution_of_a_batch_of_sequences_stays(forward: Callable[..., object]) -> None:
    module = parts(forward)
    captured = capture(module, (sequence(),))
    assert widen_convolutions(captured, COUNTING)[0] is captured


@examples(30)
@given(data=st.data())
def test_any_convolution_computes_the_same(data: st.DataObject) -> None:
    groups, kernel, stride, dilation = (data.draw(st.integers(1, most)) for most in (3, 4, 3, 3))
    padding, bias = data.draw(st.integers(0, 4)), data.draw(st.booleans())
    conv = nn.Conv1d(6, 6, kernel, stride, padding, dilation, groups, bias).eval()
    program = widened(conv, x := torch.randn(2, 6, 12))
    assert "conv2d" in names(program)
    agrees(conv, program, x)
