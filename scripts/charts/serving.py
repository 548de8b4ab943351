"""Latency over throughput, as figure 4.8 of the dissertation draws it: a line for each system and largest batch.

A few systems share a panel, where each has a colour, a dash and a fill of its own. More would lie on each other: each has a
panel then, over the lines of all others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

import conf
from results.cell import Choice
from results.record import Record
from results.selection import NoResults, Place, Selection

from .chart import Chart
from .names import written
from .style import COLOURS, FAINT, FONT, MARKERS, PAGE, WORDS, above, below, broken, house, set_log, width

ACROSS = 2  # panels
HEIGHT, LOW = 2.8, 1.6  # inches of a panel of several systems, and of one
FOOT = 0.06  # of the axis, under the marks of what falls behind
BESIDE = 0.3  # inches between panels
MOST = 4  # systems of a panel
SIZE = "max_batch_size"
RING: dict[str, Any] = {"linestyle": "none", "markersize": 8, "markerfacecolor": "none"}  # of what was measured
CROSS: dict[str, Any] = {"linestyle": "none", "marker": "x", "markersize": 4}  # of a rate without a latency
DASHES, FILLS = ("-", "--", ":", "-."), ("full", "none", "left", "bottom")  # of the systems of a panel, and of their marks
SLO: dict[str, Any] = {"color": FAINT, "linewidth": 0.8, "linestyle": (0, (1, 1))}
OTHERS: dict[str, Any] = {"color": "0.8", "linewidth": 0.8, "zorder": 1}  # lines of what has another panel
COSTS = re.compile(r"costs of one part measured on ([^,]*)")  # the GPU, in the source of what is simulated


@dataclass(frozen=True)
class Point:
    """A trace, or several at one rate.

    Args:
        throughput: requests finished a second.
        latency_ms: median normalized; None where requests came faster than they were finished.
    """

    throughput: float
    latency_ms: float | None


def draw(measured: Selection, real: Mapping[Place, Sequence[Point]] | None = None) -> Chart:
    """Median normalized latency over requests a second, both logarithmic, a panel for each model.

    Args:
        measured: the records.
        real: of simulated ones, what engines did, by model, batch and system; those of systems without a line are left out.

    Raises:
        NoResults: nothing was served at a rate.
    """
    lines = {model: _lines(measured, model) for model in measured.models}
    lines = {model: of for model, of in lines.items() if any(p.latency_ms for points in of.values() for p in points)}
    if not lines:
        raise NoResults("nothing was served at a rate that it keeps up with")
    slos = {model: slo for model in lines if (slo := _slo_ms(measured, model)) is not None}
    drawn = [system for system in measured.systems if any(system in curves for curves in lines.values())]
    choices = [system.choice for system in drawn]
    systems = sorted(drawn, key=lambda system: (choices.index(system.choice), _by_numbers(_name(system)), size_of(system)))
    shared = _shared(systems)
    groups = _groups(systems, shared)
    is_apart = len(groups) > 1
    panels = [(model, group) for model in sorted(lines) for group, own in groups.items() if lines[model].keys() & set(own)]
    across = min(ACROSS if width() == PAGE or is_apart else 1, len(panels))
    down = -(-len(panels) // across)
    rings = {model: _rings(lines[model], real or {}, model) for model in lines}
    with house():
        size = width(), (LOW if is_apart else HEIGHT) * down + 0.5
        figure, grid = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
        for number, (axes, (model, group)) in enumerate(zip(grid.flat, panels, strict=False)):
            _panel(axes, lines[model], systems, groups[group], slos.get(model), rings[model])
            title = ", ".join([*([model] if len(lines) > 1 else []), *([group] if group else [])])
            axes.set_title("\n".join(broken(written(title), width() / across - BESIDE, FONT, (WORDS,))), pad=3)
            if not is_apart or number + across >= len(panels):
                axes.set_xlabel("requests a second" if is_apart else "requests finished a second")
            if not is_apart or number % across == 0:
                axes.set_ylabel("ms a token" if is_apart else "normalized latency, ms a token")
        for axes in list(grid.flat)[len(panels) :]:
            axes.set_axis_off()
        marks = _markers_of(systems)
        if any(rings.values()):
            marks.append(Line2D([], [], label="measured", color=FAINT, marker="o", **RING))
        if any(point.latency_ms is None for curves in lines.values() for points in curves.values() for point in points):
            marks.append(Line2D([], [], label="falls behind", color=FAINT, **CROSS))
        if slos:
            limits = ", ".join(f"{slo_ms:.3g}" for _, slo_ms in sorted(slos.items()))
            marks.append(Line2D([], [], label=f"SLO {limits} ms a token", **SLO))
        setting = ", ".join([measured.setting.label, *_costs(measured), *(lines if len(lines) == 1 else []), *shared])
        if is_apart:
            above(figure, [*marks, Line2D([], [], label="the other systems", **OTHERS)], setting)
        else:
            above(figure, _lines_of(systems, shared), setting)
            if marks:
                below(figure, marks)
    caption = (
        "Median normalized latency (end to end, over the tokens generated) over the requests finished a second, a line for "
        "each largest batch. A panel of one system has its own scale of them. A cross under the axis is a rate that the "
        "system did not keep up with: it has a throughput and no latency."
    )
    caption += " The dotted line is twice what a request takes alone." if slos else ""
    if any(rings.values()):
        caption += " Large rings are measured on an engine, with traces of their own. All else is simulated."
    return Chart("serving", "Serving: latency over throughput", caption, figure)


def _groups(systems: Sequence[Choice], shared: Sequence[str]) -> dict[str, list[Choice]]:
    """The systems of each panel by its name, which is "" where all have one."""
    of_name: dict[str, list[Choice]] = {}
    for system in systems:
        of_name.setdefault(_name(system, shared), []).append(system)
    return of_name if len(of_name) > MOST else {"": list(systems)}


def _costs(measured: Selection) -> list[str]:
    """The GPU that the costs of simulated iterations were measured on."""
    parts = [part for record in measured.records for part in record.measured.values()]
    sources = {quantity.source or "" for part in parts for quantity in part.quantities}
    return sorted({f"costs of {match[1]}" for source in sources if (match := COSTS.search(source))})


def _lines(measured: Selection, model: str) -> dict[Choice, list[Point]]:
    """The points of each system, by throughput; of a rate that was served again the newest counts."""
    points: dict[Choice, dict[float, Point]] = {}
    for record in measured.records:
        if record.cell.model.label == model and record.is_ok:
            system = next(s for s in measured.systems if s.key == record.cell.system.key)
            for rate, point in _points(record).items():
                points.setdefault(system, {}).setdefault(rate, point)
    return {system: sorted(of.values(), key=lambda point: point.throughput) for system, of in points.items()}


def _rings(
    lines: Mapping[Choice, Sequence[Point]], real: Mapping[Place, Sequence[Point]], model: str
) -> dict[Choice, list[Point]]:
    """Of the systems that have lines, the points with a latency that were measured."""
    of_system = {system: real.get((model, 1, system.key), ()) for system in lines}
    return {system: stable for system, of in of_system.items() if (stable := [point for point in of if point.latency_ms])}


def _points(record: Record) -> dict[float, Point]:
    """By rate of arrivals."""
    if (capacity := record.measured.get("capacity")) is not None:
        samples = capacity.samples
        stable = zip(samples["stable_rate"], samples["stable_throughput"], samples["normalized_ms"], strict=True)
        unstable = zip(samples["unstable_rate"], samples["unstable_throughput"], strict=True)
        return {rate: Point(throughput, latency) for rate, throughput, latency in stable} | {
            rate: Point(throughput, None) for rate, throughput in unstable
        }
    if record.serving is None or record.cell.runner.get("concurrency"):
        return {}
    by_name = {quantity.name: quantity.value for quantity in record.serving.quantities}
    throughput = by_name.get("request_throughput")
    rate = record.cell.runner.get("rate")
    if throughput is None or not isinstance(rate, float):
        return {}
    return {rate: Point(throughput, by_name.get("normalized_p50_ms"))}


def _slo_ms(measured: Selection, model: str) -> float | None:
    """The largest that was asked for of a model's systems."""
    values = [
        quantity.value
        for record in measured.records
        if record.cell.model.label == model and (part := record.measured.get("capacity")) is not None
        if (quantity := part.quantity("slo_ms")) is not None and quantity.value is not None
    ]
    return max(values, default=None)


def _panel(
    axes: Axes,
    lines: dict[Choice, list[Point]],
    systems: Sequence[Choice],
    own: Sequence[Choice],
    slo_ms: float | None,
    rings: Mapping[Choice, Sequence[Point]],
) -> None:
    points = [point for of in (*lines.values(), *rings.values()) for point in of]
    latencies = [point.latency_ms for point in points if point.latency_ms]
    low, high = min(latencies) / 1.5, max(*latencies, slo_ms or 0.0) * 1.5
    for system, of in lines.items():
        stable = [(point.throughput, point.latency_ms) for point in of if point.latency_ms]
        xs, ys = [throughput for throughput, _ in stable], [latency_ms for _, latency_ms in stable]
        if system not in own:
            axes.plot(xs, ys, **OTHERS)
            continue
        style = _style(system, systems, own)
        axes.plot(xs, ys, **style)
        lost = [point.throughput for point in of if not point.latency_ms]
        axes.plot(lost, [low * (high / low) ** FOOT] * len(lost), color=style["color"], **CROSS)
    for system in [system for system in own if system in rings]:
        style = _style(system, systems, own)
        xs, ys = [p.throughput for p in rings[system]], [p.latency_ms or 0.0 for p in rings[system]]
        axes.plot(xs, ys, color=style["color"], marker=style["marker"], **RING)
    throughputs = [point.throughput for system in own for point in (*lines.get(system, ()), *rings.get(system, ()))]
    set_log(axes, "x", min(throughputs) / 1.3, max(throughputs) * 1.3)
    set_log(axes, "y", low, high)
    if slo_ms:
        axes.axhline(slo_ms, **SLO)


def _style(system: Choice, systems: Sequence[Choice], own: Sequence[Choice] = ()) -> dict[str, Any]:
    """A system has a colour, a dash and a fill among `own`, those of its panel (all if empty), and each of the largest
    batches of all systems a marker.
    """
    names = list(dict.fromkeys(_name(other) for other in own or systems))
    sizes = sorted({size_of(other) for other in systems})
    number = names.index(_name(system))
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[number % len(DASHES)],
        "fillstyle": FILLS[number % len(FILLS)],
        "markerfacecoloralt": "white",
        "marker": ("o", "s", "^", "D", "v", "P", *MARKERS)[sizes.index(size_of(system)) % (6 + len(MARKERS))],
        "linewidth": 1.0,
        "markersize": 4.5,
    }


def size_of(system: Choice) -> int:
    """Its largest batch, its file's where that is not changed; 0 where it has no such option."""
    of_file = conf.options("system", system.choice) if system.choice in conf.choices("system") else {}
    return int(system.options.get(SIZE) or of_file.get(SIZE) or 0)


def _shared(systems: Sequence[Choice]) -> list[str]:
    """The options that each of several systems has, which the title says once."""
    options = [_options(system) for system in systems]
    return [option for option in options[0] if all(option in other for other in options[1:])] if len(systems) > 1 else []


def _lines_of(systems: Sequence[Choice], shared: Sequence[str]) -> list[Line2D]:
    """A line for each system; with its largest batch where all have that one."""
    if _have_one_size(systems):
        return [Line2D([], [], label=written(_label(system, shared)), **_style(system, systems)) for system in systems]
    lines = {_name(system, shared): _style(system, systems) | {"marker": "o"} for system in systems}
    return [Line2D([], [], label=written(name), **style) for name, style in lines.items()]


def _markers_of(systems: Sequence[Choice]) -> list[Line2D]:
    """A marker for each largest batch where there are several."""
    if _have_one_size(systems):
        return []
    markers = {size_of(system): _style(system, systems)["marker"] for system in sorted(systems, key=size_of)}
    look: dict[str, Any] = {"color": FAINT, "linestyle": "none", "markersize": 4.5}
    return [Line2D([], [], label=f"batches up to {size}", marker=marker, **look) for size, marker in markers.items()]


def _have_one_size(systems: Sequence[Choice]) -> bool:
    return len({size_of(system) for system in systems}) == 1


def _by_numbers(name: str) -> list[tuple[str, int]]:
    """A key that has size=16 behind size=2."""
    return [(words, int(number or 0)) for words, number in re.findall(r"([^0-9]*)([0-9]*)", name)]


def _label(system: Choice, shared: Sequence[str]) -> str:
    name = _name(system, shared)
    return f"{name}, batches up to {size_of(system)}" if size_of(system) else name


def _name(system: Choice, shared: Sequence[str] = ()) -> str:
    """Without its largest batch, and what others share."""
    rest = ", ".join(option for option in _options(system) if option not in shared)
    return f"{system.choice} ({rest})" if rest else system.choice


def _options(system: Choice) -> list[str]:
    """What is changed but its largest batch, as "key=value"."""
    return [f"{key}={system.options[key]}" for key in system.changed if key != SIZE]
