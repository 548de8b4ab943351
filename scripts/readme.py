"""The README's tables, chart and gallery, made from the committed results: python scripts/readme.py [--check]

Rewrites the parts of README.md between its markers and the pictures under results/reference/h200; with --check it writes
nothing and ends with status 1 where any of them is not what the results give.
"""

import argparse
import io
import sys
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("svg")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns

from results.comparison import Speedup, speedup
from results.record import group_key, label
from results.store import Store
from scripts.charts.style import LOOKS
from scripts.exhibits.gallery import gallery

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "reference" / "h200"
README = ROOT / "README.md"
TURNS = ROOT / "results" / "reference" / "h200-turns"  # with more systems, and no profiler before the rounds
SCHEDULERS = ROOT / "results" / "reference" / "h200-schedulers"  # every scheduler in one set of rounds
ZOO = ROOT / "results" / "reference" / "h200-zoo"  # compilers and schedulers in one set of rounds
COMPILED = ROOT / "results" / "reference" / "h200-tvm"  # networks that ZOO has not
STAGES = ROOT / "results" / "reference" / "h200-ios"
UNHINDERED = ROOT / "results" / "reference" / "h200-ios-barriers"  # IOS's stages with and without their barriers
PRUNED = ROOT / "results" / "reference" / "h200-ios-pruning"  # its `ios` is that of h200-ios in other rounds
LAUNCHED = ROOT / "results" / "reference" / "h200-opara"
ORDERED = ROOT / "results" / "reference" / "h200-orders"  # its `opara` in more launch orders, on more models at batch 1
SCHEDULES = ROOT / "results" / "reference" / "exhibits"  # and timelines, as scripts/reproduce.py wrote them
CHART = RESULTS / "speedup.svg"
BEGIN_SCHEDULERS, END_SCHEDULERS = "<!-- schedulers: python scripts/readme.py -->", "<!-- end of schedulers -->"
BEGIN_TURNS, END_TURNS = "<!-- in turn: python scripts/readme.py -->", "<!-- end of turns -->"
BEGIN_COMPILED, END_COMPILED = "<!-- compilers: python scripts/readme.py -->", "<!-- end of compilers -->"
BEGIN_TRAINING, END_TRAINING = "<!-- training: python scripts/readme.py -->", "<!-- end of training -->"
BEGIN_STAGES, END_STAGES = "<!-- stages: python scripts/readme.py -->", "<!-- end of stages -->"
BEGIN_ORDERS, END_ORDERS = "<!-- launch orders: python scripts/readme.py -->", "<!-- end of launch orders -->"
BEGIN, END = "<!-- results: python scripts/readme.py -->", "<!-- end of results -->"
EXHIBITS, END_EXHIBITS = "<!-- exhibits: python scripts/readme.py -->", "<!-- end of exhibits -->"
# Systems that launch one graph a call, and so hardly depend on what else the host does.
GRAPHS = [
    ("nimble", "cuda_graph"),
    ("nimble", "nimble_single_stream"),
    ("opara", "nimble"),
    ("nimble_fused", "nimble"),
    ("nimble_fused", "torch_compile"),
    ("nimble_fused", "torch_compile_channels_last"),
]
TRAINERS = ("eager", "torchscript", "torch_compile", "nimble")
BESIDE_TVM = ("eager", "torch_compile", "cuda_graph", "nimble", "ios", "opara", "tvm")
LAUNCH_ORDERS = ("depth_first", "breadth_first", "reverse", "opara", "critical_path")
SIDE_BY_SIDE = ("cuda_graph", "torch_compile", "nimble", "opara", "ios", "nimble_fused")
ELSEWHERE = {  # exhibits, and the records that tell of them, if not the first table's
    "nimble/figure2b": (ZOO,),
    "nimble/figure7": (TURNS, ZOO, COMPILED),
    "nimble/table1": (TURNS,),
    "nimble/figure8": (TURNS,),
    "nimble/supplement_figure1": (TURNS,),
    "nimble/supplement_figure2": (TURNS,),
    "opara/figure2": (LAUNCHED, ORDERED),
    "opara/figure5": (SCHEDULERS, TURNS),
    "opara/figure8": (LAUNCHED,),
    "opara/figure9": (LAUNCHED,),
    "ios/autotune": (ZOO,),
    "ios/frameworks": (ZOO,),
    "ios/schedules": (STAGES,),
    "ios/blockwise": (STAGES,),
    "ios/active_warps": (STAGES,),
    "ios/batch_sizes": (STAGES,),
    "ios/specialization": (STAGES,),
    "ios/pruning": (PRUNED,),
}
SYSTEMS = ["eager", "torchscript", "torch_compile", "cuda_graph", "nimble"]
COLOURS = {system: LOOKS[system].colour for system in SYSTEMS}


def groups(records: list[dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """Records by system, one entry for each set that was measured in turn, ordered by batch and by Nimble's speedup."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for record in records:
        found.setdefault(group_key(record["config"]), {})[label(record["config"]["system"])] = record

    def order(group: dict[str, dict[str, Any]]) -> tuple[int, float, str]:
        config = next(iter(group.values()))["config"]
        ratio = over(group, "nimble", "cuda_graph")
        return config["batch"], -(ratio.ratio if ratio else 0.0), config["model"]["name"]

    return sorted(found.values(), key=order)


def over(group: dict[str, dict[str, Any]], system: str, baseline: str) -> Speedup | None:
    """How many times faster one system was than another in the rounds that they shared."""
    if system not in group or baseline not in group:
        return None
    return speedup(group[system], group[baseline])


def table(measured: list[dict[str, dict[str, Any]]]) -> str:
    """Latency by system, and what Nimble gains, as a Markdown table."""
    head = [
        "model",
        "batch",
        *SYSTEMS,
        "Nimble over CUDA Graph",
        "critical path",
        "MiB: CUDA Graph",
        "Nimble",
        "nothing reused",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for group in measured:
        any_record = next(iter(group.values()))
        config = any_record["config"]
        row = [config["model"]["name"], str(config["batch"]), *(latency(group.get(s)) for s in SYSTEMS)]
        ratio = over(group, "nimble", "cuda_graph")
        alone = "" if ratio is None or ratio.in_turn else " *"
        row.append(f"{ratio.ratio:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]{alone}" if ratio else "–")
        row.append(f"{any_record['limits']['critical_path_ms']:.2f}")
        row += [
            memory(group.get("cuda_graph"), "peak"),
            memory(group.get("nimble"), "peak"),
            memory(group.get("nimble"), "all"),
        ]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def turns(measured: list[dict[str, dict[str, Any]]]) -> str:
    """Ratios between systems that launch a graph, as a Markdown table, and how far their latencies are from the rounds."""
    head = ["model", "batch", *(f"{better} over {worse}" for better, worse in GRAPHS)]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for group in measured:
        config = _config(group)
        ratios = [over(group, better, worse) for better, worse in GRAPHS]
        cells = [told(ratio) for ratio in ratios]
        lines.append("| " + " | ".join([config["model"]["name"], str(config["batch"]), *cells]) + " |")
    return "\n".join([*lines, "", alone(measured, {name for pair in GRAPHS for name in pair})])


def side_by_side(measured: list[dict[str, dict[str, Any]]]) -> str:
    """Milliseconds of the schedulers in their rounds, and what IOS's search took, as a Markdown table."""
    head = ["model", *SIDE_BY_SIDE, "IOS's search: stages measured", "seconds"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for group in measured:
        times = [_in_turn(group.get(system)) for system in SIDE_BY_SIDE]
        search = group["ios"]["schedule"]["search"]
        cells = [_config(group)["model"]["name"], *times]
        lines.append("| " + " | ".join([*cells, f"{search['measured']:,}", f"{search['seconds']:.1f}"]) + " |")
    return "\n".join([*lines, "", alone(measured, set(SIDE_BY_SIDE) - {"torch_compile"}), "", equal_to_eager(measured)])


def stages(measured: list[dict[str, dict[str, Any]]], unhindered: list[dict[str, dict[str, Any]]]) -> str:
    """IOS over the sequential schedule captured and not, what the searches of its strategies took one after the other, and
    what barriers cost, as a Markdown table.
    """
    head = ["model", "sequential", "ios", "ios over sequential", "stages measured", "seconds of search"]
    head += ["uncaptured: sequential", "ios", "ios over sequential", "without barriers over with them"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    free = {name_of(group): over(group, "ios (barriers=false)", "ios") for group in unhindered}
    for group in measured:
        name = name_of(group)
        if name not in free or _config(group)["batch"] != 1:
            continue
        searches = [group[system]["schedule"]["search"] for system in ("ios_merge", "ios_parallel", "ios")]
        counted = (sum(search[what] for search in searches) for what in ("measured", "seconds"))
        cells = [name, *_both(group, ""), *(f"{count:,.0f}" for count in counted)]
        cells += [*_both(group, " (capture=false)"), told(free[name])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _both(group: dict[str, dict[str, Any]], how: str) -> list[str]:
    """Milliseconds of the sequential schedule and of IOS's, and the ratio."""
    ratio = over(group, f"ios{how}", f"sequential{how}")
    return [*(_in_turn(group.get(f"{system}{how}")) for system in ("sequential", "ios")), told(ratio)]


def launch_orders(measured: list[dict[str, dict[str, Any]]]) -> str:
    """Milliseconds of Opara's streams in each launch order, in their rounds, and of Opara in other rounds, as a Markdown
    table. measured: of what was measured more than once the row comes first.
    """
    pairs = [("opara", "depth_first"), ("critical_path", "depth_first")]
    head = ["model", "batch", "mean achieved occupancy", *LAUNCH_ORDERS, "opara in other rounds"]
    head += [f"{better} over {worse}" for better, worse in pairs]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    of = {order: "opara" if order == "opara" else f"opara (launch_order={order})" for order in LAUNCH_ORDERS}
    same: dict[str, list[dict[str, dict[str, Any]]]] = {}
    for group in measured:
        if "opara" in group and group["opara"]["comparison"]:
            same.setdefault(group_key(_config(group) | {"runner": None}), []).append(group)
    for group, *others in same.values():
        if of["depth_first"] not in group:
            continue
        cells = [name_of(group), str(_config(group)["batch"]), f"{group['opara']['schedule']['search']['occupancy']:.0%}"]
        cells += [_in_turn(group.get(system)) for system in of.values()]
        cells.append(", ".join(sorted(_in_turn(other["opara"]) for other in others)) or "–")
        cells += [told(over(group, of[better], of[worse])) for better, worse in pairs]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def told(ratio: Speedup | None) -> str:
    return f"{ratio.ratio:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio else "–"


def name_of(group: dict[str, dict[str, Any]]) -> str:
    """The model with its options, as in a request."""
    return label(_config(group)["model"])


def beside_tvm(measured: list[dict[str, dict[str, Any]]]) -> str:
    """Milliseconds of TVM, tuned too where it was, and of others in their rounds, the trials and seconds of tuning, what it
    took to compile, and TVM's distance from eager's outputs.
    """
    head = ["model", *BESIDE_TVM, "tvm_tuned", "trials", "seconds of tuning", "nimble over the faster tvm"]
    head += ["seconds to compile: torch_compile", "tvm", "tvm's relative error against eager"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for group in measured:
        tuned = group.get("tvm_tuned")
        spent = [str(tuned["compilation"]["trials"]), f"{tuned['compilation']['tuning_s']:.0f}"] if tuned else ["–", "–"]
        cells = [name_of(group), *(_in_turn(group.get(system)) for system in (*BESIDE_TVM, "tvm_tuned")), *spent]
        cells.append(
            told(min(filter(None, (over(group, "nimble", s) for s in ("tvm", "tvm_tuned"))), key=lambda r: r.ratio))
        )
        cells += [f"{group[s]['compilation']['compile_s']:.0f}" if s in group else "–" for s in ("torch_compile", "tvm")]
        lines.append("| " + " | ".join([*cells, f"{group['tvm']['correctness']['relative_error']:.1e}"]) + " |")
    return "\n".join(lines)


def equal_to_eager(measured: list[dict[str, dict[str, Any]]]) -> str:
    """How many cells of systems that run the model's own operators give eager's outputs bit for bit, and which do not."""
    errors = {
        f"{_config(group)['model']['name']} under {system}": group[system]["correctness"]["relative_error"]
        for group in measured
        for system in SIDE_BY_SIDE
        if system in group and system not in ("torch_compile", "nimble_fused")
    }
    others = [f"{cell} ({error:.1e})" for cell, error in errors.items() if error]
    equal = f"{len(errors) - len(others)} of the {len(errors)} cells that run the model's own operators do"
    return f"Outputs equal eager's bit for bit: {equal}" + (f"; not {', '.join(others)}." if others else ".")


def _in_turn(record: dict[str, Any] | None) -> str:
    if record is None:
        return "–"
    return f"{in_rounds(record):.3f}" if record["status"] == "ok" else record["status"]


def training(measured: list[dict[str, dict[str, Any]]]) -> str:
    """Samples a second of the steps in their rounds, as a Markdown table."""
    pairs = [("nimble", "eager"), ("nimble", "torch_compile")]
    head = [
        "model",
        "batch",
        *TRAINERS,
        *(f"{better} over {worse}" for better, worse in pairs),
        "kernels, ms: eager",
        "torch_compile",
        "nimble",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for group in sorted(measured, key=lambda group: (_config(group)["model"]["name"], _config(group)["batch"])):
        config = _config(group)
        cells = [config["model"]["name"], str(config["batch"])]
        cells += [f"{config['batch'] / in_rounds(group[s]) * 1e3:,.0f}" for s in TRAINERS]
        cells += [told(over(group, better, worse)) for better, worse in pairs]
        cells += [f"{group[s]['kernels']['covered_ms']:.2f}" for s in ("eager", "torch_compile", "nimble")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _config(group: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the cells of a group have in common, and the system of one of them."""
    config: dict[str, Any] = next(iter(group.values()))["config"]
    return config


def alone(measured: list[dict[str, dict[str, Any]]], systems: set[str]) -> str:
    """How far the latencies of cells are from their rounds."""
    cells = [group[s] for group in measured for s in systems & set(group) if group[s]["comparison"]]
    shares = [median(cell["latency"]["host_ms"]) / in_rounds(cell) for cell in cells]
    middle = f"a cell alone takes {median(shares):.1%} of its time in the rounds in the middle"
    return f"Of these {len(shares)} cells, {middle}, and {max(shares):.0%} at most."


def in_rounds(record: dict[str, Any]) -> float:
    """Median milliseconds of a call, of all rounds."""
    return median(call for turn in record["comparison"]["rounds"] for call in turn)


def latency(record: dict[str, Any] | None) -> str:
    """Median milliseconds, or why there are none."""
    if record is None:
        return "–"
    if record["status"] != "ok":
        return record["status"]
    return f"{record['latency']['statistics']['host']['median']:.2f}"


def memory(record: dict[str, Any] | None, what: str) -> str:
    if record is None or record["status"] != "ok":
        return "–"
    measured = record["memory"]
    size = measured["peak_bytes"] if what == "peak" else measured["system"]["keep_all"]
    return f"{size / 2**20:.0f}"


def chart(measured: list[dict[str, dict[str, Any]]]) -> str:
    """Speedup over eager at batch 1, as SVG: a bar a system, its 95 % interval, grouped by model."""
    rows = []
    for group in measured:
        config = _config(group)
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
    launched = [*read(ORDERED), *read(LAUNCHED), *schedulers, *turned, *read(ZOO)]
    shown, pictures = gallery(RESULTS, SCHEDULES, RESULTS / "exhibits", ROOT, ELSEWHERE)
    text = README.read_text(encoding="utf-8")
    for begin, end, part in (
        (BEGIN, END, table(measured)),
        (BEGIN_TURNS, END_TURNS, turns(turned)),
        (BEGIN_COMPILED, END_COMPILED, beside_tvm([*read(ZOO), *read(COMPILED)])),
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
