"""Reproduces a paper's exhibits: runs what is missing, draws it, and says how the paper's figures stand here.

python scripts/reproduce.py PAPER/EXHIBIT ... | all [+size=small] [--judge | --recorded] [--output FOLDER] [KEY=VALUE ...]

    python scripts/reproduce.py nimble/figure7
    python scripts/reproduce.py all
    python scripts/reproduce.py opara/table1 model=googlenet
    python scripts/reproduce.py nimble/figure7 +size=small        # on the CPU, with small models and few samples

KEY=VALUE are run.py's, and take the place of the preset's (conf/experiment/PAPER/EXHIBIT.yaml); results=FOLDER is where
records go (results/runs). What has a record, a schedule or a timeline is not run again, so that an interrupted run goes on
where it stopped; force=true runs it again. --judge runs nothing and goes by what is there; --recorded does so by the
committed records (results/reference), and so does `all` alone where no GPU is visible. --list shows every exhibit, and how
it stands by the committed records or why it cannot be.
Pictures (PNG and SVG) and each verdict go to results/exhibits/PAPER-EXHIBIT/, all verdicts to verdicts.json beside it, where
scripts/report.py finds them. There a whole run's verdict stands until another whole run's comes.

Exit status 0 when all that was asked for ran, whatever the verdicts; 1 where an exhibit could not be run; 2 for a bad
request, with which none can be, or for an exhibit that needs a GPU on a machine without one (`all` with KEY=VALUE runs the
others, and says at once which it leaves out).
"""

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a file: the rooms are beside its folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conf.text import counted
from scripts.interrupts import tell_interrupts

if __name__ == "__main__":
    tell_interrupts()

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

from results.finding import NOT_RUN, NOT_SHOWN, Finding
from results.published.values import NoSuchValue
from results.terminal import Terminal
from results.verdict import Verdict, read_verdicts, write_verdicts
from scripts.arguments import Parser, path_argument
from scripts.charts import style
from scripts.exhibits import judgement
from scripts.exhibits.behind import behind
from scripts.exhibits.evidence import Evidence
from scripts.exhibits.findings import findings
from scripts.exhibits.overrides import NOT_A_PRESETS, SIZE, hint, mistake
from scripts.exhibits.pictures import pictures
from scripts.exhibits.preset import OUTPUT, NoPreset, Preset, names
from scripts.exhibits.recorded import recorded
from scripts.exhibits.running import ROOT, CannotRun, Refused, Run
from scripts.exhibits.without import ALIASES, WITHOUT_PRESET

ALL, SMALL, SIZES = "all", "small", ("small", "full")
NO_TERMINAL = 200  # columns where nobody's terminal sets a width
INTERRUPTED = 130
FILES = "model.path"


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    presets: Sequence[Preset]
    overrides: dict[str, str]
    results: Path
    output: Path
    small: bool
    judge: bool
    recorded: bool


def gpu_here() -> bool:
    """Whether the runners see a GPU. A process of its own asks them, since scripts do not import them."""
    module = f"{__package__.rpartition('scripts')[0]}runners.machine.device" if __package__ else "runners.machine.device"
    answer = subprocess.run([sys.executable, "-m", module], cwd=ROOT, capture_output=True, text=True, check=True)
    return int(answer.stdout) > 0


def reproduce(run: Run, judge_only: bool, console: Console) -> Verdict:
    """Run what is missing of one exhibit, draw it, print it. Raises CannotRun, ValueError for a file that is broken."""
    if not judge_only:
        run.run()
    evidence = run.evidence()
    figures = findings(run.preset, evidence)
    verdict = judgement.judge(run.preset, evidence, figures, run.small, run.changes)
    tell(run.preset, evidence, figures, verdict, run.folder, console)
    return verdict


def tell(
    preset: Preset, evidence: Evidence, figures: Sequence[Finding], verdict: Verdict, folder: Path, console: Console
) -> None:
    """Print an exhibit, draw it to a folder, and write its verdict there."""
    show(preset, evidence, figures, verdict, console)
    folder.mkdir(parents=True, exist_ok=True)
    charts, refused = pictures(preset, evidence, figures) if verdict.verdict != NOT_SHOWN else ({}, {})
    for name, chart in charts.items():
        for suffix in style.FORMATS:
            path = folder / f"{name}.{suffix}"
            style.save(chart.figure, path)
        console.print(f"drawn: {folder / name}.png, .svg", highlight=False, markup=False, soft_wrap=True)
        plt.close(chart.figure)
    for name, reason in refused.items():
        console.print(f"not drawn: {name}: {reason}", highlight=False, markup=False, soft_wrap=True)
    write_verdicts(folder / "verdict.json", [verdict])


def show(preset: Preset, evidence: Evidence, figures: Sequence[Finding], verdict: Verdict, console: Console) -> None:
    """The paper's figures, ours, and how they stand."""
    say = {"markup": False, "highlight": False, "soft_wrap": True}
    console.print(f"\n{preset.name}: {preset.title}", style="bold", **say)  # type: ignore[arg-type]
    console.print(f"claim: {preset.claim}", **say)  # type: ignore[arg-type]
    console.print(f"measured on: {verdict.place or 'nothing yet'}", **say)  # type: ignore[arg-type]
    stands = judgement.stands(preset, evidence)
    table = Table(box=None)
    for heading in ("figure", "paper", "here", "verdict"):
        table.add_column(heading, justify="right" if heading in ("paper", "here") else "left", overflow="fold")
    for f in figures:
        table.add_row(f.what, judgement.published(f), judgement.interval(f), judgement.how_it_stands(f, stands))
    console.print(table)
    for one in behind(evidence.measured):
        table = Table(box=None)
        for column in one.columns:
            table.add_column(column.heading, justify="right" if column.number else "left", overflow="fold")
        for row in one.rows:
            table.add_row(*(entry.text for entry in row))
        console.print(table)
    for rule in judgement.rules(figures):
        console.print(f"rule: {rule}", style="dim", **say)  # type: ignore[arg-type]
    console.print(f"verdict: {verdict.verdict}, {verdict.extent_in_words}: {verdict.reason}", style="bold", **say)  # type: ignore[arg-type]


def keep(file: Path, verdict: Verdict) -> None:
    """Put the verdict among those in the file, in the place of an older one of the same exhibit that says no more."""
    verdicts = read_verdicts(file) if file.exists() else []
    if any(other.exhibit == verdict.exhibit and weight(other) > weight(verdict) for other in verdicts):
        return
    others = [other for other in verdicts if other.exhibit != verdict.exhibit]
    order = names()
    write_verdicts(file, sorted([*others, verdict], key=lambda v: order.index(v.exhibit) if v.exhibit in order else -1))


def weight(verdict: Verdict) -> int:
    """2 for a verdict of a whole run, 1 for one of a small run or of changed settings, 0 where nothing was measured."""
    changes = shlex.split(verdict.command)[3:]
    is_whole = all(word.startswith(f"{FILES}=") for word in changes)  # nobody has the same files
    return 0 if verdict.verdict in (NOT_RUN, NOT_SHOWN) else 1 + is_whole


def listed() -> Iterator[str]:
    """A line for each exhibit: how it stands by the committed records, or why it has no preset; then its other number."""
    standing_by_name: dict[str, str] = {}
    for name in names():
        preset = Preset.read(name)
        need = {"gpu": " (needs a GPU)", "files": " (needs files of yours: model.path=)"}.get(preset.needs, "")
        best = recorded(preset)[0].verdict
        extent = counted(best.figures, "figure") if best.verdict == NOT_RUN else best.extent_in_words
        stands = f"{best.verdict}, {extent}"
        standing_by_name[name] = stands
        yield f"{name}: {preset.title}{need}: {stands}"
    for name, reason in WITHOUT_PRESET.items():
        standing_by_name[name] = f"no preset: {reason}"
        yield f"{name}: {standing_by_name[name]}"
    for alias, name in ALIASES.items():
        yield f"{alias}: {name}: {standing_by_name[name]}"


def request(parser: Parser) -> Request:
    """What the command line asks for; a bad request ends the program."""
    parser.add_argument("words", nargs="*", metavar="PAPER/EXHIBIT | all | +size=small | KEY=VALUE")
    parser.add_argument("--judge", action="store_true", help="run nothing: judge and draw what is there")
    parser.add_argument("--recorded", action="store_true", help="run nothing: judge and draw the committed records")
    parser.add_argument("--output", type=path_argument, default=Path(OUTPUT), metavar="FOLDER", help=f"{OUTPUT} if left out")
    parser.add_argument("--list", action="store_true", help="show every exhibit")
    arguments = parser.parse_intermixed_args()
    if arguments.list:
        for line in listed():
            print(line, flush=True)
        sys.exit(0)
    exhibits = [word for word in arguments.words if "=" not in word]
    pairs = [word.partition("=")[::2] for word in arguments.words if "=" in word]
    overrides = {key: value for key, value in pairs if key not in (SIZE, "results")}
    values = dict(pairs)
    if values.get(SIZE, "full") not in SIZES:
        parser.error(f"{SIZE}={values[SIZE]} is neither small nor full")
    if strange := [key for key in overrides if key.startswith(("+", "~", "-")) or key in NOT_A_PRESETS]:
        parser.error(f"{strange[0]}= is nothing that a preset can be given: {hint(strange[0])}")
    if not exhibits:
        parser.error(f"name an exhibit, or all: {', '.join(names())}")
    try:
        wanted = names() if ALL in exhibits else exhibits
        presets = [Preset.read(name) for name in dict.fromkeys(ALIASES.get(name, name) for name in wanted)]
    except (NoPreset, NoSuchValue) as error:
        parser.error(str(error))
    if (wrong := mistake(overrides, presets)) is not None:
        parser.error(wrong)
    try:
        results = path_argument(values.get("results", "results/runs"))
    except argparse.ArgumentTypeError as error:
        parser.error(f"results={values['results']}: {error}")
    parser.check_folder(arguments.output)
    if arguments.judge and "results" in values:
        parser.check_results(results)
    is_bare = arguments.words == [ALL] and not arguments.judge
    is_recorded = arguments.recorded or (is_bare and not gpu_here())
    if arguments.recorded and (pairs or arguments.judge):
        parser.error("--recorded goes by the committed records alone: leave out KEY=VALUE, +size and --judge")
    if is_recorded and not arguments.recorded:
        notice = "no GPU is visible here, so verdicts are by the committed records and nothing is run (results/reference)"
        print(f"{parser.prog}: {notice}", file=sys.stderr)
    small = values.get(SIZE) == SMALL
    return Request(presets, overrides, results, arguments.output, small, arguments.judge, is_recorded)


def writable(parser: Parser, output: Path, runs: Sequence[Run]) -> Path:
    """The file of all verdicts. The program ends where it cannot be read, or where an exhibit has no room for its files."""
    file = output / "verdicts.json"
    try:
        if file.exists():
            read_verdicts(file)
    except (OSError, ValueError) as error:
        parser.unreadable(file, error)
    for run in runs:
        parser.check_folder(run.folder)
    return file


def with_costs(parser: Parser, runs: Sequence[Run], is_all: bool) -> list[Run]:
    """Those whose simulations have the costs of iterations that they name; the program ends where another was asked for."""
    without = {run.preset.name: commands for run in runs if (commands := run.missing_costs())}
    if without and not is_all:
        name, (command, *_) = next(iter(without.items()))
        parser.error(f"{name}: needs costs of iterations that are not there; on a GPU this measures them: {command}")
    if without:
        print(
            f"{parser.prog}: costs of iterations are not there for these, so they are left out: {', '.join(without)}",
            file=sys.stderr,
        )
    return [run for run in runs if run.preset.name not in without]


def main() -> None:
    parser = Parser(__doc__)
    wanted = request(parser)
    presets = list(wanted.presets)
    if not (wanted.judge or wanted.recorded or FILES in wanted.overrides):
        without = [preset.name for preset in presets if preset.needs == "files"]
        if without and len(wanted.presets) < len(names()):
            parser.error(f"{', '.join(without)}: needs files of yours, which nobody may pass on: {FILES}=FILE or FOLDER")
        presets = [preset for preset in presets if preset.name not in without]
    if not (wanted.small or wanted.judge or wanted.recorded or gpu_here()):
        without = [preset.name for preset in presets if preset.needs == "gpu"]
        if without and len(wanted.presets) < len(names()):
            parser.error(
                f"{', '.join(without)}: needs a GPU, and none is visible here; +size=small runs it on the CPU, and "
                "--recorded goes by the committed records"
            )
        if without:
            notice = (
                f"no GPU is visible here, so these are left out (+size=small runs them on the CPU): {', '.join(without)}"
            )
            print(f"{parser.prog}: {notice}", file=sys.stderr)
            presets = [preset for preset in presets if preset.name not in without]
    console = Terminal()
    if not console.is_terminal:
        console.width = max(console.width, NO_TERMINAL)
    begin, failed, refused = time.monotonic(), False, 0
    verdicts: list[Verdict] = []
    runs = [Run(preset, wanted.overrides, wanted.results, wanted.output, wanted.small) for preset in presets]
    if not (wanted.judge or wanted.recorded):
        runs = with_costs(parser, runs, is_all=len(wanted.presets) == len(names()))
        presets = [preset for preset in presets if any(run.preset.name == preset.name for run in runs)]
    file = writable(parser, wanted.output, runs)
    try:
        for place, (preset, run) in enumerate(zip(presets, runs, strict=True), start=1):
            passed = f", {time.monotonic() - begin:.0f} s so far" if place > 1 else ""
            print(f"[{place}/{len(presets)}] {preset.name}{passed}", file=sys.stderr, flush=True)
            try:
                if wanted.recorded:
                    best = recorded(preset)[0]
                    tell(preset, best.evidence, best.findings, best.verdict, run.folder, console)
                    verdicts.append(best.verdict)
                else:
                    for system in run.missing_systems():
                        print(f"{parser.prog}: {preset.name}: {system} is no system here", file=sys.stderr)
                    verdicts.append(reproduce(run, wanted.judge, console))
                keep(file, verdicts[-1])
            except (CannotRun, ValueError) as error:
                print(f"{parser.prog}: {preset.name}: {error}", file=sys.stderr)
                failed, refused = True, refused + isinstance(error, Refused)
            except BrokenPipeError:  # nobody reads the verdicts
                raise
            except OSError as error:
                parser.error(f"{error.filename or wanted.output} cannot be written: {error.strerror or error}")
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted; the same command goes on where this one stopped", file=sys.stderr)
        sys.exit(INTERRUPTED)
    if len(presets) > 1:
        console.print()
        for verdict in verdicts:
            counts = verdict.reason.partition(". ")[0]
            line = f"{verdict.exhibit}: {verdict.verdict}, {verdict.extent_in_words}: {counts}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    sys.exit(2 if refused and refused == len(presets) else 1 if failed else 0)


if __name__ == "__main__":
    main()
