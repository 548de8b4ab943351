"""The names of the zoo, and what stands behind each: a function that builds the network, and its inputs.

Each network is a function `(training, **options) -> nn.Module` under `@register`; its name is the model's.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from conf import Options, nearest, not_one_of

if TYPE_CHECKING:
    import torch
    from torch import nn

PIPELINE = "pipeline"  # the name of what is no network but a pipeline over a table, which runner=accuracy measures
FOLDER = "hf"  # the name of weights in a folder, as transformers saves them
SERVED = ("qwen3", "t5_generation", FOLDER)  # names of what only a server runs; gpt is of the zoo as well
NUM_NEAREST = 3  # names that a hint suggests at most
SIZES = ("full", "small")  # the network as published, and one of the same operators that any CPU runs in a second


class BadModel(ValueError):
    """A wrong request for a model. The message is one line: what is wrong, and what would be right."""


@dataclass(frozen=True)
class Input:
    """One input of a network.

    Attributes:
        shape: of one sample.
        vocabulary: the number of token ids, or one number for each place of a sample's last dimension; None for an input of
            floating-point values.
    """

    shape: tuple[int, ...]
    vocabulary: int | tuple[int, ...] | None = None

    def draw(self, batch: int, generator: torch.Generator) -> torch.Tensor:
        """Random values on the CPU, [batch, *shape]: float32, standard normal; or int64, uniform token ids."""
        import torch

        shape = (batch, *self.shape)
        if self.vocabulary is None:
            return torch.randn(shape, generator=generator)
        if isinstance(self.vocabulary, int):
            return torch.randint(self.vocabulary, shape, generator=generator)
        places = [torch.randint(size, shape[:-1], generator=generator) for size in self.vocabulary]
        return torch.stack(places, -1)


@dataclass(frozen=True)
class Entry:
    """A registered network. `inputs` takes the same options as `build`; the rest is as in `register`."""

    build: Callable[..., nn.Module]
    inputs: Callable[..., tuple[Input, ...]]
    is_made_in_place: bool = False

    @property
    def takes_batch(self) -> bool:
        """Is it built for one batch, since it has state of each sample?"""
        return "batch" in inspect.signature(self.build).parameters

    def options(self, changed: Options) -> Options:
        """The defaults of all options, overlaid with `changed`.

        Raises:
            BadModel: an option does not exist, or its value is of another type than its default.
        """
        parameters = inspect.signature(self.build).parameters.values()
        defaults: Options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        name = self.build.__name__
        for key, value in changed.items():
            if key not in defaults:
                hint = nearest(key, defaults, count=NUM_NEAREST, otherwise="it takes no options")
                raise BadModel(f"model {name} has no option {key!r}; {hint}")
            default = defaults[key]
            if type(value) is not type(default):
                kind = "an integer" if isinstance(default, int) else "a word"
                raise BadModel(f"option {key} of model {name} must be {kind} (default {default}), not {value!r}")
            if isinstance(value, int) and value < 1:
                raise BadModel(f"option {key} of model {name} must be at least 1, not {value}")
        return defaults | changed


_entries: dict[str, Entry] = {}


def register(
    inputs: Callable[..., tuple[Input, ...]], *, is_made_in_place: bool = False
) -> Callable[[Callable[..., nn.Module]], Callable[..., nn.Module]]:
    """Enters a function `(training, **options) -> nn.Module` into the zoo under its own name.

    The options of the model are the function's keyword-only parameters. A default gives an option its type. A network with
    state of each sample is `(training, batch, **options) -> nn.Module`.

    Args:
        inputs: takes the same options and describes one sample of each input.
        is_made_in_place: its weights are drawn on the device where it will run, since they are too many for the host. They
            are the same in every process on such a device, and others on a CPU than on a GPU.
    """

    def enter(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        _entries[build.__name__] = Entry(build, inputs, is_made_in_place)
        return build

    return enter


def images(size: int) -> Callable[..., tuple[Input, ...]]:
    """The inputs of an image network: one RGB image, [B, 3, size, size]."""
    return lambda **options: (Input((3, size, size)),)


def is_small(size: str) -> bool:
    """Is an option `size` that of the small form? Raises BadModel where it is none of SIZES."""
    if wrong := not_one_of("model.size", size, SIZES):
        raise BadModel(wrong)
    return size == "small"


@cache
def _modules() -> dict[str, str]:
    """The module of each model by the model's name.

    The sources are parsed and not imported, so that names can be listed without torch.
    """
    modules: dict[str, str] = {}
    for file in sorted(Path(__file__).parent.glob("*.py")):
        source = file.read_text(encoding="utf-8")
        if f"@{register.__name__}(" in source:
            modules |= dict.fromkeys(_registered(ast.parse(source)), f"{__package__}.{file.stem}")
    return modules


def _registered(tree: ast.Module) -> list[str]:
    """The names of a file's functions under `@register(...)`."""
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call)
        and isinstance(decorator.func, ast.Name)
        and decorator.func.id == register.__name__
    ]


def names() -> list[str]:
    """Every model of the zoo, sorted. `custom` is none of them."""
    return sorted(_modules())


def module_name(name: str) -> str:
    """The name of the module that defines a model, for an import.

    Raises:
        BadModel: no model has that name; the message holds the nearest names.
    """
    if name not in _modules():
        raise BadModel(f"no model {name!r}; {nearest(name, [*names(), 'custom'], count=NUM_NEAREST)}")
    return _modules()[name]


def find(name: str) -> Entry:
    """The entry of that name; imports its module. Raises BadModel as `module_name`."""
    importlib.import_module(module_name(name))
    return _entries[name]
