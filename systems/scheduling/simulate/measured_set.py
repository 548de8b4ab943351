"""Measured schedules of one model, with all that predicting them takes: operators, what they launch, and each one's time.

A file of this kind needs neither the model nor a GPU. It is JSON, compressed by gzip where its name ends with .gz.
"""

import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

from systems.cache import JSON
from systems.profiling.profile import Capacity, OperatorProfile, Profile, checked, mapping, number, operator_of
from systems.scheduling.graph.operator_graph import Operator, OperatorGraph
from systems.scheduling.plans.schedule import Schedule, Search

T = TypeVar("T")


@dataclass(frozen=True)
class ProfiledProgram:
    """The operators of one program, and each one alone; `profile` is in the order of `graph`."""

    graph: OperatorGraph
    profile: Profile


@dataclass(frozen=True)
class MeasuredSchedule:
    """A schedule and what it took.

    Args:
        name: Of the system that made it; "random" for one that was drawn.
        program: The name of the program that it executes, its merges carried out.
        schedule: Of that program.
        replay_ms: Of one replay on the device, of replays back to back; one number for each time that it was measured, which
            are minutes apart. On a CPU, of one call.
        call_ms: Of one call, from the host's launch to the end of the device's work, copies of inputs and outputs included.
        search: What finding the schedule took, where it was searched.
    """

    name: str
    program: str
    schedule: Schedule
    replay_ms: tuple[float, ...]
    call_ms: float
    search: Search | None = None

    @property
    def latency_ms(self) -> float:
        """The median of `replay_ms`."""
        return median(self.replay_ms)


@dataclass(frozen=True)
class MeasuredSet:
    """Schedules of one model at one batch size on one device, measured in one process.

    Args:
        model: Its name.
        batch: Samples of a call.
        conditions: Of the profile: device, libraries, arithmetic (`measurements.conditions`).
        programs: By name: "captured", and what passes and merges made of it; "merges" holds every merge of at most 8 units.
        schedules: Of these programs.
        commit: Of the code that measured; None where nothing names it.
        modified: Did files differ from that commit?
    """

    model: str
    batch: int
    conditions: dict[str, JSON]
    programs: dict[str, ProfiledProgram]
    schedules: tuple[MeasuredSchedule, ...]
    commit: str | None = None
    modified: bool | None = None

    @property
    def device(self) -> str:
        """That it was measured on, as CUDA names it."""
        return next(iter(self.programs.values())).profile.device

    def to_json(self) -> dict[str, JSON]:
        """One JSON document, each distinct operator once."""
        place: dict[str, int] = {}
        operators: list[JSON] = []
        programs: dict[str, JSON] = {}
        for name, program in self.programs.items():
            rows: list[JSON] = []
            alike = zip(program.graph.operators, program.profile.signatures, program.profile.operators, strict=True)
            for operator, signature, alone in alike:
                if signature not in place:
                    place[signature] = len(operators)
                    operators.append({"signature": signature, **asdict(alone)})
                rows.append([operator.name, operator.target, place[signature]])
            programs[name] = {"operators": rows, "edges": [[u, v] for u, v in program.graph.edges]}
        profile = next(iter(self.programs.values())).profile
        return {
            "model": self.model,
            "batch": self.batch,
            "conditions": self.conditions,
            "commit": self.commit,
            "modified": self.modified,
            "device": profile.device,
            "capacity": None if profile.capacity is None else asdict(profile.capacity),
            "operators": operators,
            "programs": programs,
            "schedules": [
                {
                    "name": s.name,
                    "program": s.program,
                    "order": [*s.schedule.order],
                    "streams": [*s.schedule.streams],
                    "waits": [[u, v] for u, v in s.schedule.waits],
                    "replay_ms": [*s.replay_ms],
                    "call_ms": s.call_ms,
                    **({} if s.search is None else {"search": s.search.to_json()}),  # type: ignore[dict-item]
                }
                for s in self.schedules
            ],
        }

    @classmethod
    def from_json(cls, document: object) -> "MeasuredSet":
        """Read what `to_json` wrote.

        Raises:
            ValueError: It is no such document.
        """
        try:
            whole = mapping(document)
            operators = [mapping(entry) for entry in checked(whole["operators"], list)]
            signatures = [checked(entry["signature"], str) for entry in operators]
            alone = [operator_of(entry) for entry in operators]
            limits = whole["capacity"]
            capacity = None if limits is None else Capacity(**{k: checked(v, int) for k, v in mapping(limits).items()})
            device = checked(whole["device"], str)
            programs = {
                name: _program(mapping(entry), signatures, alone, device, capacity)
                for name, entry in mapping(whole["programs"]).items()
            }
            if not programs:
                raise ValueError("it holds no program")
            return cls(
                model=checked(whole["model"], str),
                batch=checked(whole["batch"], int),
                conditions=mapping(whole["conditions"]),  # type: ignore[arg-type]
                programs=programs,
                schedules=tuple(_schedule(mapping(entry), programs) for entry in checked(whole["schedules"], list)),
                commit=_or_none(whole.get("commit"), str),
                modified=_or_none(whole.get("modified"), bool),
            )
        except KeyError as error:
            raise ValueError(f"this is no set of measured schedules: it lacks {error}") from error
        except (TypeError, IndexError) as error:
            raise ValueError(f"this is no set of measured schedules: {type(error).__name__}: {error}") from error

    def write(self, file: Path) -> None:
        """Raises OSError."""
        text = json.dumps(self.to_json(), separators=(",", ":")).encode()
        file.write_bytes(gzip.compress(text, mtime=0) if file.suffix == ".gz" else text)

    @classmethod
    def read(cls, file: Path) -> "MeasuredSet":
        """Raises OSError; ValueError where the file is none of this kind."""
        content = file.read_bytes()
        try:
            return cls.from_json(json.loads(gzip.decompress(content) if file.suffix == ".gz" else content))
        except (EOFError, gzip.BadGzipFile, RecursionError) as error:
            raise ValueError(f"this is no set of measured schedules: {type(error).__name__}: {error}") from error


def _or_none(value: object, kind: type[T]) -> T | None:
    return None if value is None else checked(value, kind)


def _program(
    entry: dict[str, object],
    signatures: Sequence[str],
    alone: Sequence[OperatorProfile],
    device: str,
    capacity: Capacity | None,
) -> ProfiledProgram:
    rows = [checked(row, list) for row in checked(entry["operators"], list)]
    places = [checked(row[2], int) for row in rows]
    predecessors: list[list[int]] = [[] for _ in rows]
    for u, v in checked(entry["edges"], list):
        predecessors[checked(v, int)].append(checked(u, int))
    graph = OperatorGraph([Operator(v, row[0], row[1]) for v, row in enumerate(rows)], predecessors)
    chosen = tuple(signatures[i] for i in places), tuple(alone[i] for i in places)
    return ProfiledProgram(graph, Profile(device, *chosen, capacity))


def _schedule(entry: dict[str, object], programs: dict[str, ProfiledProgram]) -> MeasuredSchedule:
    name, program = checked(entry["name"], str), checked(entry["program"], str)
    order, streams, waits = (checked(entry[key], list) for key in ("order", "streams", "waits"))
    schedule = Schedule(programs[program].graph, name, tuple(order), tuple(streams), tuple((u, v) for u, v in waits))
    replay_ms = tuple(number(each) for each in checked(entry["replay_ms"], list))
    search = Search.from_json(mapping(entry["search"])) if "search" in entry else None
    return MeasuredSchedule(name, program, schedule, replay_ms, number(entry["call_ms"]), search)
