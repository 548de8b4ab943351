"""XGBoost's trees: `x < threshold` in float32, a direction for NaN at each node, a base score outside the trees."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from models.neural.trees import Tree, TreeEnsemble
from systems.windtunnel.base import Link, Untranslatable

if TYPE_CHECKING:
    from xgboost import Booster

LINKS = {
    "binary:logistic": "sigmoid",
    "reg:logistic": "sigmoid",
    "multi:softprob": "softmax",
    "multi:softmax": "softmax",
    "count:poisson": "exponential",
    "reg:gamma": "exponential",
    "reg:tweedie": "exponential",
}
IDENTITIES = ("reg:squarederror", "reg:absoluteerror", "reg:pseudohubererror", "reg:squaredlogerror", "reg:quantileerror")


def parse(booster: Booster, name: str, num_iterations: int | None = None) -> tuple[TreeEnsemble, Link]:
    """A booster's trees and its link.

    Args:
        name: of the operator, for a refusal.
        num_iterations: rounds of boosting that count, the first ones; None for all.

    Raises:
        Untranslatable: it has no trees, splits by categories, has leaves of several outputs, or an unknown objective.
    """
    learner = json.loads(booster.save_raw("json"))["learner"]
    objective = learner["objective"]["name"]
    if objective not in LINKS and objective not in IDENTITIES and not objective.startswith("rank:"):
        raise Untranslatable(f"{name} has the objective {objective}, whose link has no translation")
    kind = LINKS.get(objective, "identity")
    gradient_booster, weights = learner["gradient_booster"], None
    if gradient_booster["name"] == "dart":
        weights = gradient_booster["weight_drop"]
        gradient_booster = gradient_booster["gbtree"]
    elif gradient_booster["name"] != "gbtree":
        raise Untranslatable(f"{name} has no trees: its booster is {gradient_booster['name']}")
    model = gradient_booster["model"]
    parameters = learner["learner_model_param"]
    num_outputs = max(1, int(parameters["num_class"]), int(parameters.get("num_target", 1)))
    num_trees = len(model["trees"])
    if num_iterations is not None:
        num_trees = model["iteration_indptr"][num_iterations]
    weights = weights or [1.0] * num_trees
    trees = [_tree(model["trees"][t], model["tree_info"][t], num_outputs, weights[t], name) for t in range(num_trees)]
    if not trees:
        raise Untranslatable(f"{name} has no trees")
    base = np.atleast_1d(np.array(json.loads(parameters["base_score"]), dtype=np.float64))
    if kind == "sigmoid":
        base = np.log(base) - np.log1p(-base)
    elif kind == "exponential":
        base = np.log(base)
    base = np.broadcast_to(base, (num_outputs,)).copy()
    return TreeEnsemble.of(trees, int(parameters["num_feature"]), base, rounds_inputs=True), Link(kind)


def _tree(tree: dict[str, Any], output: int, num_outputs: int, weight: float, name: str) -> Tree:
    if any(tree["split_type"]):
        raise Untranslatable(f"{name} splits by categories, which has no translation: encode them, or leave them numbers")
    if int(tree["tree_param"].get("size_leaf_vector", 1)) > 1:
        raise Untranslatable(f"{name} has several outputs a leaf (multi_output_tree), which have no translation")
    left, right = np.array(tree["left_children"]), np.array(tree["right_children"])
    is_leaf = left < 0
    # Deleted nodes (by pruning) are reached from nowhere, and stay out.
    reached, pending = [], [0]
    while pending:
        place = pending.pop()
        reached.append(place)
        if not is_leaf[place]:
            pending += [int(right[place]), int(left[place])]
    nodes = [place for place in reached if not is_leaf[place]]
    leaves = [place for place in reached if is_leaf[place]]
    number = {place: i for i, place in enumerate(nodes)} | {place: -1 - i for i, place in enumerate(leaves)}
    conditions = np.array(tree["split_conditions"], dtype=np.float32)
    value = np.zeros((len(leaves), num_outputs))
    value[:, output] = conditions[leaves] * weight
    # x < threshold is x <= the number of float32 before it.
    before = np.nextafter(conditions[nodes], np.float32(-np.inf), dtype=np.float32)
    return Tree(
        np.array(tree["split_indices"], dtype=np.int64)[nodes],
        before.astype(np.float64),
        np.array([[number[int(left[place])], number[int(right[place])]] for place in nodes], dtype=np.int64).reshape(-1, 2),
        value,
        np.array(tree["default_left"], dtype=np.bool_)[nodes],
        np.ones(len(nodes), dtype=np.bool_),
        np.zeros(len(nodes), dtype=np.bool_),
    )
