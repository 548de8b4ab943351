"""How many examples a test of Hypothesis draws."""

from typing import Any

from hypothesis import settings

THOROUGH = "thorough"  # the profile under which each test draws all of its examples, as `make slow` has them
FEWEST = 6


def few(number: int) -> int:
    """A third of a number of examples, and FEWEST at least where there are as many."""
    return max(min(number, FEWEST), number // 3)


def examples(number: int, **more: Any) -> settings:
    """What has a test draw so many examples in a thorough run, and few in any other.

    Args:
        number: of examples.
        more: what else the test sets.
    """
    is_thorough = settings.get_current_profile_name() == THOROUGH
    return settings(max_examples=number if is_thorough else few(number), **more)
