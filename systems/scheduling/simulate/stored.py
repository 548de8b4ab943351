"""Profiles out of files, for programs that are captured here."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from systems.base import BadOption, Unsupported
from systems.profiling.profile import OperatorProfile, Profile
from systems.scheduling.graph.effects import is_view
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.schedule import Schedule

from .measured_set import MeasuredSchedule, MeasuredSet

COMMITTED = Path(__file__).resolve().parents[3] / "results" / "reference" / "simulation"
Before: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]  # [v, u]: does u happen before v?
COPY, ATTENTION = "aten.clone.default", "aten.scaled_dot_product_attention.default"
DEVICE = re.compile(r"device\(type='\w+'(, index=\d+)?\)")  # in a signature: the only part that names where it was captured


def read_sets(files: Sequence[Path]) -> list[MeasuredSet]:
    """The sets that files hold, of torch's present arithmetic alone. One that names none is of any, as a CPU's.

    Raises:
        BadOption: A file cannot be read.
        Unsupported: All were measured in another arithmetic.
    """
    sets = []
    for file in files:
        try:
            sets.append(MeasuredSet.read(file))
        except OSError as error:
            raise BadOption(f"{file} cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise BadOption(f"{file} is no file of runner=profile: {error}") from error
    own = [each for each in sets if _arithmetic_of(each) in (None, arithmetic())]
    if sets and not own:
        raise Unsupported(f"no profile here was measured in {_in_words(arithmetic())}, but in {_measured_in(sets)}")
    return own


def arithmetic() -> tuple[bool, bool]:
    """Whether torch rounds convolutions and products to TF32."""
    return torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32


def _arithmetic_of(measured: MeasuredSet) -> tuple[bool, bool] | None:
    """As `arithmetic`, out of the settings of `systems.profiling.measurements.conditions`; None where there are none."""
    settings = measured.conditions.get("settings")
    return (settings[0] is True, settings[3] is True) if isinstance(settings, list) and len(settings) == 4 else None


def are_of_other_algorithms(sets: Sequence[MeasuredSet]) -> bool:
    """Did cuDNN choose convolutions by timing in one of the sets where torch's heuristics choose now, or the reverse?"""
    settings = [s for each in sets if isinstance(s := each.conditions.get("settings"), list) and len(s) == 4]
    return any(own[1] is not torch.backends.cudnn.benchmark for own in settings)


def _measured_in(sets: Sequence[MeasuredSet]) -> str:
    return " or ".join(sorted({_in_words(own) for own in map(_arithmetic_of, sets) if own is not None}))


def _in_words(rounds: tuple[bool, bool]) -> str:
    """An arithmetic by the name of its precision."""
    return {(False, False): "fp32", (True, False): "tf32", (True, True): "tf32_products"}.get(rounds, "TF32 products alone")


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

    def operators(self, program: Program) -> list[OperatorProfile | None]:
        """Those of a program; None for one that launches something and is in none of the sets.

        A view takes no time, nor does a copy that capture on a GPU leaves out (`_is_for_a_cpu`).
        """
        operators: list[OperatorProfile | None] = []
        for v, call in enumerate(program.calls):
            operator = self.known.get(_anywhere(program.signature(v)))
            if operator is None and (is_view(call.function) or _is_for_a_cpu(program, v)):
                operator = OperatorProfile(0.0)
            operators.append(operator)
        return operators

    def profile(self, program: Program) -> Profile:
        """The profile of a program.

        Raises:
            Unsupported: An operator that launches something is in none of the sets; the message names it.
        """
        signatures = tuple(program.signature(v) for v in range(len(program.graph)))
        operators = []
        for v, operator in enumerate(self.operators(program)):
            if operator is None:
                raise Unsupported(f"the profile lacks operator {program.graph.label(v)}: {signatures[v]:.120}")
            operators.append(operator)
        profile = next(iter(self.sets[0].programs.values())).profile
        return Profile(profile.device, signatures, tuple(operators), profile.capacity)

    def measurement(self, schedule: Schedule, profile: Profile) -> MeasuredSchedule | None:
        """What was measured of this schedule: of the same operators, ordered in the same way.

        Only those count that launch something: captures on a CPU and on a GPU differ in views. All that run in turn are one.

        Args:
            profile: Of the scheduled program, by this object.
        """
        own = _Launched.of(schedule, profile)
        for measured in self.sets:
            for each in measured.schedules:
                other = _Launched.of(each.schedule, measured.programs[each.program].profile)
                if other.signatures == own.signatures and _are_alike(other.before(), own.before()):
                    return each
        return None


@dataclass(frozen=True)
class _Launched:
    """The operators of a schedule that launch something: `places` among all, and their `signatures`, wherever captured."""

    schedule: Schedule
    places: tuple[int, ...]
    signatures: tuple[str, ...]

    @classmethod
    def of(cls, schedule: Schedule, profile: Profile) -> "_Launched":
        places = tuple(v for v, operator in enumerate(profile.operators) if operator.milliseconds)
        return cls(schedule, places, tuple(_anywhere(profile.signatures[v]) for v in places))

    def before(self) -> Before:
        """Of these operators, in their order. This takes far longer than comparing signatures."""
        n = len(self.schedule.graph)
        masks = b"".join(mask.to_bytes(-(-n // 8), "little") for mask in self.schedule.happens_before())
        bits = np.unpackbits(np.frombuffer(masks, np.uint8).reshape(n, -1), axis=1, bitorder="little")
        return bits[np.ix_(self.places, self.places)]


def _are_alike(one: Before, other: Before) -> bool:
    """Is it the same order, or are both complete ones?"""
    pairs = len(one) * (len(one) - 1) // 2
    return np.array_equal(one, other) or one.sum() == other.sum() == pairs


def _is_for_a_cpu(program: Program, v: int) -> bool:
    """Is it a copy of an attention's argument, which the attention of a GPU takes as it lies?"""
    consumers = program.graph.successors[v]
    is_copy = program.graph.operators[v].target == COPY
    return is_copy and bool(consumers) and all(program.graph.operators[w].target == ATTENTION for w in consumers)


def _anywhere(signature: str) -> str:
    return DEVICE.sub("device", signature)
