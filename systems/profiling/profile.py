"""What each operator of a program launches, how long that takes alone, and how many bytes it moves, as data."""

from dataclasses import asdict, dataclass, field
from math import ceil, prod
from typing import TypeVar

from systems.cache import JSON

from .trace import Dim3

WARP = 32  # threads
# An SM gives registers to a warp in units of so many, and holds a multiple of so many warps where registers limit them. A
# block gets shared memory in units of so many bytes.
REGISTER_UNIT, WARP_UNIT, SHARED_MEMORY_UNIT = 256, 4, 128

T = TypeVar("T")


@dataclass(frozen=True)
class Kernel:
    """One kernel of an operator.

    Args:
        milliseconds: That it takes with the device for itself, in the sequence of its program's operators.
        grid: Blocks in each dimension.
        block: Threads of a block in each dimension.
        registers: Of a thread.
        shared_memory: Bytes of a block, static and dynamic together: the trace tells their sum only.
        achieved_occupancy: 0 to 1, as the profiler estimates it from the blocks an SM gets; None where it does not.
        warm_ms: That it takes right after itself, with what it reads in L2 where that holds it; None where nobody looked.
        cold_ms: That it takes with other data in L2.
    """

    name: str
    milliseconds: float
    grid: Dim3
    block: Dim3
    registers: int
    shared_memory: int
    achieved_occupancy: float | None = None
    warm_ms: float | None = None
    cold_ms: float | None = None

    @property
    def num_blocks(self) -> int:
        return prod(self.grid)

    @property
    def num_threads(self) -> int:
        """Of a block."""
        return prod(self.block)


@dataclass(frozen=True)
class OperatorProfile:
    """One operator alone.

    Bytes are the operator's and not split over its kernels: nothing says which kernel reads which tensor. They are computed
    from the tensors, each moved once, not counted by hardware; what a kernel reads twice, or finds in a cache, differs.

    Args:
        milliseconds: Of its kernels and copies, added up; on a CPU, of its call.
        kernels: In the order of launching; none on a CPU.
        bytes_read: Of the distinct tensors among its arguments, weights included; 0 for a view.
        bytes_written: Of the tensors that it returns; 0 for a view.
    """

    milliseconds: float
    kernels: tuple[Kernel, ...] = ()
    bytes_read: int = 0
    bytes_written: int = 0


@dataclass(frozen=True)
class Capacity:
    """What one streaming multiprocessor (SM) shares among the blocks on it.

    Args:
        threads: That are resident at most.
        registers: Of 32 bits.
        shared_memory: Bytes.
        blocks: That are resident at most.
        reserved_shared_memory: Bytes that CUDA takes for itself from each block's shared memory.
        num_multiprocessors: SMs of the device.
    """

    threads: int
    registers: int
    shared_memory: int
    blocks: int
    reserved_shared_memory: int
    num_multiprocessors: int

    def resident_blocks(self, kernel: Kernel) -> int:
        """Blocks of this kernel that one SM holds at once: the least that threads, registers, shared memory and slots allow.

        CUDA C++ Best Practices Guide, "Calculating Occupancy"; the units are those of NVIDIA's occupancy calculator for
        compute capability 7.0 and later.
        """
        warps = max(1, ceil(kernel.num_threads / WARP))
        limits = [self.blocks, self.threads // WARP // warps]
        if kernel.registers:
            registers_per_warp = _rounded_up(kernel.registers * WARP, REGISTER_UNIT)
            limits.append(self.registers // registers_per_warp // WARP_UNIT * WARP_UNIT // warps)
        if shared_memory := kernel.shared_memory + self.reserved_shared_memory:
            limits.append(self.shared_memory // _rounded_up(shared_memory, SHARED_MEMORY_UNIT))
        return min(limits)

    def theoretical_occupancy(self, kernel: Kernel) -> float:
        """Resident warps of a full SM over the warps that it can hold, 0 to 1; the grid may be too small to fill one."""
        warps = max(1, ceil(kernel.num_threads / WARP))
        return self.resident_blocks(kernel) * warps / (self.threads // WARP)


@dataclass(frozen=True)
class Profile:
    """Every operator of a program alone, on one device.

    Args:
        device: Its name.
        signatures: Of the operators, in the order of capture: `Program.signature`.
        operators: In the same order.
        capacity: Of an SM; None on a CPU.
        is_fresh: Something was measured now, and not found in the cache.
    """

    device: str
    signatures: tuple[str, ...]
    operators: tuple[OperatorProfile, ...]
    capacity: Capacity | None
    is_fresh: bool = field(default=False, compare=False)

    @property
    def milliseconds(self) -> list[float]:
        """Of each operator."""
        return [o.milliseconds for o in self.operators]

    def occupancy(self) -> float | None:
        """The mean achieved occupancy over the kernels' time, of those that have one."""
        timed = [
            (k.achieved_occupancy, k.milliseconds)
            for o in self.operators
            for k in o.kernels
            if k.achieved_occupancy is not None
        ]
        total = sum(milliseconds for _, milliseconds in timed)
        return sum(share * milliseconds for share, milliseconds in timed) / total if total else None

    def to_json(self) -> dict[str, JSON]:
        """One JSON document. Each kernel has its theoretical occupancy too, which `from_json` computes anew."""
        operators: list[JSON] = []
        for signature, operator in zip(self.signatures, self.operators, strict=True):
            kernels: list[JSON] = []
            for kernel in operator.kernels:
                occupancy = None if self.capacity is None else self.capacity.theoretical_occupancy(kernel)
                shape: dict[str, JSON] = {"grid": [*kernel.grid], "block": [*kernel.block]}
                kernels.append(asdict(kernel) | shape | {"theoretical_occupancy": occupancy})
            operators.append({"signature": signature, **asdict(operator), "kernels": kernels})
        capacity = None if self.capacity is None else asdict(self.capacity)
        return {"device": self.device, "capacity": capacity, "operators": operators}

    @classmethod
    def from_json(cls, document: object) -> "Profile":
        """Read what `to_json` wrote.

        Raises:
            ValueError: It is no such document.
        """
        try:
            whole = mapping(document)
            capacity = whole["capacity"]
            entries = [mapping(entry) for entry in checked(whole["operators"], list)]
            return cls(
                device=checked(whole["device"], str),
                signatures=tuple(checked(entry["signature"], str) for entry in entries),
                operators=tuple(map(operator_of, entries)),
                capacity=None if capacity is None else Capacity(**_whole_numbers(capacity)),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no profile: {type(error).__name__}: {error}") from error


def operator_of(entry: object) -> OperatorProfile:
    """Read one operator of a profile's document.

    Raises:
        KeyError, TypeError, ValueError: It is no such entry.
    """
    whole = mapping(entry)
    return OperatorProfile(
        milliseconds=number(whole["milliseconds"]),
        kernels=tuple(kernel_of(kernel) for kernel in checked(whole["kernels"], list)),
        bytes_read=checked(whole["bytes_read"], int),
        bytes_written=checked(whole["bytes_written"], int),
    )


def kernel_of(entry: object) -> Kernel:
    """Read one kernel of a profile's document; raises as `operator_of`."""
    whole = mapping(entry)
    occupancy, warm_ms, cold_ms = (
        None if value is None else number(value)
        for value in (whole["achieved_occupancy"], whole.get("warm_ms"), whole.get("cold_ms"))
    )
    return Kernel(
        name=checked(whole["name"], str),
        milliseconds=number(whole["milliseconds"]),
        grid=_dim3(whole["grid"]),
        block=_dim3(whole["block"]),
        registers=checked(whole["registers"], int),
        shared_memory=checked(whole["shared_memory"], int),
        achieved_occupancy=occupancy,
        warm_ms=warm_ms,
        cold_ms=cold_ms,
    )


def checked(value: object, kind: type[T]) -> T:
    """`value`, which has to be of this kind; raises TypeError."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{value!r:.80} is no {kind.__name__}")
    return value


def mapping(value: object) -> dict[str, object]:
    return checked(value, dict)


def number(value: object) -> float:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else checked(value, float)


def _dim3(value: object) -> Dim3:
    x, y, z = (checked(size, int) for size in checked(value, list))
    return x, y, z


def _whole_numbers(value: object) -> dict[str, int]:
    return {name: checked(size, int) for name, size in mapping(value).items()}


def _rounded_up(amount: int, unit: int) -> int:
    return -(-amount // unit) * unit
