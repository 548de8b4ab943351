"""Undoes what runs change."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # attributes


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


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Give a module's parts the plain attributes back that they have on entry, and what lists and dicts there hold.

    Forward may keep in them what it computes, which is a stand-in for a tensor while it is traced.

    Yields:
        By the names of attributes that hold another tensor on exit, the tensors that they held before.
    """
    parts = dict(module.named_modules())
    before = {path: _plain_attributes(part) for path, part in parts.items()}
    values = [value for attributes in before.values() for value in attributes.values()]
    lists = [(value, value.copy()) for value in values if type(value) is list]
    dicts = [(value, value.copy()) for value in values if type(value) is dict]
    tensors = {(path, name): _tensors(value) for path, own in before.items() for name, value in own.items()}
    assigned: dict[str, list[Tensor]] = {}
    try:
        yield assigned
    finally:
        for path, part in parts.items():
            for name, value in _plain_attributes(part).items():
                then = tensors.get((path, name), [])
                if any(all(x is not y for y in then) for x in _tensors(value)):
                    assigned[f"{path}.{name}" if path else name] = then
                if name not in before[path]:
                    del part.__dict__[name]
            part.__dict__.update(before[path])
        for items, own_items in lists:
            items[:] = own_items
        for entries, own_entries in dicts:
            entries.clear()
            entries.update(own_entries)


@contextmanager
def state_kept(module: nn.Module) -> Iterator[None]:
    """Undo what forward passes within change: buffers, plain attributes with the tensors there, and the random state."""
    owned_buffers = [(part._buffers, name, buffer) for part in module.modules() for name, buffer in part._buffers.items()]
    devices = sorted({x.get_device() for x in (*module.parameters(), *module.buffers()) if x.is_cuda})
    attributes = [value for part in module.modules() for value in _plain_attributes(part).values()]
    states = [x for value in attributes for x in _tensors(value) if not x.requires_grad]
    try:
        with restored((*module.buffers(), *states), devices), attributes_kept(module):
            yield
    finally:
        for buffers, name, buffer in owned_buffers:  # forward may have assigned it anew
            buffers[name] = buffer


def _plain_attributes(module: nn.Module) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}


def _tensors(value: object) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]
