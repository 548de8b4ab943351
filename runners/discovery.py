"""The classes that a package's files define, so that a new file needs no list."""

import inspect
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar

T = TypeVar("T")


def classes_of(package_name: str, base: type[T]) -> dict[str, type[T]]:
    """The concrete subclasses of `base` in a package, by their attribute `name`, in the order of its files' names.

    Raises ValueError where two have one name.
    """
    package = import_module(package_name)
    classes: dict[str, type[T]] = {}
    for module_info in iter_modules(package.__path__, f"{package_name}."):
        module = import_module(module_info.name)
        for member in vars(module).values():
            is_own = inspect.isclass(member) and issubclass(member, base) and member.__module__ == module.__name__
            if not is_own or inspect.isabstract(member) or not getattr(member, "name", ""):
                continue
            if member.name in classes:
                raise ValueError(f"{module.__name__} and {classes[member.name].__module__} both define {member.name}")
            classes[member.name] = member
    return classes
