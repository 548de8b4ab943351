"""Exhibits as they are judged: records of the committed overview, and the findings of a preset by them."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from conftest import ROOT

from results.cell import Cell, choose, named
from results.finding import Finding
from results.record import Record
from results.store import Store
from scripts.exhibits import findings
from scripts.exhibits.evidence import Evidence, select
from scripts.exhibits.preset import Preset

H200 = ROOT / "results" / "reference" / "h200"
# As if profilers had come after their rounds, so that it is these that give the ratios.
RECORDS = [replace(record, warnings=()) for record in Store(H200 / "overview.jsonl.gz").read().records.values()]
EAGER, NIMBLE, OPARA = (named("system", name) for name in ("eager", "nimble", "opara"))
NIMBLE_PAPER, OPARA_PAPER = named("system", "nimble_paper"), named("system", "opara_paper")


def under(system: str, measured: str, records: Iterable[Record] = RECORDS) -> list[Record]:
    """The records, as if `measured` had been `system`."""
    own = choose("system", system)
    return [replace(r, cell=r.cell.under(own)) if r.cell.system.key == measured else r for r in records]


OF_THE_PAPER = under("nimble_paper", NIMBLE)  # as if nimble had been measured with the paper's passes


def judged(name: str, records: list[Record] = RECORDS) -> tuple[Preset, Evidence, list[Finding]]:
    read = Preset.read(name)
    evidence = Evidence(select(records, [read.sweep, *({**read.sweep, **change} for change in read.also)]))
    return read, evidence, findings.findings(read, evidence)


def made(system: str, batch: int, scale: float, model: str = "inception_v3", **options: Any) -> Record:
    """A record as that of a batch and a choice of model, under another system and `scale` times as slow."""
    choice = choose("model", model)
    (known,) = [r for r in RECORDS if (r.cell.model.name, r.cell.batch, r.cell.system.key) == (choice.name, 1, NIMBLE)]
    assert known.comparison is not None
    conditions = replace(known.cell.conditions, batch=batch)
    own = Cell(choice, choose("system", system, **options), known.cell.runner, conditions)
    comparison = replace(known.comparison, group=f"{model}{batch}", rounds=((scale,),) * 5)
    return replace(known, cell=own, comparison=comparison, id=f"{own.label}")
