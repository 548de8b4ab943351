"""The names of the zoo, and what stands behind each: a function that builds the network, and its inputs.

Each network is a function `(training, **options) -> nn.Module` under `@register`; its name is the entry.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

# Which file defines which entries: the names can be listed without importing torch.
FILES: dict[str, tuple[str, ...]] = {
    "cifar": ("efficientnet_b0_cifar10", "mobilenet_v2_cifar10", "resnet50_cifar10"),
    "darts": ("amoebanet", "darts"),
    "language": ("bert", "gpt2", "t5"),
    "nasnet": ("nasnet", "nasnet_large"),
    "randwire": ("randwire",),
    "vision": (
        "efficientnet_b0",
        "efficientnet_b5",
        "googlenet",
        "inception_v3",
        "mobilenet_v2",
        "resnet18",
        "resnet50",
        "resnet101",
        "squeezenet",
        "vgg16",
    ),
}


class BadModel(ValueError):
    """A model that was asked for wrongly. The message is one line: what is wrong, and what would be right."""


@dataclass(frozen=True)
class Input:
    """One input of a network: `shape` is that of one sample; with a vocabulary it holds token ids below it."""

    shape: tuple[int, ...]
    vocabulary: int | None = None

    def draw(self, batch: int, generator: torch.Generator) -> torch.Tensor:
        """Random values on the CPU, [batch, *shape]: float32, standard normal; or int64, uniform token ids."""
        import torch

        shape = (batch, *self.shape)
        if self.vocabulary is None:
            return torch.randn(shape, generator=generator)
        return torch.randint(self.vocabulary, shape, generator=generator)


@dataclass(frozen=True)
class Entry:
    """A registered network. `inputs` takes the same options as `build`."""

    build: Callable[..., nn.Module]
    inputs: Callable[..., tuple[Input, ...]]

    def options(self, given: dict[str, Any]) -> dict[str, Any]:
        """The defaults overlaid with `given`. Raises BadModel for an unknown option or a value of the wrong kind."""
        parameters = inspect.signature(self.build).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        name = self.build.__name__
        for key, value in given.items():
            if key not in defaults:
                raise BadModel(f"model {name} has no option {key!r}; {nearest(key, defaults, 'it takes no options')}")
            default = defaults[key]
            if type(value) is not type(default):
                kind = "an integer" if isinstance(default, int) else "a word"
                raise BadModel(f"option {key} of model {name} must be {kind} (default {default}), not {value!r}")
            if isinstance(value, int) and value < 1:
                raise BadModel(f"option {key} of model {name} must be at least 1, not {value}")
        return defaults | given


_entries: dict[str, Entry] = {}


def register(
    inputs: Callable[..., tuple[Input, ...]],
) -> Callable[[Callable[..., nn.Module]], Callable[..., nn.Module]]:
    """Enters a function `(training, **options) -> nn.Module` into the zoo under its own name.

    Options are its keyword-only parameters; their defaults say their kind. `inputs(**options)` describes one sample.
    """

    def enter(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        _entries[build.__name__] = Entry(build, inputs)
        return build

    return enter


def images(size: int) -> Callable[..., tuple[Input, ...]]:
    """The inputs of an image network: one RGB image, [B, 3, size, size]."""
    return lambda **options: (Input((3, size, size)),)


def names() -> list[str]:
    """Every model of the zoo, sorted; `custom` is none of them. Imports nothing."""
    return sorted(name for file in FILES.values() for name in file)


def find(name: str) -> Entry:
    """The entry of that name. Raises BadModel with the nearest names if there is none."""
    for file, defined in FILES.items():
        if name in defined:
            importlib.import_module(f"models.{file}")
            return _entries[name]
    raise BadModel(f"no model {name!r}; {nearest(name, [*names(), 'custom'], '')}")


def nearest(name: str, candidates: Iterable[str], otherwise: str) -> str:
    """`did you mean ...?` with up to three near names, or every candidate where none is near."""
    candidates = sorted(candidates)
    close = difflib.get_close_matches(name, candidates, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"there is {', '.join(candidates)}" if candidates else otherwise
