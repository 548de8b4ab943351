"""One cell inside its own process: the model, and the system made ready for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from time import perf_counter

import torch
from torch import nn

import models
import systems
from models.calibration import calibrate
from results.calls import Correctness
from results.cell import Cell
from results.limits import Limits
from results.statistics import Samples
from results.warning import Warning
from results.words import one_line
from runners.measurements import correctness
from systems.base import Compilation, Prepared, Unsupported
from systems.notice import Notice
from systems.scheduling.execution.scheduled import Scheduled
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.schedule import Schedule

from . import behaviour
from .arithmetic import set_arithmetic
from .calls import sample, synchronize, warm_up
from .loading import load

AWAKE_SECONDS = 0.3
ROUND_SECONDS, MOST_ROUND_CALLS = 0.15, 60


class Session:
    """A cell that is loaded, and can be prepared, compared with eager, and called."""

    is_training = False  # the form of the model
    is_clock_real = True  # so that what else the machine does slows it
    wake_calls = 2  # before a turn in the rounds
    round_calls = 10  # of a turn, at least

    def __init__(self, cell: Cell, visible_device: str, phase: Callable[[str], None]):
        """Load the system and the model.

        Args:
            cell: what was asked for.
            visible_device: the device as CUDA_VISIBLE_DEVICES and NVML name it.
            phase: told what is being done now.

        Raises:
            models.BadModel, systems.base.BadOption: an option is wrong.
            Unsupported: before the model is loaded for nothing.
        """
        self.cell, self.visible_device, self.phase = cell, visible_device, phase
        self.device = cell.device
        self.system = systems.load(cell.system.name, **cell.system.options)
        self.system.report = lambda message: phase(f"preparing: {message}")
        if reason := self.system.unsupported(self.device):
            raise Unsupported(reason)
        conditions = cell.conditions
        set_arithmetic(conditions.precision, conditions.algorithms)
        phase("loading the model")
        torch.manual_seed(conditions.seed)
        loaded = load(cell.model, cell.batch, is_training=self.is_training, device=self.device)
        if loaded.drawn is None and not self.is_training:
            calibrate(loaded.module, loaded.inputs)  # as the zoo is
        self.model = models.place(loaded, device=self.device, precision=conditions.precision, layout=conditions.layout)
        self.inputs = self.model.fresh_inputs(conditions.seed)
        if self.device == "cuda" and torch.backends.cudnn.benchmark:
            phase("choosing algorithms")
            self._choose_algorithms()
        self._prepared: Prepared | None = None
        self._is_warm = False
        self.notices: tuple[Warning, ...] = ()
        self.known_limits: Limits | None = None  # the model's, if a sibling has measured them
        self.undisturbed_ms: float | None = None  # of a call before any profiler

    def _choose_algorithms(self) -> None:
        """Have cuDNN choose its algorithms on a GPU that is awake, in the same way for every system.

        It takes the fastest of one timing each. A system may leave the GPU idle (its clock low) for seconds, while it traces
        or compiles, before its first run.
        """
        awake = torch.randn(4096, 4096, device=self.device)
        begin = perf_counter()
        while perf_counter() - begin < AWAKE_SECONDS:
            awake = torch.tanh(awake @ awake)
            torch.cuda.synchronize()
        del awake
        for _ in range(3):
            self._run_eagerly()
        torch.cuda.synchronize()

    @torch.no_grad()
    def _run_eagerly(self) -> None:
        """What cuDNN is to choose algorithms for, and what a model does that no system is asked about."""
        self.model.module(*self.inputs)

    @property
    def module(self) -> nn.Module:
        return self.model.module

    @property
    def prepared(self) -> Prepared:
        assert self._prepared is not None, "prepare comes first"
        return self._prepared

    @property
    def schedule(self) -> Schedule | None:
        """What the prepared system runs, where it has a schedule."""
        return self.prepared.schedule if isinstance(self.prepared, Scheduled) else None

    @property
    def compilation(self) -> Compilation | None:
        """What a compiler says of its work."""
        return self.prepared.compilation

    @property
    def program(self) -> Program | None:
        """The module as captured, where the prepared system captures operators."""
        return self.prepared.program if isinstance(self.prepared, Scheduled) else None

    @property
    def is_rewritten(self) -> bool:
        """Have passes made other operators of the model's?"""
        schedule = self.schedule
        return schedule is not None and any(row.kind != schedule.system for row in schedule.decisions)

    @property
    def is_captured(self) -> bool:
        """Is a call one replay of one CUDA Graph?"""
        return self.prepared.is_captured

    @property
    def streams(self) -> int:
        """The streams that a call's operators run on; one where the prepared system has no schedule."""
        return self.schedule.stream_count if self.schedule is not None else 1

    @property
    def operator_threads(self) -> int | None:
        """The threads that one operator has on a CPU."""
        if self.device != "cpu":
            return None
        return self.prepared.operator_threads or torch.get_num_threads()

    @property
    def system_bytes(self) -> dict[str, int]:
        """What the system knows of its memory, bytes by name."""
        return self.prepared.memory

    def learn(self) -> float | None:
        """Have the system learn, where it has something to learn; returns the seconds. Raises Unsupported."""
        if not self.system.learns:
            return None
        self.phase("learning")
        self.system.report = lambda message: self.phase(f"learning: {message}")
        start = perf_counter()
        with self._notices_kept(), behaviour.refused_by_the_system(self._run_eagerly):
            self.system.learn(self.module, self.inputs)
        synchronize(self.device)
        return perf_counter() - start

    def prepare(self) -> float:
        """Make the system ready; returns the seconds. Raises Unsupported."""
        self.phase("preparing")
        start = perf_counter()
        with self._notices_kept(), behaviour.refused_by_the_system(self._run_eagerly):
            self._prepared = self._made_ready()
        synchronize(self.device)
        return perf_counter() - start

    def before_preparing(self) -> None:
        """What has to be done with the module before the system has it."""

    def _made_ready(self) -> Prepared:
        return self.system.prepare(self.module, self.inputs)

    @contextmanager
    def _notices_kept(self) -> Iterator[None]:
        """Keep the notices that are given within, for the record; other warnings go where they would."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", Notice)
            yield
        texts = [one_line(str(warning.message)) for warning in caught if issubclass(warning.category, Notice)]
        self.notices += tuple(Warning("notice", {"text": text}) for text in dict.fromkeys(texts))
        for warning in caught:
            if not issubclass(warning.category, Notice):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)

    def call(self) -> object:
        """One call of the prepared system."""
        return self.prepared(*self.inputs)

    def compare(self) -> Correctness:
        """Compare the prepared system with eager, on inputs that neither has seen."""
        conditions = self.cell.conditions
        reason = behaviour.not_comparable(self.module, self.inputs, behaviour.SAME[conditions.precision])
        seeds = range(conditions.seed + 1, conditions.seed + 1 + correctness.DRAWS)
        draws = [correctness.accepted(self.module, self.model.trial_inputs(seed)) for seed in seeds]
        compared = correctness.measure(self.module, self.prepared, draws, conditions.precision)
        return compared if reason is None else replace(compared, is_correct=False, is_checked=False, reason=reason)

    def settle(self) -> tuple[Warning, ...]:
        """Bring every CUDA Graph, ours and those within libraries, into the state in which the rounds find it.

        Returns a warning where that cannot be.
        """
        if self.device == "cuda":
            from systems.scheduling.execution.context_switch import switch_contexts

            if not switch_contexts(torch.device("cuda", torch.cuda.current_device())):
                return (Warning("no_second_context"),)
        return ()

    def warm_up(self) -> int:
        """Call until calls are steady, unless they are; returns how many calls that took."""
        if self._is_warm:
            return 0
        self._is_warm = True
        return self._warm_up()

    def _warm_up(self) -> int:
        return warm_up(self.call, self.device)

    def round(self) -> Samples:
        """One turn in the interleaved rounds: host milliseconds of a few calls, after some to wake up."""
        for _ in range(self.wake_calls):
            self.call()
        return tuple(sample(self.call, self.device, self.round_calls, ROUND_SECONDS, MOST_ROUND_CALLS))

    def time_undisturbed(self) -> None:
        """Note the milliseconds of a call, before any profiler is in this process."""
        if self.undisturbed_ms is None:
            times_ms = sample(self.call, self.device, self.round_calls, ROUND_SECONDS, MOST_ROUND_CALLS)
            self.undisturbed_ms = median(times_ms)
