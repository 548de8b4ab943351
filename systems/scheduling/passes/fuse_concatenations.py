"""Lets the kernels that compute the parts of a concatenation write them where it is read."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import Any

import torch
from torch import Tensor

from systems.kernels.kernel import Kernel
from systems.scheduling.decision import Decision
from systems.scheduling.graph.capture import on_meta
from systems.scheduling.graph.patterns import ADDITION, CONCATENATION, only_user, users
from systems.scheduling.graph.program import Call, Input, Output, Program
from systems.scheduling.graph.rewrite import Replacement, replace

from .context import Context, Rewritten
from .convolution_places import separate_places
from .own_kernels import SEPARATE, activation, has_kernels, is_plain, kernel_alone, target_of
from .patterns import SPLIT, addend_of, returned_operators, shape_of

WRITTEN = "written by its parts"  # the alternative to a kernel that copies them
OUT = {"Dense": 5, "Depthwise": 3, "Separable": 7, "Pooled": 2}  # the place of the argument that such a kernel writes to


@dataclass(frozen=True)
class _Part:
    """A part of a concatenation, and who writes it.

    Args:
        operators: that one kernel replaces, in the order of capture; none where a tensor is copied.
        call: of the kernel, which writes to its last argument.
    """

    operators: tuple[int, ...]
    call: Call


@dataclass(frozen=True)
class _Joined:
    """A concatenation with its parts.

    Args:
        operators: itself, the last, and those that it alone reads.
        out: what it computes, in memory of its own.
    """

    operators: tuple[int, ...]
    out: Tensor
    parts: tuple[_Part, ...]

    @property
    def copies(self) -> list[Call]:
        return [part.call for part in self.parts if not part.operators]


def fuse_concatenations(program: Program, context: Context) -> Rewritten:
    """Replace each concatenation of channels by kernels of `systems.kernels` that write its parts where it is read, where
    that is faster (in none of the papers).

    A convolution that is such a kernel already writes there itself, and so does a kernel for a sum or an activation. One
    that is merged with others writes their channels right before the concatenation (`_leading`). Other parts are copied,
    each by a kernel of its own, which waits for that part alone.

    Invariants:
        - What is written lies in memory that nothing else of the program uses, and that lasts as long as the program. It
          is no output of the model: a later run writes it again.
        - Others read a part only where its strides stay what they were.
        - No operator waits for more than before.

    Each distinct place is measured: the copying kernel, and the copies that remain, one after the other. A decision
    names the places of convolutions among its parts that are no such kernels (`needs`).
    """
    if not has_kernels(program.device):
        return program, []
    readers = users(program)
    times_by_signature: dict[str, dict[str, float]] = {}
    replacements: list[Replacement] = []
    decisions: list[Decision] = []
    taken: set[int] = set()  # operators of replacements
    places = separate_places(program)
    for v in reversed(range(len(program.graph))):  # an outer concatenation before those within it
        joined = None if v in taken else _join(program, readers, v, taken)
        if joined is None:
            continue
        shapes = [shape_of(program.value(part.call.produces)) for part in joined.parts]
        signature = f"{program.signature(v)}; {shapes}"  # of the same place whoever computes its parts
        measured = f"{signature}, copied: {[not part.operators for part in joined.parts]}"
        if measured not in times_by_signature:
            copies = [context.cost(kernel_alone(program, call, program.device)) for call in joined.copies]
            times_by_signature[measured] = {SEPARATE: context.cost(_alone(program, joined)), WRITTEN: sum(copies)}
        times = times_by_signature[measured]
        pattern = f"{' + '.join(shapes)}, {len(joined.copies)} of them copied"
        decision = context.decide("fuse_concatenations", pattern, joined.operators, signature, times)
        needs = [places[u] for call in joined.copies if (u := _copied(call)) in places]
        decisions.append(changed(decision, needs=tuple(dict.fromkeys(needs))))
        if decisions[-1].chosen == WRITTEN:
            made = _replacements(program, joined)
            replacements += made
            taken.update(u for each in made for u in each.operators)
    return replace(program, replacements)[0], decisions


def _copied(call: Call) -> int | None:
    """The operator whose only output a kernel copies."""
    x = call.args[0]
    return x.operator if isinstance(x, Output) and x.index is None else None


def joined(out: Tensor, *parts: Tensor) -> Tensor:
    """What the parts were written to."""
    return out


def _join(program: Program, readers: Sequence[list[int]], v: int, taken: Collection[int]) -> _Joined | None:
    """Operator v as a concatenation whose parts are written where it is read, or None."""
    references, operators = _references(program, readers, v)
    if not references or v in returned_operators(program):
        return None
    value = program.calls[v].produces
    is_channels_last = not value.is_contiguous()
    if not is_plain(value) or (is_channels_last and not value.is_contiguous(memory_format=torch.channels_last)):
        return None
    claimed: set[int] = {*taken, *operators}
    sizes = [program.value(reference).shape[1] for reference in references]
    parts: list[_Part] = []
    leading = _leading(program, readers, references[0], claimed)
    if leading is None:
        layout = torch.channels_last if is_channels_last else torch.contiguous_format
        out = torch.empty(value.shape, dtype=value.dtype, device=program.device).contiguous(memory_format=layout)
    else:  # one image, contiguous, in memory that has the channels before it too
        u, num_before = leading
        call = program.calls[u]
        whole = torch.empty((1, num_before + value.shape[1], *value.shape[2:]), dtype=value.dtype, device=program.device)
        out = whole[:, num_before:].as_strided(value.shape, value.stride())
        written = whole[:, : num_before + sizes[0]].as_strided(call.produces.shape, call.produces.stride())
        parts.append(_Part((u,), changed(call, args=(*call.args, written))))
        claimed.add(u)
    places = [*zip(references, out.split(sizes, 1), strict=True)][len(parts) :]
    for reference, place in places:
        part = _part(program, readers, reference, place, operators, claimed, is_channels_last)
        claimed.update(part.operators)
        parts.append(part)
    return _Joined(operators, out, tuple(parts))


def _leading(
    program: Program, readers: Sequence[list[int]], reference: Output | Input, claimed: Collection[int]
) -> tuple[int, int] | None:
    """The kernel of merged convolutions whose last channels are the first of a concatenation, and how many come before them.

    It writes all of its channels in one piece, of which the concatenation begins within. So one image is that its channels
    lie one after the other; of several each would have a gap.
    """
    if not isinstance(reference, Output) or program.calls[reference.operator].function is not SPLIT:
        return None
    source, sizes, dimension = program.calls[reference.operator].args
    if not isinstance(source, Output) or source.index is not None or source.operator in claimed:
        return None
    v, call = source.operator, program.calls[source.operator]
    is_written = isinstance(call.function, Kernel) and OUT.get(type(call.function).__name__) == len(call.args)
    is_last = dimension == 1 and reference.index == len(sizes) - 1 and readers[v] == [reference.operator]
    is_seen = v in returned_operators(program)
    is_one_piece = is_plain(call.produces) and call.produces.shape[0] == 1 and call.produces.is_contiguous()
    return (v, sum(sizes[:-1])) if is_written and is_last and is_one_piece and not is_seen else None


def _references(program: Program, readers: Sequence[list[int]], v: int) -> tuple[list[Output | Input], tuple[int, ...]]:
    """What concatenation v puts together, and the concatenations that it alone reads, itself the last; nothing where v is
    none of channels."""
    call = program.calls[v]
    is_joined = call.function is CONCATENATION and not call.kwargs and len(call.args) == 2 and call.args[1] in (1, -3)
    if not is_joined or not isinstance(call.produces, Tensor) or call.produces.dim() != 4:
        return [], ()
    references: list[Output | Input] = []
    operators: list[int] = []
    for reference in call.args[0]:
        value = program.value(reference)
        if not isinstance(reference, Output | Input) or not is_plain(value) or value.dtype != call.produces.dtype:
            return [], ()
        inner: list[Output | Input] = []
        u = reference.operator if isinstance(reference, Output) and reference.index is None else None
        if u is not None and only_user(readers[u]) == v:
            inner, own = _references(program, readers, u)
            operators += own
        references += inner or [reference]
    return references, (*sorted(operators), v)


def _part(
    program: Program,
    readers: Sequence[list[int]],
    reference: Output | Input,
    place: Tensor,
    operators: Collection[int],
    claimed: Collection[int],
    is_channels_last: bool,
) -> _Part:
    """Who writes one part to its place.

    Args:
        operators: the concatenation, with those within it.
        claimed: operators that belong to something else.
    """
    from systems.kernels.placed import Placed  # imports Triton

    def own(candidate: object) -> int | None:
        """The operator that computes this for the concatenation alone."""
        if not isinstance(candidate, Output) or candidate.index is not None or candidate.operator in claimed:
            return None
        return candidate.operator if set(readers[candidate.operator]) <= {*operators} else None

    produces = on_meta(place)
    if isinstance(reference, Output) and reference.index is None and reference.operator not in claimed:
        call = program.calls[reference.operator]
        out_place = OUT.get(type(call.function).__name__)
        is_written = isinstance(call.function, Kernel) and out_place == len(call.args)
        others_may = -1 not in readers[reference.operator] and _is_alike(place, call.produces)
        if is_written and (own(reference) is not None or others_may):
            return _Part((reference.operator,), changed(call, args=(*call.args, place), produces=produces))
    x: Any = reference
    members: list[int] = []
    after, addend = "none", None
    u = own(x)
    if u is not None and (name := activation(program, u)):
        members, after, x = [u], name, program.calls[u].args[0]
        u = x.operator if isinstance(x, Output) and x.operator not in claimed and readers[x.operator] == [u] else None
    if u is not None and program.calls[u].function is ADDITION and isinstance(first := program.calls[u].args[0], Output):
        other = addend_of(program, u, first.operator) if first.index is None else None
        if other is not None and is_plain(program.value(first)):
            members, x, addend = [u, *members], first, other
    kernel = Placed(after, is_channels_last)
    return _Part(tuple(sorted(members)), Call(kernel, (x, addend, place), {}, produces))


def _is_alike(a: Tensor, b: Tensor) -> bool:
    """Do both lie alike in memory? The stride of a dimension of one element says nothing."""
    steps = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(size == 1 or own == other for size, own, other in steps)


def _replacements(program: Program, one: _Joined) -> list[Replacement]:
    made = []
    arguments: list[Any] = []
    for part in one.parts:
        if part.operators:
            name = "_".join(program.graph.operators[u].name for u in part.operators)
            last = part.operators[-1]
            made.append(Replacement(part.operators, name, target_of(part.call), part.call, {last: None}))
            arguments.append(Output(last))
        else:
            arguments.append(part.call)
    v = one.operators[-1]
    call = Call(joined, (one.out, *arguments), {}, program.calls[v].produces)
    made.append(Replacement(one.operators, "joined", "opweave.joined", call, {v: None}))
    return made


def _alone(program: Program, one: _Joined) -> Program:
    from systems.scheduling.graph.part import part

    return part(program, one.operators)
