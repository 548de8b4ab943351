"""Every system by the name of its choice in conf/system; its module is imported only when it is loaded."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

import conf

if TYPE_CHECKING:  # base.py imports torch, which listing the names does not need
    from .base import System

# A system NAME lies in the package's NAME/system.py. These lie elsewhere.
ELSEWHERE = {
    "eager": ".pytorch.eager",
    "torchscript": ".pytorch.torchscript",
    "torch_compile": ".pytorch.torch_compile",
    "cuda_graph": ".pytorch.cuda_graph",
    "onnxruntime": ".onnx.runtime",
    "pipeline": ".tabular.pipeline",
    "lightgbm": ".tabular.pipeline",
    "tabm": ".tabular.networks",
    "ft_transformer": ".tabular.networks",
    "deepgbm": ".tabular.deepgbm",
    "hummingbird": ".tabular.hummingbird",
    "translation": ".windtunnel.translation",
    "transformers_continuous_batching": ".peers.transformers",
    "transformers_generate": ".peers.transformers",
    "vllm": ".peers.vllm",
    "nano_vllm": ".peers.nano_vllm",
    "endpoint": ".peers.endpoint",
    "weave_or_peers": ".weave.peers",
}
CUSTOM = "custom"  # a user's own scheduler, which needs its option `plan`


def names() -> list[str]:
    """Every system that needs no option."""
    return sorted({str(conf.options("system", choice).get("name", CUSTOM)) for choice in conf.choices("system")} - {CUSTOM})


def load(choice: str, **options: conf.Value | os.PathLike[str]) -> System:
    """The system of a choice.

    Args:
        choice: as of `system=` on the command line: a file of conf/system, or of the folder that OPWEAVE_CONF names.
        options: in the place of the file's; a path stands for its text.

    Raises:
        ValueError: there is no such choice.
        BadOption: there is no such option, or it does not take that value.
    """
    from .base import BadOption

    if not isinstance(choice, str):
        raise ValueError(f"a system has a name, as 'weave', and {choice!r} is none")
    options = {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in options.items()}
    if choice not in conf.choices("system"):
        raise ValueError(f"no system is named {choice}: {conf.nearest(choice, conf.choices('system'))}")
    defaults = conf.options("system", choice)
    name = defaults.pop("name", None)
    if name not in conf.choices("system"):
        raise ValueError(f"the file of system={choice} has no name of a system: begin it with defaults: [{CUSTOM}]")
    if mistake := conf.mistake("system", defaults, options):
        raise BadOption(mistake)
    return system_class(str(name))(**defaults | options)


def place(name: str) -> str:
    """The module of a system, relative to this package."""
    return ELSEWHERE.get(name, f".{name}.system")


def system_class(name: str) -> type[System]:
    """The class of that name in the module of that name. Raises ImportError."""
    from .base import System

    module = import_module(place(name), __package__)
    classes = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, System)]
    return next(c for c in classes if getattr(c, "name", None) == name)
