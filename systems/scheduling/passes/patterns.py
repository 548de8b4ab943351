"""What passes match beyond `graph.patterns` (products, reductions, kernels of convolutions), and how they name it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from systems.scheduling.graph.effects import is_view
from systems.scheduling.graph.patterns import CONVOLUTION, Convolution, convolution, reads_tensors
from systems.scheduling.graph.program import Call, Input, Output, Program

aten = torch.ops.aten
LINEAR, ADDMM = aten.linear.default, aten.addmm.default
PRODUCTS = (LINEAR, ADDMM, aten.mm.default, aten.matmul.default)
NORMS = (aten.layer_norm.default, aten.rms_norm.default)
SOFTMAXES = (aten.softmax.int, aten._softmax.default)
GROUP_NORM = aten.group_norm.default
SPLIT = aten.split_with_sizes.default
SPLITS = (SPLIT, aten.split.Tensor)
SUMS = (aten.mean.dim, aten.sum.dim_IntList)


@dataclass(frozen=True)
class Product:
    """A matrix product with a weight of the module's own.

    Args:
        operator: its id.
        x: what is multiplied, [..., features].
        weight: [K, features] of a linear, else [features, K].
        bias: [K].
        along: the dimension of the weight that has the K output features.
    """

    operator: int
    x: Output | Input
    weight: Tensor
    bias: Tensor | None
    along: int


def product(call: Call, v: int) -> Product | None:
    """Operator v, which is `call`, as a product; None where it is none or its weight is computed."""
    if call.function not in PRODUCTS or call.kwargs:
        return None
    if call.function is ADDMM:
        bias, x, weight = call.args
    else:
        x, weight, bias = (*call.args, None)[:3]
    along = 0 if call.function is LINEAR else 1
    if not isinstance(x, Output | Input) or not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    if bias is not None and (not isinstance(bias, Tensor) or bias.shape != (weight.shape[along],)):
        return None
    return Product(v, x, weight, bias, along)


def addend_of(program: Program, v: int, u: int) -> Output | Input | None:
    """What addition v adds to the output of u, where it is a tensor of the same shape and layout."""
    call = program.calls[v]
    if call.kwargs:
        return None
    addends = [a for a in call.args if a != Output(u)]
    if len(addends) != 1 or not isinstance(addends[0], Output | Input):
        return None
    x, addend = program.value(Output(u)), program.value(addends[0])
    is_alike = (x.shape, x.dtype, x.stride()) == (addend.shape, addend.dtype, addend.stride())
    return addends[0] if is_alike else None


def is_reduction(program: Program, v: int) -> bool:
    """Does the operator read contiguous rows, and compute each of its own rows from the same one?"""
    call = program.calls[v]
    if call.function not in (*NORMS, *SOFTMAXES, *SUMS) or not reads_tensors(program, v):
        return False
    x = program.value(call.args[0])
    if not isinstance(x, Tensor) or not x.is_contiguous() or x.dim() == 0 or x.numel() == 0:
        return False
    if call.function in NORMS:
        return len(call.args[1]) == 1
    if call.function in SOFTMAXES:
        return call.args[1] in (-1, x.dim() - 1)
    dims = call.args[1] if isinstance(call.args[1], (list, tuple)) else [call.args[1]]
    keeps_dimension = len(call.args) > 2 and call.args[2] is True
    return list(dims) in ([-1], [x.dim() - 1]) and keeps_dimension


def cudnn_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """cuDNN's convolution, also where PyTorch would dispatch to a kernel of its own (depthwise). Shapes as conv2d's."""
    allow_tf32 = torch.backends.cudnn.allow_tf32
    out = aten.cudnn_convolution.default(x, weight, padding, stride, dilation, groups, True, False, allow_tf32)
    return out if bias is None else out.add_(bias.view(-1, 1, 1))


def native_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """PyTorch's own convolution: im2col and a matrix product, or its depthwise kernel. Shapes as conv2d's."""
    kernel = weight.shape[2:]
    if groups > 1:
        return aten._conv_depthwise2d.default(x, weight, kernel, bias, stride, padding, dilation)  # type: ignore[no-any-return]
    if list(dilation) != [1, 1]:
        return aten.slow_conv_dilated2d.default(x, weight, kernel, bias, stride, padding, dilation)  # type: ignore[no-any-return]
    return aten._slow_conv2d_forward.default(x, weight, kernel, bias, stride, padding)  # type: ignore[no-any-return]


def product_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None, *window: object) -> Tensor:
    """A pointwise convolution of stride 1 and one group: pixels times the weight, in a kernel that adds the bias.

    It reads and writes channels_last without a copy. Shapes as conv2d's, and `window` is the rest of its arguments.
    """
    rows, columns = _factors(x, weight)
    return _image(rows.mm(columns) if bias is None else torch.addmm(bias, rows, columns), x)


def product_relu_conv2d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As `product_conv2d`, with a ReLU that the same kernel computes."""
    return _image(aten._addmm_activation.default(bias, *_factors(x, weight)), x)


def _factors(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Of a pointwise convolution: [pixels, C] of [N, C, H, W] and [C, K] of [K, C, 1, 1]."""
    columns = weight.flatten(1).t()
    return x.permute(0, 2, 3, 1).reshape(-1, columns.shape[0]), columns


def _image(rows: Tensor, x: Tensor) -> Tensor:
    """[pixels, K] as an image of the height and width of x, in channels_last."""
    n, _, h, w = x.shape
    return rows.view(n, h, w, -1).permute(0, 3, 1, 2)


def group_norm_channels_last(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    epsilon: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """A group norm whose output is in channels_last; PyTorch's own is contiguous on a GPU. Shapes as group_norm's."""
    out = GROUP_NORM(x, groups, weight, bias, epsilon, cudnn_enabled)
    return out.contiguous(memory_format=torch.channels_last)  # type: ignore[no-any-return]


GROUP_NORMS = (GROUP_NORM, group_norm_channels_last)
CONV2D_FUNCTIONS = (CONVOLUTION, cudnn_conv2d, native_conv2d, product_conv2d)


def is_product(x: Tensor, conv: Convolution) -> bool:
    """Is a convolution of these images one product of pixels with the weight, without a copy? They are in channels_last."""
    is_pointwise = conv.weight.dim() == 4 and set(conv.weight.shape[2:]) == set(conv.stride) == {1} and not any(conv.padding)
    if not is_pointwise or conv.groups != 1 or conv.weight.shape[0] == 1:
        return False
    return not is_same_either_way(x) and x.is_contiguous(memory_format=torch.channels_last)


def is_same_either_way(image: Tensor) -> bool:
    """Has it one channel, or one pixel, in the order of its dimensions? Then both layouts are the same bytes."""
    return image.is_contiguous() and (image.shape[1] == 1 or tuple(image.shape[2:]) == (1, 1))


def name_convolution(program: Program, v: int) -> str:
    """A convolution in words: "1x192x16x16, weight 192x1x3x3, stride 2, groups 192"."""
    conv = convolution(program.calls[v], CONV2D_FUNCTIONS)
    assert conv is not None
    parts = [shape_of(program.value(conv.x)), f"weight {shape_of(conv.weight)}"]
    for name, sizes in (("stride", conv.stride), ("dilation", conv.dilation), ("groups", (conv.groups,))):
        if set(sizes) != {1}:
            parts.append(f"{name} {'x'.join(map(str, sizes[:1] if len(set(sizes)) == 1 else sizes))}")
    return ", ".join(parts)


def returned_operators(program: Program) -> set[int]:
    """Operators whose output is an output of the model, or is seen through one: a caller may write to it."""
    returned = program.kept_operators()
    for v in reversed(range(len(program.graph))):
        if v in returned and is_view(program.calls[v].function):
            returned |= {*program.graph.predecessors[v]}
    return returned


def name_operators(program: Program, operators: Sequence[int]) -> str:
    """Operators in words: "batch_norm + relu"."""
    return " + ".join(program.graph.operators[v].name for v in operators)


def shape_of(tensor: Any) -> str:
    """A tensor's shape in words: "1x192x16x16"."""
    return "x".join(map(str, tensor.shape))
