"""Which systems get a place of their own beside a model, where many were not measured."""

from collections.abc import Callable, Sequence

from .measured import WORDS

FEW = 3  # systems that were not measured and have a place all the same
NOT_MEASURED = WORDS[None]


def places(systems: Sequence[str], empty: Callable[[str], bool]) -> tuple[list[str], str]:
    """Those with a place, in their order, and words for the others; "" where all have one.

    empty: whether nothing is to be shown of a system but that it was not measured. Of records of several sweeps most systems
    can be empty beside a model, and would leave no room for what was measured.
    """
    lacking = [system for system in systems if empty(system)]
    if len(lacking) <= FEW:
        return list(systems), ""
    return [system for system in systems if system not in lacking], f"{len(lacking)} others {NOT_MEASURED}"
