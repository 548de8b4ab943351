"""Which streams of a schedule may be one where it runs."""

from collections.abc import Collection, Sequence

from .schedule import Schedule


def shared_streams(schedule: Schedule, streams: Collection[int], before: Sequence[int]) -> dict[int, int]:
    """For each of these streams the one in whose place it runs: its own, or one that ends before it begins.

    Invariant: no operator waits for more than without, since a stream's first operator comes after all of the other stream.

    Args:
        streams: of the schedule, those that may share.
        before: as `Schedule.happens_before` has it.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for v in schedule.order:
        first.setdefault(schedule.streams[v], v)
        last[schedule.streams[v]] = v
    places: dict[int, int] = {}
    ends: dict[int, int] = {}  # by place, the last operator of the stream that came to it last
    for stream, v in first.items():
        if stream in streams:
            places[stream] = next((place for place, end in ends.items() if before[v] >> end & 1), stream)
            ends[places[stream]] = last[stream]
    return places
