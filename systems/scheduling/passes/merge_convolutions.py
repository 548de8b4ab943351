"""Merges convolutions of one input into one with the filters stacked, where that is faster."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from systems.scheduling.decision import Decision
from systems.scheduling.graph.capture import on_meta
from systems.scheduling.graph.derived import Derived
from systems.scheduling.graph.part import part
from systems.scheduling.graph.patterns import CONCATENATION, CONVOLUTION, Convolution, convolution, only_user, users
from systems.scheduling.graph.program import Call, Input, Output, Program
from systems.scheduling.graph.rewrite import Replacement
from systems.scheduling.graph.rewrite import replace as rewrite

from .context import Context, Rewritten
from .own_kernels import activation, without_unread_activations
from .patterns import SPLIT, shape_of
from .strides import with_strides

MERGED, FEWER = "merged", "merged but what is concatenated"  # the alternatives


@dataclass(frozen=True)
class _Member:
    """One of the convolutions to merge.

    Args:
        operator: its id; last: that of the activation after it, or its own.
        conv: the convolution.
        is_part: concatenations alone read it.
    """

    operator: int
    last: int
    conv: Convolution
    is_part: bool

    @property
    def operators(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((self.operator, self.last)))


@dataclass(frozen=True)
class _Merged:
    """One convolution in the place of several.

    Args:
        members: in the order of their channels; those that are concatenated come last.
        call: the convolution, with the activation that all have after it.
        outputs: the channels of each, by its last operator, on the meta device.
    """

    members: tuple[_Member, ...]
    call: Call
    derived: tuple[Derived, ...]
    outputs: dict[int, Tensor]

    @property
    def operators(self) -> tuple[int, ...]:
        return tuple(sorted(v for m in self.members for v in m.operators))

    @property
    def sizes(self) -> list[int]:
        return [m.conv.weight.shape[0] for m in self.members]


def merge_convolutions(program: Program, context: Context) -> Rewritten:
    """Merge convolutions of equal kernel, stride, padding and dilation that read the same tensor, and split the output.

    IOS merges so within a stage (Section 3, "Operator merge"), and there pads kernels too; in the other papers it is absent.
    Filters and biases are stacked, in memory of their own beside the module's. Convolutions that read equal activations of
    one tensor read the first of these; all have the same activation after them, which the merged one takes over.

    Invariants:
        - Each output becomes a view of channels. It is merged only if every reader takes such a view, and every output of
          the model keeps its strides.
        - The graph stays acyclic: a merged convolution depends on nothing but the tensor that all of them read.

    Each distinct place is measured: in turn, at once, merged, and without those that only a concatenation reads. Like
    `merge_linears` it costs parallelism, so that a reader of one output waits for all. Readers are not measured.
    """
    times_by_signature: dict[str, dict[str, float]] = {}
    replacements: list[Replacement] = []
    decisions: list[Decision] = []
    for members in _groups(program):
        alternatives = _alternatives(program, members)
        if not alternatives:
            continue
        operators = tuple(m.operator for m in members)
        separate = part(program, operators)
        signature = "; ".join([*(separate.signature(i) for i in range(len(operators))), f"{[m.is_part for m in members]}"])
        if signature not in times_by_signature:
            separate_ms = {"in turn": context.cost(separate), "at once": context.cost_at_once(separate)}
            ascending = dict(sorted(separate_ms.items(), key=lambda item: item[1]))  # a gain is over the first
            merged_ms = {name: _milliseconds(program, members, each, context) for name, (each, _) in alternatives.items()}
            times_by_signature[signature] = {**ascending, **merged_ms}
        times = times_by_signature[signature]
        decisions.append(context.decide("merge_convolutions", _pattern(program, members), operators, signature, times))
        if (chosen := decisions[-1].chosen) in alternatives:
            merged, program = alternatives[chosen]
            replacements.append(_replacement(merged))
    return without_unread_activations(rewrite(program, replacements)[0]), decisions


def _groups(program: Program) -> list[list[_Member]]:
    """Convolutions that could be one, in the order of the first of them."""
    readers = users(program)
    groups: dict[tuple[object, ...], list[_Member]] = {}
    for v, call in enumerate(program.calls):
        conv = convolution(call, (CONVOLUTION,))
        if conv is None or conv.groups != 1 or not isinstance(conv.x, Output | Input):
            continue
        source, before = conv.x, None
        if isinstance(source, Output) and source.index is None and (before := activation(program, source.operator)):
            source = program.calls[source.operator].args[0]
        reader = only_user(readers[v])
        after = None if reader is None else activation(program, reader)
        last = v if reader is None or after is None else reader
        is_part = all(u >= 0 and program.calls[u].function is CONCATENATION for u in readers[last])
        geometry = tuple(conv.weight.shape[1:]), conv.stride, conv.padding, conv.dilation
        key = source, before, after, geometry, conv.weight.dtype, conv.bias is None
        groups.setdefault(key, []).append(_Member(v, last, conv, is_part))
    return [members for members in groups.values() if len(members) > 1]


def _alternatives(program: Program, members: Sequence[_Member]) -> dict[str, tuple[_Merged, Program]]:
    """The ways to merge them, by name, that leave each reader what it takes; with the program whose tensors lie so."""
    ordered = sorted(members, key=lambda m: m.is_part)  # stable
    candidates = {MERGED: ordered, FEWER: [m for m in ordered if not m.is_part]}
    alternatives = {}
    for name, chosen in candidates.items():
        if len(chosen) < 2 or (name == FEWER and len(chosen) == len(members)):
            continue
        merged = _merge(program, chosen)
        if (strided := with_strides(program, merged.outputs)) is not None:
            alternatives[name] = merged, strided
    return alternatives


@torch.no_grad()
def _merge(program: Program, members: Sequence[_Member]) -> _Merged:
    """The convolution with stacked filters. It runs once, to see how its output lies in memory."""
    first = min(members, key=lambda m: m.operator)
    conv = first.conv
    derived = [Derived.of(_stack, *(m.conv.weight for m in members))]
    bias = None
    if conv.bias is not None:
        derived.append(Derived.of(_stack, *(m.conv.bias for m in members if m.conv.bias is not None)))
        bias = derived[1].tensor
    numbers = [*conv.stride], [*conv.padding], [*conv.dilation], 1
    (x,) = part(program, [first.operator]).examples  # [N, C, H, W]
    out = CONVOLUTION(x, derived[0].tensor, bias, *numbers)  # [N, sum of K, H', W']
    call = Call(CONVOLUTION, (conv.x, derived[0].tensor, bias, *numbers), {}, on_meta(out))
    if first.last != first.operator:
        call = Call(program.calls[first.last].function, (call,), {}, on_meta(out))
    sizes = [m.conv.weight.shape[0] for m in members]
    outputs = {m.last: on_meta(t) for m, t in zip(members, out.split(sizes, 1), strict=True)}
    return _Merged(tuple(members), call, tuple(derived), outputs)


def _stack(*tensors: Tensor) -> Tensor:
    return torch.cat(tensors)


def _milliseconds(program: Program, members: Sequence[_Member], merged: _Merged, context: Context) -> float:
    """Of the merged convolution, and of those that stay, one after the other; without activations."""
    one = merged.call if merged.call.function is CONVOLUTION else merged.call.args[0]
    first = part(program, [min(m.operator for m in merged.members)])
    stacked = Program(first.graph, [one.map(_as_input)], first.outputs, first.output_spec, first.examples)
    rest = tuple(m.operator for m in members if m not in merged.members)
    return context.cost(stacked) + (context.cost(part(program, rest)) if rest else 0.0)


def _as_input(argument: Any) -> Any:
    return Input(0) if isinstance(argument, Output | Input) else argument


def _replacement(merged: _Merged) -> Replacement:
    places: dict[int, int | None] = {m.last: i for i, m in enumerate(merged.members)}
    split = Call(SPLIT, (merged.call, merged.sizes, 1), {}, [merged.outputs[m.last] for m in merged.members])
    return Replacement(merged.operators, "split_with_sizes", str(SPLIT), split, places, merged.derived)


def _pattern(program: Program, members: Sequence[_Member]) -> str:
    """A place in words: "1x192x28x28, weights 64x192x1x1 + 96x192x1x1 (concatenated)"."""
    weights = " + ".join(shape_of(m.conv.weight) + " (concatenated)" * m.is_part for m in members)
    return f"{shape_of(program.value(members[0].conv.x))}, weights {weights}"
