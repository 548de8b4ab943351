"""Normalisations and softmaxes with the elementwise operators around them, compiled into one kernel by TorchInductor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from systems.scheduling.graph.part import part
from systems.scheduling.graph.program import Program
from systems.scheduling.graph.rewrite import Replacement, only_user, replace, users

from .fuse_convolution import Fusion
from .fuse_elementwise import is_elementwise, is_view
from .fused_kernel import MOST_INPUTS, inputs_of, reads_tensors, replacement
from .select_kernels import Cost

aten = torch.ops.aten
NORMS = (aten.layer_norm.default, aten.rms_norm.default)
SOFTMAXES = (aten.softmax.int, aten._softmax.default)
SUMS = (aten.mean.dim, aten.sum.dim_IntList)


def fuse_reductions(
    program: Program, cost: Cost, separately: Callable[[Program], Program] = lambda program: program
) -> tuple[Program, list[Fusion]]:
    """Join each reduction of rows with the elementwise operators before and after it, where one kernel for all is faster.

    A row is what lies along the last dimension; layer norms, softmaxes, means and sums of a row are reductions. What others
    read too, as the sum that a residual connection passes on, is one more output of the kernel; it then waits for all that
    the kernel reads. Each distinct group is measured both ways, as a whole; `separately` is what a later pass would make of
    its operators if they stay apart.
    """
    readers = users(program)
    group_of: dict[int, list[int]] = {}
    times: dict[str, tuple[float, float]] = {}
    replacements, fusions = [], dict[tuple[int, ...], Fusion]()
    for seed in range(len(program.graph)):
        if seed in group_of or not is_reduction(program, seed):
            continue
        members = _Growing(program, readers, group_of, seed).grown()
        if tuple(members) in fusions:  # around another reduction, and faster apart
            continue
        apart = part(program, members)
        together = replace(apart, [_one(apart, users(apart), range(len(members)))])[0]
        signature = together.signature(0)  # with how the members read each other, and which of them others read
        if signature not in times:
            times[signature] = cost(separately(apart)), cost(together)
        fusion = Fusion(tuple(members), _describe(program, seed, members, len(apart.outputs)), *times[signature])
        fusions[fusion.operators] = fusion
        if fusion.chosen:
            group_of |= dict.fromkeys(members, members)
            replacements.append(_one(program, readers, members))
    return replace(program, replacements)[0], list(fusions.values())


def is_reduction(program: Program, v: int) -> bool:
    """Does the operator read contiguous rows, and compute each of its own from the same one?"""
    call = program.calls[v]
    if call.function not in (*NORMS, *SOFTMAXES, *SUMS) or not reads_tensors(program, v):
        return False
    x = program.value(call.args[0])
    if not isinstance(x, Tensor) or not x.is_contiguous() or x.dim() == 0 or x.numel() == 0:
        return False
    if call.function in NORMS:
        return len(call.args[1]) == 1
    if call.function in SOFTMAXES:
        return call.args[1] in (-1, x.dim() - 1)
    dims = call.args[1] if isinstance(call.args[1], (list, tuple)) else [call.args[1]]
    return list(dims) in ([-1], [x.dim() - 1]) and len(call.args) > 2 and call.args[2] is True  # keeps the dimension


@dataclass
class _Growing:
    """The group around one reduction. group_of: what earlier groups have taken."""

    program: Program
    readers: list[list[int]]
    group_of: dict[int, list[int]]
    seed: int

    def grown(self) -> list[int]:
        """The members in the order of capture: the reduction, and in turn each operator that `fits` among those that compute
        what a member reads, or that alone read a member.
        """
        members, refused = {self.seed}, set[int]()
        while True:
            before = {u for v in members for u in self.program.graph.predecessors[v]}
            after = {w for v in members if (w := only_user(self.readers[v])) is not None and not is_view(self.program, w)}
            near = (before | after) - members - refused
            if not near:
                return self._beginning_in_operators(members)
            v = max(near)
            if self.fits(v, members):
                members.add(v)
                refused.clear()  # a view fits once all its readers are members
            else:
                refused.add(v)

    def _beginning_in_operators(self, members: set[int]) -> list[int]:
        """Without the views of what is no member."""
        predecessors = self.program.graph.predecessors
        outer = {v for v in members if is_view(self.program, v) and not members & {*predecessors[v]}}
        return self._beginning_in_operators(members - outer) if outer else sorted(members)

    def fits(self, v: int, members: set[int]) -> bool:
        """Can v join? It has as many rows as the reduction, each as long or reduced to one element, brings not too many
        inputs along, and no operator between it and the members is left out: that could come neither before nor after.
        """
        program = self.program
        if is_view(program, v):
            if not set(self.readers[v]) <= members:
                return False
        elif not (is_elementwise(program, v) or is_reduction(program, v)):
            return False
        out = program.calls[v].produces
        elements, length = _row(program, self.seed)
        wanted = ((elements, length), (elements // length, 1))
        if not out.is_contiguous() or out.dim() == 0 or (out.numel(), out.shape[-1]) not in wanted or v in self.group_of:
            return False
        joined = members | {v}
        return len(inputs_of(program, sorted(joined))) <= MOST_INPUTS and not self._reads_itself(joined)

    def _reads_itself(self, members: set[int]) -> bool:
        """Does a way lead from the members through others, earlier groups as one operator each, back to them?"""
        successors = self.program.graph.successors
        ahead = [w for v in members for w in successors[v] if w not in members]
        seen = set(ahead)
        while ahead:
            v = ahead.pop()
            for w in (w for u in self.group_of.get(v, [v]) for w in successors[u]):
                if w in members:
                    return True
                if w not in seen:
                    seen.add(w)
                    ahead.append(w)
        return False


def _row(program: Program, reduction: int) -> tuple[int, int]:
    """Elements that the reduction reads in all, and in a row."""
    x = program.value(program.calls[reduction].args[0])
    return x.numel(), x.shape[-1]


def _describe(program: Program, reduction: int, members: Sequence[int], outputs: int) -> str:
    """A group for people: "add + layer_norm, 128 rows of 768, 2 outputs"."""
    names = " + ".join(program.graph.operators[v].name for v in members if not is_view(program, v))
    elements, length = _row(program, reduction)
    return f"{names}, {elements // length} rows of {length}" + (f", {outputs} outputs" if outputs > 1 else "")


def _one(program: Program, readers: list[list[int]], members: Sequence[int]) -> Replacement:
    """One operator for the members; its outputs are those that others read."""
    kept = [v for v in members if any(reader not in members for reader in readers[v])]
    return replacement(program, members, "rows", kept)
