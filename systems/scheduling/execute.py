"""Which executor runs a schedule: the one for the device that the program was captured on."""

from systems.base import Prepared

from .program import Program
from .schedule import Schedule


def execute(program: Program, schedule: Schedule) -> Prepared:
    """Make `schedule` callable. Raises InvalidSchedule where it may give a wrong answer."""
    if program.examples[0].device.type == "cuda":
        from .cuda_executor import CudaExecutor

        return CudaExecutor(program, schedule)
    from .cpu_executor import CpuExecutor

    return CpuExecutor(program, schedule)
