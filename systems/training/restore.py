"""Undoes what runs change."""

import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # attributes
NO_HOLDERS = (Tensor, type, ModuleType, FunctionType, Thread)  # what has attributes, and no state of a forward pass
DEEPEST = 4  # objects that hold each other, from a module on
MOST_BYTES = 2**28  # of a tensor that is copied
PLAIN = (int, float, str, type(None))
CONTAINERS = (list, tuple, dict, OrderedDict, defaultdict, deque)
MOST_ENTRIES = 10_000  # of what is looked into


@contextmanager
def restored(tensors: Iterable[Tensor], devices: Sequence[int | torch.device]) -> Iterator[None]:
    """Give tensors and the random state the values back that they have on entry.

    Args:
        tensors: They keep their memory; their values are copied.
        devices: GPUs whose random state is restored, beside the CPU's.
    """
    copies = [(t, t.detach().clone()) for t in tensors]
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for t, copy in copies:
                t.copy_(copy)


@dataclass
class Changes:
    """What forward passes changed of a module and a loss.

    Args:
        assigned: By the names of attributes that held another tensor on exit, the tensors that they held before.
        registered: The names of buffers, parameters and submodules that were others on exit, or new.
        begun: The names of attributes that held a tensor and none before, or another number, word or truth, when `look` was
            called or on exit.
        look: Looks for what began.
    """

    assigned: dict[str, list[Tensor]] = field(default_factory=dict)
    begun: list[str] = field(default_factory=list)
    look: Callable[[], None] = lambda: None
    registered: list[str] = field(default_factory=list)


@contextmanager
def attributes_kept(module: nn.Module, loss: object = None) -> Iterator[Changes]:
    """Give a module's parts back what they have on entry: members, plain attributes, and what lists and dicts there hold.

    Forward may keep in them what it computes, which is a stand-in for a tensor while it is traced. So it may in what else
    the parts hold, such as a cache, as `_Held` says. That is given back what it had if one of it got another tensor.

    Args:
        module: The one that runs within.
        loss: What runs within too and may have attributes: a module, another object, a function or a method.

    Yields:
        What has changed, which is known on exit.
    """
    parts = _parts(module) | {f"loss.{path}" if path else "loss": part for path, part in _parts(loss).items()}
    before = {path: plain_attributes(part) for path, part in parts.items()}
    held = _Held(parts)
    values = [value for attributes in before.values() for value in attributes.values()]
    lists = [(value, value.copy()) for value in values if type(value) is list]
    dicts = [(value, value.copy()) for value in values if type(value) is dict]
    tensors = {(path, name): _tensors(value) for path, own in before.items() for name, value in own.items()}
    members = [(path, owner, dict(owner.items())) for path, part in parts.items() for owner in _members(part)]
    changes = Changes()

    def look() -> None:
        for path, part in parts.items():
            for name, value in plain_attributes(part).items():
                if _begins(value, before[path].get(name), tensors.get((path, name), [])):
                    changes.begun.append(_joined(path, name))

    changes.look = look
    try:
        yield changes
    finally:
        look()
        changes.assigned |= held.give_back()
        for path, part in parts.items():
            for name, value in plain_attributes(part).items():
                then = tensors.get((path, name), [])
                if _has_another(value, then):
                    changes.assigned[_joined(path, name)] = then
                if name not in before[path]:
                    del vars(part)[name]
            vars(part).update(before[path])
        for items, own_items in lists:
            items[:] = own_items
        for entries, own_entries in dicts:
            entries.clear()
            entries.update(own_entries)
        for path, owner, own_members in members:
            others = [k for k, value in owner.items() if own_members.get(k) is not value]
            changes.registered += [_joined(path, k) for k in others]
            if isinstance(owner, dict):
                owner.clear()
                owner.update(own_members)
            else:  # of a scripted module, which can get no others
                for k in others:
                    owner[k] = own_members[k]


@contextmanager
def held_values_kept(module: nn.Module) -> Iterator[None]:
    """Give tensors that a module holds, and that are no parameters or buffers, the values back that they have on entry.

    A trace runs what is written in place by constants alone. Tensors above MOST_BYTES are left out, as a copy is made.
    """
    held = {id(x): x for _, tensors in held_tensors(module) for x in tensors}
    copies = [
        (x, x._version, x.detach().clone())
        for x in held.values()
        if not (isinstance(x, nn.Parameter) or x.is_inference()) and x.layout is torch.strided and x.nbytes <= MOST_BYTES
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for x, version, copy in copies:
                if x._version != version:
                    x.copy_(copy)


def held_tensors(module: nn.Module) -> Iterator[tuple[str, list[Tensor]]]:
    """The tensors that a module's parts hold and that are no parameters or buffers, by where they are held."""
    parts = _parts(module)
    for path, part in parts.items():
        for name, value in plain_attributes(part).items():
            yield _joined(path, name), _direct(value)
    for path, (_, _, tensors) in _Held(parts).owners.items():
        for name, own in tensors.items():
            yield f"{path}.{name}", own


class _Held:
    """What objects, lists, dicts, deques and closures have that parts of a module hold: the parts themselves are left out.

    What sets, iterators, partial functions, bound methods and objects of C hold is not seen, nor are globals.

    Args:
        parts: By path.
    """

    def __init__(self, parts: Mapping[str, object]):
        self.owners: dict[str, tuple[Any, dict[Any, object], dict[Any, list[Tensor]]]] = {}  # by path: entries, and tensors
        self.seen = {id(part) for part in parts.values() if not isinstance(part, FunctionType)}
        for path, part in parts.items():
            if isinstance(part, FunctionType):
                self._add(path, part, 1)
            for name, value in {**plain_attributes(part), "forward": getattr(type(part), "forward", None)}.items():
                self._add(_joined(path, name), value, 1)

    def _add(self, path: str, value: object, depth: int) -> None:
        entries = _entries(value)
        if entries is None or id(value) in self.seen or depth > DEEPEST or len(entries) > MOST_ENTRIES:
            return
        self.seen.add(id(value))
        if not isinstance(value, tuple):
            self.owners[path] = value, entries, {k: _direct(x) for k, x in entries.items()}
        for k, x in entries.items():
            self._add(f"{path}.{k}", x, depth + (type(value) not in CONTAINERS))

    def give_back(self) -> dict[str, list[Tensor]]:
        """The tensors of before, by the paths of entries that held another one; what holds such an entry is as it was.

        Of a list that has grown they are all that it held.
        """
        changed = dict[str, list[Tensor]]()
        for path, (owner, _, tensors) in self.owners.items():
            grown = [x for own in tensors.values() for x in own] if isinstance(owner, list | deque) else []
            for k, x in (_entries(owner) or {}).items():
                if _has_another(_direct(x), then := tensors.get(k, grown)):
                    changed[f"{path}.{k}"] = then
        for path, (owner, own, _) in self.owners.items():
            if any(each.startswith(f"{path}.") for each in changed):
                _fill(owner, own)
        return changed


def _entries(value: object) -> dict[Any, object] | None:
    """What an object, container or closure holds now; None of what holds nothing that a forward pass may change."""
    if type(value) in CONTAINERS:
        return dict(value if isinstance(value, dict) else enumerate(value))  # type: ignore[arg-type]
    if isinstance(value, FunctionType):
        return {name: cell.cell_contents for name, cell in _cells(value).items() if cell != CellType()}
    if isinstance(value, (*NO_HOLDERS, list, tuple, dict, deque)):
        return None
    slots = _slots(value)
    own = _dict(value)
    if own is None and not slots:
        return None
    return (own or {}) | {name: slot.__get__(value) for name, slot in slots.items() if _is_set(slot, value)}


def _fill(owner: Any, own: Mapping[Any, object]) -> None:
    """Have an owner hold these entries again, and no others."""
    if isinstance(owner, list | deque):
        owner.clear()
        owner.extend(own.values())
    elif isinstance(owner, dict):
        owner.clear()
        owner.update(own)
    elif isinstance(owner, FunctionType):
        for name, cell in _cells(owner).items():
            if name in own:
                cell.cell_contents = own[name]
            elif cell != CellType():
                del cell.cell_contents
    else:
        slots, attributes = _slots(owner), _dict(owner)
        if attributes is not None:
            attributes.clear()
            attributes.update({name: value for name, value in own.items() if name not in slots})
        for name, slot in slots.items():
            if name in own:
                slot.__set__(owner, own[name])
            elif _is_set(slot, owner):
                slot.__delete__(owner)


def _dict(value: object) -> dict[str, object] | None:
    """An object's own attributes; None where it has slots alone, or is of C."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return own if type(own) is dict else None


def _slots(value: object) -> dict[str, Any]:
    """What `__slots__` of its classes make: by name, what gets and sets."""
    kinds = [kind for kind in reversed(type(value).__mro__) if "__slots__" in vars(kind)]
    return {name: slot for kind in kinds for name, slot in vars(kind).items() if isinstance(slot, MemberDescriptorType)}


def _is_set(slot: Any, owner: object) -> bool:
    try:
        slot.__get__(owner)
    except AttributeError:
        return False
    return True


def _cells(function: FunctionType) -> dict[str, CellType]:
    """What a function has of those around it, by name."""
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _direct(value: object) -> list[Tensor]:
    """The tensor that an entry is, or those of a tuple, which can hold no others later."""
    return _tensors(value) if isinstance(value, Tensor | tuple) else []


def _begins(value: object, before: object, then: Sequence[Tensor]) -> bool:
    """Does what a call left in an attribute say more than was there before? then: the tensors of before."""
    if isinstance(value, PLAIN) and isinstance(before, PLAIN):
        return type(value) is not type(before) or value != before
    return not then and bool(_tensors(value))


def _has_another(value: object, then: Sequence[Tensor]) -> bool:
    """Holds a value a tensor that is none of those of before?"""
    return any(all(x is not y for y in then) for x in _tensors(value))


@contextmanager
def python_random_kept() -> Iterator[list[str]]:
    """Give the generators of Python and numpy the state back that they have on entry.

    Yields:
        A list, which on exit has the names of those that were drawn from.
    """
    own, numpys = random.getstate(), numpy.random.get_state(legacy=False)
    before = _in_full(numpys)
    drawn: list[str] = []
    try:
        yield drawn
    finally:
        if random.getstate() != own:
            drawn.append("Python")
        if _in_full(numpy.random.get_state(legacy=False)) != before:
            drawn.append("numpy")
        random.setstate(own)
        numpy.random.set_state(numpys)


def _in_full(state: object) -> str:
    """The state of numpy's generator in words, whatever numpy is told to leave out of long arrays."""
    with numpy.printoptions(threshold=sys.maxsize):
        return str(state)


@contextmanager
def state_kept(module: nn.Module) -> Iterator[None]:
    """Undo what forward passes within change: buffers, plain attributes with the tensors there, and the random state."""
    devices = sorted({x.get_device() for x in (*module.parameters(), *module.buffers()) if x.is_cuda})
    attributes = [value for part in module.modules() for value in plain_attributes(part).values()]
    states = [x for value in attributes for x in _tensors(value) if not x.requires_grad]
    with restored((*module.buffers(), *states), devices), attributes_kept(module):
        yield


def _parts(owner: object) -> dict[str, Any]:
    """What may hold attributes, by path: a module's parts, or another object, or that of a bound method."""
    owner = owner.__self__ if isinstance(owner, MethodType) else owner
    if isinstance(owner, nn.Module):
        return dict(owner.named_modules())
    return {"": owner} if isinstance(getattr(owner, "__dict__", None), dict) else {}


def _members(part: object) -> list[Any]:
    return [part._buffers, part._parameters, part._modules] if isinstance(part, nn.Module) else []


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def plain_attributes(part: object) -> dict[str, object]:
    """What an object holds by name, but for what every module does."""
    return {name: value for name, value in vars(part).items() if name not in OF_EVERY_MODULE}


def _tensors(value: object) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]
