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
DEVICE = re.compile(r"device\(type='\w+'(, index=\d+)?\)")  # in a signature: the only part that names where it was captured


def read_sets(file: str) -> list[MeasuredSet]:
    """The sets of a file; for "" all that are committed.

    Raises:
        BadOption: There is none, or it cannot be read.
    """
    files = [Path(file).expanduser()] if file else sorted(COMMITTED.glob("*.json.gz"))
    if not files:
        raise BadOption("no profile is committed here: name a file of runner=profile")
    try:
        return [MeasuredSet.read(each) for each in files]
    except (OSError, ValueError) as error:
        raise BadOption(f"{file or COMMITTED} is no profile: {error}") from error


def stored_profile(program: Program, sets: Sequence[MeasuredSet]) -> Profile:
    """The profile of a program whose operators these sets hold, in whichever of their programs.

    Args:
        sets: Of one device.

    Raises:
        Unsupported: An operator that launches something is in none of them; the message names it.
    """
    known: dict[str, OperatorProfile] = {}
    for measured in sets:
        for profiled in measured.programs.values():
            alike = zip(profiled.profile.signatures, profiled.profile.operators, strict=True)
            known |= {_anywhere(signature): operator for signature, operator in alike}
    signatures, operators = [], []
    for v, call in enumerate(program.calls):
        signatures.append(program.signature(v))
        operator = known.get(_anywhere(signatures[-1]))
        if operator is None:
            if not is_view(call.function):
                label = program.graph.label(v)
                raise Unsupported(f"the profile lacks operator {label}: {signatures[-1]:.120}")
            operator = OperatorProfile(0.0)
        operators.append(operator)
    profile = next(iter(sets[0].programs.values())).profile
    return Profile(profile.device, tuple(signatures), tuple(operators), profile.capacity)


def measurement(schedule: Schedule, profile: Profile, sets: Sequence[MeasuredSet]) -> MeasuredSchedule | None:
    """What was measured of this schedule: of the same operators, ordered in the same way."""
    own = [_anywhere(signature) for signature in profile.signatures]
    before = schedule.happens_before()
    for measured in sets:
        for each in measured.schedules:
            signatures = measured.programs[each.program].profile.signatures
            if list(map(_anywhere, signatures)) == own and each.schedule.happens_before() == before:
                return each
    return None


def _anywhere(signature: str) -> str:
    return DEVICE.sub("device", signature)
