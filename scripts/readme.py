"""The tables, charts and gallery of the pages, made from the committed results: python scripts/readme.py [--check]

Rewrites the parts of README.md and of results/reference's pages between their markers, the pictures under
results/reference/h200, and results/reference/h200.csv; with --check it writes nothing and ends with status 1 where any of
them is not what the results give.
"""

import sys
from functools import cache
from pathlib import Path
from statistics import geometric_mean

import matplotlib

matplotlib.use("svg")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import matplotlib.pyplot as plt

from conf.text import counted
from results import selection
from results.cell import Choice
from results.pack import SUFFIX, sweep_of
from results.record import Record
from results.selection import Selection
from results.siblings import Siblings, siblings
from results.store import Store
from scripts import best_tables, cells, pipeline_tables, serving_tables, tables, today
from scripts.arguments import Parser
from scripts.charts import speedup, style
from scripts.exhibits.gallery import gallery
from scripts.precision_table import half_precision
from scripts.standing import by_precision, sections, standings
from scripts.tables import CUDA_GRAPH, EAGER, GRAPHS, SIDE_BY_SIDE, SYSTEMS, TORCH_COMPILE
from scripts.weave_tables import beside_all, searched

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "reference" / "h200"  # a pack of records for each sweep
README = ROOT / "README.md"
REFERENCE = ROOT / "results" / "reference"  # its pages have parts too
OVERVIEW = RESULTS / "overview.jsonl.gz"  # the first table: eager, compilers, a CUDA Graph and Nimble
TURNS = RESULTS / "turns.jsonl.gz"  # with more systems, and no profiler before the rounds
SCHEDULERS = RESULTS / "schedulers.jsonl.gz"  # every scheduler in one set of rounds
ZOO = RESULTS / "zoo.jsonl.gz"  # compilers and schedulers in one set of rounds
BEST = RESULTS / "best.jsonl.gz"  # each system with all that it can change
REDUCED = RESULTS / "reductions.jsonl.gz"  # with fuse_reductions and without
TUNED = RESULTS / "tuned.jsonl.gz"  # TVM before and after tuning, beside some of them
CHOSEN = [RESULTS / f"{name}.jsonl.gz" for name in ("algorithms", "algorithms-again")]
FIGURE5 = RESULTS / "figure5.jsonl.gz"  # Opara's, with counters
LEARNED = RESULTS / "windtunnel.jsonl.gz"  # pipelines over New York's flights
HALF = RESULTS / "half-precision.jsonl.gz"  # the zoo in fp16 and bf16 under each fused system
SPEED = RESULTS / "windtunnel-speed.jsonl.gz"  # of their tuning and predicting
SERVED = [  # 13B
    RESULTS / f"serving{what}.jsonl.gz" for what in ("", "-engine", "-ladder", "-transformers", "-asynchronous")
]
ATTENDED = RESULTS / "serving-attention.jsonl.gz"  # attention in one launch, or in a call a request
PREFETCHED = RESULTS / "serving-prefetch.jsonl.gz"  # a small model with a batch more in flight, and without
OTHERS = RESULTS / "serving-models.jsonl.gz"  # another architecture, and an encoder-decoder
PEERED = RESULTS / "serving-vllm.jsonl.gz"  # vLLM and Orca, one after another on one machine
AZURE = RESULTS / "serving-azure.jsonl.gz"  # conversations of Azure's trace, as they came
SATURATED = RESULTS / "serving-azure-saturated.jsonl.gz"  # and as fast as they were answered
EXTENDED = RESULTS / "serving-extensions.jsonl.gz"  # what came after Orca, with prompts that begin alike
INCREMENTED = RESULTS / "serving-increments.jsonl.gz"  # an increment iteration by each of our schedulers
PARTED = RESULTS / "serving-two-gpus.jsonl.gz"  # models in parts on two GPUs, and beside them on one
QUARTERED = RESULTS / "serving-four-gpus.jsonl.gz"  # larger models in parts on four GPUs
ON_H100 = RESULTS.with_name("h100") / "serving.jsonl.gz"  # static and iteration-level batches on another GPU
TODAY = RESULTS / "today.jsonl.gz"  # networks of today in half precision
LEVEL = RESULTS / "level.jsonl.gz"  # weave in turn with others at further batches and precisions
SEARCHED = RESULTS / "weave.jsonl.gz"  # weave in turn with what it begins with
STAGES = RESULTS / "ios.jsonl.gz"
UNHINDERED = RESULTS / "ios-barriers.jsonl.gz"  # IOS's stages with and without their barriers
LAUNCHED = RESULTS / "opara.jsonl.gz"
ORDERED = RESULTS / "orders.jsonl.gz"  # in more launch orders, on more models, the same kernels in all
COSTS = "gpt_13b-h200"  # of iterations, that figures of 13B are simulated with
COSTS_IN_STAGES, COSTS_IN_QUARTERS = "gpt_13b-pp2-h200", "gpt_66b-tp4-h200"
CHART, FRONT = RESULTS / "speedup.svg", RESULTS / "best.svg"
CELLS = RESULTS.with_suffix(".csv")
COMMAND = "python scripts/readme.py"


def chart(measured: Selection, baseline: Choice, title: str) -> str:
    """Speedup over a system, as SVG: a bar a system, its 95 % interval, grouped by model; beneath it the means."""
    means = []
    for system in measured.systems:
        ratios = [ratio.ratio for row in measured.rows if (ratio := measured.over(row, system, baseline)) is not None]
        if system != baseline and ratios:
            means.append(f"{style.label(system)} {geometric_mean(ratios):.2f} ({counted(len(ratios), 'model')})")
    with style.column():
        drawn = speedup.draw(measured, baseline, remark=f"Geometric mean: {', '.join(means)}.")
    style.head(drawn.figure, title)
    svg = style.svg(drawn.figure)
    plt.close(drawn.figure)
    return svg


def charts() -> dict[Path, str]:
    """The README's, of systems with all that each can change, and that of the first table."""
    overview = Selection(selection.read([OVERVIEW]), style.order).only(systems=[s.label for s in SYSTEMS], batches=[1])
    best = Selection(selection.read([BEST]), style.order)
    return {
        CHART: chart(overview, EAGER, "Speedup over eager, by model"),
        FRONT: chart(best, CUDA_GRAPH, "Speedup over a CUDA Graph of eager's kernels, all systems in turn"),
    }


@cache
def of_today() -> list[Selection]:
    return by_precision(records(TODAY))


@cache
def charts_of_today() -> dict[str, str]:
    """SVG by its place beside the pages: speedup over one stream, a chart for each precision and batch."""
    charts = {}
    for measured in of_today():
        for batch in measured.batches:
            with style.column():
                figure = today.drawn(measured.only(batches=[batch]), "Networks of today")
            charts[f"{RESULTS.name}/today-{measured.setting.precision}-b{batch}.svg"] = style.svg(figure)
            plt.close(figure)
    return charts


def read(sweep: Path) -> list[Siblings]:
    """The groups of a sweep's records of runner=bench."""
    return siblings(record for record in Store(sweep).read().records.values() if record.cell.runner.name == "bench")


def everything(sweep: Path) -> list[Siblings]:
    """The groups of a sweep's records, whatever measured them."""
    return siblings(Store(sweep).read().records.values())


def records(sweep: Path) -> list[Record]:
    """All that a sweep has."""
    return list(Store(sweep).read().records.values())


def parts() -> dict[str, str]:
    """Markdown by the name of the part of a page that it fills; the exhibits are not among them."""
    zoo, schedulers = read(ZOO), read(SCHEDULERS)
    in_turn = everything(TURNS)
    trained = [group for group in in_turn if group.group.runner.name == "training"]
    turned = [group for group in in_turn if group not in trained]
    launched = [*read(ORDERED), *read(LAUNCHED), *schedulers, *turned, *read(FIGURE5), *read(TUNED), *zoo]
    graphs = {system for pair in GRAPHS for system in pair}
    same_kernels = set(SIDE_BY_SIDE) - {TORCH_COMPILE}
    served = [record for sweep in SERVED for record in records(sweep)]
    beneath = {  # a table's own sentences
        "in turn": [tables.measured_alone(turned, graphs)],
        "schedulers": [tables.measured_alone(schedulers, same_kernels), tables.equal_to_eager(schedulers)],
        "today": [*map("![speedup over one stream]({})".format, charts_of_today()), sections(standings(of_today()))],
    }
    sweeps = {sweep_of(pack): list(Store(pack).read().records.values()) for pack in RESULTS.glob(f"*{SUFFIX}")}
    shown = {
        "sweeps": tables.sweeps(sweeps),
        "front": best_tables.front(read(BEST)),
        "results": tables.overview(everything(OVERVIEW)),
        "in turn": tables.turns(turned),
        "compilers": tables.compilers(zoo),
        "best": best_tables.best(read(BEST)),
        "products": best_tables.products(read(BEST)),
        "reductions": tables.reductions(read(REDUCED)),
        "tuned": tables.tuned([*zoo, *read(TUNED)]),
        "algorithms": tables.algorithms([everything(sweep) for sweep in CHOSEN]),
        "training": tables.training(trained),
        "half precision": half_precision(everything(HALF)),
        "pipelines": pipeline_tables.tuned_pipelines(everything(LEARNED)),
        "tuning": pipeline_tables.tuning(everything(SPEED)),
        "predictions": pipeline_tables.predictions(everything(SPEED)),
        "schedulers": tables.side_by_side(schedulers),
        "weave": searched(read(SEARCHED)),
        "level": beside_all(read(LEVEL)),
        "today": beside_all(read(TODAY)),
        "stages": tables.stages(read(STAGES), read(UNHINDERED)),
        "iterations": serving_tables.iterations(served),
        "requests at once": serving_tables.at_once(served),
        "requests at once, h100": serving_tables.at_once(records(ON_H100)),
        "requests at once, extensions": serving_tables.at_once(records(EXTENDED)),
        "increments": serving_tables.iterations(records(INCREMENTED)),
        "attention": serving_tables.iterations(records(ATTENDED)),
        "prefetch": serving_tables.at_once(records(PREFETCHED)),
        "other models": serving_tables.at_a_rate(records(OTHERS)),
        "other models, iterations": serving_tables.iterations(records(OTHERS)),
        "two GPUs, iterations": serving_tables.iterations(records(PARTED)),
        "two GPUs, requests at once": serving_tables.at_once(records(PARTED)),
        "two GPUs, both clocks": serving_tables.both_clocks(records(PARTED), COSTS_IN_STAGES),
        "two GPUs, at an SLO": serving_tables.at_an_slo(records(PARTED)),
        "four GPUs, iterations": serving_tables.iterations(records(QUARTERED)),
        "four GPUs, both clocks": serving_tables.both_clocks(records(QUARTERED), COSTS_IN_QUARTERS),
        "vllm at once": serving_tables.at_once(records(PEERED)),
        "vllm at a rate": serving_tables.at_a_rate(records(PEERED)),
        "azure at once": serving_tables.at_once(records(SATURATED)),
        "azure at a rate": serving_tables.at_a_rate(records(AZURE)),
        "both clocks": serving_tables.both_clocks(served, COSTS),
        "launch orders": tables.launch_orders(launched),
    }
    return {name: "\n\n".join([table.markdown(), *beneath.get(name, [])]) for name, table in shown.items()}


def begins(name: str) -> str:
    """The marker before a part."""
    return f"<!-- {name}: {COMMAND} -->"


def replaced(text: str, name: str, part: str) -> str:
    """A page with one part anew, between its two markers. Raises ValueError where the page lacks one of them."""
    begin, end = begins(name), f"<!-- end of {name} -->"
    before, _, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    if not last:
        raise ValueError(f"no part {name!r} between markers")
    return f"{before}{begin}\n\n{part}\n\n{end}{after}"


def pages(made: dict[str, str]) -> dict[Path, str]:
    """Every page that has parts, each of them anew. Raises ValueError where a part is on no page.

    Args:
        made: Markdown by the name of the part.
    """
    texts = {page: page.read_text(encoding="utf-8") for page in (README, *sorted(REFERENCE.glob("*.md")))}
    for name, part in made.items():
        places = [page for page, text in texts.items() if begins(name) in text]
        if not places:
            raise ValueError(f"no page has a part {name!r}")
        for page in places:
            texts[page] = replaced(texts[page], name, part)
    return texts


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where a page or a picture differs")
    check: bool = parser.parse_args().check
    for line in Store(RESULTS).read().skipped:
        print(line, file=sys.stderr)
    exhibits, pictures = gallery(RESULTS / "exhibits", REFERENCE)
    wanted = {
        **pages(parts() | exhibits),
        **charts(),
        CELLS: cells.table(RESULTS),
        **{REFERENCE / name: svg for name, svg in charts_of_today().items()},
        **pictures,
    }
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'differs from the results' if check else 'written'}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
