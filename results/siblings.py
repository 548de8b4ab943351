"""Records that were measured in turn, in the same interleaved rounds, by system."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .cell import Choice, Group, named
from .comparison import Speedup, speedup
from .record import Record


@dataclass(frozen=True)
class Siblings:
    """The records of one group by the keys of their systems."""

    records: Mapping[Choice, Record]

    @property
    def any(self) -> Record:
        return next(iter(self.records.values()))

    @property
    def group(self) -> Group:
        """What their cells share."""
        return self.any.cell.group

    def __contains__(self, system: Choice) -> bool:
        return system in self.records

    def __getitem__(self, system: Choice) -> Record:
        return self.records[system]

    def get(self, system: Choice) -> Record | None:
        return self.records.get(system)

    def over(self, system: Choice, baseline: Choice) -> Speedup | None:
        """How many times faster one system is than another, in the rounds that they shared."""
        if system not in self or baseline not in self:
            return None
        return speedup(self[system], self[baseline])

    def fastest(self, systems: Iterable[Choice]) -> Choice | None:
        """The system that took least in the rounds; None where none took part in any."""
        times = {s: c.median_ms for s in systems if (r := self.get(s)) is not None and (c := r.comparison) is not None}
        return min(times, key=lambda system: times[system], default=None)


def siblings(records: Iterable[Record]) -> list[Siblings]:
    """The groups of records, by batch, and then by how much Nimble gains over a CUDA Graph, the largest first."""
    groups: dict[Group, dict[Choice, Record]] = {}
    for record in records:
        groups.setdefault(record.cell.group, {})[record.cell.system.key] = record
    nimble, cuda_graph = named("system", "nimble"), named("system", "cuda_graph")

    def order(group: Siblings) -> tuple[int, float, str]:
        ratio = group.over(nimble, cuda_graph)
        return group.group.conditions.batch, -(ratio.ratio if ratio else 0.0), group.group.model.name

    return sorted(map(Siblings, groups.values()), key=order)
