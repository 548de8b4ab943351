"""How much of the device an operator asks for (Opara, Section 3.2)."""

from systems.profiling.profile import Capacity, Kernel, Profile

RESOURCES = ("shared_memory", "largest_share")


def demand(profile: Profile, resource: str) -> list[float]:
    """For each operator, what one block of its most demanding kernel asks for, in a measure that only compares operators.

    An operator that launches no kernel asks for nothing. On a CPU an operator's milliseconds stand in.

    Args:
        resource: `shared_memory`, in bytes, as the released prototype has it. `largest_share`: the largest of a block's
            shares in an SM's threads, registers and shared memory, the resources that Section 2.1 names.
    """
    capacity = profile.capacity
    if capacity is None:
        return profile.milliseconds
    return [max((_of_block(k, resource, capacity) for k in o.kernels), default=0.0) for o in profile.operators]


def _of_block(kernel: Kernel, resource: str, capacity: Capacity) -> float:
    if resource == "shared_memory":
        return float(kernel.shared_memory)
    return max(
        kernel.num_threads / capacity.threads,
        kernel.num_threads * kernel.registers / capacity.registers,
        kernel.shared_memory / capacity.shared_memory,
    )
