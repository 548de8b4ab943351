"""Which passes a scheduler has run over the captured model, in which order, and what is kept of what they found."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from systems.base import Unsupported
from systems.profiling.timing import Timer
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program

from .fold_batch_norm import fold_batch_norm
from .fuse_convolution import Fusion, fuse_convolution
from .fuse_elementwise import fuse_elementwise
from .fuse_reductions import fuse_reductions
from .fused_kernel import FusedKernel
from .merge_linears import Merge, merge_linears
from .select_kernels import Choice, select_kernels
from .select_products import select_products


@dataclass(frozen=True)
class Rewriting:
    """The passes that are switched on, each by its name in conf/system/nimble.yaml (Nimble, Section 5 and Appendix B; it
    has no merge_linears and no fuse_reductions, and selects kernels for convolutions alone).

    They leave a program like any other, so that IOS and Opara schedule it too.
    """

    fold_batch_norm: bool = False
    merge_linears: bool = False
    select_kernels: bool = False
    select_layouts: bool = False
    fuse_convolution: bool = False
    fuse_reductions: bool = False
    fuse_elementwise: bool = False

    def captured(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Program, dict[str, Any]]:
        """The model as captured and as the passes leave it, and what they did. Raises Unsupported as `capture` does, and for
        a model without an operator.
        """
        program = capture(module, inputs)
        if not len(program.graph):
            raise Unsupported("the model has no operator, so there is nothing to schedule")
        timer = Timer(inputs[0].device)
        try:
            return self.apply(program, timer)
        finally:
            timer.close()

    def compile(self, program: Program) -> None:
        """Have fused kernels compiled now, and not in the threads of a CPU's streams."""
        if self.fuse_elementwise or self.fuse_reductions:
            program.run(program.examples)

    def apply(self, program: Program, timer: Timer) -> tuple[Program, dict[str, Any]]:
        """The program as the passes leave it, and what they did, as data for a schedule file.

        timer: asked by the passes that choose by measuring.
        """
        report: dict[str, Any] = {}
        if self.fold_batch_norm:
            before, program = len(program.graph), fold_batch_norm(program)
            report["fold_batch_norm"] = {"folded": before - len(program.graph)}
        if self.merge_linears:  # before those that look at strides, which it changes
            program, merges = merge_linears(program, timer, timer.at_once)
            report["merge_linears"] = _merges(merges)
        if self.select_kernels or self.select_layouts:
            program, choices = select_kernels(
                program, timer, implementations=self.select_kernels, layouts=self.select_layouts
            )
            if self.select_kernels:
                program, more = select_products(program, timer)
                choices += more
            report["select_kernels"] = [_choice(c) for c in choices]
        later: Callable[[Program], Program] = fuse_elementwise if self.fuse_elementwise else lambda part: part
        if self.fuse_convolution:
            program, fusions = fuse_convolution(program, timer, later)
            report["fuse_convolution"] = _fusions(fusions)
        if self.fuse_reductions:
            program, fusions = fuse_reductions(program, timer, later)
            report["fuse_reductions"] = _fusions(fusions)
        if self.fuse_elementwise:
            rows = sum(isinstance(c.function, FusedKernel) for c in program.calls)
            before, program = len(program.graph), fuse_elementwise(program)
            kernels = sum(isinstance(c.function, FusedKernel) for c in program.calls) - rows
            report["fuse_elementwise"] = {"operators": before - len(program.graph) + kernels, "kernels": kernels}
        return program, report


def _choice(choice: Choice) -> dict[str, Any]:
    return {
        "operator": choice.pattern,
        "count": len(choice.operators),
        "chosen": choice.chosen,
        "gain": round(choice.gain, 3),
        "milliseconds": {name: round(t, 5) for name, t in choice.milliseconds.items()},
    }


def _fusions(fusions: list[Fusion]) -> list[dict[str, Any]]:
    equal: dict[tuple[str, float, float], list[Fusion]] = {}
    for fusion in fusions:
        equal.setdefault((fusion.pattern, fusion.separate_ms, fusion.fused_ms), []).append(fusion)
    return [
        {
            "operators": pattern,
            "count": len(members),
            "chosen": "fused" if members[0].chosen else "separate",
            "milliseconds": {"separate": round(separate, 5), "fused": round(fused, 5)},
        }
        for (pattern, separate, fused), members in equal.items()
    ]


def _merges(merges: list[Merge]) -> list[dict[str, Any]]:
    equal: dict[tuple[str, float, float, float], list[Merge]] = {}
    for merge in merges:
        equal.setdefault((merge.pattern, merge.in_turn_ms, merge.at_once_ms, merge.merged_ms), []).append(merge)
    return [
        {
            "operators": pattern,
            "count": len(members),
            "chosen": "merged" if members[0].chosen else "separate",
            "milliseconds": {name: round(t, 5) for name, t in zip(("in_turn", "at_once", "merged"), times, strict=True)},
        }
        for (pattern, *times), members in equal.items()
    ]
