"""What the papers report, as committed."""

import csv
import hashlib
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import models
from results.published import values
from results.published.value import RELEASED, SOURCES, Value
from results.published.values import COLUMNS, NoSuchValue, everything, exhibit, exhibits, papers, reproduced, select

# Of the rows as they were transcribed from the papers, and of Opara's released prototype, all of them, in one order.
TRANSCRIBED = 344, "b589f488bcd6704f"
# The papers' names of what is no entry of the zoo, or of several entries at once.
NO_ENTRY = {"relu_and_conv", "add_first"}


def text(value: Value) -> str:
    return "|".join(str(getattr(value, column)) for column in COLUMNS)


def test_every_value_is_as_it_was_transcribed() -> None:
    lines = sorted(text(value) for value in everything())
    assert (len(lines), hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]) == TRANSCRIBED
    assert papers() == ["ios", "nimble", "opara", "orca", "windtunnel"]


def test_a_few_that_the_papers_print() -> None:
    (nasnet,) = select("nimble/figure7", model="nasnet_a_mobile", baseline="eager")
    assert (nasnet.value, nasnet.unit, nasnet.device, nasnet.batch) == (22.34, "x", "V100", "1")
    assert {v.model: v.value for v in select("nimble/table1", metric="speedup")}["amoebanet"] == 1.45
    assert [v.value for v in select("ios/batch_size_figure", system="ios_both")] == [255, 1050, 1165, 1245, 1245]
    assert [v.value for v in select("ios/batch_size_figure", system="ios_both", batch=[1, 128])] == [255, 1245]
    # Table 3 (1) as the paper prints it, and not what one run of the authors' README prints.
    own = select("ios/specialization_table", system="ios_both(optimized_for_batch=32)")
    assert [v.value for v in own] == [4.5, 27.44, 103.74]
    (googlenet,) = select("opara/table1", model="googlenet", system="opara")
    assert (googlenet.value, googlenet.unit) == (0.27, "ms")


def test_where_the_paper_prints_a_number_the_released_one_is_the_same() -> None:
    """IOS's own latency at batch 1 stands in Figure 9 and Table 3 too; elsewhere the paper prints none."""
    released = [v for v in everything() if v.source == RELEASED]
    assert {v.exhibit for v in released} == {"schedules_figure", "frameworks_figure"} and len(released) == 55
    by_model = {v.model: v.value for v in select("ios/schedules_figure", system="ios_both")}
    assert by_model == {v.model: v.value for v in select("ios/frameworks_figure", system="ios_both")}
    printed = select("ios/pruning_figure", metric="latency", system="ios_both(r=3,s=8)")
    printed += select("ios/specialization_table", device="V100", batch=1, system="ios_both(optimized_for_batch=1)")
    assert len(printed) == 3 and all(abs(v.value - by_model[v.model]) < 0.05 for v in printed)


def test_networks_have_an_entry_in_the_zoo() -> None:
    inference = [v for v in everything() if v.paper in ("nimble", "ios", "opara")]
    zoo = {v.zoo_model for v in inference} - {None}
    assert zoo - set(models.names()) == NO_ENTRY
    assert {v.zoo_model for v in select("nimble/figure8")} == {
        "mobilenet_v2_cifar10",
        "efficientnet_b0_cifar10",
        "resnet50_cifar10",
    }
    assert {v.zoo_model for v in select("ios/frameworks_figure", model="geomean")} == {None}


@pytest.mark.parametrize(
    ("source", "criteria", "message"),
    [
        ("nimbel/figure7", {}, "no paper is named 'nimbel': did you mean nimble?"),
        ("nimble/figure77", {}, "did you mean figure7?"),
        ("nimble", {}, "there is figure2a, figure2b, figure7"),
        ("nimble/figure7", {"modle": "resnet50"}, "no column 'modle': did you mean model?"),
        ("nimble/figure7", {"model": "resnet5"}, "no value with model=resnet5: did you mean resnet50?"),
        ("nimble/figure7", {"model": "resnet50", "baseline": "tvm"}, "no value with baseline=tvm: there is eager"),
        ("nimble/figure7", {"model": []}, "no value with model=[]"),
    ],
)
def test_what_is_not_there_is_told_in_a_line(source: str, criteria: dict[str, str], message: str) -> None:
    with pytest.raises(NoSuchValue) as raised:
        select(source, **criteria)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@given(st.sampled_from([(v.name, c) for v in everything() for c in COLUMNS]), st.data())
def test_select_is_a_filter(place: tuple[str, str], data: st.DataObject) -> None:
    source, column = place
    there = sorted({str(getattr(v, column)) for v in everything() if v.name == source})
    wanted = data.draw(st.lists(st.sampled_from(there), min_size=1, unique=True))
    expected = [v for v in everything() if v.name == source and str(getattr(v, column)) in wanted]
    assert select(source, **{column: wanted}) == expected  # type: ignore[arg-type]


def test_a_preset_names_rows() -> None:
    rows = [
        {"exhibit": "nimble/figure7", "baseline": "eager"},
        {"exhibit": "nimble/figure7", "model": "resnet50"},
        {"exhibit": "nimble/table1", "metric": "speedup", "model": ["darts", "amoebanet"]},
    ]
    published_values = reproduced(rows)
    assert len(published_values) == 8 + 0 + 2 and len(set(published_values)) == len(published_values)
    with pytest.raises(NoSuchValue, match="named by their exhibit"):
        reproduced([{"paper": "nimble"}])


def test_every_exhibit_can_be_named() -> None:
    names = [f"{paper}/{name}" for paper in papers() for name in exhibits(paper)]
    assert sum(len(exhibit(name)) for name in names) == len(everything()) and "opara/section5.2" in names


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("paper,value\n", "its columns are"),
        (",".join(COLUMNS) + "\nnimble,f,m,s,b,t,1,V100,speedup,fast,x,,text,Section 1\n", "'fast' is not a number"),
        (",".join(COLUMNS) + "\nios,f,m,s,b,t,1,V100,speedup,1.0,x,,text,Section 1\n", "line 2: not a row"),
        (",".join(COLUMNS) + "\nnimble,f,m\n", "line 2: not a row"),
        (",".join(COLUMNS) + "\nnimble,f,m,s,b,t,1,V100,speedup,1.0,x,note,text,Section 1,more\n", "line 2: not a row"),
        (
            ",".join(COLUMNS) + "\nnimble,f,m,s,b,t,1,V100,speedup,1.0,x,,README,Section 1\n",
            "line 2: a source is one of text",
        ),
        (
            ",".join(COLUMNS) + "\nnimble,f,m,s,b,t,1,V100,speedup,1.0,x,,text,\n",
            "line 2: a source is one of text, .*with its place",
        ),
    ],
)
def test_a_broken_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, message: str) -> None:
    (tmp_path / "nimble.csv").write_text(broken)
    monkeypatch.setattr(values, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match=message):
        everything.__wrapped__()


PLACES = {
    "text": r"Section \d(\.\d+)*(; .*)?",
    "table": r"Section \d(\.\d+)*, Table (\d+(\.\d+)?|I)( \(\d\))?",
    "figure label": r"(Section \d(\.\d+)*|Supplement, Appendix [A-D]), Figure \d+[a-c]?",
    "figure by eye": r"Section \d(\.\d+)*, Figure \d+",
    "released output": r"README [\d.]+, the table beside Figure \d+",
    "released code": r"measured by this project on another host of the same GPU",
    "words": r"Section \d(\.\d+)*",
}


@pytest.mark.parametrize(
    "value", everything(), ids=lambda value: f"{value.name} {value.model} {value.system} {value.metric}"
)
def test_a_value_says_where_it_stands(value: Value) -> None:
    assert set(PLACES) == set(SOURCES)
    assert re.fullmatch(PLACES[value.source], value.place), value
    # A figure or table that the exhibit is named after is the one that the place names.
    number = re.search(r"(?:figure|table)(\d+(?:\.\d+)?)", value.exhibit)
    if number is not None and value.source != "text" and value.paper != "nimble":
        assert re.search(rf"(Figure|Table) ({number[1]}|I)\b", value.place), value


def test_files_are_plain_csv() -> None:
    for file in sorted(values.FOLDER.glob("*.csv")):
        with file.open(newline="") as lines:
            assert {len(row) for row in csv.reader(lines)} == {len(COLUMNS)}
