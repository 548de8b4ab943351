"""The name that was probably meant."""

from collections.abc import Iterable
from difflib import get_close_matches

CUTOFF = 0.5  # of difflib's similarity, 0 to 1


def nearest(name: str, valid: Iterable[str], *, count: int = 1, otherwise: str = "there is none") -> str:
    """A hint for a name that does not exist: "did you mean ...?", or the valid names where none is near.

    Args:
        name: what was asked for.
        valid: the names there are.
        count: at most so many near names.
        otherwise: the hint where there are no valid names.
    """
    names = sorted(valid)
    if close := get_close_matches(name, names, n=count, cutoff=CUTOFF):
        return f"did you mean {' or '.join(close)}?"
    return f"there is {', '.join(names)}" if names else otherwise
