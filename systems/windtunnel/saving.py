"""A translated pipeline on disk: tensors as safetensors, all else as JSON. Reading runs no code of a file's.

A module is written as its class, its plain attributes, and the names of its parameters and buffers; a class must be one
of those below.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load as deserialize
from safetensors.torch import save as serialize
from torch import Tensor, nn

from models.neural import distances, embeddings, factorization, forests, graph, likelihood, linear, lookups

from .base import Form, Link
from .inputs import Beside, Kept, Lookup, Source, Step, Take
from .translate import Line, Translation

WEIGHTS, DESCRIPTION, VERSION = "weights.safetensors", "windtunnel.json", 2
ROOMS = (distances, embeddings, factorization, forests, graph, likelihood, linear, lookups)
MODULES: dict[str, type[nn.Module]] = {
    **{c.__name__: c for room in ROOMS for c in vars(room).values() if isinstance(c, type) and issubclass(c, nn.Module)},
    **{c.__name__: c for c in (nn.Linear, nn.Sequential, nn.ModuleList, nn.ParameterList)},
}
# Operators that stay on the host, and what is in them is numbers, words and arrays.
KEPT = {
    "Binarizer": "sklearn.preprocessing",
    "KBinsDiscretizer": "sklearn.preprocessing",
    "PolynomialFeatures": "sklearn.preprocessing",
    "PowerTransformer": "sklearn.preprocessing",
    "QuantileTransformer": "sklearn.preprocessing",
    "SimpleImputer": "sklearn.impute",
    "MissingIndicator": "sklearn.impute",
}
WITHIN = {"OneHotEncoder": "sklearn.preprocessing", "StandardScaler": "sklearn.preprocessing"}  # parts of those
OWN = {"Bucketizer": "models.tabular.encoders"}

Plain: TypeAlias = Any  # what JSON holds


class NotSavable(ValueError):
    """What neither file can hold, or a folder that holds something else. The message is one line."""


@dataclass(frozen=True)
class Facts:
    """What an estimator knows of the pipeline it was made of.

    Attributes:
        is_classifier: or a regressor.
        classes: of a classifier.
        num_features, feature_names: of the table; no names where it had none.
        allows_missing: of each column whether NaN may stand in it.
        parameters: of the estimator, but the pipeline.
    """

    is_classifier: bool
    classes: NDArray[Any] | None
    num_features: int
    feature_names: tuple[str, ...] | None
    allows_missing: tuple[bool, ...]
    parameters: dict[str, Any]


def save(folder: Path, translation: Translation, facts: Facts) -> None:
    """Write both files, the description last. Raises NotSavable."""
    names = {id(module): name for name, module in translation.network.named_modules()}
    form = {name: value for name, value in asdict(translation.form).items() if name != "dtype"}
    description = {
        "version": VERSION,
        "network": _described(translation.network),
        "sources": [_source(source) for source in translation.sources],
        "link": asdict(translation.link),
        "report": [asdict(line) for line in translation.report],
        "predictor": names[id(translation.predictor)],
        "form": {**form, "dtype": str(translation.form.dtype).removeprefix("torch.")},
        "is_classifier": facts.is_classifier,
        "classes": None if facts.classes is None else _array(facts.classes, "y"),
        "num_features": facts.num_features,
        "feature_names": facts.feature_names,
        "allows_missing": facts.allows_missing,
        "parameters": {name: _plain(value, name) for name, value in facts.parameters.items()},
    }
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in translation.network.state_dict().items()}
    weights = serialize(tensors)
    text = json.dumps({**description, "digest": sha256(weights).hexdigest()})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS).write_bytes(weights)
    (folder / DESCRIPTION).write_text(text, encoding="utf-8")


def load(folder: Path) -> tuple[Translation, Facts]:
    """Read both files. Raises NotSavable: they are not there, or not what `save` writes."""
    for name in (DESCRIPTION, WEIGHTS):
        if not (folder / name).is_file():
            raise NotSavable(f"{folder} holds no saved WindTunnel: {name} is missing")
    try:
        description = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        weights = (folder / WEIGHTS).read_bytes()
        if description["version"] != VERSION:
            raise NotSavable(f"{folder} is of version {description['version']}; this code reads version {VERSION}")
        if description["digest"] != sha256(weights).hexdigest():
            raise NotSavable(f"{folder}: {WEIGHTS} is damaged, or not the one that {DESCRIPTION} was written with")
        return _loaded(description, deserialize(weights))
    except NotSavable:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        line = " ".join(str(error).split())
        raise NotSavable(f"{folder} holds no saved WindTunnel: {type(error).__name__} {line}") from None


def _loaded(description: dict[str, Plain], weights: dict[str, Tensor]) -> tuple[Translation, Facts]:
    network = _rebuilt(description["network"], weights, "")
    if not isinstance(network, graph.Network):
        raise NotSavable(f"a saved WindTunnel holds a Network, not a {type(network).__name__}")
    form = dict(description["form"])
    form["dtype"] = {"float32": torch.float32, "float64": torch.float64}[form["dtype"]]
    sources = tuple(_read_source(source) for source in description["sources"])
    report = tuple(Line(**line) for line in description["report"])
    predictor = network.get_submodule(description["predictor"])
    translation = Translation(network, sources, Link(**description["link"]), report, (), predictor, Form(**form))
    classes, names = description["classes"], description["feature_names"]
    facts = Facts(
        description["is_classifier"],
        None if classes is None else _read_array(classes),
        description["num_features"],
        None if names is None else tuple(names),
        tuple(description["allows_missing"]),
        description["parameters"],
    )
    return translation, facts


def _described(module: nn.Module) -> Plain:
    kind = type(module)
    if MODULES.get(kind.__name__) is not kind:
        raise NotSavable(f"{kind.__name__} is no module of a translation")
    fresh = vars(nn.Module()).keys()
    attributes = {name: value for name, value in vars(module).items() if name not in fresh}
    return {
        "class": kind.__name__,
        "attributes": {name: _plain(value, f"{kind.__name__}.{name}") for name, value in attributes.items()},
        "parameters": {name: p.requires_grad for name, p in module.named_parameters(recurse=False)},
        "buffers": [name for name, _ in module.named_buffers(recurse=False)],
        "children": {name: _described(child) for name, child in module.named_children()},
    }


def _rebuilt(described: Plain, weights: dict[str, Tensor], prefix: str) -> nn.Module:
    kind = MODULES.get(described["class"])
    if kind is None:
        raise NotSavable(f"{described['class']!r} is no module of a translation")
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name, value in described["attributes"].items():
        setattr(module, name, tuple(value) if isinstance(value, list) else value)
    for name, trains in described["parameters"].items():
        module.register_parameter(name, nn.Parameter(weights[prefix + name], requires_grad=trains))
    for name in described["buffers"]:
        module.register_buffer(name, weights[prefix + name])
    for name, child in described["children"].items():
        module.add_module(name, _rebuilt(child, weights, f"{prefix}{name}."))
    return module.eval()


def _source(source: Source) -> Plain:
    lookup = source.lookup
    return {
        "steps": [_step(step) for step in source.steps],
        "lookup": None
        if lookup is None
        else {
            "name": lookup.name,
            "categories": [_array(c, lookup.name) for c in lookup.categories],
            "refuses_unknown": lookup.refuses_unknown,
        },
    }


def _read_source(plain: Plain) -> Source:
    lookup = plain["lookup"]
    if lookup is not None:
        categories = tuple(_read_array(c) for c in lookup["categories"])
        lookup = Lookup(lookup["name"], categories, lookup["refuses_unknown"])
    return Source(tuple(_read_step(step) for step in plain["steps"]), lookup)


def _step(step: Step) -> Plain:
    if isinstance(step, Take):
        return {"take": step.places}
    if isinstance(step, Beside):
        return {"beside": [[_step(inner) for inner in branch] for branch in step.branches]}
    kind = type(step.transformer)
    is_own = "models.tabular" in kind.__module__ and kind.__name__ in OWN
    if not is_own and not _is_of(kind, KEPT):
        known = ", ".join(sorted([*KEPT, *OWN]))
        raise NotSavable(f"{step.name} stays on the host, and no file can hold it; these that stay can be saved: {known}")
    return {"kept": step.name, **_operator(step.transformer, step.name)}


def _is_of(kind: type, rooms: dict[str, str]) -> bool:
    return kind.__name__ in rooms and kind.__module__.startswith("sklearn.")


def _operator(operator: Any, name: str) -> dict[str, Plain]:
    return {
        "class": type(operator).__name__,
        "state": {attribute: _fitted(value, name) for attribute, value in vars(operator).items()},
    }


def _read_step(plain: Plain) -> Step:
    if "take" in plain:
        return Take(tuple(plain["take"]))
    if "beside" in plain:
        return Beside(tuple(tuple(_read_step(inner) for inner in branch) for branch in plain["beside"]))
    return Kept(plain["kept"], _read_operator(plain, KEPT))


def _read_operator(plain: Plain, rooms: dict[str, str]) -> Any:
    name = plain["class"]
    if name in OWN:
        from models.tabular import encoders

        kind = getattr(encoders, name)
    elif name in rooms:
        kind = getattr(import_module(rooms[name]), name)
    else:
        raise NotSavable(f"{name!r} is no operator that stays on the host")
    operator = kind()
    for attribute, value in plain["state"].items():
        setattr(operator, attribute, _read_fitted(value))
    return operator


def _fitted(value: Any, name: str) -> Plain:
    """An attribute of an operator: an array, several, a type of numpy, an operator within it, or a plain value."""
    are_objects = isinstance(value, list) or (isinstance(value, np.ndarray) and value.dtype == object)
    if are_objects and len(value) and all(isinstance(v, np.ndarray) for v in value):
        return {"list" if isinstance(value, list) else "objects": [_array(v, name) for v in value]}
    if isinstance(value, np.ndarray):
        return {"array": _array(value, name)}
    if isinstance(value, np.dtype):
        return {"dtype": value.str}
    if _is_of(type(value), KEPT | WITHIN):
        return {"operator": _operator(value, name)}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"words": {key: _plain(inner, name) for key, inner in value.items()}}
    return {"plain": _plain(value, name)}


def _read_fitted(plain: Plain) -> Any:
    ((kind, value),) = plain.items()
    if kind == "array":
        return _read_array(value)
    if kind == "list":
        return [_read_array(v) for v in value]
    if kind == "objects":
        objects = np.empty(len(value), dtype=object)
        objects[:] = [_read_array(v) for v in value]
        return objects
    if kind == "operator":
        return _read_operator(value, KEPT | WITHIN)
    return np.dtype(value) if kind == "dtype" else value


def _array(array: NDArray[Any], name: str) -> Plain:
    array = np.asarray(array)
    if array.dtype.kind not in "biufOUST":
        raise NotSavable(f"{name} holds an array of {array.dtype}, which no file can hold")
    values = array.astype(object).tolist() if array.dtype.kind in "OUST" else array.tolist()
    flat = np.asarray(values, dtype=object).reshape(-1)
    if not all(value is None or isinstance(value, bool | int | float | str) for value in flat):
        raise NotSavable(f"{name} holds {next(type(v).__name__ for v in flat)} objects, which no file can hold")
    return {"dtype": "object" if array.dtype.kind in "OUST" else array.dtype.str, "shape": array.shape, "values": list(flat)}


def _read_array(plain: Plain) -> NDArray[Any]:
    values = np.empty(len(plain["values"]), dtype=object)
    values[:] = plain["values"]
    dtype = np.dtype(plain["dtype"])
    if dtype.kind not in "biufO":
        raise NotSavable(f"a saved array cannot be of {dtype}")
    return values.astype(dtype).reshape(plain["shape"])


def _plain(value: Any, name: str) -> Plain:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, tuple | list) and all(isinstance(v, bool | int | float | str) for v in value):
        return list(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise NotSavable(f"{name} holds a {type(value).__name__}, which no file can hold")
