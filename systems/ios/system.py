"""IOS: stages found by a dynamic programme over measured latencies (Ding et al., MLSys 2021)."""

import json
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import conf
from conf import not_one_of
from conf.text import first_line
from systems.base import BadOption
from systems.profiling.timing import Timer
from systems.scheduling.execution.arena import Arena
from systems.scheduling.execution.scheduled import Scheduled
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.lower import lower
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.stages import to_schedule
from systems.scheduling.plans.verify import verify
from systems.scheduling.scheduler import Scheduler

from .planning import KIND, Options, StagePlan, find_stages
from .stored import StoredStages
from .units import KINDS

STRATEGIES = ("both", "parallel", "merge", "sequential", "greedy")
COSTS = ("measured", "simulated", "both")
GROUPS = ("connected", "one_head")


class Ios(Scheduler):
    """IOS's engine.

    Args:
        strategy: one of STRATEGIES (Section 6.1).
        r: most units of a group of a stage (Section 4.3); 0 for no limit.
        s: most groups of a stage; 0 for no limit.
        units: what is scheduled as one, one of KINDS.
        max_part_size: units above which a block is split, and then searched in windows of as many across its parts.
        capture: into one CUDA Graph; False launches every operator in every call, as the original does.
        exhaustive: measure every stage, as the original does. False leaves out stages that cannot be in the best schedule,
            since a part of them takes too long already.
        barriers: between stages. Without them, which is not in the paper, an operator waits for its own dependencies alone.
        schedule: a schedule file, which is executed in the place of a search.
        costs: of stages, one of COSTS; simulated ones, which the paper lacks, need no GPU. By both, stages are simulated
            first, and only those are measured that may win.
        profile: a file of runner=profile for simulated costs; "" for those that are committed.
        gpu: of conf/gpu, for simulated costs.
        groups: what a group of a stage may be, one of GROUPS. `connected`: all units that edges join (Section 3).
            `one_head`: one unit with all that depends on it, as in the released code.
        switches: those of `Rewriting`, which the paper lacks.

    Raises:
        BadOption: an option has another value, or the file is no schedule of IOS.
    """

    name = KIND

    def __init__(
        self,
        strategy: str = "both",
        r: int = 3,
        s: int = 8,
        units: str = "auto",
        max_part_size: int = 24,
        capture: bool = True,
        exhaustive: bool = False,
        barriers: bool = True,
        schedule: str = "",
        costs: str = "measured",
        profile: str = "",
        gpu: str = "h200",
        groups: str = "connected",
        **switches: bool,
    ):
        super().__init__(**switches)
        for option, value, valid in (
            ("strategy", strategy, STRATEGIES),
            ("units", units, KINDS),
            ("costs", costs, COSTS),
            ("groups", groups, GROUPS),
            ("gpu", gpu, conf.choices("gpu")),
        ):
            if wrong := not_one_of(f"system.{option}", value, valid):
                raise BadOption(wrong)
        for option, number, least in (("r", r, 0), ("s", s, 0), ("max_part_size", max_part_size, 2)):
            if number < least:
                raise BadOption(f"system.{option} is {number}, and must be at least {least}")
        if not barriers and schedule:
            raise BadOption(f"system.barriers is false, but system.schedule={schedule} is executed as it stands")
        if profile and costs == "measured":
            raise BadOption(f"system.profile={profile} is for simulated costs: system.costs=simulated")
        if exhaustive and costs == "both":
            raise BadOption("system.exhaustive measures every stage, of which system.costs=both leaves most out")
        if not barriers and strategy == "sequential":
            raise BadOption("system.barriers is false, but a sequential schedule has nothing else")
        self.options = Options(strategy, r, s, units, max_part_size, exhaustive, costs, profile, gpu, groups)
        self.capture, self.barriers = capture, barriers
        self.file = Path(schedule) if schedule else None
        self.file_schedule = _read(self.file) if self.file else None

    @property
    def learns(self) -> bool:
        return super().learns or (self.options.searches and self.file_schedule is None)

    def plan(self, program: Program) -> Schedule:
        """By the file, by the stages that the cache holds, or by a search. Raises BadOption for another model's file."""
        if self.file_schedule is not None:
            try:
                verify(program.graph, self.file_schedule)
                lowered, executed = lower(program, self.file_schedule)
                verify(lowered.graph, executed)
            except ValueError as error:  # InvalidSchedule among them
                raise BadOption(f"system.schedule={self.file} does not fit this model: {error}") from error
            return self.file_schedule
        stored = StoredStages(program, self.options) if self.options.searches else None
        stage_plan = (stored and stored.read()) or self._search(program, stored)
        schedule = to_schedule(program.graph, self.name, stage_plan.stages, stage_plan.search, self.barriers)
        return replace(schedule, decisions=stage_plan.decisions)

    def execute(self, program: Program, schedule: Schedule, arena: Arena | None = None) -> Scheduled:
        if self.capture or program.device.type != "cuda":
            return super().execute(program, schedule, arena)
        from systems.scheduling.execution.stream_executor import StreamExecutor  # CUDA's bindings

        return StreamExecutor(*lower(program, schedule))

    def _search(self, program: Program, stored: StoredStages | None) -> StagePlan:
        begin = perf_counter()
        timer = Timer(program.device)
        try:
            stage_plan = find_stages(program, self.options, timer, self.report)
        finally:
            timer.close()  # also when it is interrupted, so that nothing is measured twice
        self.num_measured += timer.taken
        search = replace(stage_plan.search, seconds=perf_counter() - begin, measured=timer.taken)
        stage_plan = replace(stage_plan, search=search)
        if stored:
            stored.write(stage_plan)
        return stage_plan


def _read(file: Path) -> Schedule:
    try:
        schedule = Schedule.from_json(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise BadOption(f"system.schedule={file} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        no_json = "no JSON: " if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else ""
        raise BadOption(f"system.schedule={file}: {no_json}{first_line(error)}") from error
    if schedule.system != KIND:  # its record would be another scheduler's under this one's name
        raise BadOption(f"system.schedule={file} is a schedule of {schedule.system}, and {KIND} executes its own alone")
    return schedule
