"""An exhibit of a paper, as its preset in conf/experiment/ describes it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from results.finding import RULES
from results.published.value import Value
from results.published.values import COLUMNS, reproduced
from results.record import CONF

EXPERIMENTS = CONF / "experiment"
OUTPUT = "results/exhibits"  # what a preset calls the folder of its exhibits' files
NEEDS = ("gpu", "nothing")
Parameters = dict[str, str]


class NoPreset(ValueError):
    """There is no such exhibit, or its preset is not as it should be; the message is one line."""


@dataclass(frozen=True)
class Renamed(Value):
    """A published value, with the labels that a preset has for its model (None for no single one) and its systems."""

    model_here: str | None
    system_here: str
    baseline_here: str

    @property
    def zoo_model(self) -> str | None:
        return self.model_here

    @property
    def our_system(self) -> str:
        return self.system_here

    @property
    def our_baseline(self) -> str:
        return self.baseline_here


@dataclass(frozen=True)
class Claim:
    """What a paper says in its text alone, as a published value, and the rule of results.finding that it stands by."""

    value: Value
    rule: str


@dataclass(frozen=True)
class Preset:
    """name: "nimble/figure7". title: for people. claim: what the paper, or else `source`, says, in a line. needs: of NEEDS.

    sweep: what is run, as run.py takes it: the `params` of Hydra's sweeper. also: further sweeps, each a change of `sweep`.
    schedules, timeline: runs of these runners beside it. cold: each schedule is searched with nothing known of any before.
    rows: the published values. claims: those that stand in the text alone. ratio: {"over": SYSTEM} where a published value
    of a system, or {"of": SYSTEM} where one of all others, is compared as a ratio to that system's. systems, models: our
    labels for the paper's names. absent: why a system or device of the paper's is not here. charts: of scripts/plot.py, and
    idle, critical_path, blocks, active_warps. baseline: what the chart of speedups is over. remark: in what ours is another
    thing than the paper's. small: what +size=small changes of `sweep`, and of the others where they have the key.
    """

    name: str
    title: str
    claim: str
    sweep: Parameters
    source: str = "The paper"
    needs: str = "gpu"
    also: list[Parameters] = field(default_factory=list)
    schedules: Parameters = field(default_factory=dict)
    timeline: Parameters = field(default_factory=dict)
    cold: bool = False
    rows: list[Value] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    ratio: dict[str, str] = field(default_factory=dict)
    systems: dict[str, str] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    charts: list[str] = field(default_factory=list)
    baseline: str = "eager"
    remark: str = ""
    small: Parameters = field(default_factory=dict)

    @classmethod
    def read(cls, name: str) -> "Preset":
        """Raises NoPreset, and NoSuchValue where it names rows that are not published."""
        file = EXPERIMENTS / f"{name}.yaml"
        if name not in names():
            close = get_close_matches(name, names(), n=1, cutoff=0.5)
            raise NoPreset(
                f"no exhibit is named {name!r}: " + (f"did you mean {close[0]}?" if close else ", ".join(names()))
            )
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
        about = dict(document["exhibit"])
        known = {f.name for f in fields(cls)} - {"name", "sweep"}
        if strange := set(about) - known:
            raise NoPreset(f"{file}: an exhibit has no {min(strange)}; it has {', '.join(sorted(known))}")
        if about.get("needs", "gpu") not in NEEDS:
            raise NoPreset(f"{file}: needs is {about['needs']}, not one of {', '.join(NEEDS)}")
        about["rows"] = reproduced(about.get("rows", []))
        about["claims"] = [_claim(name, claim) for claim in about.get("claims", [])]
        for key in ("schedules", "timeline", "small"):
            about[key] = _texts(about.get(key, {}))
        about["also"] = [_texts(change) for change in about.get("also", [])]
        return cls(name=name, sweep=_texts(document["hydra"]["sweeper"]["params"]), **about)

    @property
    def figures(self) -> list[tuple[Value, str | None]]:
        """What is to be reproduced, and the rule it stands by where that does not follow from its metric."""
        return [*((value, None) for value in self.rows), *((claim.value, claim.rule) for claim in self.claims)]

    def model_of(self, value: Value) -> str | None:
        """Our label for its network; None where it is of no single one."""
        return None if value.zoo_model is None else self.models.get(value.model, value.zoo_model)

    def system_of(self, value: Value) -> str:
        return self.systems.get(value.system, value.our_system)

    def baseline_of(self, value: Value) -> str:
        return self.systems.get(value.baseline, value.our_baseline)

    def beside(self, value: Value) -> list[Value]:
        """The same figure of every system that the paper has it of, this one too."""
        same = ("model", "batch", "device", "metric", "task")
        return [other for other, _ in self.figures if all(getattr(other, key) == getattr(value, key) for key in same)]


def names() -> list[str]:
    """Every exhibit that has a preset, paper by paper."""
    return list(_names(EXPERIMENTS))


@cache
def _names(folder: Path) -> tuple[str, ...]:
    files = sorted(folder.rglob("*.yaml"))
    presets = [file for file in files if "exhibit" in (yaml.safe_load(file.read_text(encoding="utf-8")) or {})]
    return tuple(file.relative_to(folder).with_suffix("").as_posix() for file in presets)


def systems_here() -> list[str]:
    """The choices of system=."""
    return sorted(file.stem for file in (CONF / "system").glob("*.yaml"))


def _texts(parameters: Mapping[str, Any]) -> Parameters:
    """As they are written on a command line."""
    return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in parameters.items()}


def _claim(name: str, columns: Mapping[str, Any]) -> Claim:
    paper, _, exhibit = name.partition("/")
    plain = {"paper": paper, "exhibit": exhibit, "task": "inference", "batch": "1", "unit": "x"}
    given = {key: str(value) for key, value in columns.items() if key not in ("rule", "value")}
    rule = columns.get("rule", "ratio")
    if strange := set(given) - set(COLUMNS):
        raise NoPreset(f"{name}: a claim has no {min(strange)}")
    if rule not in RULES:
        raise NoPreset(f"{name}: a claim's rule is {rule}, not one of {', '.join(RULES)}")
    value: dict[str, Any] = {**dict.fromkeys(COLUMNS, ""), **plain, **given, "value": float(columns.get("value", 1))}
    return Claim(Value(**value), rule)
