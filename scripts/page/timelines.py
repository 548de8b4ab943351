"""The timelines of a report: those that it is given, and of those beside its records those of models that it shows."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from results.files import COMPRESSED, read_json
from results.selection import Selection
from results.setting import Setting
from results.timeline import Bar, Timeline, from_trace
from scripts.arguments import Parser
from scripts.charts.style import short

ENDING = ".trace.json"  # of what scripts/reproduce.py has runner=timeline write
FOLDERS = Path("results") / "exhibits", Path("results") / "reference" / "exhibits"  # where it writes, and what is committed
LEAST_GAP = 5e-4  # of the axis: a quarter of a point, as wide as a bar's edge


def asked_for(files: Iterable[Path], parser: Parser) -> list[Timeline]:
    """Those of traces; one that is none ends the program."""
    timelines: list[Timeline] = []
    for file in files:
        try:
            timelines += _with_bars(file)
        except (OSError, ValueError) as error:
            parser.unreadable(file, error)
    return timelines


def beside(settings: Mapping[Setting, Selection]) -> list[Timeline]:
    """Those of FOLDERS whose model has records at their batch, seen on the same machine under its torch and arithmetic.

    A file that holds none is left out with a warning.
    """
    timelines: list[Timeline] = []
    for folder in FOLDERS:
        for file in sorted((*folder.glob(f"*/*{ENDING}"), *folder.glob(f"*/*{ENDING}{COMPRESSED}"))):
            try:
                timelines += _with_bars(file)
            except (OSError, ValueError) as error:
                print(f"warning: {file} is left out: {error}", file=sys.stderr)
    return [timeline for timeline in timelines if any(_is_of(timeline, *pair) for pair in settings.items())]


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


def joined(timelines: Sequence[Timeline]) -> list[Timeline]:
    """As they are drawn on a page that has to stay small: bars of one kind that follow each other at once are one.

    Args:
        timelines: of one picture, whose axis is as long as the longest.
    """
    least_ms = max(bar.end for timeline in timelines for bar in timeline.bars) * LEAST_GAP
    return [replace(timeline, bars=tuple(_joined(timeline.bars, least_ms))) for timeline in timelines]


def _joined(bars: Iterable[Bar], least_ms: float) -> list[Bar]:
    """By stream and start. A bar of several has no name."""
    wide_bars: list[Bar] = []
    for bar in sorted(bars, key=lambda bar: (bar.stream, bar.start)):
        last = wide_bars[-1] if wide_bars else None
        if last is not None and (last.stream, last.kind) == (bar.stream, bar.kind) and bar.start - last.end < least_ms:
            wide_bars[-1] = replace(last, name="", duration=max(last.end, bar.end) - last.start)
        else:
            wide_bars.append(bar)
    return wide_bars


def summary(timelines: Sequence[Timeline]) -> str:
    """The system and the length of each."""
    return ", ".join(f"{short(t.cell.system)} {max(bar.end for bar in t.bars):.3f} ms" for t in timelines)
