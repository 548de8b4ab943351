"""Which executor runs a schedule: the one for the device that the program was captured on."""

from systems.scheduling.graph.program import Program
from systems.scheduling.plans.schedule import Schedule

from .arena import Arena
from .cpu_executor import CpuExecutor
from .scheduled import Scheduled


def execute(program: Program, schedule: Schedule, arena: Arena | None = None) -> Scheduled:
    """Make `schedule` callable.

    Args:
        arena: on a GPU, memory to share with other schedules whose calls never overlap with this one's.

    Raises:
        InvalidSchedule: it may give a wrong answer.
    """
    if program.device.type == "cuda":
        from .cuda_executor import CudaExecutor  # CUDA's bindings: PyTorch for a CPU comes without

        return CudaExecutor(program, schedule, arena)
    return CpuExecutor(program, schedule)
