"""Lets the kernel that computes one addend of a sum add the other, which then goes first."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from systems.kernels.kernel import Kernel
from systems.scheduling.decision import Decision
from systems.scheduling.graph.part import part
from systems.scheduling.graph.patterns import ADDITION, only_user, users
from systems.scheduling.graph.program import Call, Program
from systems.scheduling.graph.rewrite import Replacement
from systems.scheduling.graph.rewrite import replace as rewrite

from .context import Context, Rewritten
from .own_kernels import SEPARATE, activation, has_kernels, kernel_alone, target_of
from .patterns import addend_of, name_operators, shape_of

FUSED = "added by the kernel of one"  # the alternative to a kernel for the sum
ADDEND = {"Dense": 3, "Separable": 5}  # the place of the argument that such a kernel adds


@dataclass(frozen=True)
class _Sum:
    """A sum, with the kernel of one addend and an activation after it.

    Args:
        operators: the kernel, the sum, and the activation; the last alone is read from outside.
        call: of the kernel that adds.
    """

    operators: tuple[int, ...]
    call: Call


def fuse_sums(program: Program, context: Context) -> Rewritten:
    """Fuse each sum whose addends only it reads into the kernel of `systems.kernels` that computes one of them (in none of
    the papers).

    Invariants:
        - Only the sum reads that kernel's output. So nothing that the other addend is computed from waits for the kernel:
          the graph stays acyclic.
        - Of two such kernels that one adds that has more operators before it, one after the other: it waits least.

    It costs parallelism: the kernels of a sum run one after the other. Each distinct place is measured alone, where a kernel
    less is always faster. Only a search over the whole graph can tell: weave begins without.
    """
    if not has_kernels(program.device):
        return program, []
    readers, levels = users(program), _levels(program)
    times_by_signature: dict[str, dict[str, float]] = {}
    replacements: list[Replacement] = []
    decisions: list[Decision] = []
    for v, call in enumerate(program.calls):
        one = _place(program, readers, levels, v) if call.function is ADDITION else None
        if one is None:
            continue
        separate = part(program, one.operators)
        signature = "; ".join(separate.signature(i) for i in range(len(one.operators)))
        if signature not in times_by_signature:
            separate_ms = context.cost(context.later(separate))
            fused_ms = context.cost(kernel_alone(program, one.call, program.device))
            times_by_signature[signature] = {SEPARATE: separate_ms, FUSED: fused_ms}
        pattern = f"{name_operators(program, one.operators[1:])}, {shape_of(one.call.produces)}"
        times = times_by_signature[signature]
        decisions.append(context.decide("fuse_sums", pattern, one.operators, signature, times))
        if decisions[-1].chosen == FUSED:
            name = "_".join(program.graph.operators[u].name for u in one.operators)
            results: dict[int, int | None] = {one.operators[-1]: None}
            replacements.append(Replacement(one.operators, name, target_of(one.call), one.call, results))
    return rewrite(program, replacements)[0], decisions


def _levels(program: Program) -> list[int]:
    """For each operator how many there are at most, one after the other, up to it."""
    levels: list[int] = []
    for before in program.graph.predecessors:
        levels.append(1 + max((levels[u] for u in before), default=0))
    return levels


def _place(program: Program, readers: Sequence[list[int]], levels: Sequence[int], v: int) -> _Sum | None:
    """The place of sum v; None where no kernel can add."""
    hosts = [u for u in program.graph.predecessors[v] if set(readers[u]) == {v} and _adds_nothing(program.calls[u])]
    for u in sorted(hosts, key=lambda u: (-levels[u], -u)):
        addend = addend_of(program, v, u)
        if addend is None:
            continue
        operators, after = [u, v], "none"
        if (reader := only_user(readers[v])) is not None and (name := activation(program, reader)):
            operators, after = [u, v, reader], name
        kernel, arguments = program.calls[u].function, list(program.calls[u].args)
        arguments[ADDEND[type(kernel).__name__]] = addend
        produces = program.calls[operators[-1]].produces
        call = Call(replace(kernel, after=after), tuple(arguments), {}, produces)  # type: ignore[type-var]
        return _Sum(tuple(operators), call)
    return None


def _adds_nothing(call: Call) -> bool:
    """Is it a kernel that can add a tensor, and neither adds one nor has an activation after?"""
    kernel = call.function
    place = ADDEND.get(type(kernel).__name__) if isinstance(kernel, Kernel) else None
    return place is not None and call.args[place] is None and kernel.after == "none"  # type: ignore[attr-defined]
