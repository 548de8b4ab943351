"""Stages that a search has found, kept in the cache: a later preparation does not search again."""

from dataclasses import asdict
from typing import Any

from systems.cache import code_of
from systems.profiling.measurements import Measurements
from systems.profiling.timing import Timer
from systems.scheduling.decision import DecisionRow
from systems.scheduling.graph.program import Program
from systems.scheduling.graph.structure import digest, structure
from systems.scheduling.plans.merge import merge
from systems.scheduling.plans.schedule import Search
from systems.scheduling.plans.stages import Stage

from . import blocks, endings, planning, search, stage_simulator, stage_timer, units, windows

KIND = "ios"
CODE = (blocks, endings, planning, search, stage_simulator, stage_timer, units, windows)


class StoredStages:
    """The stages of one program under one set of options.

    NOTE: the name of the entry holds everything that a search depends on but its measured costs: what the operators do and
    what each one reads, the options, and the code of the search. The file of the entry holds the conditions of its device.
    """

    def __init__(self, program: Program, options: planning.Options):
        self.cache = Measurements(KIND, program.device)
        used = (Stage.__module__, merge.__module__, Timer.__module__, DecisionRow.__module__)
        code = code_of(*(module.__name__ for module in CODE), *used)
        self.name = digest([*structure(program), asdict(options), code])

    def read(self) -> planning.StagePlan | None:
        """None where there is none."""
        if self.name not in self.cache:
            return None
        entry: Any = self.cache[self.name]
        stages = [Stage(tuple(map(tuple, groups)), is_merged) for groups, is_merged in entry["stages"]]
        decisions = tuple(map(DecisionRow.from_json, entry["decisions"]))
        return planning.StagePlan(stages, Search.from_json(entry["search"]), decisions)

    def write(self, plan: planning.StagePlan) -> None:
        entry: Any = {
            "stages": [[s.groups, s.is_merged] for s in plan.stages],
            "search": plan.search.to_json(),
            "decisions": [row.to_json() for row in plan.decisions],
        }
        self.cache.add({self.name: entry})
