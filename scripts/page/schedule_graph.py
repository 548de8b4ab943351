"""A schedule as a picture: operators in layers from top to bottom, a lane for each live stream, streams as colours."""

import colorsys
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path

from conf.text import counted
from results.schedule import AFTER, BEFORE, gained_in_whole
from results.schedule_file import NoSchedule, Operator, ScheduleFile

LAYER, LANE = 26, 108  # pixels between layers, and between lanes
BOX = 92, 18  # pixels, of an operator
LETTERS = 14  # of an operator's name in its box
MARGIN, STAGES = 8, 58  # pixels around the picture, and beside it where it has stages
# Lines: those that waits or streams order anyway, those along a stream, and waits.
FAINT, SOLID, WAIT = 'stroke="#c4c4c4"', 'stroke="#666"', 'stroke="#111" stroke-dasharray="4 2"'
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
            words.append(counted(len(schedule.stages), "stage"))
        if schedule.merges:
            words.append(counted(len(schedule.merges), "merge"))
        if schedule.search.seconds is not None:
            words.append(f"found in {schedule.search.seconds * 1e3:,.1f} ms")
        if schedule.limits is not None:
            words += [f"{name} {ms:.3f} ms" for name, ms in schedule.limits.bounds.items()]
        return ", ".join(words)

    @property
    def gains(self) -> list[str]:
        """What each decision gained in the whole, in words."""
        rows = gained_in_whole(self.schedule.decisions)
        return [f"{r.pattern}: {r.milliseconds[BEFORE]:.3f} to {r.milliseconds[AFTER]:.3f} ms, {r.gain:.3f}x" for r in rows]

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

        def place(v: int) -> tuple[int, int]:
            return left_edge + LANE * lane[operators[v].stream] + LANE // 2, MARGIN + LAYER * layer[v] + LAYER // 2

        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="schedule" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" font-family="sans-serif" font-size="10">',
            f"<title>{escape(self.title)}: {escape(self.summary)}</title>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *self._bands(layer, width),
        ]
        lines: dict[str, list[str]] = {FAINT: [], SOLID: [], WAIT: []}
        for u, v in set(schedule.edges) | waits:
            look = WAIT if (u, v) in waits else SOLID if operators[u].stream == operators[v].stream else FAINT
            lines[look].append(_line(place(u), place(v)))
        parts += [f'<path fill="none" {look} d="{"".join(sorted(drawn))}"/>' for look, drawn in lines.items() if drawn]
        streams: dict[int, list[Operator]] = {}
        for o in operators.values():
            streams.setdefault(o.stream, []).append(o)
        for stream, members in sorted(streams.items()):
            fill, ink = colour(stream)
            parts.append(f'<g class="stream" fill="{fill}">')
            parts += [_box(place(o.id), o, merged.get(o.id)) for o in members]
            parts.append(f'<g fill="{ink}" text-anchor="middle" pointer-events="none">')
            parts += [_name(place(o.id), o) for o in members]
            parts.append("</g></g>")
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


def _box(at: tuple[int, int], o: Operator, merge: int | None) -> str:
    (x, y), (wide, tall) = at, BOX
    about = f"{o.id}: {o.target}, stream {o.stream}, launch {o.position}"
    if merge is not None:
        about += f", in merge {merge + 1}"
    border = "" if merge is None else ' stroke="black" stroke-width="2"'
    path = f"M{x - wide // 2} {y - tall // 2}h{wide}v{tall}h-{wide}z"
    return f'<path d="{path}"{border}><title>{escape(about)}</title></path>'


def _name(at: tuple[int, int], o: Operator) -> str:
    name = o.name if len(o.name) <= LETTERS else o.name[: LETTERS - 1] + "…"
    return f'<text x="{at[0]}" y="{at[1] + 4}">{escape(name)}</text>'


def _line(start: tuple[int, int], end: tuple[int, int]) -> str:
    """From the lower side of one box to the upper side of another."""
    (x0, y0), (x1, y1) = (start[0], start[1] + BOX[1] // 2), (end[0], end[1] - BOX[1] // 2)
    across, down = x1 - x0, y1 - y0
    if not across and down > LAYER:  # around the boxes between the two, which would hide it
        return f"M{x0 + BOX[0] // 2 - 6} {y0}c22 12 22 {down - 12} 0 {down}"
    if not across:
        return f"M{x0} {y0}v{down}"
    bend = max(6, down // 2)
    return f"M{x0} {y0}c0 {bend} {across} {down - bend} {across} {down}"
