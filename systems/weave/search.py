"""Weave's search: from the passes' own decisions, one change at a time, each held against the best so far in turn."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from time import perf_counter
from typing import TypeAlias

from conf.text import counted, first_line
from systems.preparing import collector_spared
from systems.scheduling.decision import Decision
from systems.scheduling.execution.arena import Arena
from systems.scheduling.execution.execute import execute
from systems.scheduling.execution.scheduled import Scheduled
from systems.scheduling.graph.program import Program
from systems.scheduling.graph.structure import weights
from systems.scheduling.plans.launch_early import early_operators
from systems.scheduling.plans.lower import lower
from systems.scheduling.plans.priorities import PRIORITIES, has_priorities
from systems.scheduling.plans.schedule import Schedule

from . import changes
from .candidate import Candidate
from .precision import Precision, Rewrite, in_words
from .state import Gain, State
from .stream_plans import SEARCHED, STREAM_PLANS
from .trials import Holder, in_turn, milliseconds

MARGIN = 0.995  # of the best so far that a change has to stay below; less may be scatter
KEPT = 0.1  # of the budget, for the stream plans that are tried last
SLOW = 1.05  # times the best so far, as simulated, from which on a change is not measured
ROOM = 2.0  # bytes of the candidates' memory over those that the first needs

Forecast: TypeAlias = Callable[[Program, Schedule], float]  # milliseconds, by simulation


class Search:
    """An anytime search: `state` always holds the best so far.

    Invariants:
        - It begins with what the other schedulers execute: the passes' own decisions, but for those of `changes.OWN` kinds.
          In the end the best is held against that once more, both captured anew, and goes where it is no faster: by the
          next search where one is killed before, within its budget or not.
        - Candidates lie in the same memory, but for those that need more than ROOM times the first's; none runs beside
          another. In memory of its own a graph of the same schedule is some percent faster or slower. That would decide.
        - A change is kept only where the whole graph with it is faster than without it, both called in turn.
        - No candidate is measured twice, in whatever process the search goes on, but for one whose gain was given up, and a
          last plan that a new best is held against.
        - By a forecast, a candidate is measured unless the forecast has it SLOW times the best so far. Early launches and
          priorities are always measured, since no simulation knows them.
        - Where forecasts stand in the place of measurements, no candidate is measured, none launches early, and none has
          priorities.
        - Stream plans that are SEARCHED for are tried last, with the best that single changes have led to: each decision
          after them would ask for another search. A share of the budget is KEPT for them. A longer search goes on from that
          best.
        - What is kept is as near to the program in fp64 as a cell has to be (`reference`). Of the passes' own decisions
          those go that are not. With other weights than those it is held to that again, before anything is tried.

    Args:
        captured: the program before any pass, whose output is eager's.
        rewrite: the program under given choices, and its decisions.
        budget_s: seconds that the search may take, with those of `state`.
        report: told what is tried.
        keep: called with the state after every trial, and in the end.
        state: to go on from.
        forecast: what a schedule would take; None for measuring every candidate.
        is_measuring: candidates are measured; else forecasts decide.
        may_profile: stream plans that are SEARCHED for are tried, which take a profiler.
        clock: seconds, of which the budget is.
    """

    def __init__(
        self,
        captured: Program,
        rewrite: Rewrite,
        budget_s: float,
        report: Callable[[str], None],
        keep: Callable[[State], None],
        state: State | None = None,
        forecast: Forecast | None = None,
        is_measuring: bool = True,
        may_profile: bool = True,
        clock: Callable[[], float] = perf_counter,
    ):
        self.forecast, self.is_measuring = forecast, is_measuring
        self.last_plans = SEARCHED if may_profile else {}
        self.kept_s = KEPT * budget_s if may_profile else 0.0
        self.captured, self.rewrite, self.inputs, self.budget_s = captured, rewrite, captured.examples, budget_s
        self.report, self.keep, self.state = report, keep, state or State()
        self.clock, self.begin = clock, clock() - self.state.seconds
        self.num_tried = 0
        self.arena = Arena(ROOM)
        self.programs: dict[tuple[tuple[str, str], ...], tuple[Program, list[Decision]]] = {}
        self.rewind, self.weights = captured.rewinding(), weights(captured)
        self.precision = Precision(captured, rewrite, report)

    def run(self) -> State:
        """Search until the budget is over or nothing is left; returns the state.

        It is held to the reference before any budget ends.
        """
        if self.state.first is None:
            self.state.first = self.state.best = self._beginning()
        self.state.is_complete = self.state.is_complete and self._are_last_tried
        is_held, is_over = self.state.weights == self.weights, self.state.is_complete or self._is_over()
        if is_held and is_over and self._is_confirmed:
            return self.state
        try:
            with collector_spared():  # each trial collects
                if not (is_held and is_over):
                    self._begin_precisely()
                if not (self.state.is_complete or self._is_over()):
                    self._search()
                elif not self._is_confirmed:  # it ended before it came to this, or was held to other weights
                    self._confirm()
        finally:  # also when it is interrupted: what a search has spent is spent
            self.state.seconds = self.clock() - self.begin
            self.keep(self.state)
        return self.state

    def _search(self) -> None:
        """Try one change after another, as long as there is time; again from the first where all gains are given up."""
        while not self.state.is_complete:
            are_all_tried = self._try_all()
            if are_all_tried or self._is_over():
                self.state.is_complete = (self._is_confirmed or self._confirm()) and are_all_tried
                if self._is_over():
                    break

    def _begin_precisely(self) -> None:
        """Require precision, and drop what costs it of what is known: before anything is tried, and with other weights."""
        self.precision.require(lambda: self._rewritten(Candidate())[0])
        if self.state.weights == self.weights:
            return
        state = self.state
        known = dict.fromkeys(each for each in (state.first, state.best, state.last) if each is not None)
        precise = {candidate: self._precise(candidate) for candidate in known}
        if any(candidate != other for candidate, other in precise.items()):
            state.first, state.best = precise[state.first or Candidate()], precise[state.best]
            state.last = precise[state.last] if state.last else None
            state.total, state.is_complete = None, False
            state.gains = state.gains if state.best != state.first else []
        state.weights = self.weights

    def _precise(self, candidate: Candidate) -> Candidate:
        """The candidate without those decisions of the passes that cost more precision than a cell may lose."""
        dropped = self.precision.dropped(dict(candidate.choices))
        words = map(in_words, dropped.values())
        self.state.dropped += [each for each in words if each not in self.state.dropped]
        return candidate.choose_all({place: decision.without for place, decision in dropped.items()})

    @property
    def _are_last_tried(self) -> bool:
        """Were all stream plans tried that come last?"""
        return all(self._last(name).key in self._known for name in self.last_plans)

    def _last(self, name: str) -> Candidate:
        return replace(self.state.best, stream_plan=name)

    @property
    def _known(self) -> set[str]:
        """Keys of the candidates that need no trial."""
        return self.state.ratios.keys() | (set() if self.is_measuring else self.state.simulated.keys())

    @property
    def _is_confirmed(self) -> bool:
        """Is there nothing to hold the best against, or was that done?"""
        return not self.is_measuring or self.state.chosen == self.state.first or self.state.total is not None

    def _beginning(self) -> Candidate:
        """The passes' own decisions, and none where no other scheduler takes one."""
        _, decisions = self._rewritten(Candidate())
        return Candidate().choose_all({d.place: d.without for d in decisions if d.kind in changes.OWN and d.is_change})

    def _confirm(self) -> bool:
        """Keep what is chosen only where it is faster than the first, both captured anew: a graph's age counts too.

        What is given up stays known as no faster. Other changes that won in turn are unknown again: each alone may
        still gain.
        """
        first = self.state.first or Candidate()
        with (
            closing(Holder(self._prepare(first))) as before,
            closing(Holder(self._prepare(self.state.chosen))) as after,
        ):
            before_ms, after_ms = self._in_turn(before.executor, after.executor)
        if after_ms < before_ms:
            self.state.total = Gain("all changes, both captured anew", before_ms, after_ms)
            return True
        ratio = after_ms / before_ms
        self.report(f"{counted(len(self.state.gains), 'gain')} given up: captured anew, all together take {ratio:.3f}")
        lost = {key: known for key, known in self.state.ratios.items() if known is None or known >= MARGIN}
        self.state.ratios = lost | {self.state.chosen.key: ratio}
        self.state.best, self.state.gains, self.state.last, self.state.last_gain = first, [], None, None
        return False

    def _try_all(self) -> bool:
        """Try every change of the best so far, again after each that gained; then the stream plans that are searched for.

        Returns False where the budget was over before all were tried.
        """
        with closing(Holder(self._prepare(self.state.best))) as holder:
            are_all_tried, before = True, None
            while are_all_tried and self.state.best != before:
                before = self.state.best
                are_all_tried = self._try_each(self._changes(), holder, self.kept_s)
            self.kept_s = 0.0
            return self._try_last(holder) and are_all_tried

    def _try_last(self, holder: Holder) -> bool:
        """Try the stream plans that are searched for with the best so far, each held against what is chosen.

        One that an earlier best had is held against the new best first. Returns as `_try_all`.

        holder: of the best so far.
        """
        last = self.state.last
        is_old = last is not None and self._last(last.stream_plan) != last
        if not is_old and self._are_last_tried:
            return True
        if self._is_over():
            return False
        if last is not None:
            with ExitStack() as unless_kept:
                prepared = unless_kept.enter_context(closing(self._prepare(last)))
                if is_old and self._is_slower(prepared, holder):
                    self.state.last = self.state.last_gain = self.state.total = None
                else:
                    unless_kept.pop_all()
                    holder.replace(prepared)
        return self._try_each(((f"stream plan: {name}", self._last(name)) for name in self.last_plans), holder)

    def _is_slower(self, prepared: Scheduled, holder: Holder) -> bool:
        """Is what is chosen no faster than the best, which the holder has?"""
        if self.is_measuring:
            best_ms, chosen_ms = self._in_turn(holder.executor, prepared)
            return best_ms <= chosen_ms
        times = self._forecasts(self.state.best)
        return times is not None and times[1] <= times[0]

    def _try_each(self, changes: Iterable[tuple[str, Candidate]], holder: Holder, kept_s: float = 0.0) -> bool:
        """Returns False where the budget was over before all were tried.

        kept_s: seconds of it that are for others.
        """
        for change, candidate in changes:
            if self._is_over(kept_s):
                return False
            self._try(change, candidate, holder)
        return True

    def _is_over(self, kept_s: float = 0.0) -> bool:
        self.state.seconds = self.clock() - self.begin
        return self.state.seconds >= self.budget_s - kept_s

    def _changes(self) -> Iterator[tuple[str, Candidate]]:
        """Every change of the best so far, in words and as a candidate.

        A large model has time for some 20 trials. So priorities, early launches and what no other scheduler decides come
        before the stream plans, and these before each other decision of the passes.
        """
        if has_priorities(self.captured.device):
            for name in ("", *PRIORITIES):
                yield f"priorities: {name or 'none'}", replace(self.state.best, priorities=name)
        best = self.state.best
        program, _ = self._rewritten(best)
        if early_operators(program, replace(best, is_early=False).schedule(program)):
            yield f"early launches: {'no' if best.is_early else 'yes'}", replace(best, is_early=not best.is_early)
        for words, choices in changes.of_our_own(self._rewritten(Candidate())[1]):
            yield words, self.state.best.choose_all(choices)
        for name in [name for name in STREAM_PLANS if name not in SEARCHED]:
            yield f"stream plan: {name}", replace(self.state.best, stream_plan=name)
        for words, choices in changes.at_several_places(self._rewritten(self.state.best)[1]):
            yield words, self.state.best.choose_all(choices)  # of what is the best by then
        for words, choices in changes.at_one_place(self._rewritten(self.state.best)[1]):
            yield words, self.state.best.choose_all(choices)

    def _try(self, change: str, candidate: Candidate, holder: Holder) -> None:
        """Compare a candidate that was not compared before with the best so far, and keep the faster."""
        if candidate == self.state.best or candidate.key in self._known:
            return
        self.report(f"{self.state.seconds:.0f} of {self.budget_s:.0f} s, {counted(len(self.state.gains), 'gain')}: {change}")
        ratio: float | None = None
        try:
            times = self._forecasts(candidate)
            if self._is_spared(change, candidate, times):
                return
            self.num_tried += self.is_measuring
            ratio = self._compared(change, candidate, holder, times)
        except Exception as error:  # whatever a kernel or a capture raises: the others are not at fault
            self.report(f"{change}: {first_line(error)}")
        if ratio is None or self.is_measuring:
            self.state.ratios[candidate.key] = ratio
        else:
            self.state.simulated[candidate.key] = ratio
        self.state.seconds = self.clock() - self.begin
        self.keep(self.state)
        if ratio is None and self.is_measuring:
            # It raises where the device is lost: no other candidate is at fault.
            milliseconds(holder.executor, self.inputs, self.rewind)

    def _compared(self, change: str, candidate: Candidate, holder: Holder, times: tuple[float, float] | None) -> float:
        """The ratio of a candidate over the holder's. It takes that one's place where it is faster, and precise.

        Args:
            times: As forecast, which stand where nothing is measured.
        """
        with ExitStack() as unless_kept:
            prepared = unless_kept.enter_context(closing(self._prepare(candidate)))
            if self.is_measuring:
                times = self._in_turn(holder.executor, prepared)
                if times[1] < MARGIN * times[0]:  # once more: of many that scatter one looks faster by chance
                    times = self._in_turn(holder.executor, prepared)
            assert times is not None, "what has no forecast is spared"
            before_ms, after_ms = times
            ratio = after_ms / before_ms
            if ratio < MARGIN:
                if not self.precision.is_precise(prepared, change):
                    return 1.0  # as one that gains nothing, so that it is not tried again
                unless_kept.pop_all()
                holder.replace(prepared)
                gain, self.state.total = Gain(change, before_ms, after_ms), None
                if candidate.stream_plan in SEARCHED:
                    self.state.last, self.state.last_gain = candidate, gain
                else:
                    self.state.best = candidate
                    self.state.gains.append(gain)
        return ratio

    def _forecasts(self, candidate: Candidate) -> tuple[float, float] | None:
        """Milliseconds of what the candidate is held against, and of it; None where there is no forecast that knows both."""
        best = self.state.chosen if candidate.stream_plan in SEARCHED or candidate == self.state.best else self.state.best
        if self.forecast is None or (candidate.is_early, candidate.priorities) != (best.is_early, best.priorities):
            return None
        programs = [self._rewritten(each)[0] for each in (best, candidate)]
        own_ms, other_ms = (
            self.forecast(program, each.schedule(program)) for program, each in zip(programs, (best, candidate), strict=True)
        )
        return own_ms, other_ms

    def _is_spared(self, change: str, candidate: Candidate, times: tuple[float, float] | None) -> bool:
        """Does the forecast spare the candidate a trial?"""
        if times is None:
            return not self.is_measuring
        ratio = times[1] / times[0]
        if ratio < (SLOW if self.is_measuring else MARGIN):
            return False
        self.report(f"{change}: not measured, simulated as {ratio:.2f} times the best")
        self.state.simulated[candidate.key] = ratio
        return True

    def _in_turn(self, best: Scheduled, other: Scheduled) -> tuple[float, float]:
        return in_turn(best, other, self.inputs, self.rewind)

    def _rewritten(self, candidate: Candidate) -> tuple[Program, list[Decision]]:
        """The program of a candidate, and its decisions; the best so far and the last one are remembered."""
        remembered = (self.state.best.choices, candidate.choices)
        self.programs = {choices: made for choices, made in self.programs.items() if choices in remembered}
        if candidate.choices not in self.programs:
            self.programs[candidate.choices] = self.rewrite(dict(candidate.choices))
        return self.programs[candidate.choices]

    def _prepare(self, candidate: Candidate) -> Scheduled:
        program, _ = self._rewritten(candidate)
        return execute(*lower(program, candidate.schedule(program)), self.arena)
