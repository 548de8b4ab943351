"""The README's tables, chart and gallery, made from the committed results: python scripts/readme.py [--check]

Rewrites the parts of README.md between its markers and the pictures under results/reference/h200; with --check it writes
nothing and ends with status 1 where any of them is not what the results give.
"""

import argparse
import io
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns

from results.store import Store
from scripts.charts.style import LOOKS
from scripts.exhibits.gallery import gallery
from scripts.tables import (
    SYSTEMS,
    algorithms,
    best,
    compilers,
    config_of,
    groups,
    launch_orders,
    over,
    products,
    reductions,
    side_by_side,
    stages,
    table,
    training,
    tuned,
    turns,
)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "reference" / "h200"
README = ROOT / "README.md"
TURNS = ROOT / "results" / "reference" / "h200-turns"  # with more systems, and no profiler before the rounds
SCHEDULERS = ROOT / "results" / "reference" / "h200-schedulers"  # every scheduler in one set of rounds
ZOO = ROOT / "results" / "reference" / "h200-zoo"  # compilers and schedulers in one set of rounds
BEST = ROOT / "results" / "reference" / "h200-best"  # each system with all that it can change
REDUCED = ROOT / "results" / "reference" / "h200-reductions"  # with fuse_reductions and without
TUNED = ROOT / "results" / "reference" / "h200-tuned"  # TVM before and after tuning, beside some of them
CHOSEN = [ROOT / "results" / "reference" / name for name in ("h200-algorithms", "h200-algorithms-again")]
FIGURE2B = ROOT / "results" / "reference" / "h200-figure2b"  # Nimble's
FIGURE5 = ROOT / "results" / "reference" / "h200-figure5"  # Opara's, with counters
STAGES = ROOT / "results" / "reference" / "h200-ios"
UNHINDERED = ROOT / "results" / "reference" / "h200-ios-barriers"  # IOS's stages with and without their barriers
PRUNED = ROOT / "results" / "reference" / "h200-ios-pruning"  # its `ios` is that of h200-ios in other rounds
LAUNCHED = ROOT / "results" / "reference" / "h200-opara"
ORDERED = ROOT / "results" / "reference" / "h200-orders"  # in more launch orders, on more models, the same kernels in all
SCHEDULES = ROOT / "results" / "reference" / "exhibits"  # and timelines, as scripts/reproduce.py wrote them
CHART = RESULTS / "speedup.svg"
BEGIN_SCHEDULERS, END_SCHEDULERS = "<!-- schedulers: python scripts/readme.py -->", "<!-- end of schedulers -->"
BEGIN_TURNS, END_TURNS = "<!-- in turn: python scripts/readme.py -->", "<!-- end of turns -->"
BEGIN_CHOSEN, END_CHOSEN = "<!-- algorithms: python scripts/readme.py -->", "<!-- end of algorithms -->"
BEGIN_BEST, END_BEST = "<!-- best: python scripts/readme.py -->", "<!-- end of best -->"
BEGIN_PRODUCTS, END_PRODUCTS = "<!-- products: python scripts/readme.py -->", "<!-- end of products -->"
BEGIN_REDUCED, END_REDUCED = "<!-- reductions: python scripts/readme.py -->", "<!-- end of reductions -->"
BEGIN_TUNED, END_TUNED = "<!-- tuned: python scripts/readme.py -->", "<!-- end of tuned -->"
BEGIN_COMPILED, END_COMPILED = "<!-- compilers: python scripts/readme.py -->", "<!-- end of compilers -->"
BEGIN_TRAINING, END_TRAINING = "<!-- training: python scripts/readme.py -->", "<!-- end of training -->"
BEGIN_STAGES, END_STAGES = "<!-- stages: python scripts/readme.py -->", "<!-- end of stages -->"
BEGIN_ORDERS, END_ORDERS = "<!-- launch orders: python scripts/readme.py -->", "<!-- end of launch orders -->"
BEGIN, END = "<!-- results: python scripts/readme.py -->", "<!-- end of results -->"
EXHIBITS, END_EXHIBITS = "<!-- exhibits: python scripts/readme.py -->", "<!-- end of exhibits -->"
ELSEWHERE = {  # exhibits, and the records that tell of them, if not the first table's
    "nimble/figure2b": (FIGURE2B,),
    "nimble/figure7": (TURNS, ZOO),
    "nimble/table1": (TURNS,),
    "nimble/figure8": (TURNS,),
    "nimble/supplement_figure1": (TURNS,),
    "nimble/supplement_figure2": (TURNS,),
    "opara/figure2": (ORDERED, LAUNCHED),
    "opara/figure5": (FIGURE5, ZOO, SCHEDULERS, TURNS),
    "opara/figure8": (LAUNCHED, ZOO),
    "opara/prototype": (FIGURE5, ZOO),
    "opara/figure9": (LAUNCHED,),
    "ios/autotune": (TUNED,),
    "ios/frameworks": (ZOO,),
    "ios/schedules": (STAGES,),
    "ios/blockwise": (STAGES,),
    "ios/active_warps": (STAGES,),
    "ios/batch_sizes": (STAGES,),
    "ios/specialization": (STAGES,),
    "ios/pruning": (PRUNED,),
}
COLOURS = {system: LOOKS[system].colour for system in SYSTEMS}


def chart(measured: list[dict[str, dict[str, Any]]]) -> str:
    """Speedup over eager at batch 1, as SVG: a bar a system, its 95 % interval, grouped by model."""
    rows = []
    for group in measured:
        config = config_of(group)
        if config["batch"] != 1:
            continue
        for system in SYSTEMS[1:]:
            if ratio := over(group, system, "eager"):
                rows.append((config["model"]["name"], system, ratio.ratio, ratio.low, ratio.high))
    data = pd.DataFrame(rows, columns=["model", "system", "ratio", "low", "high"])
    models = list(dict.fromkeys(data["model"]))
    style: Any = {"svg.hashsalt": "opweave", "svg.fonttype": "path", "font.size": 9}
    with sns.axes_style("whitegrid"), plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(12, 4.6), layout="constrained")
        sns.barplot(
            data,
            x="model",
            y="ratio",
            hue="system",
            order=models,
            hue_order=SYSTEMS[1:],
            palette=COLOURS,
            errorbar=None,
            ax=axes,
        )
        for bars, system in zip(list(axes.containers), SYSTEMS[1:], strict=True):
            of = data[data["system"] == system].set_index("model").reindex(models)
            middles = [bar.get_x() + bar.get_width() / 2 for bar in bars]  # type: ignore[attr-defined]
            errors = [of["ratio"] - of["low"], of["high"] - of["ratio"]]
            axes.errorbar(middles, of["ratio"], yerr=errors, fmt="none", ecolor="0.25", elinewidth=0.8, capsize=1.5)
        axes.axhline(1, color="0.3", linewidth=1)
        axes.set(xlabel="", ylabel="speedup over eager", title=title(measured))
        axes.tick_params(axis="x", rotation=40)
        plt.setp(axes.get_xticklabels(), ha="right", rotation_mode="anchor")
        axes.legend(title="", ncols=4, loc="upper right")
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
        plt.close(figure)
    return out.getvalue()


def title(measured: list[dict[str, dict[str, Any]]]) -> str:
    record = next(iter(measured[0].values()))
    environment, config = record["environment"], record["config"]
    return f"{environment['gpu']}, torch {environment['libraries']['torch']}, {config['precision']}, batch 1"


def read(folder: Path) -> list[dict[str, dict[str, Any]]]:
    """The groups of a folder's records of runner=bench."""
    return groups([r for r in Store(folder).read().records.values() if r["config"]["runner"]["name"] == "bench"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where README or chart differ")
    check: bool = parser.parse_args().check
    contents = Store(RESULTS).read()
    for file, reason in contents.skipped.items():
        print(f"skipped {file}: {reason}", file=sys.stderr)
    measured = groups(list(contents.records.values()))
    in_turn = list(Store(TURNS).read().records.values())
    trained = [r for r in in_turn if r["config"]["runner"]["name"] == "training"]
    schedulers, turned = read(SCHEDULERS), groups([r for r in in_turn if r not in trained])
    launched = [*read(ORDERED), *read(LAUNCHED), *schedulers, *turned, *read(FIGURE5), *read(TUNED), *read(ZOO)]
    chosen = [groups(list(Store(folder).read().records.values())) for folder in CHOSEN]
    shown, pictures = gallery(RESULTS, SCHEDULES, RESULTS / "exhibits", ROOT, ELSEWHERE)
    text = README.read_text(encoding="utf-8")
    for begin, end, part in (
        (BEGIN, END, table(measured)),
        (BEGIN_TURNS, END_TURNS, turns(turned)),
        (BEGIN_COMPILED, END_COMPILED, compilers(read(ZOO))),
        (BEGIN_BEST, END_BEST, best(read(BEST))),
        (BEGIN_PRODUCTS, END_PRODUCTS, products(read(BEST))),
        (BEGIN_REDUCED, END_REDUCED, reductions(read(REDUCED))),
        (BEGIN_TUNED, END_TUNED, tuned([*read(ZOO), *read(TUNED)])),
        (BEGIN_CHOSEN, END_CHOSEN, algorithms(chosen)),
        (BEGIN_TRAINING, END_TRAINING, training(groups(trained))),
        (BEGIN_SCHEDULERS, END_SCHEDULERS, side_by_side(schedulers)),
        (BEGIN_STAGES, END_STAGES, stages(read(STAGES), read(UNHINDERED))),
        (BEGIN_ORDERS, END_ORDERS, launch_orders(launched)),
        (EXHIBITS, END_EXHIBITS, shown),
    ):
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n\n{part}\n\n{end}{after}"
    wanted = {README: text, CHART: chart(measured), **pictures}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'differs from the results' if check else 'written'}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
