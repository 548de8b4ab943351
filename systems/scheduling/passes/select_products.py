"""Selects for each matrix product the fastest layout of its weight, its bias added within it or after it."""

import torch
from torch import Tensor

from systems.scheduling.decision import Decision
from systems.scheduling.graph.derived import Derived
from systems.scheduling.graph.part import part
from systems.scheduling.graph.patterns import ADDITION
from systems.scheduling.graph.program import Call, Program
from systems.scheduling.graph.rewrite import Replacement, replace

from .context import Context, Cost, Rewritten, fastest
from .patterns import ADDMM, Product, product, shape_of

# By name: whether the weight is laid out the other way, and whether the bias is added afterwards.
WAYS = {
    "library": (False, False),
    "transposed": (True, False),
    "bias apart": (False, True),
    "transposed, bias apart": (True, True),
}
MIN_GAIN = 1.03  # less may be scatter, and is not worth a copy of the weight or one more operator


@torch.no_grad()
def select_products(program: Program, context: Context) -> Rewritten:
    """Give each product with a weight of the module's own the layout and the place of its bias that are the fastest.

    A linear's weight lies in memory transposed as the product reads it (BLAS's TN), a GPT-2 Conv1D's as it is read (NN);
    each has the faster kernels for some shapes. The alternatives:
        - library: the product as captured.
        - transposed: the weight laid out the other way, once, in memory of its own beside the module's.
        - bias apart: an elementwise operator of its own adds the bias, which is one more launch.
        - transposed, bias apart.

    Invariant: equal products are measured once, alone, and treated alike. The captured form stays unless another is
    `MIN_GAIN` times as fast.
    """
    products_by_signature: dict[str, list[Product]] = {}
    for v, call in enumerate(program.calls):
        if (matched := product(call, v)) is not None:
            products_by_signature.setdefault(program.signature(v), []).append(matched)
    transposed_by_weight: dict[int, Tensor] = {}  # by the identity of a weight, which several products may share
    replacements: list[Replacement] = []
    decisions: list[Decision] = []
    for signature, equal in products_by_signature.items():
        times = _measure(part(program, [equal[0].operator]), context.cost)
        best = fastest(times)
        chosen = best if times["library"] >= MIN_GAIN * times[best] else "library"
        pattern = _pattern(program, equal[0])
        decisions += [
            context.decide("select_products", pattern, (p.operator,), signature, times, chosen=chosen) for p in equal
        ]
        chosen = decisions[-1].chosen
        if chosen == "library":
            continue
        is_transposed, is_bias_apart = WAYS[chosen]
        for p in equal:
            weight, derived = p.weight, tuple[Derived, ...]()
            if is_transposed:
                if id(weight) not in transposed_by_weight:
                    derived = (Derived.of(_transposed, weight),)
                    transposed_by_weight[id(weight)] = derived[0].tensor
                weight = transposed_by_weight[id(weight)]
            replacements.append(_replacement(program, p, weight, is_bias_apart, derived))
    return replace(program, replacements)[0], decisions


def _measure(single: Program, cost: Cost) -> dict[str, float]:
    """Milliseconds of the one product that `single` is, each way that differs from the others."""
    p = product(single.calls[0], 0)
    assert p is not None
    transposed = _transposed(p.weight)
    is_same = transposed.stride() == p.weight.stride()  # as of a single row
    times = {}
    for name, (is_transposed, is_bias_apart) in WAYS.items():
        if not (is_transposed and is_same) and not (is_bias_apart and p.bias is None):
            weight = transposed if is_transposed else p.weight
            times[name] = cost(replace(single, [_replacement(single, p, weight, is_bias_apart)])[0])
    return times


def _replacement(
    program: Program, p: Product, weight: Tensor, is_bias_apart: bool, derived: tuple[Derived, ...] = ()
) -> Replacement:
    """The product with another tensor of its weight's values; an addition after it adds the bias if `is_bias_apart`."""
    v, bias = p.operator, p.bias
    call, operator = program.calls[v], program.graph.operators[v]
    if not is_bias_apart:
        new = call.map(lambda a: weight if a is p.weight else a)
        return Replacement((v,), operator.name, operator.target, new, {v: None}, derived)
    function = torch.ops.aten.mm.default if call.function is ADDMM else call.function
    unbiased = Call(function, (p.x, weight), {}, call.produces)
    sum_ = Call(ADDITION, (unbiased, bias), {}, call.produces)
    return Replacement((v,), "add", "aten.add.Tensor", sum_, {v: None}, derived)


def _transposed(weight: Tensor) -> Tensor:
    """The same matrix by columns where it lies by rows, and by rows where it does not."""
    return weight.t().contiguous().t() if weight.is_contiguous() else weight.contiguous()


def _pattern(program: Program, p: Product) -> str:
    """A product in words: "1x128x768, weight 3072x768, with bias"."""
    bias = ", with bias" if p.bias is not None else ""
    return f"{shape_of(program.value(p.x))}, weight {shape_of(p.weight)}{bias}"
