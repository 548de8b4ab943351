"""What two records must share to stand in one chart."""

import re
from dataclasses import dataclass
from pathlib import Path

from .cell import Cell, Conditions
from .record import Record

CALL = "inference"  # the kind of every runner that measures a call
SIMULATED = "simulated"  # the runner whose numbers are of no machine that it ran on
OTHER_KINDS = ("training", SIMULATED)  # runners that measure something else, each a kind of its own
VIRTUAL = "a virtual clock"
# Options of runners that say what requests come. How fast they come is none of them: a curve is drawn over that.
LOAD = ("burstiness", "concurrency", "new_tokens", "prompt_tokens", "shared_tokens", "trace")


@dataclass(frozen=True, order=True)
class Setting:
    """One machine, one torch, one arithmetic, one kind of run, and one kind of load where requests come.

    Args:
        place: the GPU, or the CPU where there is none; VIRTUAL where the numbers are of neither.
        host: the machine's name.
        device: "cpu" or "cuda".
        torch: its version.
        precision, layout, algorithms: of the conditions.
        kind: CALL or one of OTHER_KINDS.
        load: what is unusual of the requests that come, as "concurrency=512"; how fast they come is not.
    """

    place: str
    host: str
    device: str
    torch: str
    precision: str
    layout: str
    algorithms: str
    kind: str
    load: str = ""

    @classmethod
    def of(cls, record: Record) -> "Setting":
        conditions, environment, runner = record.cell.conditions, record.environment, record.cell.runner.name
        return cls(
            place=VIRTUAL if runner == SIMULATED else environment.place,
            host=environment.host,
            device=conditions.device,
            torch=environment.libraries.get("torch", "?"),
            precision=conditions.precision,
            layout=conditions.layout,
            algorithms=conditions.algorithms,
            kind=runner if runner in OTHER_KINDS else CALL,
            load=load_of(record.cell),
        )

    @property
    def label(self) -> str:
        """ "NVIDIA H200, torch 2.11.0, tf32", with what is unusual after it."""
        usual = Conditions(1, self.device)
        unusual = [self.layout] * (self.layout != usual.layout) + [self.kind] * (self.kind != CALL)
        unusual += [f"{self.algorithms} algorithms"] * (self.algorithms != usual.algorithms)
        unusual += [self.load] * bool(self.load)
        return ", ".join([self.place, f"torch {self.torch}", self.precision, *unusual])

    @property
    def slug(self) -> str:
        """The label and the machine's name, as a part of a file's name."""
        return re.sub(r"[^a-z0-9.]+", "-", f"{self.label}, {self.host}".lower()).strip("-")


def load_of(cell: Cell) -> str:
    """What is unusual of the load of a cell that serves; "" of any other."""
    options = [(key, cell.runner.options[key]) for key in LOAD if key in cell.runner.changed]
    return ", ".join(f"{key}={Path(str(value)).name if key == 'trace' else value}" for key, value in options)
