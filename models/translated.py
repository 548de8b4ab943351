"""A translated pipeline of random structure, for speed: WindTunnel's form of encoders, trees and a factorization machine.

It needs no library of trees. What it predicts means nothing.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from conf import not_one_of
from models.neural.embeddings import Embeddings
from models.neural.factorization import Factorization
from models.neural.forests import ForestLeaves, HardForest, SoftForest
from models.neural.trees import Tree, TreeEnsemble
from models.registry import BadModel, Input, register

FORMS = ("hard", "soft")


def _inputs(*, fields: int, categories: int, **options: int | str) -> tuple[Input, ...]:
    return (Input((fields,), vocabulary=categories),)


@register(_inputs)
def translated(
    training: bool,
    *,
    fields: int = 26,
    categories: int = 1000,
    trees: int = 100,
    leaves: int = 64,
    rank: int = 20,
    form: str = "hard",
) -> nn.Module:
    """Two-hot embeddings of `fields`, trees over them, and a factorization machine over their leaves: [B, fields] -> [B, 1].

    Args:
        fields: of a row; 26 as Criteo's.
        categories: of each field.
        trees, leaves: of the ensemble; complete trees, so that leaves are a power of two.
        rank: of the factorization machine.
        form: "hard" is exact and gathers; "soft" is level 4, in which everything trains, and the train form always.
    """
    if wrong := not_one_of("model.form", form, FORMS):
        raise BadModel(wrong)
    if leaves < 2 or leaves & (leaves - 1):
        raise BadModel(f"option leaves of model translated must be a power of two, at least 2, not {leaves}")
    base = math.ceil(math.sqrt(categories))
    high, low = np.divmod(np.arange(categories), base)
    codes = np.concatenate([np.eye(base)[high], np.eye(base)[low]], 1)
    generator = np.random.default_rng(0)
    width = fields * codes.shape[1]
    ensemble = TreeEnsemble.of(
        [_complete_tree(leaves, width, generator) for _ in range(trees)], width, np.zeros(0), rounds_inputs=False
    )
    forest: HardForest | SoftForest
    if training or form == "soft":
        forest = SoftForest(ensemble)
        forest.sees_missing = False
    else:
        forest = HardForest(ensemble, "gather")
    factors = generator.normal(size=(trees * leaves, rank)) / rank
    return nn.Sequential(
        Embeddings([codes] * fields, torch.float32),
        ForestLeaves(forest, ensemble),
        Factorization(generator.normal(size=trees * leaves), factors, 0.0, torch.float32),
    )


def _complete_tree(leaves: int, width: int, generator: np.random.Generator) -> Tree:
    """A tree whose leaves are all as deep, over random columns of 0 and 1."""
    nodes = leaves - 1
    children = np.arange(1, 2 * nodes + 1).reshape(nodes, 2)
    children = np.where(children < nodes, children, nodes - 1 - children)
    nowhere = np.zeros(nodes, dtype=np.bool_)
    columns = generator.integers(0, width, nodes)
    return Tree(columns, np.full(nodes, 0.5), children, np.zeros((leaves, 0)), nowhere, nowhere, nowhere)
