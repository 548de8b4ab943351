"""Schedules of one captured model, and what each takes on the device, beside each of its operators alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from random import Random
from statistics import median
from typing import TYPE_CHECKING

import torch

from conf.text import counted
from runners.machine.installation import ROOT
from runners.machine.manifest import state
from systems.ios.merges import merged_operators
from systems.profiling.alone import operators_alone
from systems.profiling.intensity import moved_bytes
from systems.profiling.measurements import conditions
from systems.profiling.profile import OperatorProfile, Profile
from systems.profiling.profiler import capacity_of
from systems.scheduling.execution.arena import Arena
from systems.scheduling.execution.execute import execute
from systems.scheduling.execution.scheduled import Scheduled
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.lower import lower
from systems.scheduling.plans.schedule import Schedule, sequential
from systems.scheduling.scheduler import Scheduler
from systems.scheduling.simulate.measured_set import MeasuredSchedule, MeasuredSet, ProfiledProgram
from systems.scheduling.simulate.random_schedules import random_merges, random_schedules

from .calls import sample, synchronize

if TYPE_CHECKING:
    from systems.scheduling.execution.cuda_executor import CudaExecutor

REPLAYS, CALLS, WARM_UP_CALLS = 12, 6, 2
CAPTURED, MERGES = "captured", "merges"  # programs: the model's, and every merge that IOS may choose

Turn = Callable[[], AbstractContextManager[object]]


class PreparedSchedules:
    """Schedules of one program, each captured and ready to be measured.

    Args:
        model, batch: What the program is of.
        program: As captured.
        schedulers: By the names that their schedules get.
        num_random: Schedules that are drawn beside, spread over the program and its merged forms.
        num_merged: Forms of the program in which convolutions are merged, drawn too; fewer where there is nothing to merge.
        seed: Of what is drawn.
        report: Told what is being done now.

    Raises:
        Unsupported: The device does not run the program.
    """

    def __init__(
        self,
        model: str,
        batch: int,
        program: Program,
        schedulers: Mapping[str, Scheduler],
        num_random: int = 0,
        num_merged: int = 0,
        seed: int = 0,
        report: Callable[[str], None] = lambda _: None,
    ):
        self.model, self.batch, self.device, self.report = model, batch, program.device, report
        self.arena = Arena()  # of all, since they never run at once
        self.programs: dict[str, Program] = {CAPTURED: program}
        self.prepared: list[tuple[str, str, Scheduled]] = []  # (name, name of the program, what runs)
        for name, scheduler in schedulers.items():
            report(f"preparing {name}")
            executor = scheduler.prepare_program(program, self.arena)
            self.prepared.append((name, self._name(executor.program, name), executor))
        for name, form in self._forms(program, num_merged if num_random else 0, Random(seed)):
            self.programs[name] = form
        forms = [name for name in self.programs if name == CAPTURED or name.startswith("merged")]
        share = -(-num_random // len(forms))
        for number, name in enumerate(forms):
            graph, count = self.programs[name].graph, min(share, num_random - number * share)
            for i, schedule in enumerate(random_schedules(graph, count, seed + number)):
                report(f"preparing {i + 1} of {count} random schedules of the {name} program")
                self.prepared.append(("random", name, execute(self.programs[name], schedule, self.arena)))
        if (merges := merged_operators(program)) is not None:
            self.programs[MERGES] = merges
        self.profiled: dict[str, ProfiledProgram] = {}
        self.replay_ms: list[list[float]] = [[] for _ in self.prepared]
        self.call_ms: list[float] = []

    def profile(self, turn: Turn = nullcontext) -> None:
        """Measure each operator of each program alone.

        Args:
            turn: What is entered while something runs, for a caller who shares the device.
        """
        known: dict[str, OperatorProfile] = {}
        for name, program in self.programs.items():
            self.report(f"profiling the {name} program")
            signatures = tuple(program.signature(v) for v in range(len(program.graph)))
            if not known.keys() >= set(signatures):
                known = operators_alone(program, turn) | known
            operators = tuple(
                replace(known[s], bytes_read=read, bytes_written=written)
                for v, s in enumerate(signatures)
                for read, written in [moved_bytes(program, v)]
            )
            on_cuda = self.device.type == "cuda"
            device = torch.cuda.get_device_name(self.device) if on_cuda else str(self.device)
            capacity = capacity_of(self.device) if on_cuda else None
            self.profiled[name] = ProfiledProgram(program.graph, Profile(device, signatures, operators, capacity))

    def measure(self) -> None:
        """Measure every schedule once more, each second time in the opposite order."""
        places = sorted(range(len(self.prepared)), reverse=len(self.replay_ms[0]) % 2 == 1)
        has_calls = bool(self.call_ms)
        for done, i in enumerate(places):
            self.report(f"measuring {done + 1} of {counted(len(places), 'schedule')}")
            executor = self.prepared[i][2]
            for _ in range(WARM_UP_CALLS):
                executor(*executor.program.examples)
            self.replay_ms[i].append(median(_replays(executor)))
            if not has_calls:
                call = _call(executor)
                self.call_ms.append(median(sample(call, self.device.type, CALLS)))

    def result(self) -> MeasuredSet:
        """What was measured so far."""
        schedules = tuple(
            MeasuredSchedule(
                name,
                form,
                _plain(name, executor.schedule),
                tuple(self.replay_ms[i]),
                self.call_ms[i],
                executor.schedule.search,
            )
            for i, (name, form, executor) in enumerate(self.prepared)
        )
        code = state(ROOT)
        return MeasuredSet(
            self.model, self.batch, conditions(self.device), self.profiled, schedules, code.commit, code.modified
        )

    def close(self) -> None:
        for _, _, executor in self.prepared:
            executor.close()

    def _forms(self, program: Program, count: int, random: Random) -> list[tuple[str, Program]]:
        forms = []
        for i in range(count):
            if merges := random_merges(program, random):
                forms.append((f"merged {i}", lower(program, replace(sequential(program.graph), merges=merges))[0]))
        return forms

    def _name(self, program: Program, otherwise: str) -> str:
        """The name of a program; a new one is entered under `otherwise`."""
        for name, known in self.programs.items():
            if known is program:
                return name
        self.programs[otherwise] = program
        return otherwise


def _plain(name: str, schedule: Schedule) -> Schedule:
    """The schedule without what its search knows."""
    return Schedule(schedule.graph, name, schedule.order, schedule.streams, schedule.waits)


def _call(executor: Scheduled) -> Callable[[], object]:
    return lambda: executor(*executor.program.examples)


def _replays(executor: Scheduled) -> list[float]:
    """Milliseconds of replays, all launched before the first wait; on a CPU, of calls."""
    if executor.program.device.type != "cuda":
        return sample(_call(executor), "cpu", REPLAYS)
    captured: CudaExecutor = executor  # type: ignore[assignment]
    synchronize("cuda")
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    captured.replay()
    events[0].record()
    for event in events[1:]:
        captured.replay()
        event.record()
    events[-1].synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(events)]
