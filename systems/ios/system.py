"""IOS: stages found by a dynamic programme over measured latencies (Ding et al., MLSys 2021)."""

import json
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from systems.base import BadOption, Prepared, System
from systems.profiling.timing import Timer
from systems.scheduling.execution.execute import execute
from systems.scheduling.graph.operator_graph import Operator, OperatorGraph
from systems.scheduling.graph.program import Input, Output, Program
from systems.scheduling.passes.rewriting import Rewriting
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.verify import InvalidSchedule, verify

from .blocks import find_blocks, unit_graph
from .costs import StageTimer, Unit
from .endings import MOST_TRANSITIONS, TooManyTransitions
from .merge import mergeable
from .search import find_schedule
from .stages import Stage, greedy, lower, to_schedule
from .units import KINDS, find_units
from .windows import WINDOW_TRANSITIONS, Staged, improve

STRATEGIES = ("both", "parallel", "merge", "sequential", "greedy")


class Ios(System):
    """strategy: one of STRATEGIES (Section 6.1). r, s: at most s groups of at most r units a stage, 0 for no such limit
    (Section 4.3). units: one of KINDS. max_part_size: units above which a block is split, and then searched across its parts
    in windows of as many. capture: into one CUDA Graph, or launched by every call as the original does. exhaustive: measure
    every stage, as the original does, also those that cannot be in the best schedule since a part of them takes too long
    already. barriers: between stages; without them, which is not in the paper, an operator waits for what it depends on
    alone. schedule: a file to execute, searched elsewhere, in the place of a search. rewriting: the switches of
    `Rewriting`, which are not in the paper. Raises BadOption for any other value, or for a file that is no schedule.
    """

    name = "ios"

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
        **rewriting: bool,
    ):
        for option, value, valid in (("strategy", strategy, STRATEGIES), ("units", units, KINDS)):
            if value not in valid:
                raise BadOption(f"system.{option} is {value}, not one of {', '.join(valid)}")
        for option, number, least in (("r", r, 0), ("s", s, 0), ("max_part_size", max_part_size, 2)):
            if number < least:
                raise BadOption(f"system.{option} is {number}, and must be at least {least}")
        if not barriers and (strategy == "sequential" or schedule):
            what = (
                f"system.schedule={schedule} is executed as it stands"
                if schedule
                else "a sequential schedule has nothing else"
            )
            raise BadOption(f"system.barriers is false, but {what}")
        self.strategy, self.r, self.s, self.units = strategy, r, s, units
        self.max_part_size, self.capture, self.exhaustive = max_part_size, capture, exhaustive
        self.barriers = barriers
        self.rewriting = Rewriting(**rewriting)
        self.file = Path(schedule) if schedule else None
        self.given = _read(self.file) if self.file else None

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
        program, schedule = self._planned(module, inputs)
        lowered, executed = lower(program, schedule)
        if not self.capture and inputs[0].is_cuda:
            from systems.scheduling.execution.stream_executor import StreamExecutor

            return StreamExecutor(lowered, executed)
        return execute(lowered, executed)

    def schedule(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Schedule:
        return self._planned(module, inputs)[1]

    def _planned(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Program, Schedule]:
        program, report = self.rewriting.captured(module, inputs)
        self.rewriting.compile(program)
        return program, replace(self.plan(program), rewriting=report)

    def plan(self, program: Program) -> Schedule:
        """The schedule of a captured model, by the file or by a search. Raises BadOption where the file is of another."""
        if self.given is not None:
            try:
                verify(program.graph, self.given)
                lower(program, self.given)
            except (InvalidSchedule, ValueError) as error:
                raise BadOption(f"system.schedule={self.file} does not fit this model: {error}") from error
            return self.given
        begin = perf_counter()
        units = find_units(program, self.units)
        predecessors = unit_graph(program.graph, units)
        timer = Timer(program.device)
        costs = StageTimer(program, timer, lambda count: self.report(f"scheduling: {count} stages measured"))
        try:
            stages, search = self._stages(units, predecessors, costs)
        finally:
            timer.close()  # also when it is interrupted: what was measured is kept
        found = {"seconds": perf_counter() - begin, **search, "measured": timer.taken}
        return to_schedule(program.graph, stages, found, self.barriers)

    def _stages(
        self, units: Sequence[Unit], predecessors: Sequence[Sequence[int]], costs: StageTimer
    ) -> tuple[list[Stage], dict[str, Any]]:
        """The stages of the model, and what the schedule's `search` keeps of finding them: totals, and
        in `parts` of each block its units and width and, where it was searched, its transitions and the milliseconds of its
        stages and of its units one after the other.
        """
        found = find_blocks(predecessors, self.max_part_size)
        blocks = [sorted(sum(parts, ())) for parts in found.blocks]
        known = {"units": len(units), "blocks": len(blocks)}
        known |= {"largest_block": max(map(len, blocks)), "splits": found.splits}
        if self.strategy in ("sequential", "greedy"):
            levels = greedy(predecessors) if self.strategy == "greedy" else [(i,) for i in range(len(units))]
            return [Stage(tuple(units[i] for i in level)) for level in levels], {
                "states": 0,
                "transitions": 0,
                **known,
                "parts": [_shape(predecessors, block) for block in blocks],
            }
        self.solved: dict[Any, Any] = {}
        stages: list[Stage] = []
        parts: list[dict[str, Any]] = []
        states = transitions = 0
        for number, (block, pieces) in enumerate(zip(blocks, found.blocks, strict=True), 1):
            self.report(f"scheduling: block {number} of {len(blocks)}")
            staged, counts = self._block(units, predecessors, pieces, costs)
            for groups, merged in staged:
                operators = [tuple(sorted(v for i in group for v in units[i])) for group in groups]
                stages.append(Stage((tuple(sorted(sum(operators, ()))),) if merged else tuple(operators), merged))
            states += counts[0]
            transitions += counts[1]
            alone = sum(costs.concurrent([[units[v]]], [costs.number([units[v]])]) for v in block)
            times = {"milliseconds": self._total(staged, units, costs), "sequential_milliseconds": alone}
            parts.append(_shape(predecessors, block) | {"transitions": counts[1], **times})
        return stages, {"states": states, "transitions": transitions, **known, "parts": parts}

    def _block(
        self,
        units: Sequence[Unit],
        predecessors: Sequence[Sequence[int]],
        pieces: Sequence[Sequence[int]],
        costs: StageTimer,
    ) -> tuple[list[Staged], tuple[int, int]]:
        """The stages of a block and the states and transitions of its search.

        A block that was split has the stages of its parts, or the greedy ones where those take less, and then better ones
        in windows across the parts.
        """
        states = transitions = 0

        def solve(part: Sequence[int], most: int = MOST_TRANSITIONS) -> list[Staged]:
            nonlocal states, transitions
            found, counts = self._solve(units, predecessors, part, costs, most)
            states, transitions = states + counts[0], transitions + counts[1]
            return found

        def solve_window(window: Sequence[int]) -> list[Staged] | None:
            try:
                return solve(window, WINDOW_TRANSITIONS)
            except TooManyTransitions:
                return None

        def cost(stages: Sequence[Staged]) -> float:
            return self._total(stages, units, costs)

        try:
            stages = [stage for piece in pieces for stage in solve(piece)]
        except TooManyTransitions as error:
            raise BadOption(f"{error}: lower system.r, system.s or system.max_part_size") from error
        if len(pieces) > 1:
            if self.strategy != "merge":
                stages = min(stages, self._greedy(sorted(sum(map(tuple, pieces), ())), predecessors), key=cost)
            stages = improve(stages, self.max_part_size, cost, solve_window)
        return stages, (states, transitions)

    def _greedy(self, block: Sequence[int], predecessors: Sequence[Sequence[int]]) -> list[Staged]:
        """The greedy stages of a block, none of more than s groups."""
        place = {v: i for i, v in enumerate(block)}
        levels = greedy([[place[u] for u in predecessors[v] if u in place] for v in block])
        most = self.s or len(block)
        return [
            ([[block[i]] for i in level[at : at + most]], False) for level in levels for at in range(0, len(level), most)
        ]

    def _total(self, stages: Sequence[Staged], units: Sequence[Unit], costs: StageTimer) -> float:
        """Milliseconds of stages of units, one after the other."""
        staged = [[[units[i] for i in group] for group in groups] for groups, _ in stages]
        return sum(self._stage_cost(groups, [costs.number(g) for g in groups], costs)[0] for groups in staged)

    def _solve(
        self,
        units: Sequence[Unit],
        predecessors: Sequence[Sequence[int]],
        block: Sequence[int],
        costs: StageTimer,
        most: int,
    ) -> tuple[list[Staged], tuple[int, int]]:
        """The best stages of a part of the units, and its states and transitions; searched for once for equal parts."""
        place = {v: i for i, v in enumerate(block)}
        inner = tuple(tuple(place[u] for u in predecessors[v] if u in place) for v in block)
        kinds = tuple(costs.number([units[v]]) for v in block)
        inputs = [_read_by(costs.program, units[v][0]) for v in block]
        same = tuple(inputs.index(read) for read in inputs)
        if (inner, kinds, same) not in self.solved:  # cells of a network repeat
            self.solved[inner, kinds, same] = self._search([units[v] for v in block], inner, inputs, costs, most)
        found, counts = self.solved[inner, kinds, same]
        return [([[block[i] for i in group] for group in groups], merged) for groups, merged in found], counts

    def _search(
        self,
        units: Sequence[Unit],
        inner: Sequence[Sequence[int]],
        inputs: Sequence[Any],
        costs: StageTimer,
        most: int,
    ) -> tuple[list[Staged], tuple[int, int]]:
        """The stages of a block as groups of places in it, and whether each is merged; states and transitions."""
        numbers: dict[int, int] = {}
        known: dict[tuple[Any, ...], tuple[float, bool]] = {}

        def members(group: int) -> list[int]:
            return [i for i in range(group.bit_length()) if group >> i & 1]

        def number(group: int) -> int:
            if group not in numbers:
                numbers[group] = costs.number([units[i] for i in members(group)])
            return numbers[group]

        def may_merge(groups: tuple[int, ...]) -> bool:
            if self.strategy not in ("both", "merge") or len(groups) < 2 or any(g.bit_count() > 1 for g in groups):
                return False
            return len({inputs[g.bit_length() - 1] for g in groups}) == 1

        def kind(groups: tuple[int, ...]) -> tuple[Any, ...]:
            """Equal for stages that cost the same."""
            return *sorted(map(number, groups)), may_merge(groups)

        def choice(groups: tuple[int, ...]) -> tuple[float, bool]:
            key = kind(groups)
            if key not in known:
                ours = [[units[i] for i in members(g)] for g in groups]
                known[key] = self._stage_cost(ours, [number(g) for g in groups], costs)
            return known[key]

        def at_once(groups: tuple[int, ...]) -> bool:
            """Groups at once are no faster than some of them, but those that are merged into one operator may be."""
            if may_merge(groups) and mergeable(costs.program, [units[g.bit_length() - 1] for g in groups]):
                return True
            return costs.is_known([number(g) for g in groups])

        bounded = self.strategy in ("both", "parallel") and not self.exhaustive
        found = find_schedule(
            inner,
            lambda _, groups: choice(groups)[0],
            self.r or None,
            self.s or None,
            at_once if bounded else None,
            kind,
            most,
        )
        stages = [([members(g) for g in groups], choice(groups)[1]) for groups in found.stages]
        return stages, (found.counts.states, found.counts.transitions)

    def _stage_cost(self, groups: list[list[Unit]], numbers: Sequence[int], costs: StageTimer) -> tuple[float, bool]:
        """The better of the two ways of parallelisation, and whether it is the merge (Algorithm 1, GenerateStage)."""
        merged = concurrent = inf
        alone = all(len(group) == 1 for group in groups)
        if self.strategy in ("both", "merge") and alone and len(groups) > 1:
            merged = costs.merged([group[0] for group in groups]) or inf
        if self.strategy != "merge" or (alone and len(groups) == 1):
            concurrent = costs.concurrent(groups, numbers)
        return min(merged, concurrent), merged < concurrent


def _shape(predecessors: Sequence[Sequence[int]], block: Sequence[int]) -> dict[str, int]:
    """How many units a block has, and how many of them at most could run at once."""
    place = {v: i for i, v in enumerate(block)}
    operators = [Operator(i, "unit", "unit") for i in range(len(block))]
    inner = OperatorGraph(operators, [[place[u] for u in predecessors[v] if u in place] for v in block])
    return {"units": len(block), "width": inner.width}


def _read_by(program: Program, operator: int) -> Any:
    """What the operator reads first: a merge needs it to be one for all."""
    return next((a for a in program.calls[operator].leaves() if isinstance(a, Output | Input)), operator)


def _read(file: Path) -> Schedule:
    try:
        return Schedule.from_json(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise BadOption(f"system.schedule={file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise BadOption(f"system.schedule={file}: {error}") from error
