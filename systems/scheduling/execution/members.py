"""What a module computes with, and whether it still does."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import ceil
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from systems.preparing import one_at_a_time

Casts: TypeAlias = "tuple[torch.dtype | None, ...]"
KINDS = ("cpu", "cuda")  # of devices
PLAIN = (Tensor, nn.Parameter, nn.Buffer)  # classes of tensors that lie in memory of their own
SHARE = 8  # members that are looked at at once, in some 2 us: a call may last that long after its kernels
MOST = 32  # shares in one check that has to end in time
_values_of = operator.methodcaller("values")

_num_registered = 0  # parameters, buffers and submodules, by any module of this process


@dataclass(frozen=True)
class Member:
    """A parameter, buffer or submodule, or None in the place of one.

    Args:
        owner: what holds it by its key.
        path: for messages.
        address: as `_address` has it.
        place: of its part in the module, from 0.
    """

    owner: Mapping[str, object]
    key: str
    value: object
    path: str
    address: int | None
    place: int


class _Share:
    """Some parts of a module, with what they hold, as they are now.

    Args:
        parts: by their paths, with their places in the module.
        with_forms: as of Members.
    """

    def __init__(self, parts: Mapping[str, tuple[int, nn.Module]], with_forms: bool):
        self.places = parts
        self.formed = [part for _, part in parts.values()] if with_forms else []
        self.forms = [part.training for part in self.formed]
        self.members = [
            Member(owner, key, value, f"{path}.{key}" if path else key, _address(value), place)
            for path, (place, part) in parts.items()
            for owner in _owners(part)
            for key, value in owner.items()
        ]
        self.owners = list({id(member.owner): member.owner for member in self.members}.values())
        self.values = self._values()
        self.tensors = [x for x in self.values if isinstance(x, Tensor) and _address(x) is not None]
        self.addresses = [_address(x) for x in self.tensors]

    def change(self) -> tuple[int, int, str] | None:
        """What is another first, by 0 for a member and 1 for a form, its part's place, and words; None where nothing is.

        It compares whole lists first, since each call does.
        """
        values = self._values()
        is_same = len(values) == len(self.values) and all(map(operator.is_, values, self.values))
        if not is_same or list(map(Tensor.data_ptr, self.tensors)) != self.addresses:
            for member in self.members:
                now = member.owner.get(member.key)
                if now is not member.value or _address(now) != member.address:
                    words = f"{member.path} of the module is another since prepare, or has moved: prepare again"
                    return 0, member.place, words
        if [part.training for part in self.formed] != self.forms:
            for (path, (place, part)), form in zip(self.places.items(), self.forms, strict=True):
                if part.training != form:
                    name = f"{path} of the module" if path else "the module"
                    was, method = ("training", "train()") if form else ("eval", "eval()")
                    return 1, place, f"{name} was in {was} form in prepare: call {method}, or prepare again"
        return None

    def _values(self) -> list[object]:
        return list(chain.from_iterable(map(_values_of, self.owners)))


class Members:
    """The parameters, buffers and submodules of a module, where they lie, the form of each part, and the thread's autocast.

    A schedule has the tensors themselves, and computes in the form and under the autocast of the capture.

    Args:
        module: as it is now.
        with_forms: its parts, too, have to be in training form or in eval form as they are now.
    """

    def __init__(self, module: nn.Module, with_forms: bool = True):
        _watch_modules()
        self.casts, self.num_registered = casts(), _num_registered
        parts = {path: (place, part) for place, (path, part) in enumerate(module.named_modules())}
        num_members = sum(len(owner) for _, part in parts.values() for owner in _owners(part))
        num_shares = min(len(parts), max(1, ceil(num_members / SHARE)))
        # The parts of each class take turns, so that what changes many of them shows in every share.
        paths = sorted(parts, key=lambda path: f"{type(parts[path][1]).__module__}.{type(parts[path][1]).__qualname__}")
        shares = [{path: parts[path] for path in paths[i::num_shares]} for i in range(num_shares)]
        holders = [path for path in paths if parts[path][1]._parameters or parts[path][1]._buffers]
        for i, share in enumerate(shares):
            if holders and share.keys().isdisjoint(holders):  # what moves or casts the module shows there, too
                share[holders[i % len(holders)]] = parts[holders[i % len(holders)]]
        self.shares = [_Share(dict(sorted(share.items(), key=lambda item: item[1][0])), with_forms) for share in shares]
        self.due = 0

    def check(self, may_go_on: Callable[[], bool] | None = None) -> None:
        """Look at all parts; or at one share of them, and at up to MOST as long as that is free.

        A look at all of nasnet's 2,561 members takes 0.3 ms of a host, and its fused graph 0.5 ms of an H200. What is not
        looked at is the first to be in the next check. After any module of the process was given a member, all is looked at.

        Args:
            may_go_on: is the next share still free to look at? None for all parts.

        Raises:
            RuntimeError: a member is another or lies elsewhere, a part has another form, or autocast is another.
        """
        check_casts(self.casts)
        num_registered = _num_registered
        is_whole = may_go_on is None or num_registered != self.num_registered
        for i in range(len(self.shares) if is_whole else min(MOST, len(self.shares))):
            if i and not is_whole and may_go_on is not None and not may_go_on():
                return
            if self.shares[self.due].change() is not None:
                with one_at_a_time:  # another thread may trace the module, which holds stand-ins meanwhile
                    if self.shares[self.due].change() is not None:  # it stays due
                        raise RuntimeError(min(filter(None, (share.change() for share in self.shares)))[2])
            self.due = (self.due + 1) % len(self.shares)
        self.num_registered = num_registered


def _owners(part: nn.Module) -> tuple[Mapping[str, object], ...]:
    return part._parameters, part._buffers, part._modules


def _count_registered(*_: object) -> None:
    global _num_registered
    _num_registered += 1


@cache
def _watch_modules() -> None:
    """Have counted what modules are given by name: it may be in the place of another member."""
    modules.register_module_parameter_registration_hook(_count_registered)
    modules.register_module_buffer_registration_hook(_count_registered)
    modules.register_module_module_registration_hook(_count_registered)


def casts() -> Casts:
    """What autocast casts to in this thread, by KINDS; None where it is off."""
    return tuple(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in KINDS)


def check_casts(then: Casts) -> None:
    """Raise RuntimeError where this thread's autocast is another than `casts` was then."""
    if (now := casts()) != then:
        raise RuntimeError(f"it was prepared {_in_words(then)} and is called {_in_words(now)}: prepare again")


def _in_words(dtypes: Casts) -> str:
    phrases = [f"{str(dtype).removeprefix('torch.')} on {kind}" for kind, dtype in zip(KINDS, dtypes, strict=True) if dtype]
    return f"under autocast to {' and '.join(phrases)}" if phrases else "without autocast"


def _address(value: object) -> int | None:
    """Of a tensor that lies in memory by strides; None of anything else."""
    return value.data_ptr() if isinstance(value, Tensor) and type(value) in PLAIN and value.layout is torch.strided else None
