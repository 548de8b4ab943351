"""Selects for each matrix product the fastest kernel: a library's, by the layout of its weight and the place of its bias, or
one of our own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from systems.scheduling.decision import Decision
from systems.scheduling.graph.derived import Derived
from systems.scheduling.graph.effects import is_view
from systems.scheduling.graph.part import part
from systems.scheduling.graph.patterns import ADDITION, users
from systems.scheduling.graph.program import Call, Program
from systems.scheduling.graph.rewrite import Replacement, replace

from .activations import Activation, activation_of
from .context import Context, Rewritten, fastest
from .own_kernels import (
    DTYPES,
    compile_unmeasured,
    has_kernels,
    milliseconds_of,
    nearest_tf32,
    num_cores,
    target_of,
    tickets,
)
from .patterns import ADDMM, Product, product, shape_of

# By name: whether the weight is laid out the other way, and whether the bias is added afterwards.
WAYS = {
    "library": (False, False),
    "transposed": (True, False),
    "bias apart": (False, True),
    "transposed, bias apart": (True, True),
}
MIN_GAIN = 1.03  # less may be scatter, and is not worth a copy of the weight or one more operator


_Layouts: TypeAlias = dict[tuple[int, Callable[..., Tensor], int], Derived]  # by a weight's identity, layout and side


@torch.no_grad()
def select_products(program: Program, context: Context) -> Rewritten:
    """Give each product with a weight of the module's own the layout and the place of its bias that are the fastest.

    A linear's weight lies in memory transposed as the product reads it (BLAS's TN), a GPT-2 Conv1D's as it is read (NN);
    each has the faster kernels for some shapes. The alternatives:
        - library: the product as captured.
        - transposed: the weight laid out the other way, once, in memory of its own beside the module's.
        - bias apart: an elementwise operator of its own adds the bias, which is one more launch.
        - transposed, bias apart.
        - a kernel of `systems.kernels` by the name of its tile, for a product of few rows, whose sum it may split. Where
          TF32 is off, it takes one of many rows too: each factor is a number of TF32 and a rest, and there are three
          products, as precise as the library's. The weight then lies in memory twice more.
        - one by the name of its strip, for a single row: it reads the weight as fast as memory gives it.

    A kernel of our own computes the activation that alone reads the product, also one that is written in several operators,
    as GPT-2's. What it is held against is the library's product with that activation, where products alone read it in turn;
    else the activation may cost nothing, as part of another kernel.

    Invariants:
        - Equal products are measured once, alone, and treated alike.
        - The captured form stays unless another is `MIN_GAIN` times as fast. A kernel of our own has to be that much faster
          than all of the library's too.
    """
    readers = users(program)
    places_by_signature: dict[str, list[_Place]] = {}
    for v, call in enumerate(program.calls):
        if (matched := product(call, v)) is not None:
            place = _place(program, readers, matched)
            separate = part(program, place.operators)
            signature = "; ".join(separate.signature(i) for i in range(len(place.operators)))
            places_by_signature.setdefault(f"{signature}{', apart' if place.is_apart else ''}", []).append(place)
    transposed_by_weight: dict[int, Tensor] = {}  # by the identity of a weight, which several products may share
    replacements: list[Replacement] = []
    decisions: list[Decision] = []
    layouts: _Layouts = {}
    own_by_signature = {signature: _own(program, equal[0], layouts) for signature, equal in places_by_signature.items()}
    compile_unmeasured(program, (each.call for own in own_by_signature.values() for each in own.values()), context)
    for signature, equal in places_by_signature.items():
        by_library = _measure(program, equal[0], context)
        calls = {name: each.call for name, each in own_by_signature[signature].items()}
        by_own, reasons = milliseconds_of(program, calls, context)
        chosen = _own_choice(by_library, {name: t for name, t in by_own.items() if t is not None})
        pattern, times = _pattern(program, equal[0]), {**by_library, **by_own}
        decisions += [
            context.decide("select_products", pattern, each.counted, signature, times, reasons, chosen) for each in equal
        ]
        chosen = decisions[-1].chosen
        if chosen == "library":
            continue
        if chosen not in WAYS:
            replacements += [_by_own_kernel(program, each, chosen, layouts) for each in equal]
            continue
        is_transposed, is_bias_apart = WAYS[chosen]
        for each in equal:
            p = each.product
            weight, derived = p.weight, tuple[Derived, ...]()
            if is_transposed:
                if id(weight) not in transposed_by_weight:
                    derived = (Derived.of(_transposed, weight),)
                    transposed_by_weight[id(weight)] = derived[0].tensor
                weight = transposed_by_weight[id(weight)]
            replacements.append(_replacement(program, p, weight, is_bias_apart, derived))
    return replace(program, replacements)[0], decisions


@dataclass(frozen=True)
class _Place:
    """A product, and the activation that alone reads it.

    Args:
        activation: None where there is none.
        is_apart: it is a kernel of its own, where the library computes the product.
    """

    product: Product
    activation: Activation | None
    is_apart: bool

    @property
    def operators(self) -> tuple[int, ...]:
        """What a kernel of our own replaces, in the order of capture."""
        return (self.product.operator, *(self.activation.operators if self.activation is not None else ()))

    @property
    def counted(self) -> tuple[int, ...]:
        """What a library's time is of."""
        return self.operators if self.is_apart else (self.product.operator,)


def _place(program: Program, readers: list[list[int]], p: Product) -> _Place:
    after = activation_of(program, readers, p.operator)
    return _Place(p, after, after is not None and _do_products_read(program, readers, after.operators[-1]))


def _do_products_read(program: Program, readers: Sequence[list[int]], v: int) -> bool:
    """Do products alone read the operator, or views of it?"""
    calls = [program.calls[u] if u >= 0 else None for u in readers[v]]
    return bool(calls) and all(
        call is not None
        and (product(call, u) is not None or (is_view(call.function) and _do_products_read(program, readers, u)))
        for u, call in zip(readers[v], calls, strict=True)
    )


@dataclass(frozen=True)
class _Own:
    """A kernel of our own for a place.

    Args:
        call: of it.
        derived: the weight that was laid out for it.
    """

    call: Call
    derived: tuple[Derived, ...] = ()


def _own(program: Program, place: _Place, layouts: _Layouts) -> dict[str, _Own]:
    """By the names of their tiles; none where no kernel of our own takes the product."""
    p, produces = place.product, program.calls[place.product.operator].produces
    x, after = program.value(p.x), "none" if place.activation is None else place.activation.name
    if not has_kernels(program.device) or not all(map(_is_plain, (x, produces))) or p.weight.numel() >= 2**31:
        return {}
    if p.bias is not None and not p.bias.is_contiguous():
        return {}
    from systems.kernels.dense import THRICE  # imports Triton
    from systems.kernels.gemv import Gemv, strips_of
    from systems.kernels.product import Product as Kernel
    from systems.kernels.product import tiles_of

    weight = p.weight if p.along == 0 else p.weight.t()  # [outputs, features]
    outputs, features = weight.shape
    num_rows = x.numel() // features
    is_fp32 = x.dtype is torch.float32
    precision = "tf32" if not is_fp32 or torch.backends.cuda.matmul.allow_tf32 else THRICE
    own: dict[str, _Own] = {}
    cores, has_activation = num_cores(program.device), after != "none"
    if tiles := tiles_of(num_rows, outputs, features, precision, cores, not is_fp32, has_activation):
        laid, derived = _laid_out(p, weight, _rounded_rows if is_fp32 else _rows, layouts)
        rest: Tensor | None = None
        if precision == THRICE:
            rest, others = _laid_out(p, weight, _rests, layouts)
            derived += others
        for tile in tiles:
            shared = tickets(program, tile, num_rows, outputs)
            own[str(tile)] = _Own(
                Call(Kernel(precision, tile, after), (p.x, laid, p.bias, shared, rest), {}, produces), derived
            )
    if num_rows == 1:
        laid, derived = _laid_out(p, weight, _rows, layouts)
        for strip in strips_of(features):
            own[str(strip)] = _Own(Call(Gemv(strip, after), (p.x, laid, p.bias), {}, produces), derived)
    return own


def _laid_out(
    p: Product, weight: Tensor, layout: Callable[..., Tensor], layouts: _Layouts
) -> tuple[Tensor, tuple[Derived, ...]]:
    """A product's weight [outputs, features] as its kernels read it, which may be as it is; once for all that read it."""
    if weight.is_contiguous() and layout is _rows:
        return weight, ()
    key = id(p.weight), layout, p.along
    if key not in layouts:
        layouts[key] = Derived.of(partial(layout, along=p.along), p.weight)
    return layouts[key].tensor, (layouts[key],)


def _is_plain(tensor: Tensor) -> bool:
    """Does a kernel of our own take it? Its places are numbered in 32 bits."""
    return tensor.is_contiguous() and tensor.dtype in DTYPES and 0 < tensor.numel() < 2**31


def _own_choice(by_library: Mapping[str, float], by_own: Mapping[str, float]) -> str:
    """The alternative that the pass takes by its own rule."""
    best = fastest(by_library)
    chosen = best if by_library["library"] >= MIN_GAIN * by_library[best] else "library"
    own = min(by_own, key=by_own.__getitem__, default=None)
    return own if own is not None and by_library[chosen] >= MIN_GAIN * by_own[own] else chosen


def _by_own_kernel(program: Program, place: _Place, chosen: str, layouts: _Layouts) -> Replacement:
    """By the kernel of a name."""
    own, operators = _own(program, place, layouts)[chosen], place.operators
    results: dict[int, int | None] = {operators[-1]: None}
    name = program.graph.operators[place.product.operator].name
    return Replacement(operators, name, target_of(own.call), own.call, results, own.derived)


def _rows(weight: Tensor, along: int) -> Tensor:
    """A weight as [outputs, features]."""
    return (weight if along == 0 else weight.t()).contiguous()


def _rounded_rows(weight: Tensor, along: int) -> Tensor:
    """As that, each number rounded to the nearest that TF32 holds."""
    return nearest_tf32(_rows(weight, along))


def _rests(weight: Tensor, along: int) -> Tensor:
    """What rounding takes of each number, itself as TF32 holds it; 0 of what is no number."""
    rows = _rows(weight, along)
    return nearest_tf32(torch.nan_to_num(rows - nearest_tf32(rows), 0.0, 0.0, 0.0))


def _measure(program: Program, place: _Place, context: Context) -> dict[str, float]:
    """Milliseconds of the library's product, each way that differs from the others, with the activation that is apart."""
    single = part(program, place.counted)
    p = product(single.calls[0], 0)
    assert p is not None
    transposed = _transposed(p.weight)
    is_same = transposed.stride() == p.weight.stride()  # as of a single row
    times = {}
    for name, (is_transposed, is_bias_apart) in WAYS.items():
        if not (is_transposed and is_same) and not (is_bias_apart and p.bias is None):
            weight = transposed if is_transposed else p.weight
            candidate = replace(single, [_replacement(single, p, weight, is_bias_apart)])[0]
            times[name] = context.cost(context.later(candidate) if place.is_apart else candidate)
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


def _pattern(program: Program, place: _Place) -> str:
    """In words: "1x128x768, weight 3072x768, with bias, then gelu"."""
    p = place.product
    bias = ", with bias" if p.bias is not None else ""
    after = f", then {place.activation.name}" if place.is_apart and place.activation is not None else ""
    return f"{shape_of(program.value(p.x))}, weight {shape_of(p.weight)}{bias}{after}"
