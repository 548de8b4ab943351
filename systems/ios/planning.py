"""IOS's search over a whole model: units, blocks, the stages of each block, and what each stage costs (IOS, Section 4)."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from math import inf

from conf.text import counted
from systems.profiling.timing import Timer
from systems.scheduling.decision import Decision, DecisionRow, place_of, rows
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.merge import mergeable
from systems.scheduling.plans.schedule import BlockSearch, Search
from systems.scheduling.plans.stages import Stage, greedy

from .blocks import find_blocks, subgraph, unit_graph
from .endings import MAX_TRANSITIONS, TooManyTransitions
from .merges import first_input
from .search import Estimates, Groups, find_schedule
from .stage_simulator import StageSimulator
from .stage_timer import StageTimer, Unit
from .units import find_units
from .windows import WINDOW_TRANSITIONS, UnitStage, improve

KIND = "ios"  # of its decisions
MARGIN = 0.1  # by which a simulated stage, rid of its bias, may lie above what wins, and is still measured (costs=both)
IN_TURN, CONCURRENT, MERGED = "in turn", "concurrent", "merged"  # alternatives of a decision


@dataclass(frozen=True)
class Options:
    """The options that a search depends on; see `Ios`."""

    strategy: str
    r: int
    s: int
    units: str
    max_part_size: int
    exhaustive: bool
    costs: str = "measured"
    profile: str = ""
    gpu: str = "h200"
    groups: str = "connected"

    @property
    def searches(self) -> bool:
        return self.strategy in ("both", "parallel", "merge")

    @property
    def merges(self) -> bool:
        return self.strategy in ("both", "merge")

    @property
    def runs_groups_at_once(self) -> bool:
        return self.strategy in ("both", "parallel")


@dataclass(frozen=True)
class BlockPlan:
    """The stages of a block, and the size of the search for them."""

    stages: list[UnitStage]
    states: int = 0
    transitions: int = 0


@dataclass(frozen=True)
class StageCost:
    """Milliseconds of a stage by each of its two ways of parallelisation; infinite where it cannot, or must not, be done so.

    Args:
        concurrent: the groups at once.
        merged: all units as one operator.
    """

    concurrent: float
    merged: float

    @property
    def milliseconds(self) -> float:
        """By the better of the two."""
        return min(self.merged, self.concurrent)

    @property
    def is_merged(self) -> bool:
        return self.merged < self.concurrent


@dataclass(frozen=True)
class StagePlan:
    """The stages of a model.

    Args:
        stages: first to last.
        search: its size.
        decisions: how each stage runs, equal ones as one row; none where nothing was measured.
    """

    stages: list[Stage]
    search: Search
    decisions: tuple[DecisionRow, ...] = ()


def find_stages(program: Program, options: Options, timer: Timer, report: Callable[[str], None]) -> StagePlan:
    """The stages of a model, block after block.

    Invariant: stages of one block hold no unit of another, so the blocks' best stages are the best of the model within its
    blocks.

    Args:
        program: as the passes leave it.
        options: of the search.
        timer: keeps what is measured.
        report: hears which block is searched, and how many stages were measured.

    Returns:
        The stages. Their search lacks its seconds and its number of measurements.
    """
    return _Planner(program, options, timer, report).plan()


class _Planner:
    """The search over one model. Units are known by their places in `units`."""

    def __init__(self, program: Program, options: Options, timer: Timer, report: Callable[[str], None]):
        self.program, self.options, self.report = program, options, report
        self.units: Sequence[Unit] = find_units(program, options.units)
        self.graph = unit_graph(program.graph, self.units)
        simulator = StageSimulator(program, timer, options.gpu, options.profile) if options.costs != "measured" else None
        self.timer = (
            simulator
            if simulator is not None and options.costs == "simulated"
            else StageTimer(program, timer, lambda count: report(f"scheduling: {counted(count, 'stage')} measured"))
        )
        self.estimator = simulator if options.costs == "both" else None
        self.ratios: list[float] = []  # measured over simulated, of stages of both
        self.solutions: dict[Hashable, BlockPlan] = {}  # by what a part of the units computes: cells of a network repeat

    def plan(self) -> StagePlan:
        cut = find_blocks(self.graph, self.options.max_part_size)
        blocks = [sorted(sum(parts, ())) for parts in cut.blocks]
        stages: list[Stage] = []
        parts: list[BlockSearch] = []
        decisions: list[Decision] = []
        states = transitions = 0
        if self.options.searches:
            for number, (block, pieces) in enumerate(zip(blocks, cut.blocks, strict=True), 1):
                self.report(f"scheduling: block {number} of {len(blocks)}")
                plan = self._plan_block(pieces)
                stages += map(self._operator_stage, plan.stages)
                states, transitions = states + plan.states, transitions + plan.transitions
                decided = [self._decision(stage) for stage in plan.stages]
                parts.append(self._block_search(block, plan.transitions, decided))
                decisions += decided
        else:
            one_by_one = [(i,) for i in range(len(self.units))]
            levels = greedy(self.graph) if self.options.strategy == "greedy" else one_by_one
            stages = [Stage(tuple(self.units[i] for i in level)) for level in levels]
            parts = [BlockSearch(len(block), subgraph(self.graph, block).width) for block in blocks]
        search = Search(
            states=states,
            transitions=transitions,
            units=len(self.units),
            blocks=len(blocks),
            largest_block=max(map(len, blocks)),
            splits=cut.splits,
            parts=tuple(parts),
            simulated=None if self.estimator is None else len(self.estimator.costs.keys() - self.timer.names),
        )
        return StagePlan(stages, search, tuple(rows(decisions)))

    def _operator_stage(self, stage: UnitStage) -> Stage:
        """The same stage in operators; the groups of a merged one become one group."""
        groups = tuple(tuple(sorted(v for i in group for v in self.units[i])) for group in stage.groups)
        return Stage((tuple(sorted(sum(groups, ()))),), True) if stage.is_merged else Stage(groups)

    def _decision(self, stage: UnitStage) -> Decision:
        """What a stage of the plan takes by each way that was open to it, and its units in turn, each measured alone."""
        groups = [[self.units[i] for i in group] for group in stage.groups]
        numbers = [self.timer.number(group) for group in groups]
        one_by_one = [[unit] for group in groups for unit in group]
        milliseconds: dict[str, float | None] = {
            IN_TURN: sum(self.timer.concurrent([g], [self.timer.number(g)]) for g in one_by_one)
        }
        chosen = IN_TURN
        if len(one_by_one) > 1:
            cost = self.stage_cost(groups, numbers)
            ways = {CONCURRENT: cost.concurrent, MERGED: cost.merged}
            milliseconds |= {way: t for way, t in ways.items() if t < inf}
            chosen = MERGED if stage.is_merged else CONCURRENT
        operators = self._operator_stage(stage).operators
        return Decision(
            KIND, self._in_words(groups), operators, milliseconds, chosen, place=place_of(KIND, self.timer.name(numbers))
        )

    def _in_words(self, groups: Sequence[Sequence[Unit]]) -> str:
        """Groups by the names of their operators, equal ones counted: "max_pool2d | 2x conv2d + relu"."""
        names = [[self.program.graph.operators[v].name for unit in group for v in unit] for group in groups]
        counts = Counter(" + ".join(group) for group in names)
        return " | ".join(f"{count}x {group}" if count > 1 else group for group, count in sorted(counts.items()))

    def _block_search(self, block: Sequence[int], transitions: int, decisions: Sequence[Decision]) -> BlockSearch:
        return BlockSearch(
            units=len(block),
            width=subgraph(self.graph, block).width,
            transitions=transitions,
            milliseconds=sum(d.milliseconds[d.chosen] or 0.0 for d in decisions),
            sequential_milliseconds=sum(d.milliseconds[IN_TURN] or 0.0 for d in decisions),
        )

    def _plan_block(self, pieces: Sequence[Sequence[int]]) -> BlockPlan:
        """The stages of a block, of which `pieces` are the parts.

        A part that is too wide to be searched, such as dozens of embeddings, is split in halves. A block that was split
        begins with the stages of its parts, or with the greedy ones where those take less. Windows across the parts then
        make them better.
        """
        states = transitions = 0

        def solve(part: Sequence[int], max_transitions: int = MAX_TRANSITIONS) -> list[UnitStage]:
            nonlocal states, transitions
            solution = self._solve(part, max_transitions)
            states, transitions = states + solution.states, transitions + solution.transitions
            return solution.stages

        def solve_window(window: Sequence[int]) -> list[UnitStage] | None:
            try:
                return solve(window, WINDOW_TRANSITIONS)
            except TooManyTransitions:
                return None

        def solve_in_parts(piece: Sequence[int]) -> list[list[UnitStage]]:
            try:
                return [solve(piece)]
            except TooManyTransitions:
                half = len(piece) // 2  # units are in topological order: none depends on one of a later half
                return [*solve_in_parts(piece[:half]), *solve_in_parts(piece[half:])]

        parts = [part for piece in pieces for part in solve_in_parts(piece)]
        stages = [stage for part in parts for stage in part]
        if len(parts) > 1:
            if self.options.runs_groups_at_once:
                stages = min(stages, self._greedy(sorted(sum(map(tuple, pieces), ()))), key=self._total)
            stages = improve(stages, self.options.max_part_size, self._total, solve_window)
        return BlockPlan(stages, states, transitions)

    def _greedy(self, block: Sequence[int]) -> list[UnitStage]:
        """The greedy stages of a block, none of more than s groups, each by the better of its two ways."""
        levels = greedy(subgraph(self.graph, block))
        s = self.options.s or len(block)
        stages = [
            UnitStage(tuple((block[i],) for i in level[at : at + s])) for level in levels for at in range(0, len(level), s)
        ]
        return [replace(stage, is_merged=self._cost(stage).is_merged) for stage in stages]

    def _total(self, stages: Sequence[UnitStage]) -> float:
        """Milliseconds of stages one after the other."""
        return sum(self._cost(stage).milliseconds for stage in stages)

    def _cost(self, stage: UnitStage) -> StageCost:
        groups = [[self.units[i] for i in group] for group in stage.groups]
        return self.stage_cost(groups, [self.timer.number(group) for group in groups])

    def _solve(self, part: Sequence[int], max_transitions: int) -> BlockPlan:
        """The best stages of a part of the units; parts that compute the same are searched once."""
        inner = subgraph(self.graph, part).predecessors
        units = [self.units[v] for v in part]
        inputs = [first_input(self.program, unit[0]) for unit in units]
        key = (
            tuple(tuple(p) for p in inner),
            tuple(self.timer.number([unit]) for unit in units),
            tuple(inputs.index(read) for read in inputs),
        )
        if key not in self.solutions:
            self.solutions[key] = self._search(inner, units, inputs, max_transitions)
        solution = self.solutions[key]
        stages = [UnitStage(tuple(tuple(part[i] for i in g) for g in s.groups), s.is_merged) for s in solution.stages]
        return BlockPlan(stages, solution.states, solution.transitions)

    def _search(
        self, inner: Sequence[Sequence[int]], units: Sequence[Unit], inputs: Sequence[object], max_transitions: int
    ) -> BlockPlan:
        """The best stages of units, which are numbered by their places in `units`."""
        costs = _StageCosts(self, self.timer, units, inputs)
        estimates = None
        if self.estimator is not None:
            simulated = _StageCosts(self, self.estimator, units, inputs)
            estimates = Estimates(lambda groups: simulated.of(groups).milliseconds, MARGIN, self.ratios)
        best = find_schedule(
            inner,
            lambda _, groups: costs.of(groups).milliseconds,
            self.options.r or None,
            self.options.s or None,
            costs.measure_eagerly if self.options.runs_groups_at_once and not self.options.exhaustive else None,
            costs.cost_class,
            max_transitions,
            estimates,
            self.options.groups == "one_head",
        )
        stages = [UnitStage(tuple(map(_members, groups)), costs.of(groups).is_merged) for groups in best.stages]
        return BlockPlan(stages, best.counts.states, best.counts.transitions)

    def stage_cost(
        self, groups: Sequence[Sequence[Unit]], numbers: Sequence[int], timer: StageTimer | None = None
    ) -> StageCost:
        """The better of the two ways of parallelisation (Algorithm 1, GenerateStage); `numbers` are the groups'."""
        timer = timer or self.timer
        merged = concurrent = inf
        single_units = all(len(group) == 1 for group in groups)
        if self.options.merges and single_units and len(groups) > 1:
            merged = timer.merged([group[0] for group in groups]) or inf
        if self.options.runs_groups_at_once or (single_units and len(groups) == 1):
            concurrent = timer.concurrent(groups, numbers)
        return StageCost(concurrent, merged)


class _StageCosts:
    """The costs of the stages of a part, whose groups are bit masks of places in it.

    Args:
        planner: measures.
        timer: by which.
        units: of the part.
        inputs: what each unit reads first.
    """

    def __init__(self, planner: _Planner, timer: StageTimer, units: Sequence[Unit], inputs: Sequence[object]):
        self.planner, self.timer, self.units, self.inputs = planner, timer, units, inputs
        self.numbers: dict[int, int] = {}
        self.costs: dict[Hashable, StageCost] = {}

    def of(self, groups: Groups) -> StageCost:
        key = self.cost_class(groups)
        if key not in self.costs:
            unit_groups = [[self.units[i] for i in _members(g)] for g in groups]
            self.costs[key] = self.planner.stage_cost(unit_groups, [self._number(g) for g in groups], self.timer)
        return self.costs[key]

    def cost_class(self, groups: Groups) -> Hashable:
        """Equal for stages that cost the same."""
        return *sorted(map(self._number, groups)), self._may_merge(groups)

    def measure_eagerly(self, groups: Groups) -> bool:
        """Is the stage known already, or one that may take less than a subset of its groups, as a merge may?"""
        if self._may_merge(groups) and mergeable(self.planner.program, [self.units[g.bit_length() - 1] for g in groups]):
            return True
        return self.timer.is_known([self._number(g) for g in groups])

    def _may_merge(self, groups: Groups) -> bool:
        """Are they several single units that read the same input?"""
        if not self.planner.options.merges or len(groups) < 2 or any(g.bit_count() > 1 for g in groups):
            return False
        return len({self.inputs[g.bit_length() - 1] for g in groups}) == 1

    def _number(self, group: int) -> int:
        if group not in self.numbers:
            self.numbers[group] = self.timer.number([self.units[i] for i in _members(group)])
        return self.numbers[group]


def _members(group: int) -> tuple[int, ...]:
    return tuple(i for i in range(group.bit_length()) if group >> i & 1)
