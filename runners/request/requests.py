"""From composed configs to cells that can be run: every check that needs no model."""

import json
import math
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runners.machine.device import cuda_device_count

from .bad_request import CONF, BadRequest, choices, explain, nearest, top_keys, unknown_key

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
LAYOUTS = ("contiguous", "channels_last")
ALGORITHMS = ("heuristic", "timed")
DEVICES = ("auto", "cpu", "cuda")
SM_METHODS = ("auto", "counters", "estimated", "off")
OPTIMIZERS = ("sgd", "adamw")
NO_RECORD = ("schedule", "timeline", "list", "cache")
WRITES_OUTPUT = ("schedule", "timeline")
CLASSIFIED = ("measured", "table")
MOST_SEED = 2**63 - 1  # of torch's generators
NOT_OURS = ("hydra", "exhibit")  # of a composed config, what says nothing of what to run
# Of a composed config, what is about the sweep and not about a cell.
SWEEP_KEYS = ("results", "force", "timeout", "memory_gib", "rounds", "gpus", "output")


def execute(configs: list[DictConfig]) -> int:
    """Run the cells of `configs`; returns the exit status. Raises BadRequest before anything has run or been written."""
    _check_cache()
    requests = [resolve(config) for config in configs]
    cells = [{k: v for k, v in request.items() if k not in SWEEP_KEYS} for request in requests]
    options = {key: requests[0][key] for key in SWEEP_KEYS}
    for key in SWEEP_KEYS:
        if any(request[key] != options[key] for request in requests):
            raise BadRequest(f"{key} holds for a whole sweep: give it one value")
    runners = sorted({cell["runner"]["name"] for cell in cells})
    runner = runners[0]
    if alone := [r for r in runners if r in NO_RECORD and len(runners) > 1]:
        raise BadRequest(f"runner={alone[0]} keeps no record and shares no sweep with others: run it alone")
    if options["output"] is not None and runner not in WRITES_OUTPUT:
        told = f"runner={runner} writes none" if runner in NO_RECORD else "records go to the folder results=..."
        raise BadRequest(f"output={options['output']} is of runner={' and runner='.join(WRITES_OUTPUT)}: {told}")
    if runner in NO_RECORD:
        from runners.sweep.once import run_list, run_schedule, run_timeline

        if runner == "cache":
            from runners.measurements.cache import run

            return run(cells[0])
        if runner == "list":
            return run_list(cells[0], options["timeout"], options["memory_gib"])
        if runner == "timeline":
            return run_timeline(cells, options["output"], options["timeout"], options["memory_gib"])
        if options["output"] is not None and len(cells) > 1:
            raise BadRequest(f"output={options['output']} names one file, for {len(cells)} schedules")
        return max(run_schedule(cell, options["output"], options["timeout"], options["memory_gib"]) for cell in cells)
    from runners.sweep.sweep import Sweep

    return Sweep(cells, **{k: v for k, v in options.items() if k != "output"}).run()


def resolve(config: DictConfig) -> dict[str, Any]:
    """The request as plain data, with every value checked and device=auto decided. Raises BadRequest."""
    ours = OmegaConf.masked_copy(config, [str(key) for key in config if key not in NOT_OURS])
    try:
        request: dict[str, Any] = OmegaConf.to_container(ours, resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise BadRequest(explain(error)) from error
    for key in request:
        if key not in top_keys():
            raise BadRequest(unknown_key(key))
    for key in set(top_keys()) - {"experiment", *NOT_OURS}:
        if key not in request:
            raise BadRequest(f"{key} was taken out of the config; it is needed: {key}=...")
    for group in ("model", "system", "runner"):
        if not isinstance(request.get(group), dict):
            raise BadRequest(f"{group}={request.get(group)!r} is no choice of conf/{group}")
        _check_option_types(group, request[group])
    _positive_integer("batch", request["batch"])
    _one_of("precision", request["precision"], PRECISIONS)
    _one_of("layout", request["layout"], LAYOUTS)
    _one_of("algorithms", request["algorithms"], ALGORITHMS)
    _one_of("device", request["device"], DEVICES)
    _integer("seed", request["seed"], least=0)
    if request["seed"] > MOST_SEED:
        raise BadRequest(f"seed={request['seed']} is more than {MOST_SEED}")
    _integer("rounds", request["rounds"], least=0)
    if not _is_positive(request["timeout"]):
        raise BadRequest(f"timeout={request['timeout']} is not a positive number of seconds")
    if request["memory_gib"] is not None and not _is_positive(request["memory_gib"]):
        raise BadRequest(f"memory_gib={request['memory_gib']} is neither a positive number of GiB nor null")
    if not isinstance(request["force"], bool):
        raise BadRequest(f"force={request['force']} is neither true nor false")
    if "samples" in request["runner"]:
        _positive_integer("runner.samples", request["runner"]["samples"])
    if "sm_efficiency" in request["runner"]:
        _one_of("runner.sm_efficiency", request["runner"]["sm_efficiency"], SM_METHODS)
    if "classify" in request["runner"]:
        _one_of("runner.classify", request["runner"]["classify"], CLASSIFIED)
    if "optimizer" in request["runner"]:
        _one_of("runner.optimizer", request["runner"]["optimizer"], OPTIMIZERS)
        for option in ("learning_rate", "momentum", "weight_decay"):
            if not 0 <= request["runner"][option] < math.inf:
                raise BadRequest(f"runner.{option}={request['runner'][option]} is not a number of at least 0")
    if request["model"]["name"] == "custom" and not request["model"].get("factory"):
        raise BadRequest("model=custom needs model.factory=package.module:function")
    _check_device(request)
    for key in ("results", "output"):
        if request[key] is None and key == "output":
            continue
        if not isinstance(request[key], str) or not request[key]:
            raise BadRequest(f"{key}={request[key]} is not a path")
        request[key] = os.path.abspath(os.path.expanduser(request[key]))
    if request["runner"]["name"] not in NO_RECORD:
        check_writable(Path(request["results"]), "results")
    return request


@cache  # a sweep asks once a cell
def check_writable(folder: Path, what: str) -> None:
    """Raise BadRequest unless a file can be made in `folder`, which is there or could be made."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise BadRequest(f"{what}={folder} cannot be written: {existing} is not a folder")
    try:
        with tempfile.TemporaryFile(dir=existing):  # permissions do not say it all: root passes them on a read-only disk
            pass
    except OSError as error:
        raise BadRequest(f"{what}={folder} cannot be written: {error.strerror or error} ({existing})") from error


def _check_cache() -> None:
    """A folder that cannot be written keeps nothing, which may be meant; what can be no folder is a mistake."""
    folder = Path(os.environ.get("OPWEAVE_CACHE", "")).expanduser()
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise BadRequest(f"OPWEAVE_CACHE={folder} can be no folder: {existing} is a file")


def print_json(document: Any) -> None:
    json.dump(document, sys.stdout, indent=1)
    print()


def _check_device(request: dict[str, Any]) -> None:
    count = cuda_device_count()
    if request["device"] == "auto":
        request["device"] = "cuda" if count else "cpu"
    if request["device"] == "cuda" and not count:
        raise BadRequest("device=cuda, but no CUDA device is visible here: use device=cpu or device=auto")
    gpus = list(range(max(1, count))) if request["gpus"] == "all" else request["gpus"]
    if isinstance(gpus, int) and not isinstance(gpus, bool):
        gpus = [gpus]
    if not isinstance(gpus, list) or not gpus or len(set(map(str, gpus))) < len(gpus):
        raise BadRequest(f"gpus={gpus} is neither all nor a list of different GPU numbers, like [0,1]")
    request["gpus"] = gpus
    for gpu in gpus:
        _integer("gpus", gpu, least=0)
        if request["device"] == "cuda" and gpu >= count:
            raise BadRequest(f"gpus={gpus}, but GPUs are numbered 0 to {count - 1} here")


def _check_option_types(group: str, options: dict[str, Any]) -> None:
    """An option has the type of its default, so that system.multi_stream=maybe is told here and not by a crash."""
    file = CONF / group / f"{options.get('name')}.yaml"
    if not file.exists():
        raise BadRequest(f"no {group} is named {options.get('name')!r}: {nearest(str(options.get('name')), choices(group))}")
    defaults = _defaults(file)
    for key in defaults:
        if key not in options:
            raise BadRequest(f"{group}.{key} was taken out of the config; it is needed: {group}.{key}=...")
    for key, value in options.items():
        if key not in defaults:
            raise BadRequest(f"there is no key '{group}.{key}': {nearest(key, set(defaults) - {'name'})}")
        default = defaults[key]
        if default is None:
            continue
        number = isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool)
        if type(value) is not type(default) and not number:
            kind = {bool: "true or false", int: "an integer", float: "a number", str: "a name"}
            raise BadRequest(f"{group}.{key}={value} is not {kind.get(type(default), type(default).__name__)}")


def defaults_only(cell: dict[str, Any], group: str) -> bool:
    """Has the cell's model (or system) no option but those that stand in conf/?"""
    return bool(cell[group] == _defaults(CONF / group / f"{cell[group]['name']}.yaml"))


@cache
def _defaults(file: Path) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.load(file))  # type: ignore[return-value]


def _integer(key: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadRequest(f"{key}={value} is not an integer of at least {least}")


def _positive_integer(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadRequest(f"{key}={value} is not a positive integer")


def _is_positive(value: Any) -> bool:
    """Is it a number, and a finite one above zero?"""
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 < value < math.inf


def _one_of(key: str, value: Any, valid: tuple[str, ...]) -> None:
    if value not in valid:
        near = f": {hint}" if (hint := nearest(str(value), valid)).startswith("did you mean") else ""
        raise BadRequest(f"{key}={value} is not one of {', '.join(valid)}{near}")
