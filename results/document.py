"""A record as JSON, and back. The fields of the file are those of the types; results/FORMAT.md describes them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias, TypeVar, cast

from cattrs import Converter
from cattrs.errors import BaseValidationError
from cattrs.gen import make_dict_unstructure_fn, override

from conf import Value

from .cell import Cell, Choice
from .course import Course
from .older import upgraded
from .record import SCHEMA, STATUSES, Record
from .soundness import are_numbers
from .statistics import Samples
from .words import one_line

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"

Part = TypeVar("Part")

# What reading data of another form raises.
OF_ANOTHER_FORM = (BaseValidationError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


class NotARecord(ValueError):
    """The document is no record; the message says why, in one line."""

    def __init__(self, message: str):
        super().__init__(one_line(message))


class Foreign(NotARecord):
    """The document is of another kind, which may well lie among records."""


def to_json(record: Record) -> dict[str, JSON]:
    """The record as its file holds it. Fields that are None or empty are left out."""
    return {"schema": SCHEMA, **cast("dict[str, JSON]", _converter.unstructure(record))}


def from_json(document: object) -> Record:
    """The record of a file's document, of this schema or an older one. Raises NotARecord, Foreign where it has no status."""
    if not isinstance(document, dict):
        raise NotARecord("not a JSON object")
    if not {"status", "schema"} & set(document):
        raise Foreign("it has no status, so it is no record")
    schema = document.get("schema")
    if schema not in (1, SCHEMA):
        raise NotARecord(f"its schema is {schema!r}, not {SCHEMA}")
    if document.get("status") not in STATUSES:
        raise NotARecord(f"its status is {document.get('status')!r}")
    try:
        body = upgraded(document) if schema == 1 else {key: value for key, value in document.items() if key != "schema"}
        return _converter.structure(body, Record)
    except OF_ANOTHER_FORM as error:
        raise NotARecord(_reason(error)) from error


def cell_to_json(cell: Cell) -> dict[str, JSON]:
    return cast("dict[str, JSON]", _converter.unstructure(cell))


def cell_from_json(document: object) -> Cell:
    """Raises NotARecord where it is no cell."""
    try:
        return _converter.structure(document, Cell)
    except OF_ANOTHER_FORM as error:
        raise NotARecord(_reason(error)) from error


def part_to_json(part: object) -> JSON:
    """Any of the record's dataclasses as data for JSON."""
    return cast("JSON", _converter.unstructure(part))


def part_from_json(document: object, kind: type[Part], *, is_strict: bool = True) -> Part:
    """One of the dataclasses of this room from data.

    Args:
        document: the data.
        kind: the dataclass.
        is_strict: whether a key that it has no field for is an error.

    Raises:
        NotARecord: the data are of another form.
    """
    try:
        return (_converter if is_strict else _lenient).structure(document, kind)
    except OF_ANOTHER_FORM as error:
        raise NotARecord(_reason(error)) from error


def _reason(error: BaseException) -> str:
    """The innermost of a group of errors, with where it is."""
    where: list[str] = []
    while isinstance(error, BaseValidationError) and error.exceptions:
        error = error.exceptions[0]
        where += [note.name for note in getattr(error, "__notes__", []) if hasattr(note, "name")]
    what = str(error) or type(error).__name__
    if isinstance(error, KeyError):
        what = f"it lacks {error}"
    return f"{'.'.join(map(str, where))}: {what}" if where else what


def _exactly(value: object, kind: type[Any]) -> Any:
    """A JSON value of just this type; a whole number may stand for a float."""
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    raise TypeError(f"{value!r} is not {kind.__name__}")


def _samples(value: object, _: Any) -> Samples:
    if not isinstance(value, list) or not are_numbers(value):
        raise TypeError("samples are a list of numbers")
    return tuple(value)


def _made(forbid_extra_keys: bool) -> Converter:
    converter = Converter(forbid_extra_keys=forbid_extra_keys)
    for kind in (bool, int, float, str):
        converter.register_structure_hook(kind, _exactly)
    converter.register_structure_hook_func(lambda kind: kind == tuple[float, ...], _samples)
    converter.register_structure_hook_func(lambda kind: kind == str | int | float | bool | None, _value)
    converter.register_structure_hook_func(lambda kind: kind is object, lambda value, _: value)
    converter.register_structure_hook(Course, lambda document, _: Course.from_json(document))
    converter.register_unstructure_hook(Course, Course.to_json)
    converter.register_structure_hook(Choice, _choice)
    converter.register_unstructure_hook(Choice, _choice_to_json)
    converter.register_unstructure_hook_factory(is_dataclass, lambda kind: _unstructure(kind, converter))
    return converter


def _unstructure(kind: type[Any], converter: Converter) -> Any:
    """Leaves out what is empty by default and still is; other defaults are written."""
    empty = [f.name for f in fields(kind) if f.default in (None, ()) or f.default_factory is dict]
    overrides: Any = {name: override(omit_if_default=True) for name in empty}
    return make_dict_unstructure_fn(kind, converter, **overrides)


def _value(value: object, _: Any) -> Value:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{value!r} is no value of an option")


def _choice(document: Any, _: Any) -> Choice:
    options, changed = document["options"], document.get("changed", [])
    if not isinstance(options, dict) or not isinstance(changed, list):
        raise TypeError("a choice holds options, an object, and changed, a list")
    values = tuple(sorted((str(key), _value(value, None)) for key, value in options.items()))
    keys = tuple(_exactly(key, str) for key in changed)
    return Choice(_exactly(document["choice"], str), _exactly(document["name"], str), values, keys)


def _choice_to_json(choice: Choice) -> dict[str, JSON]:
    return {"choice": choice.choice, "name": choice.name, "options": dict(choice.values), "changed": list(choice.changed)}


_converter, _lenient = _made(forbid_extra_keys=True), _made(forbid_extra_keys=False)
