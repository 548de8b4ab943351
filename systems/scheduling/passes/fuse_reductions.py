"""Fuses normalisations and softmaxes with the elementwise operators around them, where one kernel is faster."""

from collections.abc import Sequence
from dataclasses import dataclass

from systems.scheduling.decision import Decision
from systems.scheduling.graph.fused_kernel import MAX_INPUTS, fuse, inputs_of
from systems.scheduling.graph.part import part
from systems.scheduling.graph.patterns import is_elementwise, is_reshape, only_user, users
from systems.scheduling.graph.program import Program
from systems.scheduling.graph.rewrite import Replacement, replace

from .context import Context, Rewritten
from .patterns import is_reduction, name_operators


def fuse_reductions(program: Program, context: Context) -> Rewritten:
    """Fuse each reduction of rows with the elementwise operators before and after it, where one kernel for all is faster.

    A row lies along the last dimension; layer norms, softmaxes, and means and sums of a row are reductions.

    Invariants:
        - Every member computes rows of the reduction's length, or one element a row: a kernel needs no row but its own.
        - No path leads from a group through other operators back into it: the graph stays acyclic.
        - No operator is in two groups.

    A member that others read too, as the sum that a residual connection passes on, is one more output of the kernel. Its
    readers then wait for everything that the kernel reads, so each distinct group is measured both ways, as a whole.
    """
    readers = users(program)
    group_of: dict[int, list[int]] = {}
    times_by_signature: dict[str, dict[str, float]] = {}
    replacements: list[Replacement] = []
    decision_by_members = dict[tuple[int, ...], Decision]()
    for seed in range(len(program.graph)):
        if seed in group_of or not is_reduction(program, seed):
            continue
        members = _Growth(program, readers, group_of, seed).members()
        if tuple(members) in decision_by_members:  # the same group around another reduction, and faster separate
            continue
        separate = part(program, members)
        fused = replace(separate, [_kernel(separate, users(separate), range(len(members)))])[0]
        signature = fused.signature(0)  # says also how the members read each other, and which of them others read
        if signature not in times_by_signature:
            separate_ms = context.cost(context.later(separate))
            times_by_signature[signature] = {"separate": separate_ms, "fused": context.cost(fused)}
        times = times_by_signature[signature]
        pattern = _pattern(program, seed, members, len(separate.outputs))
        decision = context.decide("fuse_reductions", pattern, tuple(members), signature, times)
        decision_by_members[decision.operators] = decision
        if decision.chosen == "fused":
            group_of |= dict.fromkeys(members, members)
            replacements.append(_kernel(program, readers, members))
    return replace(program, replacements)[0], list(decision_by_members.values())


@dataclass
class _Growth:
    """The group around one reduction, while it grows.

    Args:
        readers: for each operator those that read it.
        group_of: the members of the earlier groups, by each member.
        seed: the reduction.
    """

    program: Program
    readers: list[list[int]]
    group_of: dict[int, list[int]]
    seed: int

    def members(self) -> list[int]:
        """The group in the order of capture: the reduction, and in turn each neighbour that `fits`.

        A neighbour computes an argument of a member, or is the only reader of a member.
        """
        members, refused = {self.seed}, set[int]()
        while True:
            before = {u for v in members for u in self.program.graph.predecessors[v]}
            after = {w for v in members if (w := only_user(self.readers[v])) is not None and not is_reshape(self.program, w)}
            neighbours = (before | after) - members - refused
            if not neighbours:
                return self._without_leading_views(members)
            v = max(neighbours)
            if self.fits(v, members):
                members.add(v)
                refused.clear()  # a view fits once all its readers are members
            else:
                refused.add(v)

    def _without_leading_views(self, members: set[int]) -> list[int]:
        predecessors = self.program.graph.predecessors
        leading = {v for v in members if is_reshape(self.program, v) and not members & {*predecessors[v]}}
        return self._without_leading_views(members - leading) if leading else sorted(members)

    def fits(self, v: int, members: set[int]) -> bool:
        """Can v join the members?

        It has as many rows as the reduction, each as long or of one element. With it the group reads at most `MAX_INPUTS`
        tensors, and no operator outside lies between two members: that could run neither before the group nor after it.
        """
        program = self.program
        if is_reshape(program, v):
            if not set(self.readers[v]) <= members:
                return False
        elif not (is_elementwise(program, v) or is_reduction(program, v)):
            return False
        out = program.calls[v].produces
        num_elements, row_length = _row(program, self.seed)
        shapes = ((num_elements, row_length), (num_elements // row_length, 1))
        if not out.is_contiguous() or out.dim() == 0 or (out.numel(), out.shape[-1]) not in shapes or v in self.group_of:
            return False
        joined = members | {v}
        return len(inputs_of(program, sorted(joined))) <= MAX_INPUTS and not self._reads_itself(joined)

    def _reads_itself(self, members: set[int]) -> bool:
        """Does a path lead from the members through others, earlier groups as one operator each, back to them?"""
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
    """The elements that the reduction reads in all, and in a row."""
    x = program.value(program.calls[reduction].args[0])
    return x.numel(), x.shape[-1]


def _pattern(program: Program, reduction: int, members: Sequence[int], num_outputs: int) -> str:
    """A group in words: "add + layer_norm, 128 rows of 768, 2 outputs"."""
    names = name_operators(program, [v for v in members if not is_reshape(program, v)])
    num_elements, row_length = _row(program, reduction)
    outputs = f", {num_outputs} outputs" if num_outputs > 1 else ""
    return f"{names}, {num_elements // row_length} rows of {row_length}{outputs}"


def _kernel(program: Program, readers: list[list[int]], members: Sequence[int]) -> Replacement:
    """One operator for the members; its outputs are those that others read."""
    outputs = [v for v in members if any(reader not in members for reader in readers[v])]
    return fuse(program, members, "rows", outputs)
