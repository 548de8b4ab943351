"""A schedule as a picture: operators in layers from top to bottom, a lane for each live stream, streams as colours."""

import colorsys
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path

from results.schedule_file import NoSchedule, Operator, ScheduleFile
from results.words import counted

LAYER, LANE = 26, 108  # pixels between layers, and between lanes
BOX = 92, 17  # pixels, of an operator
LETTERS = 14  # of an operator's name in its box
MARGIN, STAGES = 8, 58  # pixels around the picture, and beside it where it has stages
GOLDEN_ANGLE = 137.50776405 / 360  # hues that far apart stay apart however many there are


@dataclass(frozen=True)
class ScheduleGraph:
    """A schedule with the places of its operators in a picture."""

    schedule: ScheduleFile

    @classmethod
    def read(cls, file: Path) -> "ScheduleGraph":
        """Raises NoSchedule where the file cannot be read or is no schedule."""
        return cls(ScheduleFile.read(file))

    @property
    def title(self) -> str:
        schedule = self.schedule
        return f"{schedule.model}, {schedule.system}, batch {schedule.batch}, {schedule.device}"

    @property
    def summary(self) -> str:
        schedule = self.schedule
        numbers = {"operator": len(schedule.operators), "stream": schedule.streams, "wait": len(schedule.waits)}
        operators, streams, waits = (counted(number, thing) for thing, number in numbers.items())
        words = [operators, f"width {schedule.width}", streams, waits]
        if schedule.stages:
            words.append(f"{len(schedule.stages)} stages")
        if schedule.merges:
            words.append(f"{len(schedule.merges)} merges")
        if schedule.search.seconds is not None:
            words.append(f"found in {schedule.search.seconds * 1e3:,.1f} ms")
        return ", ".join(words)

    def layers(self) -> dict[int, int]:
        """The layer of each operator, by id.

        Invariant: an operator lies below all that it waits for, so that no two operators of one stream share a layer. It
        waits for its producers, for the operator before it on its stream, and for every operator of an earlier stage.

        Raises:
            NoSchedule: these have a cycle.
        """
        operators = sorted(self.schedule.operators, key=lambda o: o.position)
        before: dict[int, set[int]] = {o.id: set() for o in operators}
        for u, v in (*self.schedule.edges, *self.schedule.waits):
            before[v].add(u)
        last: dict[int, int] = {}
        for o in operators:
            if (previous := last.get(o.stream)) is not None:
                before[o.id].add(previous)
            last[o.stream] = o.id
        stage = self.stage_of()
        layer: dict[int, int] = {}
        floor = 0  # below every earlier stage
        for _, members in sorted(by_stage(before, stage).items()):
            waiting = list(members)
            while waiting:
                ready = [v for v in waiting if before[v] <= layer.keys()]
                if not ready:
                    raise NoSchedule(f"the schedule of {self.title} has a cycle through the operator {waiting[0]}")
                for v in ready:
                    layer[v] = max([floor, *(layer[u] + 1 for u in before[v])])
                waiting = [v for v in waiting if v not in layer]
            floor = max(layer[v] for v in members) + 1
        return layer

    def stage_of(self) -> dict[int, int]:
        """The stage of each operator that is in one."""
        return {v: number for number, stage in enumerate(self.schedule.stages) for group in stage for v in group}

    def lanes(self, layer: dict[int, int]) -> dict[int, int]:
        """A lane for each stream, from its first operator to its last: of the free ones the nearest to its producers."""
        streams: dict[int, list[int]] = {}
        for o in self.schedule.operators:
            streams.setdefault(o.stream, []).append(o.id)
        stream = {o.id: o.stream for o in self.schedule.operators}
        spans = {s: (min(layer[v] for v in members), max(layer[v] for v in members)) for s, members in streams.items()}
        lane_of: dict[int, int] = {}
        free_from: list[int] = []  # by lane: the first layer at which it is free again
        for s in sorted(streams, key=lambda s: (spans[s][0], -spans[s][1])):
            first, last = spans[s]
            producers = [u for u, v in self.schedule.edges if stream[v] == s and stream[u] in lane_of and stream[u] != s]
            wish = sum(lane_of[stream[u]] for u in producers) / len(producers) if producers else 0.0
            free = [lane for lane, layer_ in enumerate(free_from) if layer_ <= first]
            lane = min(free, key=lambda lane: (abs(lane - wish), lane), default=len(free_from))
            free_from[lane : lane + 1] = [last + 1]
            lane_of[s] = lane
        return lane_of

    def to_svg(self) -> str:
        """The picture, an SVG element. Raises NoSchedule where the schedule has a cycle."""
        schedule = self.schedule
        layer = self.layers()
        lane = self.lanes(layer)
        operators = {o.id: o for o in schedule.operators}
        waits = set(schedule.waits)
        left_edge = MARGIN + (STAGES if schedule.stages else 0)
        width = left_edge + LANE * (max(lane.values(), default=0) + 1) + MARGIN
        height = 2 * MARGIN + LAYER * (max(layer.values(), default=0) + 1)
        merged = {v: number for number, merge in enumerate(schedule.merges) for v in merge}

        def place(v: int) -> tuple[float, float]:
            return left_edge + LANE * (lane[operators[v].stream] + 0.5), MARGIN + LAYER * (layer[v] + 0.5)

        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="schedule" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" font-family="sans-serif" font-size="10">',
            f"<title>{escape(self.title)}: {escape(self.summary)}</title>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *self._bands(layer, width),
        ]
        parts.append('<g fill="none" stroke="#666">')
        for u, v in sorted(set(schedule.edges) | waits, key=lambda pair: pair in waits):
            parts.append(_edge(place(u), place(v), (u, v) in waits, operators[u].stream == operators[v].stream))
        parts.append("</g>")
        for v, o in operators.items():
            parts.append(_operator(place(v), o, merged.get(v)))
        return "\n".join([*parts, "</svg>"])

    def _bands(self, layer: dict[int, int], width: int) -> Iterable[str]:
        """A band behind the operators of each stage, with its number."""
        stages: dict[int, list[int]] = {}
        for v, number in self.stage_of().items():
            stages.setdefault(number, []).append(layer[v])
        for number, members in sorted(stages.items()):
            top = MARGIN + LAYER * min(members)
            tall = LAYER * (max(members) - min(members) + 1)
            yield f'<rect x="0" y="{top}" width="{width}" height="{tall}" fill="{"#f0f0f0" if number % 2 else "#fafafa"}"/>'
            yield f'<text x="{MARGIN}" y="{top + 13}" fill="#555">stage {number + 1}</text>'


def by_stage(operators: Iterable[int], stage: dict[int, int]) -> dict[int, list[int]]:
    """The operators of each stage; an operator without a stage counts as of the first."""
    stages: dict[int, list[int]] = {}
    for v in operators:
        stages.setdefault(stage.get(v, 0), []).append(v)
    return stages


def colour(stream: int) -> tuple[str, str]:
    """The colour of a stream's boxes, and of the letters on them."""
    red, green, blue = colorsys.hls_to_rgb((0.58 + stream * GOLDEN_ANGLE) % 1, (0.72, 0.45, 0.6)[stream % 3], 0.6)
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}", "white" if dark else "black"


def _operator(at: tuple[float, float], o: Operator, merge: int | None) -> str:
    (x, y), (wide, tall) = at, BOX
    fill, ink = colour(o.stream)
    name = o.name if len(o.name) <= LETTERS else o.name[: LETTERS - 1] + "…"
    about = f"{o.id}: {o.name} ({o.target}), stream {o.stream}, launched as number {o.position}"
    border = 'stroke="black" stroke-width="2"' if merge is not None else 'stroke="none"'
    if merge is not None:
        about += f", in merge {merge + 1}"
    return (
        f'<g class="operator" data-stream="{o.stream}"><title>{escape(about)}</title>'
        f'<rect x="{x - wide / 2:g}" y="{y - tall / 2:g}" width="{wide}" height="{tall}" rx="3" fill="{fill}" {border}/>'
        f'<text x="{x:g}" y="{y + 3.5:g}" fill="{ink}">{escape(name)}</text></g>'
    )


def _edge(start: tuple[float, float], end: tuple[float, float], wait: bool, same_stream: bool) -> str:
    """A wait is dashed and dark, an edge along a stream solid, any other (which other waits already order) faint."""
    (x0, y0), (x1, y1) = (start[0], start[1] + BOX[1] / 2), (end[0], end[1] - BOX[1] / 2)
    bend = max(6.0, (y1 - y0) / 2)
    if x0 == x1 and y1 - y0 > LAYER:  # around the boxes between the two, which would hide it
        x0, x1 = x0 + BOX[0] / 2 - 6, x1 + BOX[0] / 2 - 6
        side = x0 + 22
        path = f"M{x0:g} {y0:g}C{side:g} {y0 + 12:g} {side:g} {y1 - 12:g} {x1:g} {y1:g}"
    else:
        path = f"M{x0:g} {y0:g}C{x0:g} {y0 + bend:g} {x1:g} {y1 - bend:g} {x1:g} {y1:g}"
    look = "" if same_stream else ' stroke="#c4c4c4"'
    if wait:
        look = ' stroke="#111" stroke-dasharray="4 2"'
    return f'<path d="{path}"{look}/>'
