"""From one composed config to a request of one cell: every check that needs no model and no device."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf import Value, choices, mistake, nearest
from conf import options as file_options
from models.model import LAYOUTS, PRECISIONS
from models.registry import FOLDER
from results.cell import Cell, Choice, Conditions
from results.soundness import LARGEST
from runners.checks import BadRequest, at_least, check_writable, is_positive, one_of, positive_integer
from runners.measurements import registry as measurements
from runners.showings import registry as showings

from .explain import CHOSEN, explain, top_keys, unknown_key
from .request import Request, SweepOptions

ALGORITHMS = ("heuristic", "timed")
DEVICES = ("auto", "cpu", "cuda")
LARGEST_SEED = 2**63 - 1  # of torch's generators
NOT_OURS = ("hydra", "exhibit")  # of a composed config, what says nothing of what to run


def resolve(config: DictConfig, files: Mapping[str, str]) -> Request:
    """The request that a config composes, with every value checked.

    Args:
        config: composed by Hydra, with or without its own part.
        files: the file that was chosen of each group, as Hydra's `runtime.choices` tells.

    Raises:
        BadRequest: something of it is wrong.
    """
    values = _values(config)
    model, system, runner = (_choice(group, files[group], values[group]) for group in CHOSEN)
    cell = Cell(model, system, runner, _conditions(values))
    options = _sweep_options(values)
    if model.name == "custom" and not model.get("factory"):
        raise BadRequest("model=custom needs model.factory=package.module:function")
    if model.name == FOLDER and not model.get("path"):
        raise BadRequest("model=hf needs model.path=FOLDER, of a model as transformers saves it")
    if system.name == "custom" and not system.get("plan"):
        raise BadRequest("system=custom needs system.plan=package.module:function")
    if showings.is_showing(runner):
        showings.showing(runner)
    else:
        if (listed := runner.get("measurements")) is not None and not str(listed).split():
            raise BadRequest("runner.measurements= names no measurement; correctness alone is runner=correctness")
        measurements.plan(runner)
        check_writable(options.results, "results")
    return Request((cell,), options)


def _values(config: DictConfig) -> dict[str, object]:
    """What the config holds, with just the keys that a request has."""
    masked = OmegaConf.masked_copy(config, [str(key) for key in config if key not in NOT_OURS])
    try:
        container = OmegaConf.to_container(masked, resolve=True)
    except OmegaConfBaseException as error:
        raise BadRequest(explain(error)) from error
    assert isinstance(container, dict)
    values = {str(key): value for key, value in container.items()}
    for key in values:
        if key not in top_keys():
            raise BadRequest(unknown_key(key))
    for key in set(top_keys()) - {"experiment", *NOT_OURS}:
        if key not in values:
            raise BadRequest(f"{key} was taken out of the config; it is needed: {key}=...")
    return values


def _choice(group: str, file: str, options: object) -> Choice:
    """A model, system or runner with its options, each of the type of its default."""
    if not isinstance(options, dict):
        raise BadRequest(f"{group}={options!r} is no choice of conf/{group}")
    if file not in choices(group):
        raise BadRequest(f"no {group} is named {file!r}: {nearest(file, choices(group))}")
    defaults = file_options(group, file)
    for key in defaults:
        if key not in options:
            raise BadRequest(f"{group}.{key} was taken out of the config; it is needed: {group}.{key}=...")
    if wrong := mistake(group, defaults, options):
        raise BadRequest(wrong)
    for key, value in options.items():
        _recordable(f"{group}.{key}", value)
    typed = {str(key): _typed(value, defaults[key]) for key, value in options.items()}
    if typed["name"] != defaults["name"]:
        raise BadRequest(f"{group}.name={typed['name']} is not that of {group}={file}: choose another {group} instead")
    return Choice.of(file, typed, defaults)


def _recordable(key: str, value: object) -> None:
    """Raise BadRequest for a number that is too large for a record. What is none at all is for each option's own check."""
    if isinstance(value, int | float) and LARGEST < abs(value) < math.inf:
        raise BadRequest(f"{key}={value:.3g} is more than a record holds: {LARGEST:g} at most, with either sign")


def _typed(value: Value, default: Value) -> Value:
    """An option's value, a whole number as a float where the default is one."""
    return float(value) if isinstance(default, float) and isinstance(value, int) else value


def _conditions(values: Mapping[str, object]) -> Conditions:
    positive_integer("batch", values["batch"])
    _recordable("batch", values["batch"])
    one_of("precision", values["precision"], PRECISIONS)
    one_of("layout", values["layout"], LAYOUTS)
    one_of("algorithms", values["algorithms"], ALGORITHMS)
    one_of("device", values["device"], DEVICES)
    at_least("seed", values["seed"], 0)
    conditions = Conditions(
        batch=values["batch"],  # type: ignore[arg-type]
        device=str(values["device"]),
        precision=str(values["precision"]),
        layout=str(values["layout"]),
        seed=values["seed"],  # type: ignore[arg-type]
        algorithms=str(values["algorithms"]),
    )
    if conditions.seed > LARGEST_SEED:
        raise BadRequest(f"seed={conditions.seed} is more than {LARGEST_SEED}")
    return conditions


def _sweep_options(values: Mapping[str, object]) -> SweepOptions:
    at_least("rounds", values["rounds"], 0)
    positive_integer("max_cells", values["max_cells"])
    if not is_positive(values["timeout"]):
        raise BadRequest(f"timeout={values['timeout']} is not a positive number of seconds")
    if values["memory_gib"] is not None and not is_positive(values["memory_gib"]):
        raise BadRequest(f"memory_gib={values['memory_gib']} is neither a positive number of GiB nor null")
    load = values["max_load"]
    if isinstance(load, bool) or not isinstance(load, int | float) or not 0 <= load <= 1:
        raise BadRequest(f"max_load={load} is not a share from 0 to 1")
    if not isinstance(values["force"], bool):
        raise BadRequest(f"force={values['force']} is neither true nor false")
    if not isinstance(values["margin"], bool | None):
        raise BadRequest(f"margin={values['margin']} is neither true nor false nor null")
    return SweepOptions(
        results=_path("results", values["results"]),
        force=values["force"],
        timeout=values["timeout"],  # type: ignore[arg-type]
        memory_gib=values["memory_gib"],  # type: ignore[arg-type]
        rounds=values["rounds"],  # type: ignore[arg-type]
        max_load=float(values["max_load"]),  # type: ignore[arg-type]
        gpus=_gpus(values["gpus"]),
        output=None if values["output"] is None else _path("output", values["output"]),
        margin=values["margin"],
    )


def _path(key: str, value: object) -> Path:
    """An absolute path."""
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{key}={value} is not a path")
    return Path(os.path.abspath(os.path.expanduser(value)))


def _gpus(value: object) -> tuple[int, ...] | None:
    """Numbers of GPUs; None for all of them."""
    if value == "all":
        return None
    gpus = [value] if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(gpus, list) or not gpus or len(set(map(str, gpus))) < len(gpus):
        raise BadRequest(f"gpus={gpus} is neither all nor a list of different GPU numbers, like [0,1]")
    for gpu in gpus:
        at_least("gpus", gpu, 0)
    return tuple(gpus)
