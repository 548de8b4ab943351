"""Every chart of the committed exhibits: what a paper would print, in a column's width and without colour."""

import re
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import matplotlib

matplotlib.use("agg")

import pytest
from conftest import ROOT
from drawn_charts import check_words, lay_out, texts
from judged_exhibits import judged
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from results.finding import HOLDS
from results.store import Store
from scripts.charts import serving, style
from scripts.charts.chart import Chart
from scripts.charts.names import WRITTEN, written
from scripts.charts.places import ABSENT
from scripts.exhibits import judgement
from scripts.exhibits.marks import paper_systems
from scripts.exhibits.pictures import MANY, pictures
from scripts.exhibits.preset import Preset, names
from scripts.exhibits.recorded import SWEEPS, Recorded, recorded

PICTURES = ROOT / "results" / "reference" / "h200" / "exhibits"
IDENTIFIER = re.compile(r"(?<![\w.])(?:" + "|".join(map(re.escape, sorted(WRITTEN))) + r")(?![\w.])")
SAME_IN_WORDS = {"pipeline", "sequential", "greedy", "eager"}
SMALLEST = 6  # points, in a column of 85 mm
APART = 12  # of a lightness of 100, between bars without a hatch that differs
BARS = ("speedup", "sm_efficiency", "idle", "critical_path")


@cache
def exhibit(name: str) -> tuple[Preset, Recorded, dict[str, Chart]]:
    preset = Preset.read(name)
    best = recorded(preset)[0]
    return preset, best, pictures(preset, best.evidence, best.findings)[0] if best.tells else {}


# Those with a committed picture: to draw all takes half a minute, and each process of a run asks for their names.
EXHIBITS = [name for name in names() if any(PICTURES.glob(f"{name.replace('/', '-')}[-.]*"))]
pytestmark = pytest.mark.slow  # traces take long to read, and large charts to draw


def charts(name: str, *kinds: str) -> list[tuple[str, Figure]]:
    """The figures of an exhibit by their keys, of some kinds or of all."""
    return [(key, c.figure) for key, c in exhibit(name)[2].items() if not kinds or key.partition("-")[0] in kinds]


def words(figure: Figure) -> str:
    with style.house():  # the ticks of an axis depend on the size of its words
        return " ".join(" ".join(text.get_text() for text in texts(figure)).split())


def lightness(colour: object) -> float:
    """CIE L*, from 0 (black) to 100."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]  # type: ignore[arg-type]
    y = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return float(116 * y ** (1 / 3) - 16) if y > 0.008856 else float(903.3 * y)


def alike(patches: Sequence[Patch]) -> list[tuple[str, str]]:
    """Which entries of a legend look the same in print without colour."""
    return [
        (str(a.get_label()), str(b.get_label()))
        for a, b in combinations(patches, 2)
        if a.get_hatch() == b.get_hatch() and abs(lightness(a.get_facecolor()) - lightness(b.get_facecolor())) < APART
    ]


def test_every_exhibit_that_can_be_drawn_has_a_picture() -> None:
    assert [name for name in names() if exhibit(name)[2]] == EXHIBITS


@pytest.mark.parametrize("name", EXHIBITS)
def test_a_title_names_the_exhibit_and_the_setting(name: str) -> None:
    preset, best, drawn = exhibit(name)
    paper, number = name.split("/")
    for key, chart in drawn.items():
        shown = words(chart.figure)
        assert written(preset.title) in shown, key
        assert paper.lower() in preset.title.lower()
        measured = best.evidence.measured
        if measured is not None and key not in ("claims", "timeline"):
            assert measured.setting.place in shown and written(measured.setting.precision) in shown, key
    if match := re.match(r"(figure|table)([\d.]+)", number):
        assert f"{match[1]} {match[2]}" in preset.title


@pytest.mark.parametrize("name", EXHIBITS)
def test_names_are_written_as_people_write_them(name: str) -> None:
    for key, figure in charts(name):
        identifiers = set(IDENTIFIER.findall(words(figure))) - SAME_IN_WORDS
        assert not identifiers, key


@pytest.mark.parametrize("name", EXHIBITS)
def test_a_subtitle_says_nothing_that_the_title_says(name: str) -> None:
    """As a model's name, or its batch; and its own parts differ."""
    preset, *_ = exhibit(name)
    for key, figure in charts(name):
        legend = next(iter(figure.legends), None)
        heading = legend.get_title().get_text() if legend is not None else figure.get_suptitle()
        title, setting = written(preset.title), " ".join(heading.split())
        assert setting.startswith(title), key
        parts = re.split("[,;] ", setting.removeprefix(title).removeprefix("; the figures side by side").strip())
        assert parts != [""] or name == "orca/table4.1", key  # whose sizes are of no machine
        assert len(set(parts)) == len(parts), key
        assert not [part for part in filter(None, parts) if re.search(rf"(?<!\w){re.escape(part)}(?!\w)", title)], key


@pytest.mark.parametrize("name", EXHIBITS)
def test_a_chart_is_read_at_a_columns_width(name: str) -> None:
    for key, figure in charts(name):
        with style.house():
            wide = key == "claims" and len(exhibit(name)[1].findings) > MANY
            assert figure.get_figwidth() == (style.PAGE if wide else style.COLUMN) and figure.get_figheight() < 11, key
            assert min(text.get_fontsize() for text in texts(figure)) >= SMALLEST, key
            check_words(figure)


@pytest.mark.parametrize("name", EXHIBITS)
def test_no_mark_is_cut_off_by_its_axes(name: str) -> None:
    for key, figure in charts(name):
        with style.house():
            lay_out(figure)
        for axes in figure.axes:
            for line in axes.lines:
                if line.get_marker() in ("", "None", None, "_", "|") or not line.get_clip_on():  # none, or a cap
                    continue
                half = 0.5 * (line.get_markersize() + line.get_markeredgewidth()) * figure.dpi / 72
                inner = axes.get_window_extent().padded(-half)
                assert all(inner.contains(x, y) for x, y in axes.transData.transform(line.get_xydata())), key


@pytest.mark.parametrize("name", EXHIBITS)
def test_the_number_of_a_bar_stands_under_it_and_the_axes(name: str) -> None:
    """Clear of hatches, marks and the ends of whiskers, whose value it is not."""
    for key, figure in charts(name, *BARS):
        with style.house():
            lay_out(figure)
        for axes in figure.axes:
            floor = axes.get_window_extent().y0
            boxes = [text.get_window_extent() for text in axes.texts if re.fullmatch(r"[\d.]+", text.get_text())]
            middles = [(box.x0 + box.x1) / 2 for box in boxes if box.y1 < floor]
            bars = [patch.get_window_extent() for patch in axes.patches if patch.get_hatch() != "//"]
            bars = [bar for bar in bars if bar.width < 0.9 * axes.bbox.width]  # a published range is as wide as the axes
            assert bars and len(middles) == len(bars), key
            assert all(any(bar.x0 < middle < bar.x1 for middle in middles) for bar in bars), key
            assert all(whisker.get_path_effects() for whisker in axes.collections), key  # light around it, on a dark bar


@pytest.mark.parametrize("name", EXHIBITS)
def test_bars_have_their_values_one_scale_and_looks_without_colour(name: str) -> None:
    for key, figure in charts(name, *BARS):
        assert len({axes.get_ylim() for axes in figure.axes}) == 1, key
        numbers = [
            text.get_text() for axes in figure.axes for text in axes.texts if re.fullmatch(r"[\d.]+", text.get_text())
        ]
        cells = {(axes, round(p.get_x(), 3)) for axes in figure.axes for p in axes.patches if p.get_width() < 1}  # type: ignore[attr-defined]
        assert len(numbers) >= len(cells) > 0, key
        patches = [handle for legend in figure.legends for handle in legend.legend_handles if isinstance(handle, Patch)]
        assert not alike(patches), key


@pytest.mark.parametrize("name", EXHIBITS)
def test_each_of_the_papers_systems_has_a_mark_or_a_note(name: str) -> None:
    preset, *_ = exhibit(name)
    for key, figure in charts(name, "speedup", "idle"):
        shown = words(figure)
        for system in paper_systems(preset):
            stand_ins = [preset.system_of(v) for v, _ in preset.figures if v.system == system]
            stand_ins += [preset.baseline_of(v) for v, _ in preset.figures if v.baseline == system]
            named = {written(system), *(written(choice.label) for choice in stand_ins if choice is not None)}
            assert any(one in shown for one in named), f"{key}: {system}"
        if any(line.get_marker() in style.PAPERS.values() for axes in figure.axes for line in axes.lines):
            legends = " ".join(text.get_text() for legend in figure.legends for text in legend.get_texts())
            assert "paper" in legends or "authors' output" in legends, key


@pytest.mark.parametrize(
    ("name", "words_of_claim"),
    [
        ("opara/figure9", ("speedup over Nimble (as released)",)),
        ("ios/pruning", ("time of the search", "latency", "3, 8", "in another setting")),
        ("ios/specialization", ("searched for batch", "executed at batch", "the paper, V100")),
        ("ios/figure10", ("searched for batch", "the paper, V100", "1.28x", "1.08x")),
        ("nimble/figure2a", ("idle: no kernel runs", "idle for up to 91 %")),
        ("nimble/figure2c", ("critical path", "the rest")),
        ("ios/blockwise", ("what the search measured of each block", "2.3 times as fast")),
    ],
)
def test_a_chart_shows_its_claim(name: str, words_of_claim: tuple[str, ...]) -> None:
    (_, first), *_ = charts(name)
    shown = words(first)
    for one in words_of_claim:
        assert one in shown


def test_points_of_one_batch_stand_over_it() -> None:
    figures = [figure for name in ("opara/figure8", "ios/batch_sizes") for _, figure in charts(name, "throughput")]
    assert figures  # of the records that have a throughput
    for figure in figures:
        batches = {text.get_text() for text in figure.axes[0].get_xticklabels()}
        places = {f"{x:g}" for line in figure.axes[0].lines for x in line.get_xdata()}  # type: ignore[union-attr]
        assert places <= batches


def test_each_picture_stands_on_a_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in PICTURES.parent.parent.glob("*.md"))
    assert [file.name for file in PICTURES.glob("*.svg") if f"/{file.name})" not in pages] == []


@pytest.mark.parametrize("file", sorted(PICTURES.glob("*.svg")), ids=lambda file: file.stem)
def test_a_picture_is_small_and_has_its_text_as_text(file: Path) -> None:
    root = ElementTree.parse(file).getroot()
    assert file.stat().st_size < 300_000
    assert len(root.findall(".//{http://www.w3.org/2000/svg}text")) > 5
    hatches = [ElementTree.tostring(one) for one in root.findall(".//{http://www.w3.org/2000/svg}pattern")]
    assert all(len(hatch) < 15_000 for hatch in hatches)


def test_every_committed_picture_is_as_wide_as_a_column() -> None:
    """So that its words keep their size in a paper: a wider one would be made smaller there."""
    files = [*PICTURES.glob("*.svg"), *PICTURES.parent.glob("*.svg")]
    widths = {file.name: ElementTree.parse(file).getroot().get("width", "") for file in files}
    assert len(files) > 60 and set(widths.values()) == {f"{72 * style.COLUMN:g}pt"}, widths


@pytest.mark.parametrize(("share", "shown"), [("0.1", "10 %"), ("0.01", "1 %"), ("0.125", "12.5 %")])
def test_a_share_of_the_rows_is_written_as_percent(share: str, shown: str) -> None:
    assert written(f"pre 2 (training_share={share})") == f"pre 2 ({shown} of the rows)"


def test_what_the_authors_released_is_marked_apart_from_what_the_paper_prints() -> None:
    """As what was read off a figure is."""
    _, best, drawn = exhibit("ios/schedules")
    numbers = [finding for finding in best.findings if finding.rule == "ratio"]
    assert numbers and all(finding.is_released for finding in numbers)
    assert judgement.published(numbers[0]) == f"{6.51 / 4.62:.2f}x (released)"
    assert "(released)" in best.verdict.published and ", released 0.88x" in best.verdict.reason
    assert "published" not in best.verdict.reason
    legends = [text.get_text() for legend in drawn["speedup"].figure.legends for text in legend.get_texts()]
    assert "IOS authors' output, V100" in legends and not any("paper" in legend for legend in legends)
    (labels,) = ([tick.get_text() for tick in axes.get_yticklabels()] for axes in drawn["claims"].figure.axes)
    assert any("released" in label for label in labels) and not any("published" in label for label in labels)
    # A number of the paper's has no such mark, and neither has a claim in words.
    others = [f for f in (*judged("nimble/figure7")[2], *best.findings) if f not in numbers]
    assert others and not any(finding.is_released for finding in others)


def test_words_of_the_papers_stand_where_it_prints_no_number() -> None:
    """In the table, in the verdict and in the picture; judged by the number that stands for them."""
    _, best, drawn = exhibit("orca/figure4.8c_simulated")
    first = best.findings[0]
    assert judgement.published(first) == "an order of magnitude" and first.published == 10 and first.verdict == HOLDS
    assert "published an order of magnitude" in best.verdict.reason
    labels = [tick.get_text() for axes in drawn["claims"].figure.axes for tick in axes.get_yticklabels()]
    assert first.ours is not None
    assert f"an order of magnitude, {first.ours:.1f} here" in labels[0].replace("\n", " ")


def test_both_counts_stand_beside_their_ratio() -> None:
    _, best, drawn = exhibit("opara/figure7")
    reasons = {f.what.partition(":")[0]: f.reason for f in best.findings if f.rule == "count"}
    assert reasons == {"t5": "50 over 22 here, 6 over 3 in the paper", "bert": "28 over 3 here"}
    under = drawn["timeline"].figure.get_supxlabel().replace("\n", " ")
    assert under == "Opara paper, A100: T5 on 6 streams under Opara, 3 under Nimble."


def test_what_is_published_of_several_batches_stands_under_the_bars() -> None:
    _, _, drawn = exhibit("opara/figure2")
    note = drawn["speedup"].figure.get_supxlabel().replace("\n", " ")
    of_none = note.partition("No published value of: ")[2].partition(".")[0]
    assert of_none == "Opara, Opara (the paper's table, depth first)"
    assert "largest over batches: 1.41." in note and "largest over batches: 1.11." in note


def test_the_matrix_of_batch_sizes_has_the_ratios_of_the_table() -> None:
    """Of the rounds, also where each schedule's latency alone has another."""
    for name in ("ios/figure10", "ios/specialization"):
        _, best, drawn = exhibit(name)
        here, theirs = ([text.get_text() for text in axes.texts] for axes in drawn["matrix"].figure.axes)
        own = [f for f in best.findings if re.search(r"batch (\d+): ios \(schedule=\w+@ios@b\1\) over", f.what)]
        assert own and all(any(f"{f.ours:.2f}x" in text for text in here) for f in own)
        assert all(any(f"{f.published:.2f}x" in text for text in theirs) for f in own if f.rule == "ratio")


def test_the_tradeoff_of_searches_has_the_ratios_of_the_table() -> None:
    _, best, drawn = exhibit("ios/pruning")
    shown = [float(y) for axes in drawn["tradeoff"].figure.axes for y in axes.lines[1].get_ydata()]
    latencies = [f.ours for f in best.findings if "cost" not in f.what and f.ours is not None]
    # The search without pruning, which all are over, stands in each panel.
    assert sorted(shown) == pytest.approx(sorted([*(1 / ratio for ratio in latencies), 1.0, 1.0]))


def test_lines_of_systems_differ_in_more_than_colour_and_say_once_what_all_share() -> None:
    """Few systems share a panel, where a dash and a fill tell them apart in print; each of many has a panel of its own."""
    assert len(set(serving.DASHES)) == len(set(serving.FILLS)) == serving.MOST <= len(style.COLOURS)
    _, _, drawn = exhibit("orca/figure4.8b_simulated")
    lines, markers = drawn["serving"].figure.legends
    assert "2 stages" in lines.get_title().get_text() and "costs of NVIDIA H200" in lines.get_title().get_text()
    names = [text.get_text() for text in lines.get_texts()]
    assert names == ["request-level", "request-level (padded)", "request-level (ragged)", "Orca"]
    looks = {(line.get_linestyle(), line.get_fillstyle()) for line in lines.legend_handles}  # type: ignore[union-attr]
    assert len(looks) == len(names)
    others = [text.get_text() for text in markers.get_texts()]
    assert others[0] == "batches up to 1" and others[-2:] == ["falls behind", "SLO 34 ms a token"]


def test_each_of_many_systems_has_a_panel_over_the_lines_of_the_others() -> None:
    _, _, drawn = exhibit("orca/microbatches")
    figure = drawn["serving"].figure
    panels = {" ".join(axes.get_title().split()): axes for axes in figure.axes if axes.axison}
    names = list(panels)
    assert names[0] == "request-level (ragged)" and names[-1] == "Orca" and len(names) == 7
    counts = {}
    for name, axes in panels.items():
        lines = [line for line in axes.lines if len(line.get_xdata()) > 1 and line.get_marker() != "x"]
        behind = [line for line in lines if line.get_color() == serving.OTHERS["color"]]
        counts[name] = len(lines) - len(behind) - 1  # the SLO
        assert {line.get_marker() for line in behind} == {"None"} and len(behind) > 15
    assert counts["request-level (microbatches of 16)"] == 1 and counts["Orca"] > 5
    (legend,) = figure.legends
    words = [text.get_text() for text in legend.get_texts()]
    assert words[0] == "batches up to 1" and words[-4:] == [
        "measured",
        "falls behind",
        "SLO 14.3 ms a token",
        "the other systems",
    ]


def test_a_narrow_chart_says_once_that_some_were_not_measured() -> None:
    for name, pack, chart, mark in (
        ("windtunnel/table5.3_nycflights13", "windtunnel", "accuracy", "mark"),
        ("opara/figure5", "opara-paper", "sm_efficiency-counters", "bar"),
    ):
        preset, best, _ = exhibit(name)
        records = Store(SWEEPS / f"{pack}.jsonl.gz").read().all
        some = [r for r in records if (r.cell.model.choice, r.cell.system.choice) != ("googlenet", "nimble_released")]
        figure = pictures(preset, best.run.evidence(some), best.findings)[0][chart].figure
        assert figure.get_supxlabel() == ABSENT.format(mark)
        assert not any("not measured" in text.get_text() for axes in figure.axes for text in axes.texts)
