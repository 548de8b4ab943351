"""Charts of the committed records as tests draw them, and what is read off them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any
from weakref import WeakSet

import matplotlib

matplotlib.use("agg")

import pytest
from conftest import ROOT
from matplotlib.figure import Figure
from matplotlib.text import Text

from results.cell import named
from results.record import Record
from results.selection import Selection as Selected
from results.selection import read
from scripts.charts import bars, dots, limits, memory, search, sm_efficiency, speedup, style

REFERENCE = ROOT / "results" / "reference" / "h200"
DEPTH_FIRST = named("system", "opara", launch_order="depth_first")
EAGER, NIMBLE, CUDA_GRAPH = (named("system", name) for name in ("eager", "nimble", "cuda_graph"))


def Selection(records: Sequence[Record]) -> Selected:
    return Selected(records, style.order)


@cache
def reference() -> list[Record]:
    return read([REFERENCE / "overview.jsonl.gz"])


def measured(batches: tuple[int, ...] = (1,)) -> Selected:
    return Selection(reference()).only(batches=batches)


@cache
def several() -> Selected:
    """Of sweeps over different systems, most of which were not measured on most models."""
    folders = [REFERENCE / f"{name}.jsonl.gz" for name in ("overview", "ios", "ios-pruning", "tuned")]
    return Selection(read(folders)).only(models=["nasnet", "inception_v3", "bert", "squeezenet_bypass"])


@cache
def launched() -> Selected:
    """One model at several batches, under systems of which one has a long label."""
    return Selection(read([REFERENCE / "opara.jsonl.gz"])).only(
        models=["googlenet"], systems=["opara", DEPTH_FIRST.label, "opara (launch_order=reverse)"]
    )


def changed(model: str, system: str, **new: Any) -> Selected:
    """The reference at batch 1 with something of one record replaced."""
    own = model, system
    return Selection([replace(r, **new) if name_of(r) == own else r for r in measured().records])


def name_of(record: Record) -> tuple[str, str]:
    return record.cell.model.name, record.cell.system.label


laid_out = WeakSet[Figure]()  # a test looks at a figure several times, and laying it out takes half a second


def lay_out(figure: Figure) -> None:
    """Give each part of a figure its place, once."""
    if figure not in laid_out:
        figure.draw_without_rendering()
        laid_out.add(figure)


def texts(figure: Figure) -> list[Text]:
    """The words that a figure shows, once it is laid out, without the ticks that lie outside of an axis."""
    lay_out(figure)
    visible_texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]  # type: ignore[attr-defined]
    hidden: set[int] = set()
    for axes in figure.axes:
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            spare = axis.majorTicks[len(axis.get_major_ticks()) :]  # of an earlier layout
            hidden |= {id(label) for tick in spare for label in (tick.label1, tick.label2)}
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not min(low, high) <= tick.get_loc() <= max(low, high) or not axes.axison:
                    hidden |= {id(tick.label1), id(tick.label2)}
    return [t for t in visible_texts if id(t) not in hidden]  # type: ignore[misc]


def drawn(figure: Figure) -> str:
    return "\n".join(t.get_text() for t in texts(figure))


def check_words(figure: Figure) -> None:
    """In print: no word is under 5.5 points, none is cut off at the paper's edge, and none lies on another."""
    shown = texts(figure)
    boxes = [(t.get_text(), t.get_window_extent()) for t in shown]
    edge = figure.bbox
    for text, box in boxes:
        assert box.x0 >= edge.x0 - 1 and box.x1 <= edge.x1 + 1 and box.y0 >= edge.y0 - 1 and box.y1 <= edge.y1 + 1, text
    assert min(t.get_fontsize() for t in shown) >= 5.5
    for (a, x), (b, y) in combinations(boxes, 2):
        wide, tall = min(x.x1, y.x1) - max(x.x0, y.x0), min(x.y1, y.y1) - max(x.y0, y.y0)
        assert wide < 2 or tall < 2, f"{a!r} lies on {b!r}"


def heights(monkeypatch: pytest.MonkeyPatch, draw: Callable[[], Any]) -> dict[tuple[str, str], bars.Bar]:
    """What a chart of bars is given to draw, by model and system."""
    bars_by_cell: dict[tuple[str, str], bars.Bar] = {}
    original = bars.draw_bars

    def spy(m: Any, rows: Any, systems: Any, bar: Any, *more: Any, **named: Any) -> Figure:
        bars_by_cell.update({(row[0], s.label): b for row in rows for s in systems if (b := bar(row, s)) is not None})
        return original(m, rows, systems, bar, *more, **named)

    for module in (speedup, sm_efficiency):
        monkeypatch.setattr(module, "draw_bars", spy)
    draw()
    return bars_by_cell


def points(monkeypatch: pytest.MonkeyPatch, draw: Callable[[], Any]) -> dict[tuple[str, str], Any]:
    """The same of a chart of dots."""
    dots_by_cell: dict[tuple[str, str], Any] = {}
    original = dots.draw_dots

    def spy(m: Any, rows: Any, systems: Any, of: Any, *more: Any, **named: Any) -> Figure:
        dots_by_cell.update({(row[0], s.label): of(row, s) for row in rows for s in systems if of(row, s)})
        return original(m, rows, systems, of, *more, **named)

    for module in (limits, memory, search):
        monkeypatch.setattr(module, "draw_dots", spy)
    draw()
    return dots_by_cell
