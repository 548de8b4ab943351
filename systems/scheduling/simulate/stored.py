"""Profiles out of files, for programs that are captured here."""

import re
from collections.abc import Sequence
from pathlib import Path

from systems.base import BadOption, Unsupported
from systems.profiling.profile import OperatorProfile, Profile
from systems.scheduling.graph.effects import is_view
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.schedule import Schedule

from .measured_set import MeasuredSchedule, MeasuredSet

COMMITTED = Path(__file__).resolve().parents[3] / "results" / "reference" / "simulation"
COPY, ATTENTION = "aten.clone.default", "aten.scaled_dot_product_attention.default"
DEVICE = re.compile(r"device\(type='\w+'(, index=\d+)?\)")  # in a signature: the only part that names where it was captured


def read_sets(file: str) -> list[MeasuredSet]:
    """The sets of a file; for "" all that are committed.

    Raises:
        BadOption: There is none, or it cannot be read.
    """
    files = files_of(file)
    try:
        return [MeasuredSet.read(each) for each in files]
    except (OSError, ValueError) as error:
        raise BadOption(f"{file or COMMITTED} is no profile: {error}") from error


def files_of(file: str) -> list[Path]:
    """The file itself; for "" all that are committed. Raises BadOption where there is none."""
    files = [Path(file).expanduser()] if file else sorted(COMMITTED.glob("*.json.gz"))
    if not files:
        raise BadOption("no profile is committed here: name a file of runner=profile")
    return files


class StoredOperators:
    """The operators of some sets, in whichever of their programs.

    Args:
        sets: Of one device.
    """

    def __init__(self, sets: Sequence[MeasuredSet]):
        self.sets = sets
        self.known: dict[str, OperatorProfile] = {}
        for measured in sets:
            for profiled in measured.programs.values():
                alike = zip(profiled.profile.signatures, profiled.profile.operators, strict=True)
                self.known |= {_anywhere(signature): operator for signature, operator in alike}

    def __contains__(self, signature: str) -> bool:
        return _anywhere(signature) in self.known

    def profile(self, program: Program) -> Profile:
        """The profile of a program.

        A view takes no time, nor does a copy that capture on a GPU leaves out (`_is_for_a_cpu`).

        Raises:
            Unsupported: An operator that launches something is in none of the sets; the message names it.
        """
        signatures, operators = [], []
        for v, call in enumerate(program.calls):
            signatures.append(program.signature(v))
            operator = self.known.get(_anywhere(signatures[-1]))
            if operator is None:
                if not is_view(call.function) and not _is_for_a_cpu(program, v):
                    label = program.graph.label(v)
                    raise Unsupported(f"the profile lacks operator {label}: {signatures[-1]:.120}")
                operator = OperatorProfile(0.0)
            operators.append(operator)
        profile = next(iter(self.sets[0].programs.values())).profile
        return Profile(profile.device, tuple(signatures), tuple(operators), profile.capacity)

    def measurement(self, schedule: Schedule, profile: Profile) -> MeasuredSchedule | None:
        """What was measured of this schedule: of the same operators, ordered in the same way.

        Only those count that launch something: captures on a CPU and on a GPU differ in views.

        Args:
            profile: Of the scheduled program, by this object.
        """
        own = _launched(schedule, profile)
        for measured in self.sets:
            for each in measured.schedules:
                if _launched(each.schedule, measured.programs[each.program].profile) == own:
                    return each
        return None


def _launched(schedule: Schedule, profile: Profile) -> tuple[list[str], list[int]]:
    """The targets of the operators that launch something, and which of these happen before each."""
    places = [v for v, operator in enumerate(profile.operators) if operator.milliseconds]
    before = schedule.happens_before()
    masks = [sum(1 << i for i, u in enumerate(places) if before[v] >> u & 1) for v in places]
    return [schedule.graph.operators[v].target for v in places], masks


def _is_for_a_cpu(program: Program, v: int) -> bool:
    """Is it a copy of an attention's argument, which the attention of a GPU takes as it lies?"""
    consumers = program.graph.successors[v]
    is_copy = program.graph.operators[v].target == COPY
    return is_copy and bool(consumers) and all(program.graph.operators[w].target == ATTENTION for w in consumers)


def _anywhere(signature: str) -> str:
    return DEVICE.sub("device", signature)
