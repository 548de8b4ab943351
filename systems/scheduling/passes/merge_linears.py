"""Merges matrix products of one input into one product with the weights stacked, where that is faster."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from systems.scheduling.decision import Decision
from systems.scheduling.graph.capture import on_meta
from systems.scheduling.graph.derived import Derived
from systems.scheduling.graph.part import alone, part
from systems.scheduling.graph.program import Call, Input, Output, Program
from systems.scheduling.graph.rewrite import Replacement
from systems.scheduling.graph.rewrite import replace as rewrite

from .context import Context, Rewritten
from .patterns import ADDMM, Product, product, shape_of
from .strides import with_strides

aten = torch.ops.aten


@dataclass(frozen=True)
class _Merged:
    """One product in the place of several. outputs: the columns of each, by its operator, on the meta device."""

    product: Call
    derived: tuple[Derived, ...]
    sizes: list[int]
    outputs: dict[int, Tensor]


def merge_linears(program: Program, context: Context) -> Rewritten:
    """Merge products that read the same tensor, as attention's query, key and value do, and split the output.

    TorchScript merges so on a GPU in a frozen module (its FrozenConcatLinear). Weights and biases are stacked along the
    output features, in memory of their own beside the module's.

    Invariants:
        - The output of each product becomes a view of columns, which is strided. A product is merged only if every reader
          takes such a view, and every output of the model keeps its strides.
        - The graph stays acyclic: a merged product depends on nothing but the tensor that all of them read.

    Merging costs parallelism: the scheduler has one operator in the place of several, and a reader of one output waits for
    all of them. So each distinct place is measured three ways: the products in turn, the products at once, and merged. It is
    merged only if that beats the faster of the other two, since the schedule may run them either way. Readers are not
    measured.
    """
    times_by_signature: dict[str, dict[str, float]] = {}
    replacements: list[Replacement] = []
    decisions: list[Decision] = []
    for products in _groups(program):
        merged = _merge(program, products)
        fitting = [p for p in products if with_strides(program, {p.operator: merged.outputs[p.operator]}) is not None]
        if len(fitting) < 2:
            continue
        if len(fitting) < len(products):
            merged = _merge(program, fitting)
        strided = with_strides(program, merged.outputs)
        if strided is None:
            continue
        operators = tuple(p.operator for p in fitting)
        separate = part(program, operators)
        signature = "; ".join(separate.signature(i) for i in range(len(operators)))
        if signature not in times_by_signature:
            separate_ms = {"in turn": context.cost(separate), "at once": context.cost_at_once(separate)}
            ascending = dict(sorted(separate_ms.items(), key=lambda item: item[1]))  # a gain is over the first
            times_by_signature[signature] = {**ascending, "merged": context.cost(_alone(program, merged))}
        times = times_by_signature[signature]
        decisions.append(context.decide("merge_linears", _pattern(program, fitting), operators, signature, times))
        if decisions[-1].chosen == "merged":
            split = Call(aten.split_with_sizes.default, (merged.product, merged.sizes, -1), {}, [*merged.outputs.values()])
            name, target = "split_with_sizes", "aten.split_with_sizes.default"
            columns: dict[int, int | None] = {v: i for i, v in enumerate(operators)}
            replacements.append(Replacement(operators, name, target, split, columns, merged.derived))
            program = strided
    return rewrite(program, replacements)[0], decisions


def _groups(program: Program) -> list[list[Product]]:
    """Products of one input that could be one, in the order of the first of them."""
    groups: dict[tuple[object, ...], list[Product]] = {}
    for v, call in enumerate(program.calls):
        p = product(call, v)
        if p is not None:
            key = (call.function, p.x, p.weight.shape[1 - p.along], p.weight.dtype)
            groups.setdefault(key, []).append(p)
    return [products for products in groups.values() if len(products) > 1]


@torch.no_grad()
def _merge(program: Program, products: Sequence[Product]) -> _Merged:
    """The product with stacked weights. It runs once, to see how its output lies in memory."""
    first, function = products[0], program.calls[products[0].operator].function
    derived = [Derived.of(partial(_stack, first.along), *(p.weight for p in products))]
    arguments: tuple[Any, ...] = (first.x, derived[0].tensor)
    if any(p.bias is not None for p in products):
        derived.append(Derived.of(partial(_stack, 0), *map(_bias, products)))
        bias = derived[1].tensor
        arguments = (bias, *arguments) if function is ADDMM else (*arguments, bias)
    (x,) = part(program, [first.operator]).examples  # [..., features]
    out = function(*(x if a is first.x else a for a in arguments))  # [..., sum of K]
    sizes = [p.weight.shape[p.along] for p in products]
    outputs = {p.operator: on_meta(t) for p, t in zip(products, out.split(sizes, -1), strict=True)}
    return _Merged(Call(function, arguments, {}, on_meta(out)), tuple(derived), sizes, outputs)


def _bias(product: Product) -> Tensor:
    """Zeros where it has none, as Whisper's keys have none."""
    if product.bias is not None:
        return product.bias
    return product.weight.new_zeros(product.weight.shape[product.along])


def _stack(dimension: int, *tensors: Tensor) -> Tensor:
    return torch.cat(tensors, dimension)


def _alone(program: Program, merged: _Merged) -> Program:
    """The merged product as a program."""
    operator = program.graph.operators[min(merged.outputs)]
    examples = part(program, [operator.id]).examples
    call = merged.product.map(lambda a: Input(0) if isinstance(a, Output | Input) else a)
    return alone(operator.name, operator.target, call, examples)


def _pattern(program: Program, products: Sequence[Product]) -> str:
    """A place in words: "1x128x768, weights 3 of 768x768, with bias"."""
    counts = Counter(shape_of(p.weight) for p in products)
    weights = " + ".join(f"{count} of {shape}" for shape, count in counts.items())
    bias = ", with bias" if any(p.bias is not None for p in products) else ""
    return f"{shape_of(program.value(products[0].x))}, weights {weights}{bias}"
