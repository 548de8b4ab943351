"""The warps that the whole GPU has in flight over the time of one call, as a step function."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

DIGITS = 9  # in a record: what they round away is too little for its area to show it


@dataclass(frozen=True)
class Course:
    """warps[i] from moments[i] to moments[i + 1], none before the first moment and after the last.

    Args:
        moments: [n + 1] milliseconds, ascending; empty where nothing ran.
        warps: [n].
    """

    moments: tuple[float, ...] = ()
    warps: tuple[float, ...] = ()

    @classmethod
    def of(cls, spans: Iterable[tuple[float, float, float]], most: float) -> "Course":
        """The sum over kernels, at most `most`.

        Args:
            spans: (begin, end, warps) of each kernel, in milliseconds.
            most: the warps that the GPU holds.
        """
        # Invariant: between two instants the set of running kernels does not change.
        warps_of: list[float] = []
        begins: dict[float, list[int]] = defaultdict(list)
        ends: dict[float, list[int]] = defaultdict(list)
        for begin, end, warps in spans:
            if begin < end:
                begins[begin].append(len(warps_of))
                ends[end].append(len(warps_of))
                warps_of.append(warps)
        instants = sorted({*begins, *ends})
        running: dict[int, float] = {}  # added up anew at each instant: sums and differences would not come back to 0
        moments: list[float] = []
        levels: list[float] = []
        for instant in instants[:-1]:
            for kernel in ends[instant]:
                del running[kernel]
            running |= {kernel: warps_of[kernel] for kernel in begins[instant]}
            level = min(most, sum(running.values()))
            if not levels or level != levels[-1]:
                moments.append(instant)
                levels.append(level)
        return cls((*moments, *instants[-1:]), tuple(levels))

    @property
    def duration(self) -> float:
        """Milliseconds from the first moment to the last."""
        return self.moments[-1] - self.moments[0] if self.warps else 0.0

    @property
    def area(self) -> float:
        """Warps times milliseconds."""
        return sum(level * (end - begin) for level, (begin, end) in zip(self.warps, pairwise(self.moments), strict=True))

    @property
    def mean(self) -> float:
        """From the first moment to the last; 0 where nothing ran."""
        return self.area / self.duration if self.warps else 0.0

    def resampled(self, most: int) -> "Course":
        """In at most `most` steps: where there are more, the means over that many equal windows, which keep the area."""
        if len(self.warps) <= most:
            return self
        import numpy as np  # a tenth of a second, which reading a request has no use for

        edges = np.linspace(self.moments[0], self.moments[-1], most + 1)
        until = np.concatenate(([0.0], np.cumsum(np.diff(self.moments) * self.warps)))  # the area before each moment
        means = np.diff(np.interp(edges, self.moments, until)) / np.diff(edges)
        return Course(tuple(edges.tolist()), tuple(means.tolist()))

    def to_json(self) -> dict[str, list[float]]:
        return {"ms": [round(m, DIGITS) for m in self.moments], "warps": [round(w, DIGITS) for w in self.warps]}

    @classmethod
    def from_json(cls, document: Mapping[str, Sequence[float]]) -> "Course":
        """Raises KeyError, TypeError or ValueError where it is none."""
        moments, warps = (tuple(document[key]) for key in ("ms", "warps"))
        if not all(type(number) in (int, float) for number in (*moments, *warps)):
            raise TypeError("a course holds lists of numbers")
        if len(moments) != (len(warps) + 1 if warps else 0):
            raise ValueError(f"{len(moments)} moments do not bound {len(warps)} steps")
        return cls(moments, warps)
