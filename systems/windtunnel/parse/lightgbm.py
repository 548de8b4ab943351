"""LightGBM's trees: `x <= threshold` in float64, a direction for missing values at each node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from models.neural.trees import ZERO, Tree, TreeEnsemble
from systems.windtunnel.base import Link, Untranslatable

if TYPE_CHECKING:
    from lightgbm import Booster

LINKS = {
    "binary": "sigmoid",
    "cross_entropy": "sigmoid",
    "cross_entropy_lambda": "softplus",
    "multiclass": "softmax",
    "multiclassova": "sigmoid",
    "poisson": "exponential",
    "gamma": "exponential",
    "tweedie": "exponential",
}


def parse(booster: Booster, name: str) -> tuple[TreeEnsemble, Link]:
    """A booster's trees, up to its best iteration, and its link.

    Args:
        name: of the operator, for a refusal.

    Raises:
        Untranslatable: a split is of categories, or a leaf is a linear model.
    """
    model = booster.dump_model()
    num_outputs = model["num_tree_per_iteration"]
    infos = model["tree_info"]
    if not infos:
        raise Untranslatable(f"{name} has no trees")
    # A random forest's raw score is the sum over its trees too; only its prediction divides by their number.
    share = num_outputs / len(infos) if model["average_output"] else 1.0
    trees = [_tree(info["tree_structure"], i % num_outputs, num_outputs, name) for i, info in enumerate(infos)]
    words = str(model.get("objective", "custom")).split()
    settings = dict(word.split(":", 1) for word in words[1:] if ":" in word)
    kind = LINKS.get(words[0] if words else "custom", "identity")
    if "sqrt" in words[1:]:
        kind = "signed_square"
    link = Link(kind, share * float(settings.get("sigmoid", 1.0)))
    return TreeEnsemble.of(trees, model["max_feature_idx"] + 1, np.zeros(num_outputs), rounds_inputs=False), link


def _tree(root: dict[str, Any], output: int, num_outputs: int, name: str) -> Tree:
    nodes: list[dict[str, Any]] = []
    leaves: dict[int, float] = {}  # by LightGBM's own numbers
    children: list[list[int]] = []
    pending: list[tuple[dict[str, Any], int, int]] = [(root, -1, 0)]
    while pending:
        place, parent, side = pending.pop()
        if "split_index" in place:
            if place["decision_type"] != "<=":
                raise Untranslatable(
                    f"{name} splits by categories, which has no translation: encode them, or leave them numbers"
                )
            number = len(nodes)
            nodes.append(place)
            children.append([0, 0])
            pending += [(place["right_child"], number, 1), (place["left_child"], number, 0)]
        else:
            if place.get("leaf_features"):
                raise Untranslatable(f"{name} has linear models in its leaves (linear_tree), which have no translation")
            leaf = place.get("leaf_index", 0)
            number = -1 - leaf
            leaves[leaf] = place["leaf_value"]
        if parent >= 0:
            children[parent][side] = number
    value = np.zeros((len(leaves), num_outputs))
    value[list(leaves), output] = list(leaves.values())
    return Tree(
        np.array([node["split_feature"] for node in nodes], dtype=np.int64),
        np.array([_exact(node["threshold"]) for node in nodes], dtype=np.float64),
        np.array(children, dtype=np.int64).reshape(-1, 2),
        value,
        np.array([node["default_left"] for node in nodes], dtype=np.bool_),
        # LightGBM takes NaN for 0 first where 0 is what is missing.
        np.array([node["missing_type"] in ("NaN", "Zero") for node in nodes], dtype=np.bool_),
        np.array([node["missing_type"] == "Zero" for node in nodes], dtype=np.bool_),
    )


def _exact(threshold: float) -> float:
    """The threshold that parts values as LightGBM does.

    Its dump writes 1e300 for infinity, which parts NaN from all else. Values within ZERO of 0 are compared as 0.
    """
    if abs(threshold) >= 1e300:
        return float(np.copysign(np.inf, threshold))
    if abs(threshold) <= ZERO:
        return ZERO if threshold >= 0 else float(np.nextafter(-ZERO, -np.inf))
    return threshold
