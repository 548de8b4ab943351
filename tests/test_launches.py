"""In what order, on which streams and behind what executors of a GPU launch operators."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_executors import example

from systems.scheduling.execution import cuda_executor, stream_executor
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.launch_order import breadth_first
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.stream_assignment import assign_streams
from systems.scheduling.plans.verify import verify


class Device:
    """In the place of a GPU's streams and events: what each stream is known to have behind it, and what ran where."""

    def __init__(self) -> None:
        self.current = "caller's"
        self.behind: dict[str, set[int]] = {"caller's": set()}
        self.launched: list[tuple[int, str]] = []

    def use(self, stream: str) -> None:
        self.current = stream

    @contextmanager
    def using(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def streams(self, device: torch.device) -> SimpleNamespace:
        def take(have_workspace: list[bool]) -> list[SimpleNamespace]:
            names = [f"stream {i}" for i in range(len(have_workspace))]
            self.behind.update((name, set()) for name in names)
            return [SimpleNamespace(handle=name, torch=name) for name in names]

        return SimpleNamespace(take=take, close=lambda: None)

    def event(self) -> SimpleNamespace:
        seen: set[int] = set()
        return SimpleNamespace(
            record=lambda stream: seen.update(self.behind[stream]),
            block=lambda stream: self.behind[stream].update(seen),
            close=lambda: None,
        )

    def launching(self, program: Program) -> Program:
        """The program, whose operators must find on their stream what they read."""

        def launch(v: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            assert set(program.graph.producers[v]) <= self.behind[self.current]
            self.behind[self.current].add(v)
            self.launched.append((v, self.current))
            return function(*args, **kwargs)

        calls = [dataclasses.replace(c, function=partial(launch, v, c.function)) for v, c in enumerate(program.calls)]
        return Program(program.graph, calls, program.outputs, program.output_spec, program.examples)


def reordered(program: Program) -> Schedule:
    """Several streams, launched in another order than that of capture."""
    schedule = assign_streams(program.graph)
    schedule = dataclasses.replace(schedule, order=breadth_first(program.graph, [], []))
    verify(program.graph, schedule)
    assert schedule.stream_count > 1 and schedule.order != tuple(sorted(schedule.order))
    return schedule


def test_a_graph_is_captured_in_launch_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each operator on its stream, behind what it needs; in the end all is behind the stream that capture began on."""
    device = Device()
    monkeypatch.setattr(cuda_executor, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "stream", device.using)
    module, inputs = example()
    program = capture(module, inputs)
    executor = object.__new__(cuda_executor.CudaExecutor)
    executor.program, executor.schedule = device.launching(program), reordered(program)
    executor.inputs, executor.arena = list(inputs), None
    streams = device.streams(torch.device("cuda")).take([False] * executor.schedule.stream_count)
    origin, none = streams[executor.schedule.streams[executor.schedule.order[0]]].handle, [()] * len(program.graph)
    allocator: Any = SimpleNamespace(operator=lambda *_: nullcontext())
    noted: list[tuple[int, Any]] = []
    priorities: Any = SimpleNamespace(operator=lambda v, handle: noted.append((v, handle)) or nullcontext())
    executor._launch_all(streams, {}, device.event(), origin, allocator, priorities, none, none)
    schedule = executor.schedule
    assert noted == [(v, streams[schedule.streams[v]].handle) for v in schedule.order]
    assert device.launched == [(v, f"stream {executor.schedule.streams[v]}") for v in executor.schedule.order]
    assert device.behind[origin] == set(range(len(program.graph)))


def test_without_a_graph_operators_are_launched_in_order_behind_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(stream_executor, "Streams", device.streams)
    monkeypatch.setattr(stream_executor, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "stream", device.using)
    monkeypatch.setattr(torch.cuda, "set_stream", device.use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=device.current))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    module, inputs = example()
    program = capture(module, inputs)
    schedule = reordered(program)
    prepared = stream_executor.StreamExecutor(device.launching(program), schedule)
    device.launched.clear()
    for got, expected in zip(prepared(*inputs).values(), module(*inputs).values(), strict=True):
        torch.testing.assert_close(got, expected)
    assert device.launched == [(v, f"stream {schedule.streams[v]}") for v in schedule.order]
    assert device.current == "caller's" and device.behind["caller's"] == set(range(len(program.graph)))
    prepared.close()
    with pytest.raises(RuntimeError, match="closed"):
        prepared(*inputs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_without_a_graph_a_gpu_agrees_with_the_module() -> None:
    module, inputs = example("cuda")
    program = capture(module, inputs)
    prepared = stream_executor.StreamExecutor(program, assign_streams(program.graph))
    before = torch.cuda.current_stream()
    for _ in range(3):
        inputs = tuple(torch.randn_like(x) for x in inputs)
        for got, expected in zip(prepared(*inputs).values(), module(*inputs).values(), strict=True):
            torch.testing.assert_close(got, expected)
    assert torch.cuda.current_stream() == before
    prepared.close()
