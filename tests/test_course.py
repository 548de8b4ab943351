"""The warps over a call as a step function, against brute force."""

import json
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from results.course import DIGITS, Course

END, MOST = 40, 50
# Whole numbers, of which a sum over every unit of time is exact.
SPANS = st.lists(
    st.tuples(st.integers(0, END), st.integers(0, 9), st.integers(0, 30)).map(lambda s: (s[0], s[0] + s[1], s[2])),
    max_size=25,
)


def at(course: Course, moment: float) -> float:
    return sum(w for w, (begin, end) in zip(course.warps, pairwise(course.moments), strict=True) if begin <= moment < end)


@given(SPANS)
def test_a_course_is_the_sum_at_every_instant(spans: list[tuple[int, int, int]]) -> None:
    course = Course.of(spans, MOST)
    instants = [t + half for t in range(-1, END + 12) for half in (0.0, 0.5)]
    everywhere = [min(MOST, sum(w for begin, end, w in spans if begin <= t < end)) for t in instants]
    assert [at(course, t) for t in instants] == everywhere
    assert course.area == sum(everywhere) / 2
    there = [(begin, end) for begin, end, _ in spans if begin < end]
    first, last = min((b for b, _ in there), default=0), max((e for _, e in there), default=0)
    assert course.duration == last - first and course.mean == pytest.approx(sum(everywhere) / 2 / max(1, last - first))
    assert len(course.moments) == (len(course.warps) + 1 if there else 0)
    assert all(a < b for a, b in pairwise(course.moments)) and all(a != b for a, b in pairwise(course.warps))


@given(SPANS, st.randoms(use_true_random=False))
def test_the_order_of_kernels_says_nothing(spans: list[tuple[int, int, int]], shuffled: Any) -> None:
    course = Course.of(spans, MOST)
    shuffled.shuffle(spans)
    assert Course.of(spans, MOST) == course


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(1e-3, 1e2), st.floats(0, 1e4)), min_size=1, max_size=30))
def test_nothing_is_left_over_in_a_gap(kernels_: list[tuple[float, float, float]]) -> None:
    """Numbers that do not add up exactly: outside of the kernels there are none still, and never more than the GPU holds."""
    spans = [(begin, begin + duration, warps) for begin, duration, warps in kernels_]
    course = Course.of(spans, 5e3)
    assert all(0 <= w <= 5e3 for w in course.warps)
    for begin, end in pairwise(course.moments):
        middle = (begin + end) / 2
        if begin < middle < end and not any(b <= middle < e for b, e, _ in spans):
            assert at(course, middle) == 0.0


@pytest.mark.parametrize(
    ("spans", "mean"),
    [
        ([], 0.0),
        ([(0.0, 10.0, 8.0)], 8.0),
        ([(0.0, 10.0, 8.0), (10.0, 30.0, 2.0)], 4.0),
        ([(0.0, 10.0, 8.0), (0.0, 10.0, 8.0)], 12.0),  # no more than the device holds
        ([(0.0, 10.0, 8.0), (15.0, 20.0, 8.0)], 6.0),  # a gap
    ],
)
def test_the_mean_of_warps_that_were_given_by_hand(spans: list[tuple[float, float, float]], mean: float) -> None:
    assert Course.of(spans, 12.0).mean == pytest.approx(mean)


@given(SPANS, st.integers(1, 60))
def test_a_resampled_course_has_the_area_of_the_whole(spans: list[tuple[int, int, int]], most: int) -> None:
    whole = Course.of(spans, MOST)
    course = whole.resampled(most)
    assert len(course.warps) <= most
    assert course == whole or len(whole.warps) > most
    assert course.area == pytest.approx(whole.area) and course.duration == pytest.approx(whole.duration)
    assert course.mean == pytest.approx(whole.mean)
    for window, warps in zip(pairwise(course.moments), course.warps, strict=True):
        assert min(whole.warps) - 1e-9 <= warps <= max(whole.warps) + 1e-9
        begin, end = window
        parts = sum(  # of each step what lies within the window
            w * max(0.0, min(end, b) - max(begin, a)) for w, (a, b) in zip(whole.warps, pairwise(whole.moments), strict=True)
        )
        assert warps == pytest.approx(parts / (end - begin))


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(1e-3, 10), st.floats(0, 8448)), max_size=20))
def test_a_course_comes_back_from_a_record(given_: list[tuple[float, float, float]]) -> None:
    course = Course.of([(begin, begin + duration, warps) for begin, duration, warps in given_], 8448)
    again = Course.from_json(json.loads(json.dumps(course.to_json())))
    near = partial(pytest.approx, abs=10**-DIGITS)
    assert again.moments == near(course.moments) and again.warps == near(course.warps)
    assert Course.from_json(again.to_json()) == again
