"""The name that was probably meant."""

from collections.abc import Iterable
from difflib import SequenceMatcher

CUTOFF = 0.6  # of the likeness


def nearest(name: str, valid: Iterable[str], *, count: int = 1, otherwise: str = "there is none") -> str:
    """A hint for a name that does not exist: "did you mean ...?", or the valid names where none is near.

    Args:
        name: what was asked for.
        valid: the names there are.
        count: at most so many near names.
        otherwise: the hint where there are no valid names.
    """
    names = sorted(valid)
    likeness = {other: _likeness(name, other) for other in names}
    close = sorted((other for other in names if likeness[other] >= CUTOFF), key=lambda other: -likeness[other])
    if close:
        return f"did you mean {' or '.join(close[:count])}?"
    return f"there is {', '.join(names)}" if names else otherwise


def not_one_of(key: str, value: object, valid: Iterable[object]) -> str | None:
    """What is wrong with a value that is none of the valid ones, in one line, with the nearest of them where one is near.

    None where it is one of them.
    """
    if value in (values := tuple(valid)):
        return None
    names = [str(each) for each in values]
    hint = nearest(str(value), names)
    return f"{key}={value} is not one of {', '.join(names)}{f': {hint}' if hint.startswith('did you mean') else ''}"


def _likeness(name: str, other: str) -> float:
    """From 0 to 1, whatever the case; of two names of one group (system.r, ios/table1) that of what follows it.

    0 where quicker bounds of it are under CUTOFF: a request has hundreds of names to compare.
    """
    name, other = name.lower(), other.lower()
    group = max(other.rfind("."), other.rfind("/")) + 1
    if name.startswith(other[:group]):
        name, other = name[group:], other[group:]
    matcher = SequenceMatcher(None, other, name, autojunk=False)
    is_near = matcher.real_quick_ratio() >= CUTOFF and matcher.quick_ratio() >= CUTOFF
    return matcher.ratio() if is_near else 0.0
