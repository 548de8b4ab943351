"""Runs any schedule on a GPU without capturing it: every call launches every operator, as frameworks without graphs do."""

from typing import Any

import torch
from torch import Tensor

from systems.scheduling.graph.program import Program
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.verify import verify

from .cuda_streams import Event, Streams
from .scheduled import Scheduled

WARM_UP_RUNS = 2


class StreamExecutor(Scheduled):
    """Real streams and events, launched from Python by each call (what IOS's own engine does in C++).

    Every output is kept until all is launched: torch's allocator, which reuses memory within a stream, knows nothing of the
    other streams that read it. The streams begin after what the caller's stream has been given, and end before what it is
    given next, so that memory of one call is free for the next.

    Raises InvalidSchedule where the schedule fails verification.
    """

    def __init__(self, program: Program, schedule: Schedule):
        verify(program.graph, schedule)
        self.program, self.schedule = program, schedule
        self.device = program.device
        self.owned_streams: Streams | None = Streams(self.device)
        self.streams = self.owned_streams.take([False] * schedule.stream_count)
        self.events = {u: Event() for u in {u for u, _ in schedule.waits}}
        waits: dict[int, list[Event]] = {}
        for u, v in schedule.waits:
            waits.setdefault(v, []).append(self.events[u])
        self.steps = [
            (v, program.calls[v].launch, schedule.streams[v], waits.get(v, ()), self.events.get(v)) for v in schedule.order
        ]
        self.fork, self.joins = Event(), [Event() for _ in range(schedule.stream_count)]
        for _ in range(WARM_UP_RUNS):
            self(*program.examples)
        torch.cuda.synchronize(self.device)

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> Any:
        self.program.check(inputs)
        if self.owned_streams is None:
            raise RuntimeError("this executor is closed")
        self.program.derived.refresh()
        current = torch.cuda.current_stream(self.device).cuda_stream
        self.fork.record(current)
        handles, streams = [s.handle for s in self.streams], [s.torch for s in self.streams]
        for handle in handles:
            self.fork.block(handle)
        running = self.schedule.streams[self.schedule.order[0]]
        values: list[Any] = [None] * len(self.program.graph)
        with torch.cuda.stream(streams[running]):  # once: for each operator it would set a stream and set it back
            for v, launch, s, waits, event in self.steps:
                if s != running:
                    torch.cuda.set_stream(streams[s])
                    running = s
                for other in waits:
                    other.block(handles[s])
                values[v] = launch(values, inputs)
                if event is not None:
                    event.record(handles[s])
        for handle, join in zip(handles, self.joins, strict=True):
            join.record(handle)
            join.block(current)
        self.check_module()
        outputs = self.program.result(values, inputs)
        # Theirs is the memory of another stream, which may get it back as soon as the caller lets go of them.
        return self.program.unflatten([o.clone() if isinstance(o, Tensor) else o for o in outputs])

    def close(self) -> None:
        if self.owned_streams is not None:
            torch.cuda.synchronize(self.device)
            for event in (self.fork, *self.joins, *self.events.values()):
                event.close()
            self.owned_streams.close()
            self.owned_streams = None
