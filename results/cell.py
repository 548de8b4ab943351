"""A cell: one model under one system, and what is measured of it, as it was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import conf
from conf import Options, Value

# Options that change nothing unless one of these others is on.
SPENT_ON: dict[str, tuple[str, ...]] = {"budget_s": ("trials", "best")}
USUAL_ALGORITHMS = "heuristic"


@dataclass(frozen=True)
class Choice:
    """A model, a system or a runner, as it was asked for.

    Args:
        choice: the file of conf/ that was chosen ("nimble_fused").
        name: what the file calls it ("nimble"); several files may share a name.
        values: every option with its value, sorted by key.
        changed: the keys whose values are not the file's own.
    """

    choice: str
    name: str
    values: tuple[tuple[str, Value], ...] = ()
    changed: tuple[str, ...] = ()

    @classmethod
    def of(cls, choice: str, options: Mapping[str, Value], defaults: Mapping[str, Value] | None = None) -> Choice:
        """From the options that were resolved, `name` among them.

        Args:
            choice: the file of conf/ that was chosen.
            options: all options with their values.
            defaults: those of the file; None where every option counts as changed.
        """
        values = {key: value for key, value in options.items() if key != "name"}
        file = defaults or {}
        changed = [key for key in sorted(values) if values[key] != file.get(key) and (values[key] or key in file)]
        spent = [key for key in changed if key not in SPENT_ON or any(values.get(other) for other in SPENT_ON[key])]
        return cls(choice, str(options.get("name", choice)), tuple(sorted(values.items())), tuple(spent))

    @property
    def options(self) -> Options:
        """Every option with its value, without `name`."""
        return dict(self.values)

    def get(self, key: str, default: Value = None) -> Value:
        return self.options.get(key, default)

    @property
    def label(self) -> str:
        """As a person would ask for it: "nimble_fused", "nimble (multi_stream=false)"."""
        options = self.options
        words = ", ".join(f"{key}={plain(options[key])}" for key in self.changed)
        return self.choice + (f" ({words})" if words else "")

    @property
    def key(self) -> Choice:
        """What its label says and no more: equal for choices that differ in nothing but options of other versions."""
        options = self.options
        return replace(self, values=tuple((name, options[name]) for name in self.changed))

    def __str__(self) -> str:
        return self.label


def plain(value: Value) -> str:
    """A value as the command line takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def choose(group: str, choice: str, **changes: Value) -> Choice:
    """A choice of conf/ with some options changed. Raises KeyError for no such choice."""
    defaults = conf.options(group, choice)
    return Choice.of(choice, defaults | changes, defaults)


def named(group: str, choice: str, **changes: Value) -> Choice:
    """The key of a choice of conf/, or of a name that conf/ does not have: a paper's system, one of an older version."""
    if choice in conf.choices(group):
        return choose(group, choice, **changes).key
    return Choice.of(choice, {"name": choice, **changes})


@dataclass(frozen=True)
class Conditions:
    """How a cell runs. Cells are compared only where all of this is the same.

    Args:
        batch: samples a call.
        device: "cpu" or "cuda".
        precision: fp32, tf32, tf32_products, fp16, bf16.
        layout: contiguous, channels_last.
        seed: of the inputs.
        algorithms: how cuDNN chooses its own: heuristic, timed.
    """

    batch: int
    device: str
    precision: str = "tf32"
    layout: str = "contiguous"
    seed: int = 0
    algorithms: str = USUAL_ALGORITHMS

    @property
    def arithmetic(self) -> str:
        """ "tf32, contiguous", or "tf32, contiguous, timed algorithms"."""
        unusual = f", {self.algorithms} algorithms" if self.algorithms != USUAL_ALGORITHMS else ""
        return f"{self.precision}, {self.layout}{unusual}"


@dataclass(frozen=True)
class Group:
    """What cells share that differ in their system alone. Only ratios within a group mean something."""

    model: Choice
    runner: Choice
    conditions: Conditions

    @property
    def label(self) -> str:
        return f"{self.model.label} b{self.conditions.batch}"


@dataclass(frozen=True)
class Cell:
    """What was asked for. Frozen and hashable: two equal cells are one."""

    model: Choice
    system: Choice
    runner: Choice
    conditions: Conditions

    @property
    def group(self) -> Group:
        return Group(self.model, self.runner, self.conditions)

    @property
    def batch(self) -> int:
        return self.conditions.batch

    @property
    def device(self) -> str:
        return self.conditions.device

    @property
    def label(self) -> str:
        """ "nasnet nimble_fused b1" """
        return f"{self.model.label} {self.system.label} b{self.batch}"

    def under(self, system: Choice) -> Cell:
        """The same cell under another system."""
        return replace(self, system=system)
