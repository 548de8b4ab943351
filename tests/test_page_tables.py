"""Tables of the pages: what they say of the committed records, and of made ones."""

import re
from dataclasses import replace

import pytest
from made_records import cell, latency, record, rounds
from sentences import cells_of

from results.calls import Correctness
from results.record import Record
from results.siblings import Siblings, siblings
from results.store import Store
from results.warning import Warning
from scripts import best_tables, readme, serving_tables, tables
from scripts.precision_table import half_precision
from scripts.table import Column, Entry, Table, escaped


def test_a_changed_figure_is_noticed() -> None:
    records = list(Store(readme.OVERVIEW).read().records.values())
    text = (readme.REFERENCE / "LATENCY.md").read_text(encoding="utf-8")
    assert tables.overview(siblings(records)).markdown() in text

    def slower(one: Record) -> Record:
        if one.cell.model.name != "nasnet" or one.latency is None:
            return one
        host = replace(one.latency.host, median=2 * one.latency.host.median)
        return replace(one, latency=replace(one.latency, host=host))

    assert tables.overview(siblings(map(slower, records))).markdown() not in text


def test_a_table_is_written_as_markdown() -> None:
    shown = Table([Column("name", number=False), Column("ms")], [[Entry("a | b"), Entry("1.0", 1.0)]])
    assert shown.markdown() == "| name | ms |\n|---|---:|\n| a \\| b | 1.0 |"
    assert cells_of(shown.markdown().replace("\\|", "/")) == [{"name": "a / b", "ms": "1.0"}]
    assert Entry("a *b*", page="B.md").markdown == "[a \\*b\\*](B.md)"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a | b\n# c", "a \\| b # c"),
        ("<b>x</b> & y", "\\<b\\>x\\</b\\> \\& y"),
        ("[x](http://y)", "\\[x](http://y)"),
        ("__a__ *b* `c`", "\\_\\_a\\_\\_ \\*b\\* \\`c\\`"),
        ("# x", "\\# x"),
        ("torch_compile: 1.25x [1.20, 1.31] *", "torch_compile: 1.25x [1.20, 1.31] *"),
    ],
)
def test_a_text_is_no_markup(text: str, shown: str) -> None:
    assert escaped(text) == shown


def test_a_tuned_tvm_stands_beside_the_other_with_what_tuning_took() -> None:
    measured = [*readme.read(readme.ZOO), *readme.read(readme.TUNED)]
    rows = cells_of(tables.tuned(measured).markdown())
    groups = [group for group in measured if tables.TVM_TUNED in group]
    assert len(rows) == len(groups) == len({row["model"] for row in rows}) >= 4
    for group, cells in zip(groups, rows, strict=True):
        assert cells["model"] == group.group.model.label
        spent = group[tables.TVM_TUNED].compilation
        assert spent is not None
        texts = [cells[name] for name in ("trials", "seconds of tuning", "functions tuned")]
        assert texts == [str(spent.trials), f"{spent.tuning_s:.0f}", f"{spent.tuned} of {spent.functions}"]
        fastest = min(float(cells[s.label]) for s in tables.TUNED if cells[s.label] != "–")
        ratio = float(cells["nimble over the fastest tvm"].split("x")[0])
        assert ratio == pytest.approx(fastest / float(cells["nimble"]), rel=0.1)


def test_the_fastest_schedule_stands_over_the_fastest_compiler() -> None:
    measured = readme.read(readme.ZOO)
    rows = cells_of(tables.compilers(measured).markdown())
    assert len(rows) == len(measured)
    for cells in rows:
        ratio, _, pair = cells["fastest schedule over fastest compiler"].partition(" (")
        schedule, compiled = pair.rstrip(")").split(" over ")
        for fastest, among in ((schedule, tables.SCHEDULES), (compiled, tables.COMPILERS)):
            assert float(cells[fastest]) == min(float(cells[s.label]) for s in among if cells[s.label] != "–")
        wanted = float(cells[compiled]) / float(cells[schedule])
        assert float(ratio.split("x")[0]) == pytest.approx(wanted, rel=0.15), cells["model"]


def test_a_schedule_without_passes_may_be_the_fastest_schedule() -> None:
    names = [system.choice for system in (*tables.TUNED_COMPILERS, tables.CUDA_GRAPH, tables.NIMBLE, *tables.FUSED)]
    ms = dict.fromkeys(names, 2.0) | {"nimble": 1.0}
    measured = [record(name, latency=latency(t), comparison=rounds("g", [t])) for name, t in ms.items()]
    (cells,) = cells_of(best_tables.front(siblings(measured)).markdown())
    assert cells["fastest schedule over fastest compiler"].startswith("2.00x [2.00, 2.00] (nimble over ")
    assert "alone" not in cells["fastest schedule over fastest compiler"]


@pytest.mark.parametrize("slower", ["nimble", "torch_compile"])
def test_a_ratio_of_slow_rounds_has_that_of_calls_alone_behind_it(slower: str) -> None:
    """The compiler took 2 ms in the rounds and the schedule 1; alone they took 1.5 and 1."""
    alone_ms = {"nimble": 1.0, "torch_compile": 1.5}
    in_turn_ms = {"nimble": 1.0, "torch_compile": 2.0}
    warned = Warning("differs_in_rounds", {"ratio": 1.33})
    measured = [
        record(
            name,
            latency=latency(alone_ms[name]),
            comparison=rounds("g", [in_turn_ms[name]]),
            warnings=(warned,) if name == slower else (),
        )
        for name in alone_ms
    ]
    (cells,) = cells_of(best_tables.front(siblings(measured)).markdown())
    assert cells["fastest schedule over fastest compiler"] == "2.00x [2.00, 2.00] (nimble over torch_compile, 1.50x alone)"


def test_the_fastest_variant_of_torch_compile_stands_with_what_finding_it_took() -> None:
    measured = readme.read(readme.BEST)
    rows = cells_of(best_tables.best(measured).markdown())
    assert len(rows) == len(measured) > 0
    for group, cells in zip(measured, rows, strict=True):
        compilation = group[tables.BEST].compilation
        assert compilation is not None
        (decision,) = compilation.decisions
        ran = {name: ms for name, ms in decision.milliseconds.items() if ms is not None}
        fastest = min(ran, key=lambda name: ran[name])
        assert cells["variant"].split(", ")[0] == fastest.split(", ")[0] == compilation.mode
        assert ("frozen" in cells["variant"]) == ("frozen" in fastest)
        assert ("channels_last" in cells["variant"]) == ("channels_last" in fastest)
        tried = len(decision.milliseconds)
        wanted = f"{tried} of {tried + (compilation.num_untried or 0)}"
        wanted += f", {tried - len(ran)} in vain" if tried > len(ran) else ""
        assert cells["variants tried"] == wanted
        ratio, _, pair = cells["fastest schedule over fastest compiler"].partition(" (")
        schedule, compiled = re.split(",|\\)", pair)[0].split(" over ")
        assert float(cells[schedule]) == min(float(cells[s.label]) for s in (tables.NIMBLE, *tables.FUSED, tables.WEAVE))
        assert float(cells[compiled]) == min(float(cells[s.label]) for s in tables.TUNED_COMPILERS)
        assert float(ratio.split("x")[0]) == pytest.approx(float(cells[compiled]) / float(cells[schedule]), rel=0.15)


def test_what_products_take_each_way_is_told_with_what_the_choice_saves() -> None:
    measured = readme.read(readme.BEST)
    rows = cells_of(best_tables.products(measured).markdown())
    by_model = {group.group.model.label: group[tables.NIMBLE_FUSED].schedule for group in measured}
    assert "bert" in {row["model"] for row in rows}
    for row in rows:
        schedule = by_model[row["model"]]
        assert schedule is not None
        (decision,) = [d for d in schedule.decided("select_products") if d.pattern == row["product"]]
        us = {way: 1e3 * ms for way, ms in decision.milliseconds.items() if ms is not None}
        ours = {way: time for way, time in us.items() if "warps" in way}
        assert row["chosen"] == min(us, key=lambda way: us[way]) != "library"
        assert row["µs: library as captured"] == f"{us['library']:.1f}" and ours.keys() < us.keys()
        assert row["µs: library at its fastest"] == f"{min(time for way, time in us.items() if way not in ours):.1f}"
        assert row["µs: fastest Triton kernel"] == f"{min(ours.values()):.1f}"
        assert row["saved in all, µs"] == f"{decision.count * (us['library'] - us[row['chosen']]):.0f}"


def test_a_model_with_fused_reductions_stands_beside_the_one_without() -> None:
    measured = readme.read(readme.REDUCED)
    rows = cells_of(tables.reductions(measured).markdown())
    assert {row["model"] for row in rows} == {"bert", "gpt2", "t5"}
    for row in rows:
        assert int(row["kernels with"]) < int(row["kernels without"])
        ratio = float(row["milliseconds without"]) / float(row["milliseconds with"])
        assert float(row["with over without"].split("x")[0]) == pytest.approx(ratio, rel=0.1)


def test_the_share_of_an_error_is_that_of_the_check_it_is_nearest_to() -> None:
    part = Correctness(True, None, 0.1, 0.1, 0.4, element_error=0.3, element_tolerance=0.4)
    parts = {"fp16": part, "bf16": replace(part, element_error=0.04)}
    fused = [cell(system, precision=p) for p in parts for system in ("nimble_fused", "opara_fused", "ios_fused")]
    measured = [record(of=one, correctness=parts[one.conditions.precision]) for one in fused]
    ((_, *shares),) = [[entry.text for entry in row] for row in half_precision(siblings(measured)).rows]
    assert shares == ["0.75"] * 3 + ["0.25"] * 3


def test_cudnns_choices_are_told_of_each_process() -> None:
    sweeps = [siblings([timed(1.0), chosen(2.0)]), siblings([timed(3.0), chosen(2.0)])]
    (row,) = cells_of(tables.algorithms(sweeps).markdown())
    assert (row["timed"], row["heuristic"]) == ("1.000, 3.000", "2.000, 2.000")
    assert row["mean of timed over mean of heuristic"] == "1.00x"


def timed(ms: float, algorithms: str = "timed") -> Record:
    return record(of=cell("cuda_graph", runner="latency", algorithms=algorithms), latency=latency(ms))


def chosen(ms: float) -> Record:
    return timed(ms, "heuristic")


@pytest.mark.parametrize("are_stable", [True, False])
def test_an_unstable_trace_has_no_latency_in_a_table(are_stable: bool) -> None:
    """Whatever its tokens' times are; how many requests it served is told."""

    def told(one: Record) -> Record:
        serving = one.serving
        assert serving is not None
        traces = [replace(trace, is_stable=are_stable or i > 0) for i, trace in enumerate(serving.traces * 2)]
        return replace(one, serving=replace(serving, traces=tuple(traces)))

    rows = cells_of(serving_tables.at_a_rate(map(told, readme.records(readme.AZURE))).markdown())
    assert [row["system"] for row in rows] == ["orca_chunked", "orca_paged"]
    for row in rows:
        texts = [text for heading, text in row.items() if " ms, " in heading]
        assert len(texts) == 3 and all((text != "–") is are_stable for text in texts) and float(row["served"]) > 4


def test_of_launch_orders_the_first_records_of_a_cell_make_its_row() -> None:
    new, old = readme.read(readme.ORDERED), readme.read(readme.LAUNCHED)

    def rows(measured: list[Siblings]) -> dict[tuple[str, ...], dict[str, str]]:
        text = tables.launch_orders(measured).markdown()
        return {(c["model"], c["batch"], c["algorithms"]): c for c in cells_of(text)}

    zoo = readme.read(readme.ZOO)
    alone, both = rows(new), rows([*new, *old, *zoo])
    assert alone.keys() | rows(old).keys() == both.keys() and {algorithms for *_, algorithms in both} == {
        "heuristic",
        "timed",
    }
    elsewhere = {group.group.model.label: f"{tables.in_rounds(group[tables.OPARA]):.3f}" for group in reversed(zoo)}
    for (model, batch, algorithms), row in both.items():
        assert (row["critical_path"] == "–") == (algorithms == "timed")
        if algorithms == "heuristic":
            of_zoo = elsewhere[model] if batch == "1" else "–"
            assert row == alone[model, batch, algorithms] | {"opara in other rounds": of_zoo}


def test_a_page_without_a_marker_is_refused() -> None:
    with pytest.raises(ValueError, match="no part 'front'"):
        readme.replaced("<!-- front: python scripts/readme.py -->", "front", "")


def test_a_part_without_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match="no page has a part 'nowhere'"):
        readme.pages({"nowhere": ""})
