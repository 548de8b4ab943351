"""`model=custom`: a model from a function of the user's own."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from models.model import Model
from models.registry import BadModel, nearest

if TYPE_CHECKING:
    import torch
    from torch import nn

EXAMPLE = "mypkg.mymodule:make, with make(batch: int) -> (nn.Module, (Tensor, ...))"


def load(batch: int, *, training: bool, device: str | torch.device, factory: str | None = None, **options: Any) -> Model:
    """The Model that `factory` ("package.module:function") makes for this batch, on `device`.

    `function(batch)` returns `(nn.Module, tuple of Tensors)`; the module goes to eval mode, or to train mode with
    `training`. The working directory comes first on the import path from here on, as under `python -m`. Raises
    BadModel with one line for whatever is wrong with the factory.
    """
    if options:
        raise BadModel(f"model custom has no option {next(iter(options))!r}; it takes factory")
    if not factory:
        raise BadModel(f"model custom needs model.factory={EXAMPLE}")
    make = _import(factory)
    try:
        made = make(batch)
    except (Exception, SystemExit) as error:
        raise BadModel(f"factory {factory} raised {_line(error)}") from error
    module, inputs = _checked(made, factory)
    module = module.train(training).to(device)
    return Model("custom", module, tuple(tensor.to(device) for tensor in inputs))


def _import(factory: str) -> Callable[[int], object]:
    path, colon, attribute = str(factory).partition(":")
    if not (colon and path and attribute):
        raise BadModel(f"factory {factory!r} is not of the form {EXAMPLE}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name and (path == error.name or path.startswith(f"{error.name}.")):
            raise BadModel(f"factory {factory}: there is no module {error.name} in {os.getcwd()} or installed") from error
        raise BadModel(f"factory {factory}: importing {path} raised {_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise BadModel(f"factory {factory}: importing {path} raised {_line(error)}") from error
    try:
        make = getattr(module, attribute)
    except AttributeError as error:
        public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        hint = nearest(attribute, public, "it has no functions")
        raise BadModel(f"factory {factory}: module {path} has no {attribute!r}; {hint}") from error
    if not callable(make):
        raise BadModel(f"factory {factory} is {_kind(make)}, not a function (batch: int) -> (nn.Module, (Tensor, ...))")
    return make


def _checked(made: object, factory: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    import torch
    from torch import nn

    wanted = "it must return (nn.Module, (Tensor, ...))"
    if not (isinstance(made, tuple) and len(made) == 2):
        size = f" of {len(made)}" if isinstance(made, tuple) else ""
        raise BadModel(f"factory {factory} returned {_kind(made)}{size}; {wanted}")
    module, inputs = made
    if not isinstance(module, nn.Module):
        raise BadModel(f"factory {factory} returned {_kind(module)} first; {wanted}")
    if not isinstance(inputs, tuple):
        raise BadModel(f"factory {factory} returned {_kind(inputs)} as the inputs; {wanted}")
    if not inputs:
        raise BadModel(f"factory {factory} returned no inputs; {wanted}")
    for index, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor):
            raise BadModel(f"factory {factory} returned {_kind(value)} as input {index}; {wanted}")
    return module, inputs


def _kind(value: object) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _line(error: BaseException) -> str:
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
