"""system=deepgbm: what is distilled, against LightGBM itself and the formulas."""

from itertools import combinations

import numpy as np
import pytest
import torch

from systems.tabular.deepgbm import Network, Teacher, leaf_values, most_gaining

pytest.importorskip("lightgbm", reason="pip install '.[windtunnel]'")

import lightgbm

WIDTH = 8


@pytest.fixture(scope="module")
def forest() -> tuple[lightgbm.Booster, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(800, 5))
    y = (x[:, 0] * x[:, 1] + x[:, 2] > 0).astype(int)
    parameters = {"objective": "binary", "num_leaves": 6, "verbose": -1, "deterministic": True, "num_threads": 1}
    return lightgbm.train(parameters, lightgbm.Dataset(x, y), 7), x


def test_values_of_leaves_add_up_to_the_raw_score(forest: tuple[lightgbm.Booster, np.ndarray]) -> None:
    booster, x = forest
    leaves, values = np.asarray(booster.predict(x, pred_leaf=True)).astype(int), leaf_values(booster)
    total = sum(values[tree][leaves[:, tree]] for tree in range(booster.num_trees()))
    np.testing.assert_allclose(total, booster.predict(x, raw_score=True), atol=1e-12)


def test_columns_are_those_of_the_largest_gain(forest: tuple[lightgbm.Booster, np.ndarray]) -> None:
    booster, _ = forest
    gain = booster.feature_importance("gain")
    every = np.arange(booster.num_trees())
    chosen = most_gaining(booster, every, 2)
    assert set(chosen) == set(np.argsort(-gain)[:2]) and gain[chosen[0]] >= gain[chosen[1]]
    assert set(most_gaining(booster, every, 99)) == set(np.flatnonzero(gain))


def test_an_embedding_of_leaves_holds_what_they_add(forest: tuple[lightgbm.Booster, np.ndarray]) -> None:
    booster, x = forest
    leaves, values = np.asarray(booster.predict(x, pred_leaf=True)).astype(int), leaf_values(booster)
    sums = sum(values[tree][leaves[:, tree]] for tree in (1, 4))
    torch.manual_seed(0)
    teacher = Teacher(leaves[:, [1, 4]], np.asarray(sums), WIDTH, 200, "cpu")
    learned = (teacher.embedded @ teacher.weight + teacher.bias).numpy()
    assert np.square(learned - sums).mean() < 0.02 * np.var(sums)


def test_the_score_is_trees_and_a_factorization_machine_and_a_deep_network() -> None:
    torch.manual_seed(0)
    teachers = [Teacher(np.zeros((4, 1), np.int64), np.full(4, 0.3), WIDTH, 1, "cpu") for _ in range(2)]
    network = Network([np.array([0]), np.array([1, 2])], teachers, [3, 4, 2], 5, base=-1.0).double().eval()
    with torch.no_grad():
        for table in (*network.first, *network.second):
            table.normal_()
        network.shares.copy_(torch.tensor([0.5, 2.0]))
        features, ids = torch.randn(6, 3, dtype=torch.float64), torch.randint(0, 2, (6, 3))
        scores = network(features, ids)[:, 0]
        trees = (network.embedded(features) * network.weight).sum((1, 2)) + network.bias
        for row in range(6):
            rows = [table[ids[row, i]] for i, table in enumerate(network.second)]
            expected = sum(float(table[ids[row, i]]) for i, table in enumerate(network.first))
            expected += sum(float(a @ b) for a, b in combinations(rows, 2))
            assert network.deep is not None
            expected += float(network.deep(torch.cat(rows)))
            assert float(scores[row]) == pytest.approx(-1.0 + 0.5 * float(trees[row]) + 2.0 * expected)
