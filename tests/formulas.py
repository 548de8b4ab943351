"""Parameters and multiply-accumulates of networks by closed formulas, from the papers' tables."""

from __future__ import annotations

import math
from itertools import pairwise

from models.darts import AMOEBANET, DARTS, CellType, Genotype


def transformer_macs(layers: int, width: int, inner: int, queries: int, keys: int | None = None) -> int:
    """Multiply-accumulates of `layers` blocks of attention (over itself, or `keys` of an encoder's) and, with an inner
    width, a feed-forward part."""
    of_keys = queries if keys is None else keys
    attention = 2 * queries * width**2 + 2 * of_keys * width**2 + 2 * queries * of_keys * width
    return layers * (attention + 2 * queries * width * inner)


def t5_small_macs(sequence: int) -> int:
    """6 + 6 layers of width 512, inner width 2048, 32128 tokens (Raffel et al. 2020, section 3.8)."""
    encoder = transformer_macs(6, 512, 2048, sequence)
    decoder = transformer_macs(6, 512, 2048, sequence) + transformer_macs(6, 512, 0, sequence, sequence)
    return encoder + decoder + sequence * 512 * 32128


def gpt2_macs(sequence: int) -> int:
    """12 layers of width 768, 50257 tokens (Radford et al. 2019, table 2)."""
    return transformer_macs(12, 768, 4 * 768, sequence) + sequence * 768 * 50257


def gpt_counts(layers: int, hidden: int, vocabulary: int) -> tuple[int, int]:
    """Parameters of a GPT with 2048 positions, without biases and norms, and multiply-accumulates of 64 tokens."""
    parameters = 12 * layers * hidden**2 + (vocabulary + 2048) * hidden
    return parameters, transformer_macs(layers, hidden, 4 * hidden, 64) + 64 * hidden * vocabulary


def inverted_residuals(size: int, blocks: list[tuple[int, ...]], head: int, classes: int, squeeze: bool) -> tuple[int, int]:
    """Parameters and multiply-accumulates of MobileNetV2 (table 2) or, with `squeeze`, EfficientNet (table 1).

    `size` is that of the stem's output; `blocks` are (expansion, channels, repeats, stride, kernel).
    """
    parameters, macs, before = 32 * 27 + 64, 32 * 27 * size**2, 32
    for expansion, channels, repeats, first_stride, kernel in blocks:
        for stride in [first_stride] + [1] * (repeats - 1):
            inner = before * expansion
            if expansion > 1:
                parameters += before * inner + 2 * inner
                macs += before * inner * size**2
            size = math.ceil(size / stride)
            parameters += inner * kernel**2 + 2 * inner + inner * channels + 2 * channels
            macs += (inner * kernel**2 + inner * channels) * size**2
            if squeeze:
                narrow = before // 4
                parameters += 2 * inner * narrow + inner + narrow
                macs += 2 * inner * narrow
            before = channels
    parameters += before * head + 2 * head + head * classes + classes
    macs += before * head * size**2 + head * classes
    return parameters, macs


MOBILENET_V2 = [
    *[(1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 32, 3, 2, 3), (6, 64, 4, 2, 3)],
    *[(6, 96, 3, 1, 3), (6, 160, 3, 2, 3), (6, 320, 1, 1, 3)],
]
EFFICIENTNET_B0 = [
    *[(1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3)],
    *[(6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3)],
]
MOBILENET_V2_CIFAR10 = inverted_residuals(
    32, [(t, c, n, 1 if c == 24 else s, k) for t, c, n, s, k in MOBILENET_V2], 1280, 10, squeeze=False
)
EFFICIENTNET_B0_CIFAR10 = inverted_residuals(32, EFFICIENTNET_B0, 1280, 10, squeeze=True)


def convolutions(size: int, *kernels: tuple[int, int, int]) -> tuple[int, int]:
    """Parameters without biases, and multiply-accumulates, of convolutions (channels in, channels out, places of a kernel)
    whose outputs have size x size places."""
    weights = sum(before * after * places for before, after, places in kernels)
    return weights, weights * size**2


SAMPLE = convolutions(15, (384, 384, 9), (384, 768, 9), (384, 384, 9), (384, 768, 9))
# 1x1; 1x1, then 1x3 beside 3x1; 1x1, 3x3, then 1x3 beside 3x1; pool, then 1x1.
LAST_BLOCK = convolutions(
    *(8, (2048, 320, 1), (2048, 384, 1), (384, 384, 3), (384, 384, 3)),
    *((2048, 448, 1), (448, 384, 9), (384, 384, 3), (384, 384, 3), (2048, 192, 1)),
)


def resnet50_cifar10() -> tuple[int, float]:
    """From torchvision's published ImageNet figures: after the stem, each size shrinks from 56, 28, 14, 7 to 32, ..."""
    stem, new_stem = 3 * 64 * 49, 3 * 64 * 9
    parameters = 25_557_032 - stem + new_stem - 990 * 2049
    beyond = 4.09e9 - stem * 112**2 - 1000 * 2048
    return parameters, beyond * (32 / 56) ** 2 + new_stem * 32**2 + 10 * 2048


def cell_network(genotype: Genotype, channels: int, layers: int) -> tuple[int, int]:
    """Parameters and multiply-accumulates of DARTS's ImageNet network, from its genotype and the size of each cell."""
    parameters = macs = 0

    def add(weights: int, size: int, normed: int = 0) -> None:
        nonlocal parameters, macs
        parameters += weights + 2 * normed
        macs += weights * size**2

    add(27 * channels // 2, 112, channels // 2)
    add(9 * channels * channels // 2, 56, channels)
    add(9 * channels**2, 28, channels)
    before, size = (channels, channels), 28
    for layer in range(layers):
        reduction = layer in (layers // 3, 2 * layers // 3)
        channels *= 2 if reduction else 1
        cell: CellType = genotype.reduction if reduction else genotype.normal
        for inputs in before:  # both squeezes, and the factorized reduction, have as many weights
            add(inputs * channels, size, channels)
        size //= 2 if reduction else 1
        for name, source in cell.operations:
            strided = reduction and source < 2
            kind, kernel = name[:8], int(name[-1]) if name[-1].isdigit() else 0
            separable = {"sep_conv": 2, "dil_conv": 1}.get(kind, 0)
            for _ in range(separable):
                add(channels * kernel**2, size)
                add(channels**2, size, channels)
            if name == "skip" and strided:
                add(channels**2, size, channels)
            if name == "conv_7x1_1x7":  # the row comes first, and halves only the width
                add(7 * channels**2, size)
                macs += 7 * channels**2 * size**2 if strided else 0
                add(7 * channels**2, size, channels)
        before = (before[1], len(cell.output) * channels)
    add(before[1] * 1000, 1)
    return parameters + 1000, macs


DARTS_COUNTS = cell_network(DARTS, channels=48, layers=14)
AMOEBANET_COUNTS = cell_network(AMOEBANET, channels=48, layers=14)
# Two-hot embeddings of 26 fields, 2·32 columns each; leaves from 63 nodes a tree; a linear term, twice 20 factors a leaf.
TRANSLATED = 26 * 1000 * 64 + 6400 * 21 + 1, 100 * 63 * 64 + 6400 * (2 * 20 + 1)


def perceptron_macs(*widths: int) -> int:
    return sum(before * after for before, after in pairwise(widths))


def perceptron(*widths: int) -> int:
    """Parameters, with biases."""
    return perceptron_macs(*widths) + sum(widths[1:])


# The data set's 26 tables; Naumov et al. 2019, section 5, and MLPerf's shape for Kaggle have the rest.
KAGGLE_ROWS, FIELDS = 33_762_577, 26 + 13
DLRM_MACS = perceptron_macs(13, 512, 256, 64, 16) + 27 * 27 * 16 + perceptron_macs(16 + 27 * 26 // 2, 512, 256, 1)
# Guo et al. 2017, section 3.1: a vector of 10 and a weight for each value, and the machine's bias; three layers of 400.
DEEPFM = (KAGGLE_ROWS + 13) * 11 + 1 + perceptron(FIELDS * 10, 400, 400, 400, 1), perceptron_macs(390, 400, 400, 400, 1)


def retinanet_heads() -> tuple[int, int]:
    """Lin et al. 2017, section 4: four convolutions 3x3 of 256 channels, and the last one, of a subnet; two subnets."""
    towers = 2 * 4 * 9 * 256**2
    last = 9 * 256 * 9 * (91 + 4)
    biases = 2 * 4 * 256 + 9 * (91 + 4)
    return towers + last + biases, (towers + last) * sum(side**2 for side in (100, 50, 25, 13, 7))


def whisper_encoder() -> tuple[int, int]:
    """Radford et al. 2022, table 1 (small): 12 layers of width 768; two convolutions over 80 bands, 1500 positions."""
    width, inner = 768, 4 * 768
    layer = 4 * width**2 + 3 * width + 2 * width * inner + inner + width + 4 * width
    convolutions = 3 * 80 * width + width + 3 * width**2 + width
    macs = 3000 * 3 * 80 * width + 1500 * 3 * width**2 + transformer_macs(12, width, inner, 1500)
    return convolutions + 1500 * width + 12 * layer + 2 * width, macs


def mixture_parameters() -> int:
    """Four layers as wide as Qwen3-30B-A3B's, 32 experts of which each token takes 8, and 32,000 tokens."""
    width, inner, of_heads = 2048, 768, 128 * (32 + 2 * 4)
    attention = width * of_heads + 32 * 128 * width + 2 * 128
    layer = attention + 32 * width + 32 * 3 * width * inner + 2 * width
    return 4 * layer + 2 * 32_000 * width + width


def gptj_macs(tokens: int, keys: int) -> int:
    """Wang & Komatsuzaki 2021: 28 layers of width 4096, inner width 16384, and 50400 tokens."""
    layer = 4 * tokens * 4096**2 + 2 * tokens * keys * 4096 + 2 * tokens * 4096 * 16384
    return 28 * layer + tokens * 4096 * 50400
