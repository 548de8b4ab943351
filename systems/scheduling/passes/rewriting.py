"""The rewriting passes in the order in which they run, and the switches that turn them on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from conf import nearest
from systems.base import BadOption
from systems.profiling.timing import Timer
from systems.scheduling.decision import Decision, kind_of
from systems.scheduling.graph.fused_kernel import FusedKernel
from systems.scheduling.graph.program import Program

from .context import Context, Rewritten
from .drop_copies import drop_copies
from .fold_batch_norm import fold_batch_norm
from .fold_constants import fold_constants
from .fold_scales import fold_scales
from .fuse_concatenations import fuse_concatenations
from .fuse_convolution import fuse_convolution
from .fuse_elementwise import fuse_elementwise
from .fuse_in_triton import fuse_in_triton
from .fuse_moves import fuse_moves
from .fuse_pools import fuse_pools
from .fuse_reductions import fuse_reductions
from .fuse_sums import fuse_sums
from .make_contiguous import make_contiguous
from .merge_convolutions import merge_convolutions
from .merge_equal import merge_equal
from .merge_linears import merge_linears
from .reorder_rows import reorder_rows
from .replace_bags import replace_bags
from .select_attention import select_attention
from .select_grouped import select_grouped
from .select_kernels import select_kernels
from .select_norms import select_norms
from .select_products import select_products
from .select_sorts import select_sorts
from .widen_convolutions import widen_convolutions


@dataclass(frozen=True)
class Pass:
    """A rewriting pass.

    Args:
        run: the pass itself.
        switches: names in conf/rewriting; the pass runs where at least one is on.
        measures: whether it decides by measuring.
    """

    run: Callable[[Program, Context], Rewritten]
    switches: tuple[str, ...]
    measures: bool = True

    @property
    def kind(self) -> str:
        """The kind of its decisions."""
        return self.run.__name__  # type: ignore[attr-defined, no-any-return]


# What passes have made of one program: by how many of them ran, and the choices that these knew.
Remembered = dict[tuple[int, frozenset[tuple[str, str]]], Rewritten]
CHAINS = 3  # of passes, that are remembered

# In the order in which they run. Nimble (Section 5) has of these fold_batch_norm, select_kernels without layouts, and
# fuse_elementwise: conf/system/nimble_paper.yaml.
PASSES = (
    Pass(replace_bags, ("replace_bags",), measures=False),  # before what makes constants of where bags begin
    Pass(fold_constants, ("fold_constants",), measures=False),
    Pass(merge_equal, ("merge_equal",), measures=False),
    Pass(fold_batch_norm, ("fold_batch_norm",), measures=False),
    Pass(fold_scales, ("fold_scales",), measures=False),  # before what changes how queries lie
    Pass(widen_convolutions, ("widen_convolutions",), measures=False),
    Pass(merge_linears, ("merge_linears",)),  # before all that look at strides, which it changes
    Pass(merge_convolutions, ("merge_convolutions",)),  # as that
    Pass(select_kernels, ("select_kernels", "select_layouts")),
    Pass(reorder_rows, ("reorder_rows",)),  # before all that measure with the strides that they find
    Pass(make_contiguous, ("make_contiguous",)),  # as that
    Pass(drop_copies, ("drop_copies",)),  # as that
    Pass(select_products, ("select_products",)),
    Pass(select_grouped, ("select_grouped",)),
    Pass(select_sorts, ("select_sorts",)),
    Pass(select_norms, ("select_norms",)),
    Pass(select_attention, ("select_attention",)),
    Pass(fuse_convolution, ("fuse_convolution",)),
    Pass(fuse_in_triton, ("fuse_in_triton",)),
    Pass(fuse_sums, ("fuse_sums",)),
    Pass(fuse_pools, ("fuse_pools",)),
    Pass(fuse_concatenations, ("fuse_concatenations",)),
    Pass(fuse_reductions, ("fuse_reductions",)),
    Pass(fuse_moves, ("fuse_moves",)),
    Pass(fuse_elementwise, ("fuse_elementwise",), measures=False),
)
SWITCHES = tuple(dict.fromkeys(switch for p in PASSES for switch in p.switches))
KINDS = tuple(p.kind for p in PASSES)  # of decisions


@dataclass(frozen=True, init=False)
class Rewriting:
    """The passes that are switched on. They leave a program like any other, so every scheduler takes it.

    Args:
        switches: each of `SWITCHES` by name; what is not named is off.

    Raises:
        BadOption: there is no such switch, or its value is neither true nor false.
    """

    switches: frozenset[str]

    def __init__(self, **switches: bool):
        for name, value in switches.items():
            if name not in SWITCHES:
                raise BadOption(f"system.{name} is no switch of a rewriting pass: {nearest(name, SWITCHES)}")
            if not isinstance(value, bool):
                raise BadOption(f"system.{name} is {value}, and must be true or false")
        object.__setattr__(self, "switches", frozenset(name for name, value in switches.items() if value))

    @property
    def passes(self) -> list[Pass]:
        """Those that run, in order."""
        return [p for p in PASSES if self.switches.intersection(p.switches)]

    @property
    def measures(self) -> bool:
        """Does one of the passes that run decide by measuring?"""
        return any(p.measures for p in self.passes)

    def apply(
        self,
        program: Program,
        timer: Timer,
        choices: Mapping[str, str] | None = None,
        remembered: Remembered | None = None,
    ) -> Rewritten:
        """The program as the passes leave it, and their decisions in the order in which they were taken.

        Args:
            choices: those of `Context`.
            remembered: of earlier calls with this program. A pass does not run where it and those before it have run under
                the same choices; the last `CHAINS` of passes stay.

        Invariant: the passes run one after the other, in the order of `PASSES`; the operators of a decision are those of the
        program that its pass was given.
        """
        decisions: list[Decision] = []
        known: set[str] = set()  # kinds of the passes so far
        for i, each in enumerate(self.passes):
            known.add(each.kind)
            key = i, frozenset(c for c in (choices or {}).items() if kind_of(c[0]) in known)
            rewritten = remembered.pop(key, None) if remembered is not None else None
            if rewritten is None:
                rewritten = each.run(program, self._context(timer, i, choices or {}))
            if remembered is not None:
                remembered[key] = rewritten
                while len(remembered) > CHAINS * len(self.passes):
                    del remembered[next(iter(remembered))]
            program, taken = rewritten
            decisions += taken
        return program, decisions

    def compile(self, program: Program) -> None:
        """Compile the fused kernels of `program` now, and not in the threads of a CPU's streams."""
        if any(isinstance(call.function, FusedKernel) for call in program.calls):
            with program.undone():
                program.run(program.examples)

    def _context(self, timer: Timer, i: int, choices: Mapping[str, str]) -> Context:
        """What the pass number i of those that run is given."""
        unmeasured = [p for p in self.passes[i + 1 :] if not p.measures]

        def later(program: Program) -> Program:
            for p in unmeasured:
                program, _ = p.run(program, context)
            return program

        context = Context(timer, timer.at_once, later, self.switches, choices, timer.knows)
        return context
