"""How long IOS's search takes where stages cost nothing to measure, and what it goes through (IOS, Tables 1 and 2).

python tests/benchmarks/benchmark_ios_search.py SCHEDULE.json ... [--r 3] [--s 8] [--max-part-size 24]

A schedule file stands for a captured model; its stages are taken for the schedule units, so it has to be of the sequential
strategy: python run.py runner=schedule model=nasnet_large system=ios system.strategy=sequential output=nasnet_large.json.
With --r 0 or --s 0 there is no such limit on a stage. Times are those of one core, of all blocks, without capturing the
model; the memory is the largest that the process has held so far. `all` has the windows across a split block's parts too.
"""

import json
import resource
import sys
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from time import process_time

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from rich.console import Console
from rich.table import Table

from scripts.arguments import Parser
from systems.ios.blocks import Blocks, find_blocks, subgraph, unit_graph
from systems.ios.endings import TooManyTransitions
from systems.ios.search import BlockSchedule, Counts, find_schedule
from systems.ios.windows import WINDOW_TRANSITIONS, UnitStage, improve
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.plans.schedule import Schedule


def free(ending: int, groups: tuple[int, ...]) -> float:
    """A device that runs all groups of a stage as fast as the longest one, and takes as long again to begin a stage."""
    return 1.0 + max(group.bit_count() for group in groups)


def staged(schedule: BlockSchedule, block: Sequence[int]) -> list[UnitStage]:
    """Stages by the units of the model in the place of those of the block."""
    return [
        UnitStage(tuple(tuple(v for i, v in enumerate(block) if group >> i & 1) for group in groups))
        for groups in schedule.stages
    ]


def search(units: OperatorGraph, blocks: Blocks, r: int | None, s: int | None, most: int) -> list[Counts]:
    """What the searches of each part went through, and then those of the windows across parts of one block."""
    counts, windows = [], []

    def window(part: tuple[int, ...]) -> list[UnitStage] | None:
        try:
            schedule = find_schedule(subgraph(units, part).predecessors, free, r, s, max_transitions=WINDOW_TRANSITIONS)
        except TooManyTransitions:
            return None
        windows.append(schedule.counts)
        return staged(schedule, part)

    def cost(stages: Sequence[UnitStage]) -> float:
        return sum(1.0 + max(map(len, stage.groups)) for stage in stages)

    for parts in blocks.blocks:
        schedules = [find_schedule(subgraph(units, part).predecessors, free, r, s) for part in parts]
        counts += [f.counts for f in schedules]
        if len(parts) > 1:
            improve(
                [stage for f, part in zip(schedules, parts, strict=True) for stage in staged(f, part)], most, cost, window
            )
    return counts + windows


def read(parser: Parser, file: Path) -> tuple[str, int, OperatorGraph]:
    """The model's name, its number of operators, and the dependencies between its units."""
    try:
        document = json.loads(file.read_text())
        schedule = Schedule.from_json(document)
        model = document["model"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.unreadable(file, error)
    if not schedule.stages or any(len(stage) > 1 for stage in schedule.stages):
        parser.error(f"{file} is no sequential schedule of IOS: system=ios system.strategy=sequential")
    units = [stage[0] for stage in schedule.stages]
    return model, len(schedule.graph), unit_graph(schedule.graph, units)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("schedules", nargs="+", type=Path, metavar="SCHEDULE.json")
    parser.add_argument("--r", type=int, default=3, help="units in a group of a stage")
    parser.add_argument("--s", type=int, default=8, help="groups in a stage")
    parser.add_argument("--max-part-size", type=int, default=24, help="units above which a block is split")
    arguments = parser.parse_args()
    for option, least in (("r", 0), ("s", 0), ("max_part_size", 1)):
        if getattr(arguments, option) < least:
            parser.error(f"--{option.replace('_', '-')} {getattr(arguments, option)} is not an integer of at least {least}")
    title = f"r = {arguments.r}, s = {arguments.s}, parts of at most {arguments.max_part_size} units"
    table = Table(title=f"IOS's search at {title}")
    for column in (
        *("model", "operators", "units", "blocks", "splits", "largest: units", "width", "transitions", "schedules"),
        *("all: states", "transitions", "seconds", "peak MiB"),
    ):
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=column == "model")
    for file in arguments.schedules:
        model, operators, units = read(parser, file)
        start = process_time()
        blocks = find_blocks(units, arguments.max_part_size)
        parts = [subgraph(units, part) for part in blocks.parts]
        try:
            counts = search(units, blocks, arguments.r or None, arguments.s or None, arguments.max_part_size)
        except TooManyTransitions as error:
            parser.error(f"{file}: {error}")
        seconds = process_time() - start
        largest = max(range(len(parts)), key=lambda i: counts[i].transitions)
        several = sum(len(part) > 1 for part in parts)  # one unit alone leaves nothing to decide
        of_largest = len(parts[largest]), parts[largest].width, counts[largest].transitions
        of_all = sum(c.states for c in counts), sum(c.transitions for c in counts)
        table.add_row(
            model,
            *(f"{n:,}" for n in (operators, len(units), several, blocks.splits, *of_largest)),
            f"{Decimal(counts[largest].schedules):.1e}",
            *(f"{n:,}" for n in of_all),
            f"{seconds:.2f}",
            f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f}",
        )
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
