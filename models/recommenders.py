"""Recommenders over Criteo's fields: 13 numbers and 26 categories, whose embeddings are read side by side."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from models.registry import Input, is_small, register

NUM_DENSE = 13
# Distinct values of each categorical field of the Criteo Kaggle data set: 33,762,577 in all.
ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
SMALL_ROWS = 500  # of a table of the small form, at most
DLRM_SIZE, DLRM_BOTTOM, DLRM_TOP = 16, (512, 256, 64, 16), (512, 256, 1)
DEEPFM_SIZE, DEEPFM_HIDDEN = 10, (400, 400, 400)
DEEPFM_STD = 0.1  # of its embeddings: the sum over 741 pairs of fields stays where a sigmoid tells values apart


def tables(size: str) -> tuple[int, ...]:
    """The rows of each embedding."""
    return tuple(min(rows, SMALL_ROWS) for rows in ROWS) if is_small(size) else ROWS


def _inputs(size: str, hot: int = 1) -> tuple[Input, ...]:
    rows = tables(size)
    return Input((NUM_DENSE,)), Input((hot, len(rows)), rows)


def _perceptron(widths: tuple[int, ...], *, ends_in_relu: bool) -> nn.Sequential:
    """Linear layers with a ReLU between each two."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        linear = nn.Linear(inputs, outputs)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*(layers if ends_in_relu else layers[:-1]))


class DLRM(nn.Module):
    """Numbers [B, 13] and category ids [B, hot, 26] -> the probability of a click, [B, 1]."""

    pairs: Tensor

    def __init__(self, rows: tuple[int, ...]):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(count, DLRM_SIZE, mode="sum") for count in rows)
        for bag in self.bags:
            assert isinstance(bag, nn.EmbeddingBag)
            nn.init.normal_(bag.weight, std=DLRM_SIZE**-0.5)
        self.bottom = _perceptron((NUM_DENSE, *DLRM_BOTTOM), ends_in_relu=True)
        num_vectors = len(rows) + 1
        pairs = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.register_buffer("pairs", pairs[0] * num_vectors + pairs[1], persistent=False)
        self.top = _perceptron((DLRM_SIZE + pairs.shape[1], *DLRM_TOP), ends_in_relu=False)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        x = self.bottom(dense)  # [B, D]
        ids = categories.unbind(-1)  # each [B, hot]
        vectors = torch.stack([x, *(bag(i) for bag, i in zip(self.bags, ids, strict=True))], 1)  # [B, 27, D]
        products = torch.einsum("bid,bjd->bij", vectors, vectors).flatten(1)  # [B, 27 * 27]
        return self.top(torch.cat([x, products[:, self.pairs]], 1)).sigmoid()


class DeepFM(nn.Module):
    """Numbers [B, 13] and category ids [B, 1, 26] -> the probability of a click, [B, 1].

    A field's embedding is of the factorization machine and of the perceptron; a number is the factor of its field's.
    """

    def __init__(self, rows: tuple[int, ...]):
        super().__init__()
        num_fields = NUM_DENSE + len(rows)
        self.embeddings = nn.ModuleList(nn.Embedding(count, DEEPFM_SIZE) for count in rows)
        self.linear = nn.ModuleList(nn.Embedding(count, 1) for count in rows)
        for table in (*self.embeddings, *self.linear):
            assert isinstance(table, nn.Embedding)
            nn.init.normal_(table.weight, std=DEEPFM_STD)
        self.dense = nn.Parameter(torch.randn(NUM_DENSE, DEEPFM_SIZE) * DEEPFM_STD)
        self.dense_linear = nn.Linear(NUM_DENSE, 1)
        self.deep = _perceptron((num_fields * DEEPFM_SIZE, *DEEPFM_HIDDEN, 1), ends_in_relu=False)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        ids = categories[:, 0].unbind(-1)  # each [B]
        vectors = torch.stack([table(i) for table, i in zip(self.embeddings, ids, strict=True)], 1)  # [B, 26, D]
        vectors = torch.cat([dense[:, :, None] * self.dense, vectors], 1)  # [B, 39, D]
        first = self.dense_linear(dense) + torch.cat([table(i) for table, i in zip(self.linear, ids, strict=True)], 1).sum(
            1, keepdim=True
        )
        # The sum over pairs of fields of their products (Rendle 2010, lemma 3.1).
        second = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1, keepdim=True)
        return (first + second + self.deep(vectors.flatten(1))).sigmoid()


@register(_inputs, is_made_in_place=True)
def dlrm(training: bool, *, size: str = "full", hot: int = 1) -> nn.Module:
    """DLRM (Naumov et al. 2019), MLPerf's small shape: the tables of Criteo Kaggle. `hot`: ids of a field."""
    return DLRM(tables(size))


@register(_inputs, is_made_in_place=True)
def deepfm(training: bool, *, size: str = "full") -> nn.Module:
    """DeepFM (Guo et al. 2017), with vectors of 10 and three hidden layers of 400, on the tables of Criteo Kaggle."""
    return DeepFM(tables(size))
