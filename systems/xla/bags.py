"""Bags of embeddings in JAX: torchax has them only for offsets whose values are known."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

SUM, MEAN, MAX = range(3)  # ATen's modes of a bag
REDUCTIONS = {SUM: torch.ops.aten.sum.dim_IntList, MEAN: torch.ops.aten.mean.dim, MAX: torch.ops.aten.amax.default}


def reduce_equal_bags(graph: fx.Graph) -> None:
    """Replace bags that are all of one size, as of a matrix of indices, by rows and a reduction of them.

    Args:
        graph: Of a `torch.export.ExportedProgram`, with ATen's operators; changed in place.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.embedding_bag.padding_idx):
        weight, indices, offsets, _, mode, _, factors, has_last, padding = node.args
        size = _step(offsets)
        results = {user.args[1] for user in node.users if user.target is operator.getitem and user.users}
        if size is None or factors is not None or has_last or padding is not None or results != {0}:
            continue
        with graph.inserting_before(node):
            rows = graph.call_function(torch.ops.aten.embedding.default, (weight, indices))
            width = node.args[0].meta["val"].shape[1]
            bags = graph.call_function(torch.ops.aten.reshape.default, (rows, [-1, size, width]))
            reduced = graph.call_function(REDUCTIONS[mode], (bags, [1]))
        for user in list(node.users):
            user.replace_all_uses_with(reduced)
            graph.erase_node(user)
        graph.erase_node(node)


def _step(offsets: fx.Node) -> int | None:
    """The size of each bag where they begin at 0, size, 2 size and so on up to the indices' number."""
    if offsets.target is not torch.ops.aten.arange.start_step:
        return None
    begin, end, *step = offsets.args
    size = step[0] if step else 1
    return size if begin == 0 and size > 0 and end % size == 0 else None


def embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Any, Any, Any, Any]:
    """As `aten._embedding_bag`, forward alone, of JAX's arrays.

    Args:
        weight: [rows, D].
        indices: [N], of rows.
        offsets: [bags], where each bag begins in `indices`; one more with `include_last_offset`.
        scale_grad_by_freq: Of gradients.
        mode: SUM, MEAN or MAX.
        sparse: Of gradients.
        per_sample_weights: [N], factors of a sum.
        include_last_offset: The last offset is the end of the last bag.
        padding_idx: The row that counts for nothing; -1 for none.

    Returns:
        The bags [bags, D], which are 0 where they are empty; the bag of each index [N]; sizes [bags], twice.
    """
    import jax
    import jax.numpy as jnp

    num_bags = offsets.shape[0] - include_last_offset
    bags = jnp.searchsorted(offsets[:num_bags], jnp.arange(indices.shape[0]), side="right") - 1
    counted = jnp.where(indices == padding_idx, num_bags, bags)  # what is beyond the last bag is dropped
    sizes = jnp.bincount(counted, length=num_bags)
    rows = weight[indices].astype(jnp.promote_types(weight.dtype, jnp.float32))
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    if mode == MAX:
        output = jnp.where(sizes[:, None] > 0, jax.ops.segment_max(rows, counted, num_bags), 0)
    else:
        output = jax.ops.segment_sum(rows, counted, num_bags)
    if mode == MEAN:
        output = output / jnp.maximum(sizes, 1)[:, None]
    return output.astype(weight.dtype), bags, sizes, sizes


def register() -> None:
    """Have torchax use `embedding_bag`."""
    from torchax.ops.ops_registry import register_torch_dispatch_op

    for packet in (torch.ops.aten._embedding_bag, torch.ops.aten._embedding_bag_forward_only):
        register_torch_dispatch_op(packet.default, embedding_bag)
