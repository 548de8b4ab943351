"""How many examples a test of Hypothesis draws."""

from drawing import THOROUGH, examples, few
from hypothesis import settings


def test_a_run_draws_a_third_of_the_examples_and_a_thorough_one_all() -> None:
    assert [few(number) for number in (3, 10, 12, 60, 400)] == [3, 6, 6, 20, 133]
    before = settings.get_current_profile_name()
    drawn = {}
    try:
        for profile in ("opweave", THOROUGH):
            settings.load_profile(profile)
            drawn[profile] = settings.default.max_examples, examples(60).max_examples, examples(60).deadline
    finally:
        settings.load_profile(before)
    assert drawn == {"opweave": (33, 20, None), THOROUGH: (100, 60, None)}
