"""Compares two sets of results: two versions, or two machines. The regressions come first.

python scripts/compare.py BEFORE AFTER [--threshold 0.05] [--metric latency|throughput|memory|preparation|speedup]

BEFORE and AFTER are folders of records. Cells are matched by their request (model, batch, system with its options, device,
precision, layout, seed, kind of run, load); "times worse" is the ratio of the medians with its bootstrap 95 % interval,
above 1 where AFTER is worse. A cell is a regression where that whole interval is beyond the threshold, or where a system
that ran no longer does. On two machines, or on two days, latencies say as much of the machine as of the code: --metric
speedup compares what each set measured in turn, over --baseline, without rounds that a profiler slowed.

Exit status 0 where nothing became worse, 1 where something did, 2 for a bad request, and where nothing became worse but a
file cannot be read, which may have held a regression. A cell that AFTER lacks, or of which it does not tell the metric, is
named and is no regression, since AFTER may be a part of the sweep; with --complete the status is 1 then too.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file: the rooms are beside its folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conf.text import counted
from scripts.interrupts import tell_interrupts

if __name__ == "__main__":
    tell_interrupts()

from rich.table import Table

from results.record import Record
from results.regression import IMPROVEMENT, METRICS, REGRESSION, SAME, UNCERTAIN, Change, changes, only_in, untold
from results.store import Contents, Store
from results.terminal import Terminal
from scripts.arguments import Parser, path_argument

UNITS = {"latency": "ms", "throughput": "samples/s", "memory": "MiB", "preparation": "s", "speedup": "x"}
WORDS = {UNCERTAIN: "uncertain (the interval reaches within the threshold)", SAME: "unchanged"}
NO_TERMINAL = 160  # columns where nobody's terminal sets a width


def read(folder: Path, parser: Parser) -> Contents:
    """What the folder holds, with a line for each file that is no record; a folder without records ends the program."""
    parser.check_results(folder)
    contents = Store(folder).read()
    for line in contents.skipped:
        print(line, file=sys.stderr)
    if not contents.records:
        parser.error(f"no record in {folder}")
    return contents


def places(records: Sequence[Record]) -> str:
    """The machines and versions of a set, in a line."""

    def place(record: Record) -> str:
        environment = record.environment
        commit, torch = (environment.commit or "no commit")[:12], environment.libraries.get("torch", "?")
        return f"{environment.place}, {environment.host}, torch {torch}, {commit}"

    return "; ".join(sorted({place(record) for record in records}))


def table(shown_changes: Sequence[Change], metric: str, threshold: float) -> Table:
    """A row for each change. Conditions that all of them share are left out of their names."""
    words = enumerate(zip(*(change.key for change in shown_changes), strict=True))
    varied = [i for i, of_each in words if i >= 3 and len(set(of_each)) > 1]
    shown = Table(box=None)
    for heading in ("model", "batch", "system", *("" for _ in varied)):
        shown.add_column(heading, no_wrap=heading != "system", overflow="fold")
    for heading in (f"before, {UNITS[metric]}", f"after, {UNITS[metric]}", "times worse", "verdict"):
        shown.add_column(heading, justify="left" if heading == "verdict" else "right", no_wrap=True)
    for change in shown_changes:
        if change.worse is None:
            numbers = [change.statuses[0], change.statuses[1], "–"]
        else:
            interval = f"{change.worse:.3f} [{change.low:.3f}, {change.high:.3f}]"
            numbers = [f"{change.before:,.3f}", f"{change.after:,.3f}", interval]
        shown.add_row(*change.key[:3], *(change.key[i] for i in varied), *numbers, change.verdict(threshold))
    return shown


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("before", type=path_argument, metavar="BEFORE")
    parser.add_argument("after", type=path_argument, metavar="AFTER")
    parser.add_argument("--threshold", type=float, default=0.05, metavar="SHARE", help="how much worse is allowed; 0.05")
    parser.add_argument("--metric", default="latency", choices=list(METRICS))
    parser.add_argument("--baseline", default="eager", metavar="SYSTEM", help="of --metric speedup; eager")
    parser.add_argument("--all", action="store_true", help="show the unchanged cells too")
    parser.add_argument("--complete", action="store_true", help="AFTER has to have every cell of BEFORE")
    arguments = parser.parse_args()
    threshold: float = arguments.threshold
    if not 0 <= threshold < math.inf:
        parser.error(f"--threshold {threshold:g} is not a share like 0.05")
    contents = [read(folder, parser) for folder in (arguments.before, arguments.after)]
    before, after = (one.all for one in contents)
    compared = changes(before, after, arguments.metric, arguments.baseline)
    if not any("ok" in change.statuses for change in compared):
        what = "speedups over " + arguments.baseline if arguments.metric == "speedup" else arguments.metric
        parser.error(f"{arguments.before} and {arguments.after} have no cell in common that tells of {what}")
    console = Terminal()
    if not console.is_terminal:
        console.width = max(console.width, NO_TERMINAL)
    verdicts = [change.verdict(threshold) for change in compared]
    say = {"markup": False, "highlight": False, "soft_wrap": True}
    console.print(f"before: {places(before)}", **say)  # type: ignore[arg-type]
    console.print(f"after:  {places(after)}", **say)  # type: ignore[arg-type]
    shown = [change for change, verdict in zip(compared, verdicts, strict=True) if arguments.all or verdict != SAME]
    if shown:
        console.print(table(shown, arguments.metric, threshold))
    lost = {
        f"only in {arguments.before}": only_in(before, after),
        f"no {arguments.metric} in {arguments.after}": untold(before, after, arguments.metric, arguments.baseline),
    }
    for where, keys in {**lost, f"only in {arguments.after}": only_in(after, before)}.items():
        if keys:
            console.print(f"{where}: {counted(len(keys), 'cell')}, {', '.join(keys[0][:3])} the first", **say)  # type: ignore[arg-type]
    numbers = {verdict: verdicts.count(verdict) for verdict in (REGRESSION, IMPROVEMENT, *WORDS) if verdict in verdicts}
    counts = [f"{n} {WORDS[verdict]}" if verdict in WORDS else counted(n, verdict) for verdict, n in numbers.items()]
    console.print(f"{arguments.metric}, threshold {threshold:.1%}: {', '.join(counts)}", **say)  # type: ignore[arg-type]
    if REGRESSION in verdicts or (arguments.complete and any(lost.values())):
        sys.exit(1)
    sys.exit(2 if any(one.is_damaged for one in contents) else 0)


if __name__ == "__main__":
    main()
