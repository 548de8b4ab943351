"""An exhibit of a paper, as its preset in conf/experiment/ describes it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TypeAlias

import yaml

import conf
from conf import Value as Option
from conf import nearest
from results.cell import Choice, named, plain
from results.document import part_from_json
from results.finding import RULES
from results.published.value import SOURCES, Value
from results.published.values import COLUMNS, Criterion, reproduced

EXPERIMENTS = conf.FOLDER / "experiment"
OUTPUT = "results/exhibits"  # what a preset calls the folder of its exhibits' files
EAGER = named("system", "eager")
OWN = ("This project", "Ours")  # how the sources of our own questions begin
NEEDS = ("gpu", "nothing", "files")
Parameters: TypeAlias = dict[str, str]
Entry: TypeAlias = str | Mapping[str, Option]  # a choice by its name, or {choice: NAME, OPTION: VALUE}


class NoPreset(ValueError):
    """There is no such exhibit, or its preset is of another form; the message is one line."""


@dataclass(frozen=True)
class Renamed(Value):
    """A published value with a preset's names.

    Args:
        model_here: the label of its model; None for no single one.
        system_here, baseline_here: the keys of its systems.
    """

    model_here: str | None
    system_here: Choice | None
    baseline_here: Choice | None

    @property
    def zoo_model(self) -> str | None:
        return self.model_here

    @property
    def our_system(self) -> Choice | None:
        return self.system_here

    @property
    def our_baseline(self) -> Choice | None:
        return self.baseline_here


@dataclass(frozen=True)
class Claim:
    """What a paper says in its text alone, as a published value, and the rule of results.finding that it stands by."""

    value: Value
    rule: str


@dataclass(frozen=True)
class Preset:
    """An exhibit as its file describes it.

    Args:
        name: "nimble/figure7".
        title: for people.
        claim: what the paper, or else `source`, says, in a line.
        sweep: what is run, as run.py takes it: the `params` of Hydra's sweeper.
        source: who says it.
        needs: one of NEEDS; "files" of the user's are named by model.path.
        also: further sweeps, each a change of `sweep`.
        schedules, timeline: runs of these runners beside it.
        cold: whether each schedule is searched with nothing known of any before.
        rows: the published values.
        claims: those that stand in the text alone.
        ratio: {"over": SYSTEM} compares each value to that system's; {"of": SYSTEM} that system's to each.
        systems, models: our choices for the paper's names.
        beside: choices of other settings than the paper's, by its names; they are shown, unjudged, where `systems` were not
            measured.
        absent: why a model, system or device of the paper's is not here.
        incomparable: why what is measured beside a system or device of the paper's is not what the paper compared with.
        optional: the same of systems whose library may be missing; where they were measured they are judged.
        charts: of scripts/plot.py, and those of scripts/exhibits/pictures.py's OWN, in their order.
        baseline: what the chart of speedups is over.
        shown: labels of the systems of that chart; all where none is named.
        remark: in what ours differs from the paper's.
        small: what +size=small changes of `sweep`, and of the others where they have the key.
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
    systems: dict[str, Choice] = field(default_factory=dict)
    beside: dict[str, Choice] = field(default_factory=dict)
    models: dict[str, Choice] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    incomparable: dict[str, str] = field(default_factory=dict)
    optional: dict[str, str] = field(default_factory=dict)
    charts: list[str] = field(default_factory=list)
    baseline: Choice = EAGER
    shown: list[str] = field(default_factory=list)
    remark: str = ""
    small: Parameters = field(default_factory=dict)

    @property
    def is_own(self) -> bool:
        """Is it a question of ours, of which no paper has a figure?"""
        return self.source.startswith(OWN)

    @classmethod
    def read(cls, name: str) -> "Preset":
        """Raises NoPreset, and NoSuchValue where it names rows that are not published."""
        file = EXPERIMENTS / f"{name}.yaml"
        if name not in names():
            raise NoPreset(f"no exhibit is named {name!r}: {_hint(name)}")
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
        about = dict(document["exhibit"])
        known = {f.name for f in fields(cls)} - {"name", "sweep"}
        if strange := set(about) - known:
            raise NoPreset(f"{file}: an exhibit has no {min(strange)}; it has {', '.join(sorted(known))}")
        if about.get("needs", "gpu") not in NEEDS:
            raise NoPreset(f"{file}: needs is {about['needs']}, not one of {', '.join(NEEDS)}")
        rows: list[Mapping[str, Criterion]] = about.get("rows", [])
        about["rows"] = reproduced(rows)
        about["claims"] = [_claim(name, claim) for claim in about.get("claims", [])]
        for key in ("schedules", "timeline", "small"):
            about[key] = _texts(about.get(key, {}))
        about["also"] = [_texts(change) for change in about.get("also", [])]
        for key, group in (("systems", "system"), ("beside", "system"), ("models", "model")):
            about[key] = {theirs: _choice(group, entry) for theirs, entry in about.get(key, {}).items()}
        about["baseline"] = _choice("system", about.get("baseline", EAGER.choice))
        return cls(name=name, sweep=_texts(document["hydra"]["sweeper"]["params"]), **about)

    @property
    def figures(self) -> list[tuple[Value, str | None]]:
        """Each value to reproduce, and the rule that it stands by; None where that follows from its metric."""
        return [*((value, None) for value in self.rows), *((claim.value, claim.rule) for claim in self.claims)]

    def model_of(self, value: Value) -> str | None:
        """Our label for its network; None where it is of no single one."""
        if value.zoo_model is None:
            return None
        return self.models[value.model].label if value.model in self.models else value.zoo_model

    def system_of(self, value: Value) -> Choice | None:
        """The key of its system here; None where it is of none."""
        return self.systems.get(value.system, value.our_system)

    def baseline_of(self, value: Value) -> Choice | None:
        return self.systems.get(value.baseline, value.our_baseline)

    def names_of(self, value: Value) -> tuple[str, ...]:
        """What the paper calls a value's model, system, baseline and device."""
        return value.model, value.system, value.baseline, value.device

    def same_figure(self, value: Value) -> list[Value]:
        """The same figure of every system that the paper has it of, this one too."""
        same = ["model", "device", "metric"]
        if value.metric != "auc":  # systems that learn from one table are trained each in its own way
            same += ["batch", "task"]
        return [other for other, _ in self.figures if all(getattr(other, key) == getattr(value, key) for key in same)]


def names() -> list[str]:
    """Every exhibit that has a preset, paper by paper."""
    return list(_names(EXPERIMENTS))


def _hint(name: str) -> str:
    """The names of which the paper or the exhibit begins as what was asked for; the nearest one where none does."""
    beginning = name.strip("/")
    begun = [other for other in names() if beginning and f"/{beginning}" in f"/{other}"]
    return f"did you mean {', '.join(begun)}?" if begun else nearest(name, names())


@cache
def _names(folder: Path) -> tuple[str, ...]:
    exhibits = {
        file: (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("exhibit") for file in folder.rglob("*.yaml")
    }
    titles = {
        file.relative_to(folder).with_suffix("").as_posix(): str(exhibit.get("title", ""))
        for file, exhibit in exhibits.items()
        if isinstance(exhibit, dict)
    }
    return tuple(sorted(titles, key=lambda name: (name.partition("/")[0], _in_parts(titles[name]), name)))


def _in_parts(title: str) -> list[tuple[int, str]]:
    """A key that has figure 2 before figure 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", title)]


def _choice(group: str, entry: Entry) -> Choice:
    """The key of a model or system that a preset names."""
    if isinstance(entry, str):
        return named(group, entry)
    return named(group, str(entry["choice"]), **{key: value for key, value in entry.items() if key != "choice"})


def _texts(parameters: Mapping[str, Option]) -> Parameters:
    """As they are written on a command line."""
    return {key: plain(value) for key, value in parameters.items()}


def _claim(name: str, columns: Mapping[str, Option]) -> Claim:
    """Without a place where it is no paper's."""
    paper, _, exhibit = name.partition("/")
    usual = {"paper": paper, "exhibit": exhibit, "task": "inference", "batch": "1", "unit": "x", "source": "text"}
    texts = {key: str(value) for key, value in columns.items() if key not in ("rule", "value")}
    rule = str(columns.get("rule", "ratio"))
    if strange := set(texts) - set(COLUMNS):
        raise NoPreset(f"{name}: a claim has no {min(strange)}")
    if rule not in RULES:
        raise NoPreset(f"{name}: a claim's rule is {rule}, not one of {', '.join(RULES)}")
    if texts.get("source", "text") not in SOURCES:
        raise NoPreset(f"{name}: a claim's source is {texts['source']}, not one of {', '.join(SOURCES)}")
    value = {**dict.fromkeys(COLUMNS, ""), **usual, **texts, "value": float(columns.get("value") or 1)}
    return Claim(part_from_json(value, Value), rule)
