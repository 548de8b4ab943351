"""Records of schema 1, as the documents that schema 2 would have written."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import yaml

import conf

from .cell import Cell, Choice, Conditions, named
from .course import Course

UNCAPTURED = ("eager", "torchscript", "torch_compile")  # systems of which a call is not one graph
STRETCHED = "its counters were put over the time of a profiled call, which is longer than a call"
OTHERS = "it does not say whether they are of the model or of what a system had rewritten it to"
NOT_YET = "the sweep ended before it was measured"
# What a choice of conf/ said when records of schema 1 were written, where it says something else now.
EARLIER: dict[tuple[str, str], dict[str, Any]] = {("system", "torch_compile_best"): {"budget_s": 300.0}}
TIMED = "timed"  # how cuDNN chose where a record says nothing of it
LOSS_SHARE = 0.5  # of what eager's loss changes by in a step, by which another's may be off it
UNTOLD = "neither its bounds nor its losses tell a step from one that updates nothing"
PROFILED = ("sm_efficiency", "active_warps", "kernels", "limits")
# A warning's kind by how its sentence reads, with its values by name.
WARNINGS = (
    ("latency_scatters", re.compile(r"latency scatters: \(p90 - p10\) / median is (?P<spread>\d+)%")),
    (
        "differs_in_rounds",
        re.compile(r"in the rounds it took (?P<ratio>[\d.]+) times as long as when it was measured alone"),
    ),
    ("not_alone", re.compile(r"not alone on the GPU: process (?P<process>\d+) holds (?P<mebibytes>\d+) MiB")),
    ("throttled", re.compile(r"the GPU is throttled: (?P<reasons>.+)")),
    ("no_ratio", re.compile(r"no ratio: in the interleaved rounds it ended as (?P<status>\w+) \((?P<reason>.*)\)")),
)
NUMBERS: dict[str, Callable[[str], object]] = {
    "spread": lambda text: int(text) / 100,
    "ratio": float,
    "process": int,
    "mebibytes": int,
}


def upgraded(document: dict[str, Any]) -> dict[str, Any]:
    """A document of schema 1 in the form of schema 2, without what is known to be wrong in it.

    Raises KeyError, TypeError or AttributeError where the document is not of schema 1.
    """
    config, environment = document["config"], document["environment"]
    body = {key: document[key] for key in ("id", "status", "reason", "when")}
    body["cell"] = {
        **{group: _choice(group, config[group]) for group in ("model", "system", "runner")},
        "conditions": {key: config[key] for key in ("batch", "device", "precision", "layout", "seed")}
        | {"algorithms": config.get("algorithms", TIMED)},
    }
    body["environment"] = environment
    for key in ("preparation_s", "phases", "comparison"):
        if document.get(key) is not None:
            body[key] = document[key]
    if "memory_gib" in document:
        body["memory_limit_gib"] = document["memory_gib"]
    for key, convert in PARTS.items():
        if document.get(key) is not None:
            body[key] = convert(document[key])
    if body.get("correctness", {}).get("reason") == UNTOLD:
        body |= {"status": "unchecked", "reason": UNTOLD}
    body |= _counters(document, config["system"])
    if _are_others_limits(document):
        body["limits"] = {
            "critical_path_ms": None,
            "busy_ms": None,
            "macs": document["limits"].get("macs"),
            "reason": OTHERS,
        }
    body["pending"] = [name for name in PROFILED if (document.get(name) or {}).get("reason") == NOT_YET]
    body["warnings"] = [_warning(sentence) for sentence in document["warnings"]]
    if _was_profiled_before_rounds(document):
        body["warnings"].append({"kind": "profiled_before_timing"})
    return body


def _choice(group: str, options: dict[str, Any]) -> dict[str, Any]:
    """A model, system or runner, as the choice of conf/ that comes nearest to its options: the record names none."""
    name = options["name"]
    by_choice = _defaults(group, conf.folders())
    candidates = [Choice.of(choice, options, known) for choice, known in by_choice.items() if known["name"] == name]
    nearest = min(candidates, key=lambda c: (len(c.changed), c.choice != name, c.choice), default=Choice.of(name, options))
    return {"choice": nearest.choice, "name": name, "options": nearest.options, "changed": list(nearest.changed)}


@cache
def _defaults(group: str, _: tuple[Path, ...]) -> dict[str, conf.Options]:
    """What options were once by default, by the choice, as the files of some folders have it."""
    return {choice: conf.options(group, choice) | EARLIER.get((group, choice), {}) for choice in conf.choices(group)}


def _warning(sentence: str) -> dict[str, Any]:
    for kind, pattern in WARNINGS:
        if match := pattern.fullmatch(sentence):
            return {"kind": kind, "values": {k: NUMBERS.get(k, str)(text) for k, text in match.groupdict().items()}}
    return {"kind": "notice", "values": {"text": sentence}}


def _counters(document: dict[str, Any], system: dict[str, Any]) -> dict[str, Any]:
    """Counters without those that were put over a profiled call's time. The estimated course stands in for warps."""
    parts = {name: dict(document[name]) for name in ("sm_efficiency", "active_warps") if document.get(name)}
    is_captured = system["name"] not in UNCAPTURED and system.get("capture") is not False
    for part in parts.values():
        if is_captured and part["source"] == "counters" and "profiled_ms" not in part:
            part |= {"value": None, "source": None, "reason": STRETCHED}
            if course := part.get("estimated_course"):
                part |= {"value": Course.from_json(course).mean, "source": "estimated"}
    return parts


def _are_others_limits(document: dict[str, Any]) -> bool:
    """A rewriting system may have the limits of another one, unless the record holds its own beside the model's."""
    limits = document.get("limits") or {}
    rewrites = bool((document.get("schedule") or {}).get("rewriting"))
    return rewrites and limits.get("critical_path_ms") is not None and "rewritten" not in limits


def _was_profiled_before_rounds(document: dict[str, Any]) -> bool:
    """Records that do not say when they were profiled had their rounds after it, in the same process."""
    return document.get("sm_efficiency") is not None and "when" not in document["sm_efficiency"]


def _latency(part: dict[str, Any]) -> dict[str, Any]:
    statistics = part["statistics"]
    return {key: part.get(key) for key in ("host_ms", "device_ms")} | {
        "warmup_calls": part["warmup_calls"],
        "host": statistics["host"],
        "device": statistics["device"],
    }


def _without_unit(part: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key != "unit"}


def _correctness(part: dict[str, Any]) -> dict[str, Any]:
    """The loss after one step counts where the bounds of training let a step pass that updates nothing."""
    body = {key: value for key, value in part.items() if key != "correct"} | {"is_correct": part["correct"]}
    if not part["correct"] or not part.get("losses") or part["tolerance"] is None or part["tolerance"] < 1:
        return body
    before, after = part["eager_losses"][:2]
    error = abs(part["losses"][1] - after) / abs(after - before) if after != before else inf
    if not error <= LOSS_SHARE:
        return body | {"is_correct": False, "is_checked": False, "reason": UNTOLD}
    return body | {"relative_error": error, "rounding": None, "tolerance": LOSS_SHARE}


def _schedule(part: dict[str, Any]) -> dict[str, Any]:
    body = {key: value for key, value in part.items() if key != "rewriting"}
    return body | {"decisions": decisions(part.get("rewriting", {}))}


def decisions(rewriting: dict[str, Any]) -> list[dict[str, Any]]:
    """What passes decided, as rows of one form. Schedule files from before decisions had a type hold it by pass."""
    rows: list[dict[str, Any]] = []
    for kind, entry in rewriting.items():
        if kind == "fold_batch_norm":
            rows.append({"kind": kind, "pattern": "batch norm", "count": entry["folded"], "chosen": "folded"})
        elif kind == "fuse_elementwise":
            counts = {"count": entry["kernels"], "num_operators": entry["operators"]}
            rows.append({"kind": kind, "pattern": "elementwise operators", "chosen": "fused"} | counts)
        else:
            for row in entry:
                pattern = row.get("operator") or row["operators"]
                rows.append({"kind": kind, "pattern": pattern} | {k: row[k] for k in ("count", "chosen", "milliseconds")})
    return rows


def _compilation(part: dict[str, Any]) -> dict[str, Any]:
    body = {key: value for key, value in part.items() if key not in ("tried", "not_tried", "inputs", "outputs")}
    if "cached_graphs" in body:
        body["num_cached_graphs"] = body.pop("cached_graphs")
    if "tried" in part:
        variants = {_variant(entry): entry for entry in part["tried"]}
        body["num_untried"] = part["not_tried"]
        body["decisions"] = [
            {
                "kind": "torch_compile",
                "pattern": "the model",
                "count": 1,
                "chosen": _variant(part),
                "milliseconds": {name: entry["latency_ms"] for name, entry in variants.items()},
                "reasons": {name: entry["reason"] for name, entry in variants.items() if "reason" in entry},
            }
        ]
    return body


def _variant(entry: dict[str, Any]) -> str:
    return f"{entry['mode']}, layout {entry['layout']}{', frozen' if entry['freezing'] else ''}"


def cell_of_title(title: str) -> Cell:
    """The cell of a timeline that has no more than a title: "nasnet, ios (r=2, s=4), batch 1, fp16, cuda".

    Raises ValueError where the title is of another form.
    """
    match = re.fullmatch(
        r"(?P<model>.+?), (?P<system>[\w-]+(?: \(.*\))?), batch (?P<batch>\d+)(?P<rest>.*), (?P<device>\w+)", title
    )
    if match is None:
        raise ValueError(f"not a timeline: {title!r} names no cell")
    conditions: dict[str, Any] = {}
    for word in filter(None, match["rest"].split(", ")):
        key = {"contiguous": "layout", "channels_last": "layout", "heuristic": "algorithms", "timed": "algorithms"}
        conditions[key.get(word, "precision")] = word
    return Cell(
        labelled("model", match["model"]),
        labelled("system", match["system"]),
        Choice("timeline", "timeline"),
        Conditions(int(match["batch"]), match["device"], **conditions),
    )


def cell_of_schedule_file(name: str, device: str) -> Cell:
    """The cell of a schedule file that holds none, by its name: "inception_v3@ios (r=1, s=3)@b1.schedule.json".

    Raises ValueError where the name is of another form.
    """
    match = re.fullmatch(r"(?P<model>[^@]+)@(?P<system>[^@]+)@b(?P<batch>\d+)\.schedule\.json", name)
    if match is None:
        raise ValueError(f"no schedule of a cell: {name!r} names none")
    choices = labelled("model", match["model"]), labelled("system", match["system"])
    return Cell(*choices, Choice("schedule", "schedule"), Conditions(int(match["batch"]), device))


def labelled(group: str, label: str) -> Choice:
    """The choice that a label names."""
    name, _, words = label.partition(" (")
    options = dict(word.split("=", 1) for word in words.removesuffix(")").split(", ") if "=" in word)
    return named(group, name, **{key: yaml.safe_load(text) for key, text in options.items()})


PARTS: dict[str, Callable[[Any], object]] = {
    "schedule": _schedule,
    "compilation": _compilation,
    "memory": _without_unit,
    "correctness": _correctness,
    "latency": _latency,
    "throughput": _without_unit,
    "kernels": dict,
    "limits": dict,
}
