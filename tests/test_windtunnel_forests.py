"""Trees as two hidden layers: what they compute, and what of them trains."""

from typing import Any

import numpy as np
import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from test_windtunnel_trees import MOST, assert_equal_to, label, table

from models.neural.forests import HardForest, SoftForest
from models.neural.trees import Tree, TreeEnsemble

lightgbm = pytest.importorskip("lightgbm", reason="pip install '.[windtunnel]'")

from sklearn.tree import DecisionTreeRegressor  # noqa: E402

from systems.windtunnel.parse import lightgbm as lightgbm_trees  # noqa: E402
from systems.windtunnel.parse import sklearn_trees  # noqa: E402


@given(st.integers(0, 10_000))
@examples(15)
def test_soft_becomes_hard_as_the_temperature_falls(seed: int) -> None:
    x = table(seed, 200, True)
    booster = lightgbm.train(
        {"objective": "binary", "verbose": -1, "num_leaves": 7}, lightgbm.Dataset(x, label(seed, x, 2)), 5
    )
    given_ensemble, _ = lightgbm_trees.parse(booster, "LightGBM")
    ensemble = given_ensemble.with_thresholds_between(x)
    want = booster.predict(x, raw_score=True)
    assert_equal_to(ensemble, x, want)  # moving the thresholds changes no decision about these rows
    rows = torch.from_numpy(x)
    errors = []
    for temperature in (1.0, 1e-1, 1e-8):
        soft = SoftForest(ensemble, temperature=temperature, dropout=0.0, dtype=torch.float64)
        errors.append(abs(soft(rows).detach().numpy()[:, 0] - want).max())
    assert errors[2] < MOST < errors[0] and errors[2] <= errors[1]


def test_a_feature_of_0_and_1_needs_its_threshold_moved() -> None:
    """As LightGBM gives it, 0 lies on the threshold 1e-35, and no temperature makes a decision of it."""
    x = np.tile([[0.0], [1.0]], (100, 1))
    booster = lightgbm.train({"objective": "binary", "verbose": -1}, lightgbm.Dataset(x, x[:, 0]), 1)
    ensemble, _ = lightgbm_trees.parse(booster, "LightGBM")
    moved = ensemble.with_thresholds_between(x)
    assert abs(ensemble.threshold.max()) < 1e-30 and moved.threshold[moved.is_node].tolist() == [0.5]
    want = booster.predict(x, raw_score=True)
    unmoved, exact = (
        SoftForest(e, temperature=1e-8, dropout=0.0, dtype=torch.float64)(torch.from_numpy(x)).detach().numpy()[:, 0]
        for e in (ensemble, moved)
    )
    assert abs(unmoved - want).max() > 0.1 and abs(exact - want).max() < MOST


def small_ensemble(has_missing: bool = False) -> tuple[TreeEnsemble, torch.Tensor]:
    x = table(3, 200, has_missing)
    booster = lightgbm.train({"objective": "binary", "verbose": -1, "num_leaves": 5}, lightgbm.Dataset(x, label(3, x, 2)), 3)
    return lightgbm_trees.parse(booster, "LightGBM")[0].with_thresholds_between(x), torch.from_numpy(x)


@pytest.mark.parametrize("has_missing", [False, True])
def test_levels_give_the_same_and_train_what_they_name(has_missing: bool) -> None:
    ensemble, x = small_ensemble(has_missing)
    names = {1: {"value", "bias"}, 2: {"threshold"}, 3: {"weight"}, 4: {"signs", "leaf_bias"}}
    trained: set[str] = set()
    outputs = []
    for level, added in names.items():
        trained |= added
        forest = SoftForest(ensemble, level, temperature=0.7, dropout=0.0, dtype=torch.float64)
        assert {name for name, p in forest.named_parameters() if p.requires_grad} == trained
        before = {name: p.detach().clone() for name, p in forest.named_parameters()}
        output = forest(x)
        outputs.append(output.detach())
        optimizer = torch.optim.Adam(forest.parameters(), 1e-2)
        output.square().sum().backward()
        optimizer.step()
        assert {name for name, p in forest.named_parameters() if not torch.equal(p, before[name])} == trained
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0])


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_gradients_are_those_of_the_function(level: int) -> None:
    ensemble, x = small_ensemble()
    forest = SoftForest(ensemble, level, temperature=5.0, dropout=0.0, dtype=torch.float64)
    scaled = (x[:3] / (x.std(0) + 1)).requires_grad_(True)
    assert torch.autograd.gradcheck(forest, (scaled,))


def test_standardized_inputs_change_no_decision() -> None:
    ensemble, x = small_ensemble(has_missing=True)
    shift, scale = np.nanmean(x.numpy(), 0), np.nanstd(x.numpy(), 0) + 1.0
    forest = SoftForest(ensemble, temperature=1e-9, dropout=0.0, dtype=torch.float64)
    forest.standardize(ensemble, shift, scale)
    want = HardForest(ensemble, dtype=torch.float64)(x)
    torch.testing.assert_close(forest(x).detach(), want, atol=MOST, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_the_tree_of_the_figure_is_its_two_hidden_layers(temperature: float) -> None:
    """Figure 5.2: leaf 3 of value 30 is left of node 1, right of node 2, right of node 3, so that C = 3."""
    children = np.array([[1, -5], [-1, 2], [-2, -3]])  # node 1: left node 2, right leaf 5; leaf 4 does not stand in it
    value = np.array([[10.0], [20.0], [30.0], [0.0], [50.0]])
    nowhere = np.zeros(3, dtype=bool)
    tree = Tree(np.array([0, 1, 2]), np.array([0.5, -0.25, 1.0]), children, value, nowhere, nowhere, nowhere)
    forest = SoftForest(TreeEnsemble.of([tree], 3, np.zeros(1), False), 4, temperature, 0.0, torch.float64).eval()
    x = torch.tensor([[0.1, 0.3, 1.4], [0.9, -1.0, 0.0]], dtype=torch.float64)
    n1, n2, n3 = (torch.tanh((x[:, i] - threshold) / temperature) for i, threshold in enumerate((0.5, -0.25, 1.0)))
    leaves = [
        torch.tanh((-n1 - n2 - 2 + 1) / temperature),
        torch.tanh((-n1 + n2 - n3 - 3 + 1) / temperature),
        torch.tanh((-n1 + n2 + n3 - 3 + 1) / temperature),
        torch.tanh(torch.full_like(n1, 1.0) / temperature),
        torch.tanh((n1 - 1 + 1) / temperature),
    ]
    expected = sum(v / 2 * (1 + leaf) for v, leaf in zip((10.0, 20.0, 30.0, 0.0, 50.0), leaves, strict=True))
    torch.testing.assert_close(forest(x)[:, 0], expected)
    torch.testing.assert_close(forest.leaves(x)[0, :, 2], (1 + leaves[2]) / 2)
    assert forest.signs[0, :3, 2].tolist() == [-1, 1, 1] and forest.leaf_bias[0, 0, 2] == 1 - 3


@pytest.mark.parametrize("level", [1, 2])
def test_the_gradient_of_gathered_features_is_that_of_an_index(level: int) -> None:
    """Of finite differences, and of a plain gather; nodes that pad a tree pass none on."""
    x = table(5, 60, False)[:, :3]
    model = DecisionTreeRegressor(max_leaf_nodes=6, random_state=0).fit(x, label(5, x.repeat(2, 1), 3))
    ensemble, _ = sklearn_trees.parse_tree(model, "tree")
    forest = SoftForest(ensemble, level, 1.0, 0.0, torch.float64)
    forest.sees_missing = False
    rows = torch.from_numpy(x[:4]).requires_grad_()
    assert not ensemble.is_node.all()
    assert torch.autograd.gradcheck(forest, (rows,))
    (gradient,) = torch.autograd.grad(forest(rows).sum(), rows)
    plain = torch.from_numpy(x[:4]).requires_grad_()
    nodes = torch.tanh(plain[:, forest.feature] - forest.threshold).view(4, *ensemble.feature.shape).transpose(0, 1)
    leaves = torch.tanh(torch.baddbmm(forest.leaf_bias, nodes, forest.signs * forest.node_mask))
    torch.bmm(leaves, forest.value * forest.leaf_mask).sum().backward()
    torch.testing.assert_close(gradient, plain.grad)


def test_padding_takes_no_part() -> None:
    """Trees of unequal size: what pads the smaller ones has no gradient and no effect."""
    x = table(3, 400, False)
    parameters = {"objective": "binary", "verbose": -1, "num_leaves": 9, "min_gain_to_split": 15.0}
    booster = lightgbm.train(parameters, lightgbm.Dataset(x, label(3, x, 2)), 8)
    ensemble, _ = lightgbm_trees.parse(booster, "LightGBM")
    assert len(set(ensemble.num_leaves)) > 1
    forest = SoftForest(ensemble, dropout=0.0)
    forest.reset_parameters()
    forest(torch.from_numpy(x)).sum().backward()
    assert forest.value.grad is not None and forest.signs.grad is not None
    assert not forest.value.grad[~torch.from_numpy(ensemble.is_leaf)].any()
    assert not forest.signs.grad[~torch.from_numpy(ensemble.is_node)].any()
    assert forest.value.grad[torch.from_numpy(ensemble.is_leaf)].all()


def test_dropout_acts_in_train_mode_alone() -> None:
    ensemble, x = small_ensemble()
    forest = SoftForest(ensemble, dropout=0.5)
    torch.manual_seed(0)
    assert not torch.equal(forest(x), forest(x))
    forest.eval()
    assert torch.equal(forest(x), forest(x))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"level": 5}, "level must be 1, 2, 3 or 4, not 5"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"temperature": float("nan")}, "temperature must be above 0"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
    ],
)
def test_wrong_options_are_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SoftForest(small_ensemble()[0], **options)
    with pytest.raises(ValueError, match="strategy must be one of"):
        HardForest(small_ensemble()[0], "walk")
