"""What was measured for an exhibit: records, schedules and timelines."""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from results.record import CONF, asked, label
from results.timeline import Timeline, from_trace
from scripts.charts.measured import Measured, Record, by_setting

Cell = tuple[str, int, str]  # model, batch and system, as labels


@dataclass(frozen=True)
class Evidence:
    """measured: the records of one setting, None for none. schedules: schedule files by cell. timelines: in their order."""

    measured: Measured | None = None
    schedules: dict[Cell, dict[str, Any]] = field(default_factory=dict)
    timelines: list[Timeline] = field(default_factory=list)

    @property
    def place(self) -> str:
        """The GPU, or the CPU, that all of it was measured on; "" where there is none of it."""
        if self.measured is not None:
            return self.measured.setting.place
        return ", ".join(sorted(self._devices))

    @property
    def on_gpu(self) -> bool:
        return self._devices | ({self.measured.setting.device} if self.measured is not None else set()) == {"cuda"}

    @property
    def _devices(self) -> set[str]:
        """Of schedules and timelines."""
        devices: set[str] = {document["device"] for document in self.schedules.values()}
        return devices | {timeline.title.rpartition(", ")[2] for timeline in self.timelines}


def select(records: Sequence[Record], sweeps: Sequence[Mapping[str, str]]) -> Measured | None:
    """The records that these sweeps ask for, of one setting: of this host where it has any, and of those the setting with
    the most cells, then the newest.
    """
    named = [{group: labels(group, sweep) for group in ("model", "system")} for sweep in sweeps]
    asked = list(zip(sweeps, named, strict=True))
    found = [record for record in records if any(_asked(record, sweep, names) for sweep, names in asked)]
    if not found:
        return None

    def rank(measured: Measured) -> tuple[bool, int, str]:
        here = measured.setting.host == platform.node()
        return here, len(measured.rows) * len(measured.systems), measured.records[0]["when"]

    return max(by_setting(found).values(), key=rank)


def _asked(record: Record, sweep: Mapping[str, str], names: Mapping[str, set[str]]) -> bool:
    """names: the labels that the sweep asks for, of models and of systems."""
    config = record["config"]
    if config["runner"]["name"] != sweep.get("runner", "bench"):
        return False
    if "batch" in sweep and str(config["batch"]) not in parts(sweep["batch"]):
        return False
    if "batch" not in sweep and config["batch"] != 1:
        return False
    if any(key in sweep and asked(config, key) not in parts(sweep[key]) for key in ("precision", "layout", "algorithms")):
        return False
    if sweep.get("device", "auto") not in ("auto", config["device"]):
        return False
    return all(label(config[group]) in wanted for group, wanted in names.items())


def labels(group: str, sweep: Mapping[str, str]) -> set[str]:
    """Of the models or systems that a sweep asks for, with every combination of their options."""
    options = [key for key in sweep if key.startswith(f"{group}.")]
    found = set()
    for choice in parts(sweep.get(group, "")):
        file = CONF / group / f"{choice}.yaml"
        plain: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else {"name": choice}
        for values in product(*(parts(sweep[key]) for key in options)):
            given = {key.partition(".")[2]: yaml.safe_load(value) for key, value in zip(options, values, strict=True)}
            found.add(label(plain | given))
    return found


def parts(text: str) -> list[str]:
    """ "a,b" as a list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def read_schedules(folder: Path) -> dict[Cell, dict[str, Any]]:
    """The schedule files of an exhibit's folder. A file's name holds the cell; see `scripts.exhibits.running`."""
    found = {}
    for file in sorted(folder.glob("*.schedule.json")):
        document = json.loads(file.read_text(encoding="utf-8"))
        model, system, _ = file.name.removesuffix(".schedule.json").split("@")
        found[model, int(document["batch"]), system] = document
    return found


def read_timelines(file: Path) -> list[Timeline]:
    """Raises ValueError where the file is no trace."""
    return from_trace(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else []
