"""Matrix products of one input with several weights, as one product with the weights stacked, where it is faster."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from systems.scheduling.graph.capture import on_meta
from systems.scheduling.graph.derived import Derived
from systems.scheduling.graph.part import alone, part
from systems.scheduling.graph.program import Call, Input, Output, Program
from systems.scheduling.graph.rewrite import Replacement
from systems.scheduling.graph.rewrite import replace as rewrite

from .select_kernels import Cost

aten = torch.ops.aten
LINEAR, ADDMM = aten.linear.default, aten.addmm.default
PRODUCTS = (LINEAR, ADDMM, aten.mm.default, aten.matmul.default)
# They read memory as it lies, not the tensor that lies in it, and would do so without an error.
OF_MEMORY = (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)


@dataclass(frozen=True)
class Merge:
    """What was measured at one place. operators: the products of one input."""

    operators: tuple[int, ...]
    pattern: str
    in_turn_ms: float
    at_once_ms: float
    merged_ms: float

    @property
    def chosen(self) -> bool:
        return self.merged_ms < min(self.in_turn_ms, self.at_once_ms)


@dataclass(frozen=True)
class Product:
    """read: [..., features]. weight: [K, features] and along 0 (linear), or [features, K] and along 1. bias: [K]."""

    operator: int
    read: Output | Input
    weight: Tensor
    bias: Tensor | None
    along: int


@dataclass(frozen=True)
class _Merged:
    """One product in the place of several. outputs: for each of them its columns, on the meta device."""

    product: Call
    derived: tuple[Derived, ...]
    sizes: list[int]
    outputs: dict[int, Tensor]


def merge_linears(program: Program, cost: Cost, at_once: Cost) -> tuple[Program, list[Merge]]:
    """Make one product of those that read the same tensor, as attention's query, key and value do, and split its output.

    TorchScript does so on a GPU to a module that is frozen (its FrozenConcatLinear). Weights and biases are stacked along
    the output features, in memory of their own beside the module's; what each product gave is now a view of columns, and
    strided. So a product stays by itself where what reads it takes no such view, or where an output of the model would lie
    in memory otherwise than before.

    Parallelism is lost: what could run at once is one operator to the scheduler, and a reader of one output waits for all.
    Each distinct place is therefore measured three ways, and merged where that takes less than the products one after the
    other (`cost`) and less than all of them at the same time (`at_once`), whichever of the two the schedule would do. What
    reads the outputs is not measured.

    No dependency can become a cycle: a product here depends on nothing but the tensor that all of them read.
    """
    times: dict[str, tuple[float, float, float]] = {}
    replacements, merges = [], []
    for products in _groups(program):
        merged = _merge(program, products)
        fitting = [p for p in products if _carried(program, {p.operator: merged.outputs[p.operator]}) is not None]
        if len(fitting) < 2:
            continue
        if len(fitting) < len(products):
            merged = _merge(program, fitting)
        carried = _carried(program, merged.outputs)
        if carried is None:
            continue
        operators = tuple(p.operator for p in fitting)
        apart = part(program, operators)
        signature = "; ".join(apart.signature(i) for i in range(len(operators)))
        if signature not in times:
            times[signature] = cost(apart), at_once(apart), cost(_alone(program, merged))
        merge = Merge(operators, _describe(program, fitting), *times[signature])
        merges.append(merge)
        if merge.chosen:
            split = Call(aten.split_with_sizes.default, (merged.product, merged.sizes, -1), {}, [*merged.outputs.values()])
            name, target = "split_with_sizes", "aten.split_with_sizes.default"
            columns: dict[int, int | None] = {v: i for i, v in enumerate(operators)}
            replacements.append(Replacement(operators, name, target, split, columns, merged.derived))
            program = carried
    return rewrite(program, replacements)[0], merges


def _groups(program: Program) -> list[list[Product]]:
    """Products of one input that could be one, by the first of them."""
    groups: dict[tuple[Any, ...], list[Product]] = {}
    for v, call in enumerate(program.calls):
        p = product(call, v)
        if p is not None:
            key = (call.function, p.read, p.weight.shape[1 - p.along], p.weight.dtype, p.bias is None)
            groups.setdefault(key, []).append(p)
    return [products for products in groups.values() if len(products) > 1]


def product(call: Call, v: int) -> Product | None:
    """Operator v as a product with a weight that is the module's own, or None."""
    if call.function not in PRODUCTS or call.kwargs:
        return None
    if call.function is ADDMM:
        bias, x, weight = call.args
    else:
        x, weight, bias = (*call.args, None)[:3]
    along = 0 if call.function is LINEAR else 1
    if not isinstance(x, Output | Input) or not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    if bias is not None and (not isinstance(bias, Tensor) or bias.shape != (weight.shape[along],)):
        return None
    return Product(v, x, weight, bias, along)


@torch.no_grad()
def _merge(program: Program, products: Sequence[Product]) -> _Merged:
    """The product with stacked weights. It is run once, to see how its output lies in memory."""
    first, function = products[0], program.calls[products[0].operator].function
    derived = [Derived.of(partial(_stack, first.along), *(p.weight for p in products))]
    arguments: tuple[Any, ...] = (first.read, derived[0].tensor)
    if first.bias is not None:
        derived.append(Derived.of(partial(_stack, 0), *(p.bias for p in products if p.bias is not None)))
        bias = derived[1].tensor
        arguments = (bias, *arguments) if function is ADDMM else (*arguments, bias)
    (x,) = part(program, [first.operator]).examples
    out = function(*(x if a is first.read else a for a in arguments))
    sizes = [p.weight.shape[p.along] for p in products]
    outputs = {p.operator: on_meta(t) for p, t in zip(products, out.split(sizes, -1), strict=True)}
    return _Merged(Call(function, arguments, {}, on_meta(out)), tuple(derived), sizes, outputs)


def _stack(dimension: int, *tensors: Tensor) -> Tensor:
    return torch.cat(tensors, dimension)


@torch.no_grad()
def _carried(program: Program, outputs: dict[int, Tensor]) -> Program | None:
    """`program` where some operators return what lies in memory as `outputs` say, and what reads them accordingly.

    None where an operator cannot read what it would be given, or where an output of the model would have other strides.
    Each operator that is given other strides is run alone, since the strides of its own output are the kernel's choice.
    """
    calls, kept, differ = list(program.calls), program.kept_operators(), set[int]()
    random = [program.device] if program.device.type == "cuda" else []
    with torch.random.fork_rng(devices=random):
        for v in range(min(outputs), len(calls)):
            value: Any = outputs.get(v)
            if value is None:
                if differ.isdisjoint(program.graph.producers[v]):
                    continue
                if calls[v].function in OF_MEMORY:
                    return None
                reader = part(_with(program, calls), [v])
                try:
                    value = on_meta(reader.execute(0, [None], reader.examples))
                except (RuntimeError, ValueError):  # such as a view that spans two strides
                    return None
            if _layout(value) == _layout(calls[v].produces):
                continue
            if v in kept:
                return None
            calls[v] = replace(calls[v], produces=value)
            differ.add(v)
    return _with(program, calls)


def _with(program: Program, calls: Sequence[Call]) -> Program:
    return Program(program.graph, calls, program.outputs, program.output_spec, program.examples, program.derived)


def _layout(value: Any) -> list[Any]:
    return [t.stride() if isinstance(t, Tensor) else t for t in tree_leaves(value)]


def _alone(program: Program, merged: _Merged) -> Program:
    """The merged product as a program."""
    operator = program.graph.operators[min(merged.outputs)]
    examples = part(program, [operator.id]).examples
    call = merged.product.map(lambda a: Input(0) if isinstance(a, Output | Input) else a)
    return alone(operator.name, operator.target, call, examples)


def _describe(program: Program, products: Sequence[Product]) -> str:
    """A place for people: "1x128x768, weights 3 of 768x768, with bias"."""
    weights = Counter("x".join(map(str, p.weight.shape)) for p in products)
    shapes = " + ".join(f"{count} of {shape}" for shape, count in weights.items())
    x = "x".join(map(str, program.value(products[0].read).shape))
    return f"{x}, weights {shapes}" + (", with bias" if products[0].bias is not None else "")
