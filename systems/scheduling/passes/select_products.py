"""For each matrix product the fastest layout of its weight, its bias added within it or after it, as measured."""

import torch
from torch import Tensor

from systems.scheduling.graph.derived import Derived
from systems.scheduling.graph.part import part
from systems.scheduling.graph.program import Call, Program
from systems.scheduling.graph.rewrite import Replacement, replace

from .merge_linears import ADDMM, Product, product
from .select_kernels import Choice, Cost

aten = torch.ops.aten
# Whether the weight is laid out the other way, and whether the bias is added afterwards.
WAYS = {
    "library": (False, False),
    "transposed": (True, False),
    "bias apart": (False, True),
    "transposed, bias apart": (True, True),
}
LEAST_GAIN = 1.03  # what is less may be scatter, and is not worth a copy of the weight or one more operator


@torch.no_grad()
def select_products(program: Program, cost: Cost) -> tuple[Program, list[Choice]]:
    """Give every product with a weight of the module's own the layout and the place of its bias that are the fastest.

    A linear's weight lies in memory transposed as the product reads it (BLAS's TN), a GPT-2 Conv1D's as it is read (NN), and
    each has the faster kernels for some shapes. Candidates are what was captured (library); `transposed`, the weight laid
    out the other way, once, in memory of its own beside the module's; `bias apart`, where a bias is added by an operator of
    its own, which is one more to launch and elementwise; and both. Each distinct product is measured alone, each way. What
    was captured stays where nothing is LEAST_GAIN times as fast.
    """
    equal: dict[str, list[Product]] = {}
    for v, call in enumerate(program.calls):
        if (found := product(call, v)) is not None:
            equal.setdefault(program.signature(v), []).append(found)
    laid: dict[int, Tensor] = {}  # by the identity of a weight, which several products may share
    replacements, choices = [], []
    for members in equal.values():
        times = _measure(part(program, [members[0].operator]), cost)
        fastest = min(times, key=lambda name: times[name])
        chosen = fastest if times["library"] >= LEAST_GAIN * times[fastest] else "library"
        choices.append(Choice(_describe(program, members[0]), chosen, times, tuple(p.operator for p in members)))
        if chosen == "library":
            continue
        transposed, apart = WAYS[chosen]
        for found in members:
            weight, derived = found.weight, tuple[Derived, ...]()
            if transposed:
                if id(weight) not in laid:
                    derived = (Derived.of(_transposed, weight),)
                    laid[id(weight)] = derived[0].tensor
                weight = laid[id(weight)]
            replacements.append(_replacement(program, found, weight, apart, derived))
    return replace(program, replacements)[0], choices


def _measure(single: Program, cost: Cost) -> dict[str, float]:
    """Milliseconds of the one product that `single` is, as captured and every other way."""
    found = product(single.calls[0], 0)
    assert found is not None
    other = _transposed(found.weight)
    same = other.stride() == found.weight.stride()  # as of a single row
    times = {}
    for name, (transposed, apart) in WAYS.items():
        if not (transposed and same) and not (apart and found.bias is None):
            weight = other if transposed else found.weight
            times[name] = cost(replace(single, [_replacement(single, found, weight, apart)])[0])
    return times


def _replacement(
    program: Program, found: Product, weight: Tensor, apart: bool, derived: tuple[Derived, ...] = ()
) -> Replacement:
    """The product with `weight`, equal to its own, and with its bias added afterwards if `apart`."""
    v, bias = found.operator, found.bias
    call, operator = program.calls[v], program.graph.operators[v]
    if not apart:
        new = call.map(lambda a: weight if a is found.weight else a)
        return Replacement((v,), operator.name, operator.target, new, {v: None}, derived)
    function = aten.mm.default if call.function is ADDMM else call.function
    alone = Call(function, (found.read, weight), {}, call.produces)
    added = Call(aten.add.Tensor, (alone, bias), {}, call.produces)
    return Replacement((v,), "add", "aten.add.Tensor", added, {v: None}, derived)


def _transposed(weight: Tensor) -> Tensor:
    """The same matrix by columns where it lies by rows, and by rows where it does not."""
    return weight.t().contiguous().t() if weight.is_contiguous() else weight.contiguous()


def _describe(program: Program, found: Product) -> str:
    """A product for people: "1x128x768, weight 3072x768, with bias"."""
    shapes = ["x".join(map(str, t.shape)) for t in (program.value(found.read), found.weight)]
    return f"{shapes[0]}, weight {shapes[1]}" + (", with bias" if found.bias is not None else "")
