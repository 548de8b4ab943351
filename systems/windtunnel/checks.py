"""What parameters of `WindTunnel` may be. Each function raises ValueError, with one line that names the parameter."""

from __future__ import annotations

from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

DEVICES = ("auto", "cpu", "cuda")


def one_of(name: str, value: object, choices: Collection[object]) -> None:
    """Of a few names or numbers; True is no 1."""
    if isinstance(value, bool) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")


def whole_number(name: str, value: object) -> None:
    """At least 1."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")


def between(name: str, value: object, low: float, high: float, takes_low: bool = False) -> None:
    """A number below `high`, and above `low` or at it."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not (low < value < high or (takes_low and value == low)):  # type: ignore[operator]
        begin = f"at least {low:g}" if takes_low else f"above {low:g}"
        end = f" and below {high:g}" if np.isfinite(high) else ""
        raise ValueError(f"{name} must be {begin}{end}, not {value!r}")


def several(name: str, value: Any, takes_0: bool = False) -> tuple[float, ...]:
    """One number or several, each above 0, or at it."""
    values = tuple(np.atleast_1d(np.asarray(value, dtype=object)).tolist())
    for number in values:
        between(name, number, 0, np.inf, takes_0)
    if not values:
        raise ValueError(f"{name} has no values to try")
    return tuple(map(float, values))


def pair(name: str, value: Any) -> None:
    """Rows and their labels."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"{name} must be (X, y), the rows and their labels")


def device(name: str) -> torch.device:
    """The device of a name."""
    one_of("device", name, DEVICES)
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ValueError("device is 'cuda', and torch sees no GPU here")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")
