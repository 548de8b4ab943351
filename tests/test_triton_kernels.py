"""Kernels of convolutions against PyTorch in fp64. Without a GPU they run in Triton's interpreter."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from drawing import examples
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from triton_cases import ACTS, LAYOUTS, acts, check_place, dense_kernels, device_with_kernels, kernels, pairs, places

from systems.scheduling.passes import fuse_in_triton

device = device_with_kernels


@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), before=acts, between=acts, after=acts, is_last=st.booleans(), reads_last=st.booleans())
@pytest.mark.slow
def test_a_kernel_computes_what_pytorch_does(
    device: str, data: st.DataObject, before: str, between: str, after: str, is_last: bool, reads_last: bool
) -> None:
    draw = data.draw
    n, c, k, h, w = (draw(st.integers(1, most)) for most in (3, 40, 40, 9, 9))
    kernel, stride, dilation = draw(pairs), draw(pairs), draw(pairs)
    padding = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    has_biases, has_addend = draw(st.booleans()), draw(st.booleans())
    # Triton's interpreter multiplies no bf16.
    dtype = draw(st.sampled_from([torch.float32, torch.float16, *([torch.bfloat16] if device == "cuda" else [])]))
    assume(all(s + 2 * p > d * (f - 1) for s, p, d, f in zip((h, w), padding, dilation, kernel, strict=True)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(device, dtype)

    x = tensor(n, c, h, w).contiguous(memory_format=LAYOUTS[reads_last])
    weight, pointwise = tensor(c, 1, *kernel), tensor(k, c, 1, 1) / c**0.5
    biases = (tensor(c), tensor(k)) if has_biases else (None, None)
    wide = [None if t is None else t.double() for t in (x, weight, biases[0], pointwise, biases[1])]
    expected = functional.conv2d(ACTS[before](wide[0]), wide[1], wide[2], stride, padding, dilation, c)
    expected = functional.conv2d(ACTS[between](expected), wide[3], wide[4])
    addend = tensor(*expected.shape).contiguous(memory_format=LAYOUTS[draw(st.booleans())]) if has_addend else None
    expected = ACTS[after](expected if addend is None else expected + addend.double())
    num_pixels, num_cores = n * expected.shape[2] * expected.shape[3], draw(st.integers(1, 40))
    tile = draw(st.sampled_from(kernels().tiles(c, k, kernel[0] * kernel[1], num_pixels, num_cores)))
    tile = replace(
        tile, depth=draw(st.sampled_from([16, 64])), splits=draw(st.integers(1, 4)), is_unrolled=draw(st.booleans())
    )
    tickets = None
    if tile.splits > 1:
        tickets = torch.zeros(tile.num_blocks(num_pixels, k), dtype=torch.int32, device=device)
    numbers = kernel, stride, padding, dilation
    separable = kernels().Separable(*numbers, before, between, after, "ieee", is_last, tile)
    place = draw(places(expected, dtype, is_last))
    for _ in range(2):  # a ticket that is left set would spoil the second
        out = separable(x, fuse_in_triton._taps(weight), biases[0], pointwise, biases[1], addend, tickets, *place[:1])
    check_place(out, place, dtype, is_last)
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max() + 1))


@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), before=acts, after=acts, is_last=st.booleans(), reads_last=st.booleans())
def test_a_dense_kernel_computes_what_pytorch_does(
    device: str, data: st.DataObject, before: str, after: str, is_last: bool, reads_last: bool
) -> None:
    draw = data.draw
    n, c, k, h, w = (draw(st.integers(1, most)) for most in (3, 40, 40, 9, 9))
    ones = st.just((1, 1))  # a pixel of the input is one of the output
    kernel, stride, dilation = draw(ones | pairs), draw(ones | pairs), draw(pairs)
    padding = draw(st.just((0, 0)) | st.tuples(st.integers(0, 2), st.integers(0, 2)))
    has_bias, has_addend = draw(st.booleans()), draw(st.booleans())
    dtype = draw(st.sampled_from([torch.float32, torch.float16, *([torch.bfloat16] if device == "cuda" else [])]))
    assume(all(s + 2 * p > d * (f - 1) for s, p, d, f in zip((h, w), padding, dilation, kernel, strict=True)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(device, dtype)

    x = tensor(n, c, h, w).contiguous(memory_format=LAYOUTS[reads_last])
    weight = tensor(k, c, *kernel) / (c * kernel[0] * kernel[1]) ** 0.5
    bias = tensor(k) if has_bias else None

    def convolved(x: Tensor) -> Tensor:
        wide_bias = None if bias is None else bias.double()
        return functional.conv2d(ACTS[before](x.double()), weight.double(), wide_bias, stride, padding, dilation)

    like = convolved(x)
    addend = tensor(*like.shape).contiguous(memory_format=LAYOUTS[draw(st.booleans())]) if has_addend else None
    num_pixels, num_taps = like.numel() // k, kernel[0] * kernel[1]
    tile = draw(st.sampled_from(dense_kernels().tiles(num_pixels, k, c, num_taps, draw(st.integers(1, 40)))))
    dense = dense_kernels().Dense(kernel, stride, padding, dilation, before, after, "ieee", is_last, tile)
    tickets = torch.zeros(tile.num_blocks(num_pixels, k), dtype=torch.int32, device=device) if tile.splits > 1 else None
    tolerance = 16 * torch.finfo(dtype).eps
    place = draw(places(like, dtype, is_last))
    for scale in (1.0, -0.5):  # the tickets are ready for another call
        out = dense(x * scale, fuse_in_triton._rows(weight), bias, addend, tickets, *place[:1])
        check_place(out, place, dtype, is_last)
        expected = ACTS[after](convolved(x * scale) + (0 if addend is None else addend.double()))
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max() + 1))


@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), before=acts, after=acts, is_last=st.booleans(), reads_last=st.booleans())
def test_a_depthwise_kernel_computes_what_pytorch_does(
    device: str, data: st.DataObject, before: str, after: str, is_last: bool, reads_last: bool
) -> None:
    draw = data.draw
    has_bias = draw(st.booleans())
    n, c, h, w = (draw(st.integers(1, most)) for most in (3, 140, 9, 9))
    kernel, stride, dilation = draw(pairs | st.tuples(st.integers(1, 7), st.integers(1, 7))), draw(pairs), draw(pairs)
    if draw(st.booleans()):  # of which strips are
        stride, dilation = (1, 1), (1, 1)
    padding = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, *([torch.bfloat16] if device == "cuda" else [])]))
    assume(all(s + 2 * p > d * (f - 1) for s, p, d, f in zip((h, w), padding, dilation, kernel, strict=True)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(device, dtype)

    x = tensor(n, c, h, w).contiguous(memory_format=LAYOUTS[reads_last])
    weight, bias = tensor(c, 1, *kernel), tensor(c) if has_bias else None
    wide_bias = None if bias is None else bias.double()
    expected = functional.conv2d(ACTS[before](x.double()), weight.double(), wide_bias, stride, padding, dilation, c)
    expected = ACTS[after](expected)
    kernels = import_module("systems.kernels.depthwise")
    numbers, tiles = (kernel, stride, padding, dilation), kernels.tiles(c, kernel, stride, dilation)
    depthwise = kernels.Depthwise(*numbers, before, after, is_last, draw(st.sampled_from(tiles)))
    place = draw(places(expected, dtype, is_last))
    out = depthwise(x, fuse_in_triton._channels_apart(weight), bias, *place[:1])
    check_place(out, place, dtype, is_last)
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max() + 1))


@given(
    num_pixels=st.integers(1, 10**6),
    channels=st.tuples(st.integers(1, 4096), st.integers(1, 4096)),
    num_taps=st.integers(1, 49),
    num_cores=st.integers(1, 200),
)
def test_tiles_cover_the_output_and_every_part_of_a_sum(
    num_pixels: int, channels: tuple[int, int], num_taps: int, num_cores: int
) -> None:
    tiles = dense_kernels().tiles(num_pixels, *channels, num_taps, num_cores)
    assert tiles and len(set(map(str, tiles))) == len(tiles)
    for tile in tiles:
        blocks = len(range(0, num_pixels, tile.pixels)) * len(range(0, channels[0], tile.channels))
        assert tile.num_blocks(num_pixels, channels[0]) == blocks
        assert tile.splits == 1 or tile.splits * tile.depth <= max(channels[1], tile.depth) * num_taps


@given(
    channels=st.tuples(st.integers(1, 2048), st.integers(1, 2048)),
    num_taps=st.integers(1, 49),
    num_pixels=st.integers(1, 10**6),
    num_cores=st.integers(1, 200),
)
def test_separable_tiles_take_all_channels(
    channels: tuple[int, int], num_taps: int, num_pixels: int, num_cores: int
) -> None:
    """Shared sums have blocks for every channel, and no more blocks than the cores hold at once."""
    tiles = kernels().tiles(*channels, num_taps, num_pixels, num_cores)
    assert 1 <= len(tiles) <= 3 and len(set(map(str, tiles))) == len(tiles)
    for tile in tiles:
        assert tile.splits == 1 or (tile.splits - 1) * tile.depth < channels[0] <= tile.splits * tile.depth
        assert tile.splits == 1 or tile.splits * tile.num_blocks(num_pixels, channels[1]) <= 8 * num_cores


def test_tf32_is_rounded_to_the_nearest(device: str) -> None:
    """What a tensor core would cut off: without rounding a product of ones just below 2 is off by twice as much."""
    values = torch.full((1, 16, 1, 1), 2.0 - 2.0**-12, device=device)
    ones = torch.ones(16, 1, 3, 3, device=device).flatten(1).t().contiguous()
    tile = kernels().Tile(16, 16, 16, 1, 1)
    separable = kernels().Separable((3, 3), (1, 1), (1, 1), (1, 1), "none", "none", "none", "tf32", False, tile)
    assert (separable(values, ones, None, torch.ones(16, 16, 1, 1, device=device), None, None) == 32.0).all()
    tile = dense_kernels().DenseTile(16, 16, 16, 1, 1)
    dense = dense_kernels().Dense((1, 1), (1, 1), (0, 0), (1, 1), "none", "none", "tf32", False, tile)
    assert (dense(values, torch.ones(16, 16, device=device), None, None, None) == 32.0).all()


def test_a_weight_is_rounded_to_the_nearest_and_keeps_what_is_no_number() -> None:
    weight = torch.tensor([2.0 - 2.0**-12, 1.0 + 2.0**-12, torch.inf, -torch.inf, -1.0 - 3 * 2.0**-12])
    all_ones = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # as a GPU writes it
    rows = fuse_in_triton._rounded_rows(torch.cat([weight, all_ones]).view(1, 6, 1, 1))
    assert rows[0, :5].tolist() == [2.0, 1.0, torch.inf, -torch.inf, -1.0 - 2.0**-10] and rows[0, 5].isnan()


@pytest.mark.parametrize("act", sorted(ACTS.keys() - {"none"}))
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_what_is_no_number_stays_none(device: str, act: str, precision: str) -> None:
    x = torch.randn(1, 16, 2, 2, device=device)
    x.view(torch.int32)[0, 3, 1, 0] = 0x7FFFFFFF  # the NaN that a GPU writes
    expected = ACTS[act](x).isnan().any(1, keepdim=True).expand(1, 16, 2, 2)
    taps, ones = torch.ones(1, 16, device=device), torch.ones(16, 16, device=device)
    numbers = (1, 1), (1, 1), (0, 0), (1, 1)
    tile = kernels().Tile(16, 16, 16, 1, 1)
    separable = kernels().Separable(*numbers, act, "none", act, precision, False, tile)
    assert separable(x, taps, None, ones.view(16, 16, 1, 1), None, None).isnan().equal(expected)
    dense = dense_kernels().Dense(*numbers, act, act, precision, False, dense_kernels().DenseTile(16, 16, 16, 1, 1))
    assert dense(x, ones, None, None, None).isnan().equal(expected)


def test_an_activation_that_there_is_not_is_refused(device: str) -> None:
    numbers = (1, 1), (1, 1), (0, 0), (1, 1)
    with pytest.raises(ValueError, match="no activation tanh"):
        kernels().Separable(*numbers, "tanh", "none", "none", "ieee", False, kernels().Tile(16, 16, 16, 1, 1))
    with pytest.raises(ValueError, match="no activation tanh"):
        dense_kernels().Dense(*numbers, "none", "tanh", "ieee", False, dense_kernels().DenseTile(16, 16, 16, 1, 1))


@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), after=acts, is_last=st.booleans(), has_addend=st.booleans())
def test_a_tensor_or_a_sum_is_written_to_its_place(
    device: str, data: st.DataObject, after: str, is_last: bool, has_addend: bool
) -> None:
    shape = data.draw(st.tuples(*(st.integers(1, most) for most in (3, 9, 9, 9))))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    x, other = (
        torch.randn(shape, generator=random).to(device, dtype).contiguous(memory_format=LAYOUTS[data.draw(st.booleans())])
        for _ in range(2)
    )
    place = data.draw(places(x, dtype, is_last).filter(bool))
    placed = import_module("systems.kernels.placed").Placed(after, is_last)
    check_place(placed(x, other if has_addend else None, place[0]), place, dtype, is_last)
    expected = ACTS[after](x.double() + (other.double() if has_addend else 0))
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(place[0].double(), expected, rtol=tolerance, atol=tolerance)


@given(
    dtype=st.sampled_from([torch.float32, torch.float16]),
    shape=st.tuples(st.integers(1, 2), st.integers(1, 40), st.integers(1, 4), st.integers(1, 4)),
    wider=st.integers(0, 40),
    is_channels_last=st.booleans(),
)
def test_numbers_over_a_unit_times_it_are_what_they_were(
    dtype: torch.dtype, shape: tuple[int, ...], wider: int, is_channels_last: bool
) -> None:
    """Of a part of a wider tensor too, whose strides are not the channels'. Of no neighbours the unit is 1."""
    n, c, h, w = shape
    layout = LAYOUTS[is_channels_last]
    x = torch.empty(n, c + wider, h, w, dtype=dtype, device="meta").to(memory_format=layout)[:, :c]
    unit, over = import_module("systems.kernels.tile").split_by_unit(x, c, None)
    expected = [c, x.stride(0), x.stride(2), x.stride(3), 0, 0, 0]
    assert [number * unit for number in over] == expected
    longest = next(u for u in (8, 4, 2, 1) if all(number % u == 0 for number in expected) and u * x.element_size() <= 16)
    assert unit == (longest if x.stride(1) == 1 else 1)
