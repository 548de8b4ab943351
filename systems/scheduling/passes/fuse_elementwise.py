"""Fuses groups of elementwise operators, each into one kernel that TorchInductor compiles (Nimble, Appendix B)."""

from systems.scheduling.decision import Decision
from systems.scheduling.graph.fused_kernel import fuse
from systems.scheduling.graph.patterns import is_elementwise, is_reshape, users
from systems.scheduling.graph.program import Call, Program
from systems.scheduling.graph.rewrite import Replacement, replace

from .context import Context, Rewritten
from .groups import convolutions_before, groups
from .patterns import name_operators


def fuse_elementwise(program: Program, _: Context) -> Rewritten:
    """Fuse each elementwise operator with its producers, looking through views, if nothing outside the group reads them.

    Invariant: of a group only the last operator is read from outside. So fusing takes no parallelism from the scheduler: an
    operator with one reader could run beside nothing that its reader does not wait for. Hence nothing is measured.

    On a GPU a group also takes over the biases of convolutions that it alone reads, since PyTorch adds those in a kernel of
    their own. Equal groups share a kernel.
    """
    readers = users(program)
    is_cuda = program.device.type == "cuda"
    replacements: list[Replacement] = []
    decisions: list[Decision] = []
    for members in groups(program, readers, lambda v: is_elementwise(program, v), lambda v: is_reshape(program, v)):
        biased = convolutions_before(program, readers, members) if is_cuda else []
        if len(members) + len(biased) < 2:
            continue
        replacements.append(fuse(program, members, "elementwise", biased=biased))
        replacements += [_without_bias(program, u) for u in biased]
        pattern = " + ".join(["bias"] * len(biased) + [name_operators(program, members)])
        decisions.append(Decision("fuse_elementwise", pattern, tuple(members), {}, "fused"))
    return replace(program, replacements)[0], decisions


def _without_bias(program: Program, u: int) -> Replacement:
    operator, call = program.graph.operators[u], program.calls[u]
    new = Call(call.function, (*call.args[:2], None, *call.args[3:]), call.kwargs, call.produces)
    return Replacement((u,), operator.name, operator.target, new, {u: None})
