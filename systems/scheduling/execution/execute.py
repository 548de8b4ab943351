"""Which executor runs a schedule: the one for the device that the program was captured on."""

from systems.base import Prepared
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.schedule import Schedule

from .arena import Arena


def execute(program: Program, schedule: Schedule, arena: Arena | None = None) -> Prepared:
    """Make `schedule` callable. Raises InvalidSchedule where it may give a wrong answer.

    arena: on a GPU, memory to share with other schedules, if their calls and this one's never overlap.
    """
    if program.device.type == "cuda":
        from .cuda_executor import CudaExecutor

        return CudaExecutor(program, schedule, arena)
    from .cpu_executor import CpuExecutor

    return CpuExecutor(program, schedule)
