"""What a plan file says beside its schedule: how the program that is scheduled came out of the captured one."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from systems.cache import JSON
from systems.profiling.measurements import conditions
from systems.profiling.timing import Timer, name_of
from systems.scheduling.graph.program import Program, describe
from systems.scheduling.graph.structure import digest, structure


class Misfit(ValueError):
    """A plan is not for this program; the message names the field that differs."""


@dataclass(frozen=True)
class Recipe:
    """How the passes came to their program.

    Args:
        fingerprint: of the captured program, its inputs, the device, the libraries and the arithmetic.
        switches: of the passes that ran.
        choices: alternatives by `Decision.place`, where they are not the passes' own.
        times: every measured time that a pass asked for, milliseconds by name.
    """

    fingerprint: Mapping[str, JSON]
    switches: tuple[str, ...]
    choices: Mapping[str, str]
    times: Mapping[str, float]

    def to_json(self) -> dict[str, JSON]:
        return asdict(self) | {"switches": [*self.switches]}

    @classmethod
    def from_json(cls, document: Any) -> "Recipe":
        """Raises KeyError, TypeError or ValueError where `document` is not of `to_json`."""
        mappings = [document[name] for name in ("fingerprint", "choices", "times")]
        if not all(isinstance(mapping, dict) for mapping in mappings):
            raise TypeError("fingerprint, choices and times are mappings")
        fingerprint, choices, times = mappings
        texts = {str(place): str(name) for place, name in choices.items()}
        return cls(fingerprint, tuple(map(str, document["switches"])), texts, {str(k): float(t) for k, t in times.items()})

    def check(self, program: Program) -> None:
        """Raises Misfit unless it is for this captured program, on this device, with these libraries."""
        for field, own in fingerprint(program).items():
            if self.fingerprint.get(field) != own:
                raise Misfit(f"{field} is {self.fingerprint.get(field)!r} in the plan, and {own!r} here")


def fingerprint(program: Program) -> dict[str, JSON]:
    """What has to be the same for a plan to hold.

    Args:
        program: as captured, before any pass.
    """
    inputs: list[JSON] = [f"{describe(x)}, strides {list(x.stride())}" for x in program.examples]
    return {"inputs": inputs, "structure": digest(structure(program)), **conditions(program.device)}


class NotingTimer(Timer):
    """A timer that notes what it was asked, in `times`."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.times: dict[str, float] = {}

    def known(self, signature: str, measure: Callable[[], float]) -> float:
        self.times[name_of(signature)] = milliseconds = super().known(signature, measure)
        return milliseconds


class RecordedTimer(Timer):
    """A timer that knows the times of a recipe alone. It raises Misfit where it is asked for another."""

    def __init__(self, device: torch.device, times: Mapping[str, float]):
        super().__init__(device)
        self.times = times

    def known(self, signature: str, measure: Callable[[], float]) -> float:
        if (name := name_of(signature)) not in self.times:
            raise Misfit(f"times lacks {signature:.80}")
        return self.times[name]

    def find(self, signature: str) -> float | None:
        return self.times.get(name_of(signature))
