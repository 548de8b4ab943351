"""Weave: of all rewriting decisions and stream plans here, those under which the whole graph is the fastest."""

import json
from dataclasses import replace
from math import inf
from pathlib import Path

import torch
from torch import Tensor, nn

from conf import not_one_of
from conf.text import first_line
from systems.base import BadOption
from systems.cache import code_in, code_of
from systems.profiling.measurements import Measurements
from systems.profiling.timing import Timer
from systems.scheduling.decision import Decision
from systems.scheduling.execution.arena import Arena
from systems.scheduling.execution.scheduled import Scheduled
from systems.scheduling.graph.program import Program
from systems.scheduling.graph.structure import digest, structure, weights
from systems.scheduling.passes.layouts import Unsolvable
from systems.scheduling.passes.rewriting import Remembered, Rewriting
from systems.scheduling.plans import local_search
from systems.scheduling.plans import schedule as schedules
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.verify import verify
from systems.scheduling.scheduler import Scheduler, captured, proved
from systems.scheduling.simulate.gpu import find

from . import candidate, changes, forecast, search, stream_plans, trials
from .candidate import Choices
from .forecast import forecast_on
from .precision import Precision
from .recipe import Misfit, NotingTimer, Recipe, RecordedTimer, binaries_of, fingerprint, stored
from .search import Forecast, Search
from .state import State

KIND = "weave"
CAPTURES = 3  # of the best schedule, of which one stays
COSTS = ("measured", "simulated", "both")


class Weave(Scheduler):
    """A search, by the time of the whole graph, that begins with the passes' own decisions and Nimble's streams.

    What a search knows lies in the cache after every trial, so that a later one goes on there.

    Args:
        budget_s: seconds that the search may take in all. What passes measure counts, and is not cut short.
        plan: a file of `runner=schedule system=weave output=FILE`, which is executed in the place of a search.
        costs: of candidates, one of COSTS. By both, each is simulated first, and measured unless that says that it is slow.
            Simulated ones rest on a profile of the operators, each alone; passes measure operators by any costs.
        switches: those of `Rewriting`.

    Raises:
        BadOption: an option has another value, or the file is no plan of weave, or one of other switches.
    """

    name = "weave"

    def __init__(self, budget_s: float = 120.0, plan: str = "", costs: str = "measured", **switches: bool):
        super().__init__(**switches)
        if wrong := not_one_of("system.costs", costs, COSTS):
            raise BadOption(wrong)
        self.costs = costs
        if not 0 <= budget_s < inf:
            raise BadOption(f"system.budget_s is {budget_s}: it is a number of seconds, not negative")
        self.budget_s = budget_s
        self.file = Path(plan) if plan else None
        self.file_schedule: Schedule | None = None
        self.recipe: Recipe | None = None
        if self.file:
            self.file_schedule, self.recipe = _read(self.file)
            if others := sorted(set(self.recipe.switches) ^ set(self.rewriting.switches)):
                was = str(others[0] in self.recipe.switches).lower()
                raise BadOption(f"system.plan={self.file} was made with system.{others[0]}={was}: ask for the same")
        self.state = State()  # of the program that is prepared
        self.executed: Program | None = None  # the program of the last schedule, as it would be executed
        self.is_learning = False  # and nothing else, in a process of its own

    @property
    def learns(self) -> bool:
        return self.file is None

    def learn(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """As every scheduler's; here alone a search on a GPU may profile."""
        self.is_learning = True
        try:
            super().learn(module, inputs)
        finally:
            self.is_learning = False

    def schedule(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Schedule:
        """As every scheduler's; the plan holds what preparing from it would have to make again."""
        program = captured(module, inputs)
        with program.undone():
            rewritten, decisions = self._rewritten(program)
            schedule = self._explained(self.plan(rewritten), decisions)
            self.executed, _ = proved(rewritten, schedule)
        if self.recipe is None:
            return schedule
        # Once as the passes leave them, which preparing runs first, and once as they are launched.
        binaries = binaries_of(rewritten, self.executed)
        recipe = replace(self.recipe.of_module(program, module), binaries=binaries)
        return replace(schedule, recipe={**recipe.to_json()})

    def program_of(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Program:
        """As every scheduler's; a plan's captured program stands in for tracing the module, where it is that module's."""
        program = None if self.file is None else self._stored(module, inputs)
        return super().program_of(module, inputs) if program is None else program

    def _stored(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Program | None:
        assert self.recipe is not None
        try:
            program = self.recipe.program(module, inputs)
        except ValueError as error:
            raise BadOption(f"system.plan={self.file} does not fit: {first_line(error)}") from error
        if program is None:
            self.report("capturing the model: the plan does not hold this module as it is")
        return program

    def execute(self, program: Program, schedule: Schedule, arena: Arena | None = None) -> Scheduled:
        """As every scheduler's; of several captures on a GPU the fastest, where no plan or arena is given.

        Two captures of one schedule may differ, as long as they live.
        """
        if program.device.type != "cuda" or self.file is not None or arena is not None:
            return super().execute(program, schedule, arena)
        return trials.fastest_of(lambda: super(Weave, self).execute(program, schedule), CAPTURES, program)

    def plan(self, program: Program) -> Schedule:
        """Of the program that `_rewritten` made last."""
        if self.file_schedule is not None:
            if self.file_schedule.graph != program.graph:
                raise BadOption(f"system.plan={self.file} does not fit: the passes make other operators here")
            try:
                proved(program, self.file_schedule)
            except ValueError as error:
                raise BadOption(f"system.plan={self.file} does not fit: {first_line(error)}") from error
            return self.file_schedule
        schedule = self.state.chosen.schedule(program)
        simulated = len(self.state.simulated) if self.costs != "measured" else None
        spent = schedules.Search(seconds=self.state.seconds, measured=len(self.state.ratios), simulated=simulated)
        recipe = self.recipe.to_json() if self.recipe else None
        return replace(schedule, system=self.name, search=spent, recipe=None if recipe is None else {**recipe})

    def _rewritten(self, program: Program) -> tuple[Program, list[Decision]]:
        if self.file is not None and self.recipe is not None:
            return self._by_file(program, self.recipe)
        state = self._searched(program)
        timer = NotingTimer(program.device, self.report)
        rewritten, decisions = self._apply(program, timer, dict(state.chosen.choices))
        self.state = state
        switches = tuple(sorted(self.rewriting.switches))
        choices = dict(state.chosen.choices)
        self.recipe = Recipe(fingerprint(program), switches, choices, timer.times, weights=state.weights)
        gains = [
            Decision("weave", gain.change, (), {"before": gain.before_ms, "after": gain.after_ms}, "after")
            for gain in state.all_gains
        ]
        drops = [Decision("weave", f"{words}, which costs precision", (), {}, "dropped") for words in state.dropped]
        return rewritten, [*decisions, *drops, *gains]

    def _by_file(self, program: Program, recipe: Recipe) -> tuple[Program, list[Decision]]:
        try:
            recipe.check(program)
            rewriting = Rewriting(**dict.fromkeys(recipe.switches, True))
            rewritten, decisions = rewriting.apply(program, RecordedTimer(program.device, recipe.times), recipe.choices)
        except (Misfit, Unsolvable) as error:
            raise BadOption(f"system.plan={self.file} does not fit: {error}") from error
        made = stored(rewritten, recipe.binaries), decisions
        if recipe.weights != weights(program):
            self.report("comparing with the model in fp64: the plan was made with other weights")
            precision = Precision(program, lambda choices: made, self.report)
            precision.require(lambda: made[0])
            if (excess := precision.program_excess({})) > 1:
                raise BadOption(
                    f"system.plan={self.file} does not fit: with these weights its error is {excess:.1f} times what it may "
                    "be: search anew"
                )
        return made

    def _apply(
        self, program: Program, timer: Timer, choices: Choices, remembered: Remembered | None = None
    ) -> tuple[Program, list[Decision]]:
        try:
            return self.rewriting.apply(program, timer, choices, remembered)
        finally:
            timer.close()  # also when it is interrupted, so that nothing is measured twice
            self.num_measured += timer.taken

    def may_profile(self, device: torch.device) -> bool:
        """May a search profile for a simulator that knows the GPU? It slows each later launch of a graph in the process."""
        return self.is_learning and device.type == "cuda" and find(torch.cuda.get_device_name(device)) is not None

    def _searched(self, program: Program) -> State:
        """What the cache knows, after a search as long as the budget allows.

        Raises Unsupported where costs are simulated for a device that conf/gpu lacks.
        """
        forecast_ms = None if self.costs == "measured" else forecast_on(program.device)
        cache = Measurements(KIND, program.device)
        code = code_of(
            *(module.__name__ for module in (search, candidate, changes, trials, stream_plans, local_search, forecast))
        )
        choosing = code_in("systems.kernels", "systems.scheduling.passes")  # what there is to choose from
        name = digest([structure(program), sorted(self.rewriting.switches), code, choosing, self.costs])
        with cache.alone(name, self.report):
            return self._search(program, cache, name, forecast_ms)

    def _search(self, program: Program, cache: Measurements, name: str, forecast_ms: Forecast | None) -> State:
        """From where the cache is, under this name, as far as the budget allows."""
        state = None
        if name in cache:
            try:
                state = State.from_json(cache[name])
            except (KeyError, TypeError, ValueError):
                state = None  # it cannot be read, and is found anew

        remembered: Remembered = {}

        def rewrite(choices: Choices) -> tuple[Program, list[Decision]]:
            rewritten, decisions = self._apply(program, Timer(program.device, self.report), choices, remembered)
            self.rewriting.compile(rewritten)
            return rewritten, decisions

        def keep(state: State) -> None:
            cache.add({name: {**state.to_json()}})

        is_measuring, may_profile = self.costs != "simulated", self.may_profile(program.device)
        searching = Search(
            program, rewrite, self.budget_s, self.report, keep, state, forecast_ms, is_measuring, may_profile, self.clock
        )
        state = searching.run()
        self.num_measured += searching.num_tried
        return state


def _read(file: Path) -> tuple[Schedule, Recipe]:
    try:
        schedule = Schedule.from_json(json.loads(file.read_text(encoding="utf-8")))
        if schedule.recipe is None:
            raise ValueError(f"it is a schedule of {schedule.system} without a recipe")
        recipe = Recipe.from_json(schedule.recipe)
        verify(schedule.graph, schedule)
        return schedule, recipe
    except OSError as error:
        raise BadOption(f"system.plan={file} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        no_json = "no JSON: " if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else ""
        raise BadOption(f"system.plan={file} is no plan of weave: {no_json}{first_line(error)}") from error
