"""`model=custom`: a model from a function of the user's own."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from conf import Options, nearest
from conf.own_code import module_hint, with_own_line
from conf.text import named_line
from models.model import Model
from models.registry import NUM_NEAREST, BadModel

if TYPE_CHECKING:
    import torch
    from torch import nn

EXAMPLE = "mypkg.mymodule:make, with make(batch: int) -> (nn.Module, (Tensor, ...))"


def load(batch: int, *, training: bool, device: str | torch.device, options: Options) -> Model:
    """The Model that a user's factory makes. The working directory comes first on the import path from then on.

    Args:
        batch: the factory's only argument.
        training: the module's mode: train, or eval.
        device: where the module and its inputs go.
        options: only `factory`, "package.module:function". The function returns (nn.Module, tuple of Tensors), or a mapping
            of Tensors by name, as a tokenizer's, for a module whose inputs go by name.

    Raises:
        BadModel: the factory is wrong or raised; the message is one line.
    """
    if wrong := [option for option in options if option != "factory"]:
        raise BadModel(f"model custom has no option {wrong[0]!r}; it takes factory")
    if not options.get("factory"):
        raise BadModel(f"model custom needs model.factory={EXAMPLE}")
    factory = str(options["factory"])
    make = _import(factory)
    try:
        product = make(batch)
    except (Exception, SystemExit) as error:
        raise BadModel(with_own_line(f"factory {factory} raised {named_line(error)}", error)) from error
    module, inputs = _checked(product, factory)
    is_of_one = all(tensor.shape[:1] in ((), (1,)) for tensor in inputs)
    if batch > 1 and is_of_one and not _uses_its_batch(make, inputs):
        shapes = " and ".join("x".join(map(str, tensor.shape)) or "no dimension" for tensor in inputs)
        raise BadModel(f"factory {factory} returned inputs of {shapes} for batch={batch}: make(batch) has to use its batch")
    module = module.train(training).to(device)
    return Model("custom", module, tuple(tensor.to(device) for tensor in inputs))


def _import(factory: str) -> Callable[[int], object]:
    """The function that `factory` names. Raises BadModel."""
    path, colon, attribute = factory.partition(":")
    if not (colon and path and attribute):
        raise BadModel(f"factory {factory!r} is not of the form {EXAMPLE}")
    if hint := module_hint(path, attribute):
        raise BadModel(f"factory {factory}: {hint}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name and (path == error.name or path.startswith(f"{error.name}.")):
            lacks = f"there is no module {error.name} in {os.getcwd()} or installed"
            raise BadModel(f"factory {factory}: {_joined(lacks, _way_out(path))}") from error
        raised = _joined(f"importing {path} raised {named_line(error)}", _way_out(error.name or ""))
        raise BadModel(with_own_line(f"factory {factory}: {raised}", error)) from error
    except (Exception, SystemExit) as error:
        raise BadModel(with_own_line(f"factory {factory}: importing {path} raised {named_line(error)}", error)) from error
    try:
        make = getattr(module, attribute)
    except AttributeError as error:
        public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        hint = nearest(attribute, public, count=NUM_NEAREST, otherwise="it has no functions")
        raise BadModel(f"factory {factory}: module {path} has no {attribute!r}; {_way_out(path) or hint}") from error
    if not callable(make):
        raise BadModel(f"factory {factory} is {_kind(make)}, not a function (batch: int) -> (nn.Module, (Tensor, ...))")
    return make


def _uses_its_batch(make: Callable[[int], object], inputs: tuple[torch.Tensor, ...]) -> bool:
    """Has a batch of 1 other shapes? A factory that makes no model for a batch of 1 knows its batch."""
    try:
        _, inputs_of_one = _checked(make(1), "")
    except (Exception, SystemExit):
        return True
    return [x.shape for x in inputs_of_one] != [x.shape for x in inputs]


def _joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def _way_out(path: str) -> str:
    """What to do where another module was imported by the name of one of the working directory; "" elsewhere."""
    name, folder = path.partition(".")[0], Path.cwd()
    place = Path(getattr(sys.modules.get(name), "__file__", None) or folder)
    own = [each for each in (folder / name, folder / f"{name}.py") if each.exists()]
    return f"{place} is in the place of {own[0]}: rename yours" if own and not place.is_relative_to(folder) else ""


def _checked(product: object, factory: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """What a factory returned, where it is a module and its inputs. Raises BadModel elsewhere."""
    import torch
    from torch import nn
    from torch.nn.parameter import is_lazy

    from models.by_name import ByName

    rule = "it must return (nn.Module, (Tensor, ...)), or a mapping of Tensors by name as the inputs"
    if not (isinstance(product, tuple) and len(product) == 2):
        size = f" of {len(product)}" if isinstance(product, tuple) else ""
        raise BadModel(f"factory {factory} returned {_kind(product)}{size}; {rule}")
    module, inputs = product
    if not isinstance(module, nn.Module):
        raise BadModel(f"factory {factory} returned {_kind(module)} first; {rule}")
    tensors = (*module.named_parameters(), *module.named_buffers())
    if lazy := [name for name, tensor in tensors if is_lazy(tensor)]:
        raise BadModel(
            f"factory {factory} returned a module whose {lazy[0]} has no shape yet: call the module once in the factory"
        )
    if isinstance(inputs, Mapping):
        if wrong := [name for name in inputs if not isinstance(name, str)]:
            raise BadModel(f"factory {factory} returned inputs by {_kind(wrong[0])}; {rule}")
        module, inputs = ByName(module, list(inputs)), tuple(inputs.values())
    if not isinstance(inputs, tuple):
        raise BadModel(f"factory {factory} returned {_kind(inputs)} as the inputs; {rule}")
    if not inputs:
        raise BadModel(f"factory {factory} returned no inputs; {rule}")
    for index, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor):
            raise BadModel(f"factory {factory} returned {_kind(value)} as input {index}; {rule}")
    return module, inputs


def _kind(value: object) -> str:
    """The type of a value as a message names it: "a Linear", "an int", "None"."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
