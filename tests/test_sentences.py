"""The figures of the pages' own sentences against what their commands print of the committed records, and of the settings.

A sentence is told by a pattern, whose groups are its figures. Pages with many of them have a file said_of_*.py. Tables that
stand between markers are no sentences: `python scripts/readme.py --check` compares those.
"""

import re
from collections.abc import Callable
from statistics import median

import pytest
import said_of_pipelines
import said_of_serving
import said_of_simulator
from conftest import ROOT
from sentences import FIGURE, H200, PERCENT, N, Said, numbers, pages, part, prose, sections

import conf
from results import finding
from results.store import Store
from systems.scheduling.passes import select_products

PAGES = ("COMPILERS", "LATENCY", "SCHEDULERS", "TODAY")
COMPILERS, LATENCY, SCHEDULERS, TODAY = (f"results/reference/{name}.md" for name in PAGES)
LONGER = ("mobilenet_v4", "swin_t")  # that torch_compile_best searched for longer at batch 1
FASTEST_BY_AUTOTUNE = "gptj_6b_decode"  # of torch_compile_best's variants
ABOUT, WEAVE = "results/reference/README.md", "systems/weave/README.md"


def without_branches() -> list[float]:
    """Nimble over a CUDA Graph, the median over networks that are chains."""
    rows = [
        row for row in part(ROOT / LATENCY, "results") if row["model"] in ("vgg16", "mobilenet_v2", "mobilenet_v2_cifar10")
    ]
    return [median(numbers(row["Nimble over CUDA Graph"])[0] for row in rows)]


def torch_compile_budget_s() -> list[float]:
    systems = [record.cell.system for record in Store(H200 / "best.jsonl.gz").read().all]
    return sorted({float(str(s.options["budget_s"])) for s in systems if s.name == "torch_compile" and s.options["best"]})


def searches_of_the_compiler() -> list[float]:
    """For how long torch_compile_best searched, and how many of its searches there are, that compiled max-autotune."""
    records = [r for r in Store(H200 / "today.jsonl.gz").read().all if r.cell.system.choice == "torch_compile_best"]
    budgets: dict[bool, set[float]] = {True: set(), False: set()}
    for record in records:
        is_longer = record.cell.model.name in LONGER and record.cell.conditions.batch == 1
        budgets[is_longer].add(float(str(record.cell.system.options["budget_s"])))
    searches = [record.compilation.decisions[0] for record in records if record.compilation is not None]
    compiled = [d for d in searches if any("max-autotune" in name and ms for name, ms in d.milliseconds.items())]
    (fastest,) = (r for r in records if r.compilation and "max-autotune" in r.compilation.decisions[0].chosen)
    assert fastest.cell.model.name == FASTEST_BY_AUTOTUNE
    return [*budgets[False], *budgets[True], len(searches), len(compiled), fastest.cell.conditions.batch]


def setting(group: str, choice: str, key: str) -> Callable[[], list[float]]:
    return lambda: [float(str(conf.options(group, choice)[key]))]


def timeout() -> list[float]:
    (seconds,) = re.findall(r"^timeout: ([\d.]+)", (conf.FOLDER / "config.yaml").read_text(encoding="utf-8"), re.MULTILINE)
    return [float(seconds)]


SAID = [
    Said(COMPILERS, rf"that it finds within {N} s\.", torch_compile_budget_s),
    Said(COMPILERS, rf"weave searches for {N} s\.", setting("system", "weave", "budget_s")),
    Said(COMPILERS, rf"MetaSchedule for {N} s,", setting("system", "tvm_tuned", "budget_s")),
    Said(SCHEDULERS, rf"after a search of {N} s,", setting("system", "weave", "budget_s")),
    Said("systems/compilers/README.md", rf"`timeout` \({N} s unless given\)", timeout),
    Said(
        "systems/scheduling/README.md",
        rf"if it is faster by {N} %\.",
        lambda: [PERCENT * (select_products.MIN_GAIN - 1)],
    ),
    Said(ABOUT, rf"Its {N} % interval is over", lambda: [PERCENT * finding.CONFIDENCE]),
    Said(ABOUT, rf"another process may differ by {N} %", lambda: [PERCENT * finding.ONE_PROCESS]),
    Said(LATENCY, rf"the rows near {N}x\.", without_branches),
    Said(
        TODAY,
        rf"searches for {N} s, for {N} on {LONGER[0]} and {LONGER[1]} at batch 1\. "
        rf"Of {N} settings max-autotune was compiled in that time on {N}\. "
        rf"It was the fastest of one, {FASTEST_BY_AUTOTUNE} at batch {N}\.",
        searches_of_the_compiler,
    ),
    *said_of_serving.SAID,
    *said_of_pipelines.SAID,
    *said_of_simulator.SAID,
]
# Figures that no command prints of what is committed, by words around them.
ELSEWHERE = {
    (ABOUT, r"such as 1\.25x"): "an example",
    (WEAVE, r"takes 1\.36 µs in a CUDA graph on an H100, and 0\.85 µs|takes 1\.40 µs"): "it needs an H100",
    **said_of_pipelines.ELSEWHERE,
    **said_of_simulator.ELSEWHERE,
}


def text_of(page: str) -> str:
    return " ".join(prose(text) for _, text in sections(ROOT / page))


def as_said(value: float, figure: str) -> str:
    """A number with the digits and the sign that a sentence gives it."""
    decimals = len(figure.partition(".")[2])
    text = f"{value:,.{decimals}f}" if "," in figure else f"{value:.{decimals}f}"
    return f"+{text}" if figure.startswith("+") else text


def compare(said: Said) -> None:
    """Raises AssertionError where a page says otherwise than what is printed."""
    (match,) = re.finditer(said.words, text_of(said.page))
    printed = [as_said(value, figure) for value, figure in zip(said.printed(), match.groups(), strict=True)]
    assert printed == list(match.groups()), match[0]


@pytest.mark.parametrize("said", SAID, ids=lambda said: f"{said.page}: {said.words[:40]}")
def test_a_sentence_says_what_its_command_prints(said: Said) -> None:
    compare(said)


@pytest.mark.slow
@pytest.mark.parametrize("said", said_of_simulator.PRINTED, ids=lambda said: f"{said.page}: {said.words[:40]}")
def test_a_sentence_says_what_the_simulators_benchmarks_print(said: Said) -> None:
    compare(said)


def test_a_sentence_with_another_figure_is_noticed() -> None:
    (tuned,) = (said for said in SAID if said.printed is said_of_pipelines.tuning)
    with pytest.raises(AssertionError, match="Tuning Pre2"):
        compare(Said(tuned.page, tuned.words, lambda: [4.0, 1.8, 2.1]))
    assert [as_said(*pair) for pair in ((0.03, "+0.0"), (4096, "4,096"), (0.65, "1"))] == ["+0.0", "4,096", "1"]


def test_no_figure_of_a_sentence_is_left_out() -> None:
    """Of the first page, those of the systems and those of the committed records: whoever adds a figure adds it here."""
    known: dict[str, list[str]] = {}
    for page, words in [*((said.page, said.words) for said in (*SAID, *said_of_simulator.PRINTED)), *ELSEWHERE]:
        known.setdefault(page, []).append(words)
    checked = 0
    for path in pages():
        page = str(path.relative_to(ROOT))
        if page != "README.md" and not page.startswith(("systems/", "results/reference/")):
            continue
        text = text_of(page)
        spans = [match.span() for words in known.get(page, []) for match in re.finditer(words, text)]
        for figure in FIGURE.finditer(text):
            around = text[max(0, figure.start() - 60) : figure.end() + 20]
            assert any(begin <= figure.start() < end for begin, end in spans), f"{page}: {around}"
            checked += 1
    assert checked > 40 and len(SAID) >= 20
    assert all(re.search(words, text_of(page)) for page, words in ELSEWHERE), "a figure that is gone"
