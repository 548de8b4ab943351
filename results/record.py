"""One cell's record: what was asked, where, what came out, and when."""

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

CONF = Path(__file__).parent.parent / "conf"
SCHEMA = 1
STATUSES = ("ok", "unsupported", "incorrect", "failed", "out_of_memory", "timeout")
# A cell with one of these is not run again by the next sweep, but for what `is_final` says; the others may fare better.
FINAL = ("ok", "unsupported", "incorrect", "out_of_memory")
# What of the config makes a cell the cell it is; where its record goes and how long it may take do not.
IDENTITY = ("model", "system", "runner", "batch", "device", "precision", "layout", "seed", "algorithms")
LATER = {"algorithms": "timed"}  # what records older than a key lack, and how they were measured
SPENT_ON = {"budget_s": ("trials", "best")}  # options that have no effect unless one of these is on


def asked(config: dict[str, Any], key: str) -> Any:
    """What a config says of a key of IDENTITY."""
    return config[key] if key in config else LATER[key]


def in_words(config: dict[str, Any]) -> str:
    """The arithmetic: "tf32, contiguous", or "tf32, contiguous, timed algorithms"."""
    algorithms = asked(config, "algorithms")
    return f"{config['precision']}, {config['layout']}" + f", {algorithms} algorithms" * (algorithms != "heuristic")


def identity(config: dict[str, Any], environment: dict[str, Any]) -> str:
    """16 hexadecimal digits that two runs share exactly when they would measure the same thing in the same place."""
    whole = {
        "config": {key: config[key] for key in IDENTITY if key in config or key not in LATER},
        "environment": environment,
    }
    text = json.dumps(whole, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_final(record: dict[str, Any]) -> bool:
    """Does the record spare the next sweep its cell? Not where it took more host memory than it was given: that is, like the
    time, no part of the cell's identity, and the next sweep may give more.
    """
    return record["status"] in FINAL and "memory_gib" not in record


def file_name(record: dict[str, Any]) -> str:
    """model-system-b1-cuda-0123456789abcdef.json"""
    config = record["config"]
    return f"{config['model']['name']}-{config['system']['name']}-b{config['batch']}-{config['device']}-{record['id']}.json"


def group_key(config: dict[str, Any]) -> str:
    """What cells must share for a ratio between their systems to mean something."""
    shared = {key: asked(config, key) for key in IDENTITY if key != "system"}
    return json.dumps(shared, sort_keys=True)


def problem(document: Any) -> str | None:
    """Why `document` is not a record, or None."""
    if not isinstance(document, dict):
        return "not a JSON object"
    if document.get("schema") != SCHEMA:
        return f"its schema is {document.get('schema')!r}, not {SCHEMA}"
    if document.get("status") not in STATUSES:
        return f"its status is {document.get('status')!r}"
    config = document.get("config")
    if not isinstance(config, dict) or any(key not in config for key in IDENTITY if key not in LATER):
        return "it lacks the config that was asked for"
    if any(not isinstance(config[group], dict) or "name" not in config[group] for group in ("model", "system", "runner")):
        return "its config does not name a model, a system and a runner"
    if not isinstance(document.get("id"), str) or not isinstance(document.get("environment"), dict):
        return "it lacks its id or its environment"
    if not isinstance(document.get("when"), str) or not isinstance(document.get("warnings"), list):
        return "it lacks its time or its warnings"
    return None


def label(choice: dict[str, Any]) -> str:
    """A model or a system as a person would ask for it: by the file in conf/ that comes nearest to it, and by the options in
    which it differs from that file: "nimble_fused", "nimble (multi_stream=false)". One that is off, and that the file does
    not know, says nothing; nor does a budget where nothing is on that it would be spent on.
    """
    known = _files(choice["name"]) or {choice["name"]: {"name": choice["name"]}}

    def differing(file: str) -> list[str]:
        options = known[file]
        differing = [k for k in sorted(choice) if choice[k] != options.get(k) and (choice[k] or k in options)]
        return [k for k in differing if k not in SPENT_ON or any(choice.get(what) for what in SPENT_ON[k])]

    nearest = min(known, key=lambda file: (len(differing(file)), file != choice["name"], file))
    options = [f"{key}={_plain(choice[key])}" for key in differing(nearest)]
    return nearest + (f" ({', '.join(options)})" if options else "")


@cache
def _files(name: str) -> dict[str, dict[str, Any]]:
    """What stands in conf/ for models and systems of this name, by the file's name."""
    found = {}
    for file in sorted([*CONF.glob("model/*.yaml"), *CONF.glob("system/*.yaml")]):
        options = yaml.safe_load(file.read_text(encoding="utf-8"))
        if options["name"] == name:
            found[file.stem] = options
    return found


def system_label(config: dict[str, Any]) -> str:
    """The label of the system of a config."""
    return label(config["system"])


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def samples(record: dict[str, Any]) -> Iterator[list[float]]:
    """The rounds that a record shares with its siblings, each a list of host milliseconds."""
    yield from (record.get("comparison") or {}).get("rounds", [])
