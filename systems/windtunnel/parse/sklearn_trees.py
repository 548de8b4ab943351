"""scikit-learn's trees: `x <= threshold`, inputs in float32, forests that average; histogram boosting in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from models.neural.trees import Tree, TreeEnsemble
from systems.windtunnel.base import Link, Untranslatable

if TYPE_CHECKING:
    from sklearn.base import BaseEstimator


def parse_tree(estimator: BaseEstimator, name: str) -> tuple[TreeEnsemble, Link]:
    """A decision tree; a classifier's outputs are probabilities."""
    return _averaged([estimator], estimator, name)


def parse_forest(estimator: BaseEstimator, name: str) -> tuple[TreeEnsemble, Link]:
    """A random forest or extremely randomized trees, the mean of the trees."""
    return _averaged(estimator.estimators_, estimator, name)


def _averaged(members: list[Any], estimator: Any, name: str) -> tuple[TreeEnsemble, Link]:
    if estimator.n_outputs_ > 1:
        raise Untranslatable(f"{name} has several targets, which have no translation")
    is_classifier = hasattr(estimator, "classes_")
    trees = []
    for member in members:
        value = member.tree_.value[:, 0, :]  # shares of classes, or a mean
        if is_classifier:
            value = value / value.sum(1, keepdims=True)
        trees.append(_tree(member.tree_, value / len(members)))
    base = np.zeros(trees[0].value.shape[1])
    link = Link("probability" if is_classifier else "identity")
    return TreeEnsemble.of(trees, estimator.n_features_in_, base, rounds_inputs=True), link


def parse_gradient_boosting(estimator: Any, name: str) -> tuple[TreeEnsemble, Link]:
    """GradientBoosting, whose initial estimator gives every row the same score.

    Raises:
        Untranslatable: the initial estimator is the user's own.
    """
    if estimator.init is not None and estimator.init != "zero":
        raise Untranslatable(f"{name} begins with {type(estimator.init).__name__} (init), which has no translation")
    num_outputs = estimator.estimators_.shape[1]
    trees = []
    for row in estimator.estimators_:
        for output, member in enumerate(row):
            value = np.zeros((member.tree_.node_count, num_outputs))
            value[:, output] = member.tree_.value[:, 0, 0] * estimator.learning_rate
            trees.append(_tree(member.tree_, value))
    base = np.asarray(estimator._raw_predict_init(np.zeros((1, estimator.n_features_in_), dtype=np.float32)))[0]
    if not hasattr(estimator, "classes_"):
        kind, scale = "identity", 1.0
    elif num_outputs > 1:
        kind, scale = "softmax", 1.0
    else:
        kind, scale = "sigmoid", 2.0 if estimator.loss == "exponential" else 1.0
    return TreeEnsemble.of(trees, estimator.n_features_in_, base, rounds_inputs=True), Link(kind, scale)


def parse_histogram_boosting(estimator: Any, name: str) -> tuple[TreeEnsemble, Link]:
    """HistGradientBoosting, which compares in float64 and knows where NaN goes.

    Raises:
        Untranslatable: a split is of categories.
    """
    predictors = estimator._predictors
    num_outputs = len(predictors[0])
    trees = []
    for row in predictors:
        for output, predictor in enumerate(row):
            nodes = predictor.nodes
            if nodes["is_categorical"].any() or getattr(estimator, "_preprocessor", None) is not None:
                raise Untranslatable(
                    f"{name} splits by categories, which has no translation: encode them, or leave them numbers"
                )
            value = np.zeros((len(nodes), num_outputs))
            value[:, output] = nodes["value"]
            children = np.stack([nodes["left"], nodes["right"]], 1).astype(np.int64)
            trees.append(
                _parted(
                    nodes["is_leaf"].astype(np.bool_),
                    nodes["feature_idx"].astype(np.int64),
                    nodes["num_threshold"].astype(np.float64),
                    children,
                    value,
                    nodes["missing_go_to_left"].astype(np.bool_),
                )
            )
    base = np.asarray(estimator._baseline_prediction, dtype=np.float64).reshape(-1)
    if hasattr(estimator, "classes_"):
        kind = "softmax" if num_outputs > 1 else "sigmoid"
    else:
        kind = "exponential" if estimator.loss in ("poisson", "gamma") else "identity"
    return TreeEnsemble.of(trees, estimator.n_features_in_, base, rounds_inputs=False), Link(kind)


def _tree(tree: Any, value: NDArray[np.float64]) -> Tree:
    """A tree of sklearn.tree, with a value for each of its places."""
    children = np.stack([tree.children_left, tree.children_right], 1)
    missing_left = getattr(tree, "missing_go_to_left", np.zeros(tree.node_count))
    is_leaf = tree.children_left < 0
    return _parted(is_leaf, tree.feature, tree.threshold, children, value, np.asarray(missing_left, dtype=np.bool_))


def _parted(
    is_leaf: NDArray[np.bool_],
    feature: NDArray[np.int64],
    threshold: NDArray[np.float64],
    children: NDArray[np.int64],
    value: NDArray[np.float64],
    missing_left: NDArray[np.bool_],
) -> Tree:
    """A tree whose places, nodes and leaves in one row, are numbered apart."""
    number = np.where(is_leaf, -1 * np.cumsum(is_leaf), np.cumsum(~is_leaf) - 1)
    nodes = ~is_leaf
    return Tree(
        feature[nodes].astype(np.int64),
        threshold[nodes].astype(np.float64),
        number[children[nodes]].astype(np.int64),
        value[is_leaf].astype(np.float64),
        missing_left[nodes],
        np.ones(int(nodes.sum()), dtype=np.bool_),
        np.zeros(int(nodes.sum()), dtype=np.bool_),
    )
