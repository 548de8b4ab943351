"""system=deepgbm: trees distilled into networks, beside a factorization machine of categories (Ke et al., KDD 2019).

Written after the paper, whose code needs libraries of 2019. Trees are parted into groups. Of each group

1. an embedding of the leaves that a row falls into is learned, of which a linear map gives the sum of their values;
2. a network of the group's features learns to give that embedding, so that it stands for the group's trees.

CatNN is DeepFM over the categories. The score is a weighted sum of both. The loss is the label's plus the embeddings' error.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, embedding, embedding_bag, mse_loss

from models.neural.linear import Columns

from .learner import SMALL_EPOCHS, Task, check_options
from .networks import Built, Ids, NetworkLearner
from .steps import AUTO

DISTILLING_EPOCHS, DISTILLING_BATCH, DISTILLING_RATE = 5, 4096, 1e-2


class DeepGBM(NetworkLearner):
    """DeepGBM over what the pipeline's preprocessing makes of a table, whatever stands behind that.

    Args:
        groups: of trees.
        leaf_width: of the embedding of a group's leaves.
        most_features: of a group; those of the largest gain.
        distillation: weight of the embeddings' error in the loss.
        category_width: of CatNN's embeddings.
        others: as of NetworkLearner.
    """

    name = "deepgbm"

    def __init__(
        self,
        groups: int = 10,
        leaf_width: int = 20,
        most_features: int = 128,
        distillation: float = 1.0,
        category_width: int = 10,
        learning_rate: float = 1e-3,
        weight_decay: float = 1e-5,
        batch_size: int = 1024,
        max_epochs: int = 100,
        patience: int = 5,
        executor: str = AUTO,
    ):
        super().__init__(learning_rate, weight_decay, batch_size, max_epochs, patience, executor)
        counts = {"groups": groups, "leaf_width": leaf_width, "most_features": most_features}
        check_options({}, {"distillation": distillation}, counts | {"category_width": category_width})
        self.groups, self.leaf_width, self.most_features = groups, leaf_width, most_features
        self.distillation, self.category_width = distillation, category_width

    def built(self, task: Task) -> Built:
        from models.tabular.pipelines import pipeline

        made = pipeline(task.preprocessing, "pipe2", task.dataset, task.size, task.seed).fit(*task.training)
        booster, encode, ids = made[-1].booster_, made[:-1].transform, Ids(task)
        encoded = encode(task.training[0])
        mean, deviation = encoded.mean(0), encoded.std(0)
        deviation[deviation == 0] = 1

        def tensors(table: Any) -> tuple[Tensor, ...]:
            features = torch.from_numpy(((encode(table) - mean) / deviation).astype(np.float32))
            return features.to(task.device), ids(table).to(task.device)

        parts = np.array_split(np.random.default_rng(task.seed).permutation(booster.num_trees()), self.groups)
        trees = [part for part in parts if len(part)]
        leaves = np.asarray(booster.predict(encoded, pred_leaf=True), dtype=np.int64).reshape(len(encoded), -1)
        values = leaf_values(booster)
        epochs = min(DISTILLING_EPOCHS, SMALL_EPOCHS) if task.is_small else DISTILLING_EPOCHS
        teachers = []
        for number, part in enumerate(trees):
            task.report(f"{self.name}, leaves of group {number + 1} of {len(trees)}")
            sums = sum(values[tree][leaves[:, tree]] for tree in part)
            teachers.append(Teacher(leaves[:, part], np.asarray(sums), self.leaf_width, epochs, task.device))
        columns = [most_gaining(booster, part, self.most_features) for part in trees]
        base = float(np.log(task.training[1].mean()) - np.log1p(-task.training[1].mean()))
        network = Network(columns, teachers, ids.sizes, self.category_width, base).to(task.device)
        training = tensors(task.training[0])
        goals = torch.stack([teacher.embedded for teacher in teachers], 1)  # [rows, groups, leaf_width]

        def loss(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
            logits, error = outputs
            return binary_cross_entropy_with_logits(logits[:, 0], target) + self.distillation * error

        return Built(network, tensors, Distillation(network), (*training, goals), loss)


def leaf_values(booster: Any) -> list[NDArray[np.float64]]:
    """Of each tree the values of its leaves, [leaves]."""
    values = []
    for tree in booster.dump_model()["tree_info"]:
        of_tree = np.zeros(tree["num_leaves"])
        pending = [tree["tree_structure"]]
        while pending:
            node = pending.pop()
            if "leaf_value" in node:
                of_tree[node.get("leaf_index", 0)] = node["leaf_value"]
            else:
                pending += [node["left_child"], node["right_child"]]
        values.append(of_tree)
    return values


def most_gaining(booster: Any, trees: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """The columns that some trees split at, at most so many, those of the largest gain first; one column at least."""
    gain = np.zeros(booster.num_feature())
    information = booster.dump_model()["tree_info"]
    for tree in trees:
        pending = [information[tree]["tree_structure"]]
        while pending:
            node = pending.pop()
            if "split_feature" in node:
                gain[node["split_feature"]] += node["split_gain"]
                pending += [node["left_child"], node["right_child"]]
    order = np.argsort(-gain, kind="stable")
    return order[: max(1, min(most, int((gain > 0).sum())))]


class Teacher:
    """An embedding of a group's leaves, learned so that a linear map of it gives the sum of their values.

    Attributes:
        embedded: [rows, width], of the training rows; what the group's network learns to give.
        weight, bias: of the linear map, [width] and [].
    """

    def __init__(
        self, leaves: NDArray[np.int64], sums: NDArray[np.float64], width: int, epochs: int, device: str | torch.device
    ):
        starts = np.concatenate([[0], np.cumsum(leaves.max(0) + 1)])
        places = torch.from_numpy(leaves + starts[:-1]).to(device)
        goal = torch.as_tensor(sums, dtype=torch.float32, device=device)
        table = (torch.randn(int(starts[-1]), width, device=device) * 0.1).requires_grad_(True)
        weight = (torch.randn(width, device=device) * width**-0.5).requires_grad_(True)
        bias = goal.mean().clone().requires_grad_(True)
        optimizer = torch.optim.Adam([table, weight, bias], DISTILLING_RATE)
        for _ in range(epochs):
            for rows in torch.randperm(len(goal), device=device).split(DISTILLING_BATCH):
                optimizer.zero_grad()
                mse_loss(embedding_bag(places[rows], table, mode="sum") @ weight + bias, goal[rows]).backward()
                optimizer.step()
        with torch.no_grad():
            self.embedded = embedding_bag(places, table, mode="sum")
        self.weight, self.bias = weight.detach(), bias.detach()


class Network(nn.Module):
    """features [B, F] and ids [B, fields] -> logits [B, 1].

    Args:
        columns: of each group, the features that it sees.
        teachers: of each group.
        sizes: categories of each field.
        width: of CatNN's embeddings.
        base: the logit to begin at.
    """

    LAYERS, CAT_LAYERS = (100, 100, 100, 50), (32, 32)

    def __init__(self, columns: list[NDArray[np.int64]], teachers: list[Teacher], sizes: list[int], width: int, base: float):
        super().__init__()
        leaf_width = len(teachers[0].weight)
        self.groups = nn.ModuleList(
            nn.Sequential(Columns(c.tolist()), _layers([len(c), *self.LAYERS, leaf_width], has_norm=True)) for c in columns
        )
        self.weight = nn.Parameter(torch.stack([teacher.weight for teacher in teachers]))  # [groups, leaf_width]
        self.bias = nn.Parameter(torch.stack([teacher.bias for teacher in teachers]).sum() - base)
        self.first = nn.ParameterList([nn.Parameter(torch.zeros(size, 1)) for size in sizes])
        self.second = nn.ParameterList([nn.Parameter(torch.randn(size, width) * 0.01) for size in sizes])
        self.deep = _layers([len(sizes) * width, *self.CAT_LAYERS, 1]) if sizes else None
        self.base = nn.Parameter(torch.tensor([base]))
        self.shares = nn.Parameter(torch.ones(2))  # of trees and of CatNN

    def embedded(self, features: Tensor) -> Tensor:
        """[B, F] -> [B, groups, leaf_width], what stands for the leaves."""
        return torch.stack([group(features) for group in self.groups], 1)

    def combined(self, embedded: Tensor, ids: Tensor) -> Tensor:
        """[B, groups, leaf_width] and [B, fields] -> [B, 1]"""
        trees = (embedded * self.weight).sum((1, 2)) + self.bias
        logits = self.base + self.shares[0] * trees
        if self.deep is not None:
            first = torch.cat([embedding(ids[:, i], table) for i, table in enumerate(self.first)], 1).sum(1)
            second = torch.stack([embedding(ids[:, i], table) for i, table in enumerate(self.second)], 1)
            pairs = (second.sum(1).square() - second.square().sum(1)).sum(1) / 2
            logits = logits + self.shares[1] * (first + pairs + self.deep(second.flatten(1))[:, 0])
        return logits[:, None]

    def forward(self, features: Tensor, ids: Tensor) -> Tensor:
        """[B, F] and [B, fields] -> [B, 1]"""
        return self.combined(self.embedded(features), ids)


class Distillation(nn.Module):
    """features [B, F], ids [B, fields] and goals [B, groups, leaf_width] -> logits [B, 1] and the embeddings' error []."""

    def __init__(self, network: Network):
        super().__init__()
        self.network = network

    def forward(self, features: Tensor, ids: Tensor, goals: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.network.embedded(features)
        return self.network.combined(embedded, ids), mse_loss(embedded, goals)


def _layers(widths: list[int], has_norm: bool = False) -> nn.Sequential:
    modules: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        modules.append(nn.Linear(inputs, outputs))
        if number < len(widths) - 2:
            modules += [nn.BatchNorm1d(outputs), nn.ReLU()] if has_norm else [nn.ReLU()]
    return nn.Sequential(*modules)
