"""One point of weave's space: a stream plan, alternatives of the passes, early launches, priorities."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from systems.cache import JSON
from systems.scheduling.graph.program import Program
from systems.scheduling.graph.structure import digest
from systems.scheduling.plans.launch_early import early_operators
from systems.scheduling.plans.priorities import PRIORITIES
from systems.scheduling.plans.schedule import Schedule

from .stream_plans import FIRST, STREAM_PLANS, operator_ms

Choices: TypeAlias = Mapping[str, str]


@dataclass(frozen=True)
class Candidate:
    """One point of the space.

    Args:
        stream_plan: a name in STREAM_PLANS.
        choices: alternatives by `Decision.place`, where they are not the passes' own.
        is_early: kernels of our own that follow another in a stream are launched early.
        priorities: a name in PRIORITIES; empty where no operator comes before another that is ready.
    """

    stream_plan: str = FIRST
    choices: tuple[tuple[str, str], ...] = ()
    is_early: bool = False
    priorities: str = ""

    @property
    def key(self) -> str:
        return digest([self.stream_plan, self.choices, self.is_early, self.priorities])

    def schedule(self, program: Program) -> Schedule:
        """The schedule of the program that its choices make."""
        schedule = STREAM_PLANS[self.stream_plan](program)
        if self.priorities:
            schedule = replace(schedule, priorities=PRIORITIES[self.priorities](program.graph, operator_ms(program)))
        return replace(schedule, early=early_operators(program, schedule)) if self.is_early else schedule

    def to_json(self) -> dict[str, JSON]:
        choices: list[JSON] = [[*choice] for choice in self.choices]
        return {
            "stream_plan": self.stream_plan,
            "choices": choices,
            "is_early": self.is_early,
            "priorities": self.priorities,
        }

    @classmethod
    def from_json(cls, document: Any) -> "Candidate":
        """Raises KeyError, TypeError or ValueError where `document` is not of `to_json`."""
        if document["stream_plan"] not in STREAM_PLANS:
            raise ValueError(f"there is no stream plan {document['stream_plan']}")
        if document["priorities"] not in ("", *PRIORITIES):
            raise ValueError(f"there are no priorities {document['priorities']}")
        choices = tuple((str(place), str(name)) for place, name in document["choices"])
        return cls(document["stream_plan"], choices, document["is_early"] is True, document["priorities"])

    def choose(self, place: str, alternative: str) -> "Candidate":
        return self.choose_all({place: alternative})

    def choose_all(self, alternative_by_place: Choices) -> "Candidate":
        return replace(self, choices=tuple(sorted((dict(self.choices) | dict(alternative_by_place)).items())))
