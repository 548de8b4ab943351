"""Stages that a search has found, kept in the cache: a later preparation does not search again."""

from dataclasses import asdict, replace
from hashlib import sha256
from typing import Any

from systems.base import BadOption
from systems.cache import code_of
from systems.profiling.measurements import Measurements
from systems.profiling.timing import Timer
from systems.scheduling.decision import DecisionRow
from systems.scheduling.graph.program import Program
from systems.scheduling.graph.structure import digest, structure
from systems.scheduling.plans.merge import merge
from systems.scheduling.plans.schedule import Search
from systems.scheduling.plans.stages import Stage
from systems.scheduling.simulate import alone, events, gpu, kernels, simulator, stored

from . import blocks, endings, merges, planning, search, stage_simulator, stage_timer, units, windows

KIND = "ios"
CODE = (blocks, endings, merges, planning, search, stage_simulator, stage_timer, units, windows)
SIMULATOR = (alone, events, gpu, kernels, simulator, stored)


class StoredStages:
    """The stages of one program under one set of options.

    NOTE: the name of the entry holds everything that a search depends on but its measured costs: what the operators do and
    what each one reads, the options, the code of the search. Of simulated costs it holds what the profile says, wherever
    that lies, and the arithmetic. The file of the entry holds the conditions of its device.
    """

    def __init__(self, program: Program, options: planning.Options):
        self.cache = Measurements(KIND, program.device)
        used = (Stage.__module__, merge.__module__, Timer.__module__, DecisionRow.__module__)
        code = code_of(*(module.__name__ for module in CODE), *used)
        self.name = digest([*structure(program), asdict(replace(options, profile="")), code, *_simulated(options)])

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


def _simulated(options: planning.Options) -> list[str]:
    """What simulated costs depend on beside the options: the simulator's code, the GPU's file, profile and arithmetic."""
    if options.costs == "measured":
        return []
    try:
        profiles = [sha256(file.read_bytes()).hexdigest() for file in stored.files_of(options.profile)]
    except OSError as error:
        raise BadOption(f"system.profile={options.profile} cannot be read: {error.strerror or error}") from error
    arithmetic = str(stored.arithmetic())
    return [code_of(*(module.__name__ for module in SIMULATOR)), str(gpu.load(options.gpu)), arithmetic, *profiles]
