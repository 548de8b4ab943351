"""What torchax lacks: bags whose offsets are computed, products of groups, histograms of integers."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

SUM, MEAN, MAX = range(3)  # ATen's modes of a bag
REDUCTIONS = {SUM: torch.ops.aten.sum.dim_IntList, MEAN: torch.ops.aten.mean.dim, MAX: torch.ops.aten.amax.default}


def reduce_equal_bags(program: ExportedProgram) -> None:
    """Replace bags that are all of one size, as of a matrix of indices, by rows and a reduction of them, in place."""
    graph: fx.Graph = program.graph
    node: Any
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
            _replace(program, user, reduced)
        graph.erase_node(node)


def _replace(program: ExportedProgram, old: fx.Node, new: fx.Node) -> None:
    """`new` in the place of `old`, also as what the program returns."""
    old.replace_all_uses_with(new)
    program.graph_signature.replace_all_uses(old.name, new.name)
    program.graph.erase_node(old)


def _step(offsets: Any) -> int | None:
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


def grouped_mm(rows: Any, weights: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """As `aten._grouped_mm` of rows that are in groups, one behind another, of JAX's arrays.

    Args:
        rows: [N, K].
        weights: [groups, K, M].
        offs: [groups], where each group of rows ends; the last is N.
        bias: None.
        out_dtype: None, or torch's type of the rows.

    Returns:
        [N, M].

    Raises:
        NotImplementedError: The product is of another form. `translated` makes it a reason.
    """
    import jax
    import jax.numpy as jnp

    if (rows.ndim, weights.ndim) != (2, 3) or offs is None or bias is not None or out_dtype is not None:
        raise NotImplementedError("a product of groups of another form than rows by a weight for each group")
    return jax.lax.ragged_dot(rows, weights, jnp.diff(offs, prepend=0).astype(jnp.int32))


def count_in_floats(program: ExportedProgram) -> None:
    """Have histograms of integers count floats, in place: torch has the others on a GPU alone."""
    graph: fx.Graph = program.graph
    node: Any
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.histc.default):
        if not node.args[0].meta["val"].is_floating_point():
            with graph.inserting_before(node):
                floats = graph.call_function(torch.ops.aten.to.dtype, (node.args[0], torch.float32))
                counts = graph.call_function(torch.ops.aten.histc.default, (floats, *node.args[1:]))
                counts = graph.call_function(torch.ops.aten.to.dtype, (counts, node.meta["val"].dtype))
            _replace(program, node, counts)


def register() -> None:
    """Have torchax use those above that are of arrays."""
    from torchax.ops.ops_registry import register_torch_dispatch_op

    for packet in (torch.ops.aten._embedding_bag, torch.ops.aten._embedding_bag_forward_only):
        register_torch_dispatch_op(packet.default, embedding_bag)
    register_torch_dispatch_op(torch.ops.aten._grouped_mm.default, grouped_mm)
