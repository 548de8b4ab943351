"""The pages of results/ and scripts/: the format of a record is that of its types, and the steps of the pages work."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args, get_type_hints

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import pytest
import yaml
from conftest import ROOT
from made_records import cell, record

from results.cell import Choice, named
from results.course import Course
from results.document import to_json
from results.occupation import Kernels
from results.quantity import Measured, Quantity
from results.record import Record
from results.selection import Selection
from scripts import plot
from scripts.charts import style
from scripts.exhibits import preset
from scripts.exhibits.evidence import Evidence
from scripts.exhibits.findings import findings
from scripts.exhibits.preset import Preset

ROOMS = "results", "scripts", "systems/serving", "systems/scheduling/simulate"
FORMAT = ROOT / "results" / "FORMAT.md"
RESULTS, SCRIPTS, SERVING, SIMULATOR = (ROOT / room / "README.md" for room in ROOMS)
# Types whose file has other keys than their fields.
KEYS = {Choice: {"choice", "name", "options", "changed"}, Course: {"ms", "warps"}}


def types_of(kind: Any, seen: set[type]) -> Iterator[type]:
    """The dataclasses that a type is made of."""
    if isinstance(kind, type) and is_dataclass(kind) and kind not in seen:
        seen.add(kind)
        yield kind
        for hint in get_type_hints(kind).values():
            yield from types_of(hint, seen)
    for argument in get_args(kind):
        yield from types_of(argument, seen)


def sections() -> dict[str, list[str]]:
    """The fields of each section of the page."""
    _, *parts = re.split(r"^## ", FORMAT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {part.partition("\n")[0]: re.findall(r"^\| `(\w+)` \|", part, flags=re.MULTILINE) for part in parts}


def test_the_page_has_every_field_of_every_type_and_no_other() -> None:
    expected = {kind.__name__: KEYS.get(kind) or {f.name for f in fields(kind)} for kind in types_of(Record, set())}
    assert {name: set(names) for name, names in sections().items()} == expected
    assert all(len(names) == len(set(names)) for names in sections().values())


def test_keys_of_a_file_that_are_not_fields_are_those_of_the_page() -> None:
    document: Any = to_json(record())
    assert set(document["cell"]["system"]) == KEYS[Choice] and set(Course((0.0, 1.0), (2.0,)).to_json()) == KEYS[Course]
    assert set(document) - {"schema"} <= set(sections()["Record"])


def test_optional_fields_are_those_that_a_file_may_lack() -> None:
    """What the page calls optional has a default, and what has none is not called so."""
    for kind in types_of(Record, set()):
        text = FORMAT.read_text(encoding="utf-8").partition(f"\n## {kind.__name__}\n")[2].partition("\n## ")[0]
        for line in text.splitlines():
            match = re.match(r"\| `(\w+)` \|.*optional", line)
            if match and kind not in KEYS:
                (field,) = [f for f in fields(kind) if f.name == match[1]]
                assert field.default in (None, ()) or field.default_factory is dict, (kind, field.name)


@pytest.mark.parametrize("page", [RESULTS, SCRIPTS, SERVING, SIMULATOR], ids=["results", "scripts", "serving", "simulator"])
def test_a_page_is_short_and_names_files_that_exist(page: Any) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    folders = page.parent, ROOT, *(ROOT / "scripts" / folder for folder in (".", "charts", "exhibits"))
    for name in re.findall(r"`((?:\w+/)*\w+\.(?:py|md))", text):
        assert "NAME" in name or any((folder / name).exists() for folder in folders), name
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (page.parent / target).exists(), target


def block(language: str) -> str:
    """The one block of a language on the page of scripts/."""
    (text,) = re.findall(rf"```{language}\n(.*?)```", SCRIPTS.read_text(encoding="utf-8"), flags=re.DOTALL)
    return str(text)


def test_a_chart_is_added_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    added: dict[str, Any] = {}
    exec(block("python"), added)
    monkeypatch.setitem(plot.DRAW, "kernels", plot.one(added["draw"]))
    records = [record(of=cell(s), kernels=Kernels(number, 1.0, 1.0)) for s, number in (("eager", 90.0), ("nimble", 60.0))]
    charts, refused = plot.draw_all(Selection(records, style.order), ["kernels"], named("system", "eager"), ())
    assert not refused and [patch.get_height() for patch in charts["kernels"].figure.axes[0].patches] == [90.0, 60.0]  # type: ignore[attr-defined]
    _, refused = plot.draw_all(Selection([record()], style.order), ["kernels"], named("system", "eager"), ())
    assert refused == {"kernels": "no record counts kernels"}
    plt.close("all")


def test_an_exhibit_is_added_as_the_page_says(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nimble").mkdir()
    (tmp_path / "nimble" / "two.yaml").write_text(block("yaml"))
    monkeypatch.setattr(preset, "EXPERIMENTS", tmp_path)
    read = Preset.read("nimble/two")
    figures = findings(read, Evidence())
    assert {figure.what.partition(":")[0] for figure in figures} == {"resnet50", "mobilenet_v2"}
    assert read.systems["nimble"] == named("system", "nimble") and yaml.safe_load(block("yaml"))["exhibit"]["small"]


def test_a_measurement_is_added_as_the_page_says() -> None:
    """Any quantity has its chart and its column by what it says of itself; tests/test_plot_quantities.py looks at both."""
    quantity = Quantity("share", "sorrow", "tears", 3.0)
    one = replace(record(), measured={"grief": Measured((quantity,))})
    assert list(Selection([one]).quantities()) == ["grief.share"]
