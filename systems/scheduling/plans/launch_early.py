"""Kernels of our own that are launched while the kernel before them ends (programmatic dependent launch)."""

from collections.abc import Collection
from dataclasses import replace as changed

from systems.kernels.compiling import Job, compile_ahead
from systems.kernels.kernel import Kernel, launches_early
from systems.scheduling.graph.program import Program

from .schedule import Schedule


def early_operators(program: Program, schedule: Schedule) -> tuple[int, ...]:
    """The operators that can be launched early, in their launch order: kernels of our own that follow another in a stream.

    The gap between the two shrinks. Blocks that wait take up SMs meanwhile, which other streams may want.
    """
    if not launches_early(program.device):
        return ()
    early = []
    last_by_stream: dict[int, int] = {}
    for v in schedule.order:
        before = last_by_stream.get(schedule.streams[v])
        if before is not None and all(isinstance(program.calls[u].function, Kernel) for u in (before, v)):
            early.append(v)
        last_by_stream[schedule.streams[v]] = v
    return tuple(early)


def launch_early(program: Program, operators: Collection[int]) -> Program:
    """The program with kernels that are launched early; no operator comes, goes or moves.

    Invariant: a block of such a kernel waits for the kernel before it, which has waited likewise, before it writes, or reads
    what an operator writes. So that work begins after all that stand before it in its stream have ended.

    Raises:
        ValueError: an operator is no kernel of this project, or the device launches none early.
    """
    if not operators:
        return program
    if not launches_early(program.device):
        raise ValueError(f"{program.device} launches no kernel early")
    calls = list(program.calls)
    for v in operators:
        kernel = calls[v].function
        if not isinstance(kernel, Kernel):
            raise ValueError(f"operator {program.graph.label(v)} is launched early, and is no kernel of this project")
        calls[v] = changed(calls[v], function=changed(kernel, is_early=True))
    if program.device.type == "cuda":
        made = [calls[v] for v in operators if isinstance(kernel := calls[v].function, Kernel) and not kernel.is_compiled]
        compile_ahead(Job.of(call.function, [program.value(a) for a in call.args]) for call in made)  # type: ignore[arg-type]
    return Program(program.graph, calls, program.outputs, program.output_spec, program.examples, program.derived)
