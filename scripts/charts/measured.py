"""The records of one setting, by model, batch and system."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from results.comparison import Speedup, speedup
from results.record import label
from results.store import Store

from .setting import Setting
from .style import order

Record = dict[str, Any]
Row = tuple[str, int]  # model and batch
# What stands where a bar would, by status; None: no record.
WORDS = {
    "unsupported": "unsupported",
    "incorrect": "incorrect",
    "failed": "failed",
    "out_of_memory": "out of memory",
    "timeout": "timed out",
    None: "not measured",
}


class NoResults(Exception):
    """There is nothing to show; the message is one line."""


def read(folders: Iterable[Path]) -> list[Record]:
    """Every record under these folders, the newest of an id. What is no record is named on standard error.

    Raises NoResults where a folder is not there, or where there is no record in any.
    """
    found: dict[str, Record] = {}
    folders = list(folders)
    for folder in folders:
        if not folder.is_dir():
            raise NoResults(f"{folder} is {'a file' if folder.exists() else 'not there'}: results are in a folder")
        contents = Store(folder).read()
        for file, reason in contents.skipped.items():
            print(f"skipped {file}: {reason}", file=sys.stderr)
        for identifier, record in contents.records.items():
            if identifier not in found or found[identifier]["when"] < record["when"]:
                found[identifier] = record
    if not found:
        raise NoResults(f"no record in {', '.join(map(str, folders))}")
    return list(found.values())


def by_setting(records: Iterable[Record]) -> "dict[Setting, Measured]":
    """What was measured in each setting, settings in the order of their names."""
    found: dict[Setting, list[Record]] = {}
    for record in records:
        found.setdefault(Setting.of(record), []).append(record)
    return {setting: Measured(found[setting]) for setting in sorted(found)}


class Measured:
    """models, systems: labels, systems in the order of charts; batches: ascending; rows: each (model, batch) there is.
    among: the systems that looks tell apart, those of all that a part was taken of, so that a system looks the same in each.
    """

    def __init__(self, records: Sequence[Record], among: Sequence[str] = ()):
        """records: of one setting. Raises NoResults for none."""
        if not records:
            raise NoResults("no record is left to show")
        self.records = sorted(records, key=lambda record: record["when"], reverse=True)
        self.setting = Setting.of(self.records[0])
        self._cells: dict[tuple[str, int, str], list[Record]] = {}
        for record in self.records:
            config = record["config"]
            place = label(config["model"]), config["batch"], label(config["system"])
            self._cells.setdefault(place, []).append(record)
        self.models = sorted({model for model, _, _ in self._cells})
        self.systems = order([system for _, _, system in self._cells])
        self.among = order([*among, *self.systems])
        self.batches = sorted({batch for _, batch, _ in self._cells})
        self.rows: list[Row] = sorted({(model, batch) for model, batch, _ in self._cells}, key=lambda row: (row[1], row[0]))

    def only(
        self,
        models: Sequence[str] = (),
        systems: Sequence[str] = (),
        batches: Sequence[int] = (),
        always: Sequence[str] = (),
    ) -> "Measured":
        """Those of these models, systems and batches; all where none is named. always: systems that are kept beside them.

        Raises NoResults for a name that there is no record of.
        """
        for what, wanted, there in (
            ("model", models, self.models),
            ("system", systems, self.systems),
            ("batch", batches, self.batches),
        ):
            for one in wanted:
                if one not in there:
                    raise NoResults(f"no record of the {what} {one}: there is {', '.join(map(str, there))}")
        kept = [
            record
            for (model, batch, system), records in self._cells.items()
            for record in records
            if (not models or model in models)
            and (not systems or system in (*systems, *always))
            and (not batches or batch in batches)
        ]
        return Measured(kept, self.among)

    def records_of(self, row: Row, system: str) -> list[Record]:
        """All of a cell's, the newest first."""
        return self._cells.get((*row, system), [])

    def record(self, row: Row, system: str, part: str) -> Record | None:
        """The newest record of a cell that has the measurement `part`, or that is not ok and so says why it has none."""
        for record in self.records_of(row, system):
            if record["status"] != "ok" or record.get(part):
                return record
        return None

    def over(self, row: Row, system: str, baseline: str) -> Speedup | None:
        """How many times faster than `baseline`, from the newest rounds that the two shared."""
        for record in self.records_of(row, system):
            if record["status"] != "ok":
                return None  # an incorrect system has no speed, whatever it had before
            for other in self.records_of(row, baseline):
                if (found := speedup(record, other)) is not None:
                    return found
        return None

    def missing(self, row: Row, system: str, part: str) -> str:
        """Why a cell has no `part`, in a word or two."""
        record = self.record(row, system, part)
        status = record["status"] if record is not None else None
        return WORDS.get(status, "not measured") if status != "ok" else "not measured"

    def reason(self, row: Row, system: str, part: str) -> str | None:
        """Why, in a line, where a record says so."""
        record = self.record(row, system, part)
        return record["reason"] if record is not None else None

    def title_of(self, rows: Sequence[Row]) -> str:
        """The setting, and the batch if it is one; of several batches the model if that is one."""
        models, batches = sorted({model for model, _ in rows}), sorted({batch for _, batch in rows})
        if len(batches) == 1:
            return f"{self.setting.label}, batch {batches[0]}"
        return self.setting.label + (f", {models[0]}" if len(models) == 1 else "")

    def row_labels(self, rows: Sequence[Row], among: Sequence[Row] = ()) -> list[str]:
        """Of rows among all that a chart has: what the title leaves open, the model, the batch or both."""
        models, batches = ({part[i] for part in among or rows} for i in range(2))
        if len(batches) == 1:
            return [model for model, _ in rows]
        return [f"batch {batch}" if len(models) == 1 else f"{model}\nbatch {batch}" for model, batch in rows]
