"""README's tables, from groups of records that were measured in turn."""

from itertools import chain
from statistics import mean, median
from typing import Any

from results.comparison import Speedup, speedup
from results.record import asked, group_key, label

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
COMPILERS = ("torch_compile", "onnxruntime", "onnxruntime_parallel", "onnxruntime_cuda_graph", "tvm", "tvm_cuda_graph")
SCHEDULES = ("nimble", "ios", "opara")
SCHEDULERS = ("cuda_graph", *SCHEDULES)
PREPARED = ("torch_compile", "onnxruntime", "tvm", "nimble", "ios")
TUNED = ("tvm", "tvm_cuda_graph", "tvm_tuned", "tvm_tuned_cuda_graph")
TUNED_COMPILERS = ("torch_compile", "torch_compile_best", "onnxruntime_cuda_graph")
FUSED = ("nimble_fused", "ios_fused", "opara_fused")
WAYS = ("library", "transposed", "bias apart", "transposed, bias apart")  # of systems/scheduling/passes/select_products.py
LAUNCH_ORDERS = ("depth_first", "breadth_first", "reverse", "opara", "critical_path")
SIDE_BY_SIDE = ("cuda_graph", "torch_compile", "nimble", "opara", "ios", "nimble_fused")
SYSTEMS = ["eager", "torchscript", "torch_compile", "cuda_graph", "nimble"]


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
        config = config_of(group)
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
        cells = [config_of(group)["model"]["name"], *times]
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
        if name not in free or config_of(group)["batch"] != 1:
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
    head = ["model", "batch", "algorithms", "mean achieved occupancy", *LAUNCH_ORDERS, "opara in other rounds"]
    head += [f"{better} over {worse}" for better, worse in pairs]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    of = {order: "opara" if order == "opara" else f"opara (launch_order={order})" for order in LAUNCH_ORDERS}
    same: dict[str, list[dict[str, dict[str, Any]]]] = {}
    for group in measured:
        if "opara" in group and group["opara"]["comparison"]:
            same.setdefault(group_key(config_of(group) | {"runner": None}), []).append(group)
    for group, *others in same.values():
        if of["depth_first"] not in group:
            continue
        cells = [name_of(group), str(config_of(group)["batch"]), asked(config_of(group), "algorithms")]
        cells.append(f"{group['opara']['schedule']['search']['occupancy']:.0%}")
        cells += [_in_turn(group.get(system)) for system in of.values()]
        cells.append(", ".join(sorted(_in_turn(other["opara"]) for other in others)) or "–")
        cells += [told(over(group, of[better], of[worse])) for better, worse in pairs]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def told(ratio: Speedup | None) -> str:
    return f"{ratio.ratio:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio else "–"


def name_of(group: dict[str, dict[str, Any]]) -> str:
    """The model with its options, as in a request."""
    return label(config_of(group)["model"])


def compilers(measured: list[dict[str, dict[str, Any]]]) -> str:
    """Milliseconds of compilers and schedulers in their rounds, the fastest of these over the fastest of those, and seconds
    until a system was ready, as a Markdown table.
    """
    head = ["model", "batch", "eager", *COMPILERS, *SCHEDULERS, "fastest schedule over fastest compiler"]
    head += [f"seconds to prepare {system}" for system in PREPARED]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for group in measured:
        schedule, compiled = (_fastest(group, systems) for systems in (SCHEDULES, COMPILERS))
        cells = [name_of(group), str(config_of(group)["batch"])]
        cells += [_in_turn(group.get(system)) for system in ("eager", *COMPILERS, *SCHEDULERS)]
        cells.append(f"{told(over(group, schedule, compiled))} ({schedule} over {compiled})")
        cells += [f"{group[s]['preparation_s']:.0f}" for s in PREPARED]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tuned(measured: list[dict[str, dict[str, Any]]]) -> str:
    """Milliseconds of TVM before and after its tuning, in rounds with others, and what tuning took, as a Markdown table."""
    head = ["model", *TUNED, "cuda_graph", "nimble", "trials", "seconds of tuning", "functions tuned"]
    head += ["nimble over the fastest tvm", *(f"{system}'s relative error against eager" for system in ("tvm", "tvm_tuned"))]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for group in measured:
        if "tvm_tuned" not in group:
            continue
        tuning = group["tvm_tuned"]["compilation"]
        cells = [name_of(group), *(_in_turn(group.get(system)) for system in (*TUNED, "cuda_graph", "nimble"))]
        cells += [str(tuning["trials"]), f"{tuning['tuning_s']:.0f}", f"{tuning['tuned']} of {tuning['functions']}"]
        cells.append(told(over(group, "nimble", _fastest(group, TUNED))))
        cells += [f"{group[s]['correctness']['relative_error']:.1e}" for s in ("tvm", "tvm_tuned")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def best(measured: list[dict[str, dict[str, Any]]]) -> str:
    """Milliseconds of compilers and schedulers, each with all that it can change, in their rounds, and what the search for
    torch_compile's fastest variant found and took, as a Markdown table.
    """
    head = ["model", *TUNED_COMPILERS, "cuda_graph", "nimble", *FUSED, "fastest fused schedule over fastest compiler"]
    head += ["variant", "variants tried", "seconds of search"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for group in measured:
        schedule, compiled = (_fastest(group, systems) for systems in (FUSED, TUNED_COMPILERS))
        cells = [name_of(group), *(_in_turn(group.get(s)) for s in (*TUNED_COMPILERS, "cuda_graph", "nimble", *FUSED))]
        cells.append(f"{told(over(group, schedule, compiled))} ({schedule} over {compiled})")
        found = (group.get("torch_compile_best") or {}).get("compilation")
        cells += _searched(found) if found else ["–"] * 3
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _searched(found: dict[str, Any]) -> list[str]:
    """The variant that `system.best` kept, how many it tried, how many of those in vain, and for how many seconds."""
    variant = [found["mode"], *([found["layout"]] if found["layout"] != "given" else []), *["frozen"] * found["freezing"]]
    tried, failed = len(found["tried"]), sum(entry["latency_ms"] is None for entry in found["tried"])
    counted = f"{tried} of {tried + found['not_tried']}" + (f", {failed} in vain" if failed else "")
    return [", ".join(variant), counted, f"{found['search_s']:.0f}"]


def products(measured: list[dict[str, dict[str, Any]]]) -> str:
    """Microseconds of the products with a bias that `select_kernels` computes otherwise than as captured, each way alone,
    and what that saves in all, as a Markdown table.
    """
    head = ["model", "product", "count", *(f"µs: {way}" for way in WAYS), "chosen", "saved in all, µs"]
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "---:|" * (len(head) - 2)]
    for group in measured:
        for row in group["nimble_fused"]["schedule"]["rewriting"]["select_kernels"]:
            if "with bias" not in row["operator"] or row["chosen"] == "library":
                continue
            us = {way: 1e3 * row["milliseconds"][way] for way in WAYS}
            saved = row["count"] * (us["library"] - us[row["chosen"]])
            cells = [name_of(group), row["operator"].removesuffix(", with bias"), str(row["count"])]
            cells += [*(f"{us[way]:.1f}" for way in WAYS), row["chosen"], f"{saved:.0f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def reductions(measured: list[dict[str, dict[str, Any]]]) -> str:
    """Milliseconds and kernels of the rewritten model without and with fused reductions, in their rounds, as a Markdown
    table.
    """
    without, fused = "nimble_fused (fuse_reductions=false)", "nimble_fused"
    head = [
        "model",
        *(f"{what} {how}" for what in ("milliseconds", "kernels") for how in ("without", "with")),
        "with over without",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for group in measured:
        both = [group[without], group[fused]]
        cells = [name_of(group), *map(_in_turn, both), *(f"{record['kernels']['count']:.0f}" for record in both)]
        lines.append("| " + " | ".join([*cells, told(over(group, fused, without))]) + " |")
    return "\n".join(lines)


def algorithms(measured: list[list[dict[str, dict[str, Any]]]]) -> str:
    """Milliseconds of the CUDA Graph by how cuDNN chose its algorithms, one of each sweep in `measured` and so of a process
    of its own, as a Markdown table.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for group in chain(*measured):
        of = found.setdefault(name_of(group), {}).setdefault(asked(config_of(group), "algorithms"), [])
        of.append(median(group["cuda_graph"]["latency"]["host_ms"]))
    head = ["model", "timed", "heuristic", "mean of timed over mean of heuristic"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for model, by in sorted(found.items()):
        cells = [", ".join(f"{ms:.3f}" for ms in by[how]) for how in ("timed", "heuristic")]
        lines.append("| " + " | ".join([model, *cells, f"{mean(by['timed']) / mean(by['heuristic']):.2f}x"]) + " |")
    return "\n".join(lines)


def _fastest(group: dict[str, dict[str, Any]], systems: tuple[str, ...]) -> str:
    """The one of `systems` that took least in the rounds."""
    ran = [system for system in systems if group.get(system, {}).get("comparison")]
    return min(ran, key=lambda system: in_rounds(group[system]))


def equal_to_eager(measured: list[dict[str, dict[str, Any]]]) -> str:
    """How many cells of systems that run the model's own operators give eager's outputs bit for bit, and which do not."""
    errors = {
        f"{config_of(group)['model']['name']} under {system}": group[system]["correctness"]["relative_error"]
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
    for group in sorted(measured, key=lambda group: (config_of(group)["model"]["name"], config_of(group)["batch"])):
        config = config_of(group)
        cells = [config["model"]["name"], str(config["batch"])]
        cells += [f"{config['batch'] / in_rounds(group[s]) * 1e3:,.0f}" for s in TRAINERS]
        cells += [told(over(group, better, worse)) for better, worse in pairs]
        cells += [f"{group[s]['kernels']['covered_ms']:.2f}" for s in ("eager", "torch_compile", "nimble")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def config_of(group: dict[str, dict[str, Any]]) -> dict[str, Any]:
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
