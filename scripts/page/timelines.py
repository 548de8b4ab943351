"""The timelines of a report: those that it is given, and of those beside its records those of models that it shows."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from results.files import COMPRESSED, read_json
from results.selection import Selection
from results.setting import Setting
from results.timeline import Timeline, from_trace
from scripts.arguments import Parser
from scripts.charts.style import short

ENDING = ".trace.json"  # of what scripts/reproduce.py has runner=timeline write
FOLDERS = Path("results") / "exhibits", Path("results") / "reference" / "exhibits"  # where it writes, and what is committed


def asked_for(files: Iterable[Path], parser: Parser) -> list[Timeline]:
    """Those of traces; one that is none ends the program."""
    found: list[Timeline] = []
    for file in files:
        try:
            found += _with_bars(file)
        except (OSError, ValueError) as error:
            parser.unreadable(file, error)
    return found


def beside(settings: Mapping[Setting, Selection]) -> list[Timeline]:
    """Those of FOLDERS whose model has records at their batch, seen on the same machine under its torch and arithmetic.

    A file that holds none is left out with a warning.
    """
    found: list[Timeline] = []
    for folder in FOLDERS:
        for file in sorted((*folder.glob(f"*/*{ENDING}"), *folder.glob(f"*/*{ENDING}{COMPRESSED}"))):
            try:
                found += _with_bars(file)
            except (OSError, ValueError) as error:
                print(f"warning: {file} is left out: {error}", file=sys.stderr)
    return [timeline for timeline in found if any(_is_of(timeline, *pair) for pair in settings.items())]


def _with_bars(file: Path) -> list[Timeline]:
    """Those of a trace that have a bar. Raises OSError where it cannot be read, ValueError where it is none."""
    return [timeline for timeline in from_trace(read_json(file)) if timeline.bars]


def _is_of(timeline: Timeline, setting: Setting, measured: Selection) -> bool:
    cell, conditions = timeline.cell, timeline.cell.conditions
    own = timeline.machine, *(getattr(conditions, key) for key in ("precision", "layout", "algorithms"))
    theirs = f"{setting.place}, torch {setting.torch}", setting.precision, setting.layout, setting.algorithms
    return own == theirs and (cell.model.label, cell.batch) in measured.rows


def by_model(timelines: Iterable[Timeline]) -> dict[str, list[Timeline]]:
    """What is drawn in one picture, by its title: of one model, batch, precision and machine."""
    groups: dict[str, list[Timeline]] = {}
    for timeline in timelines:
        cell = timeline.cell
        parts = cell.model.label, f"batch {cell.batch}", timeline.machine or cell.device, cell.conditions.precision
        groups.setdefault(", ".join(parts), []).append(timeline)
    return groups


def summary(timelines: Sequence[Timeline]) -> str:
    """The system and the length of each."""
    return ", ".join(f"{short(t.cell.system)} {max(bar.end for bar in t.bars):.3f} ms" for t in timelines)
