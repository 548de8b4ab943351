"""How charts look: colours that every eye tells apart, a look for every system, ticks, and where a text is broken."""

import itertools
from itertools import combinations
from typing import Any

import numpy as np
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb

from results.cell import Choice, named
from scripts import tables
from scripts.charts import style
from systems import registry

# Machado, Oliveira and Fernandes 2009: how the dichromat sees, on linear RGB.
DICHROMATS = (
    ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
)
TO_XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))


def seen_as(colour: Any, dichromat: Any) -> np.ndarray:
    """L*a*b* of a colour as such an eye sees it."""
    rgb = np.asarray(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(np.asarray(dichromat) @ linear, 0, 1) / (0.95047, 1.0, 1.08883)
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_colours_differ_for_every_eye_or_hatches_do() -> None:
    for (a, x), (b, y) in combinations(style.LOOKS.items(), 2):
        for eye in DICHROMATS:
            apart = float(np.linalg.norm(seen_as(x.colour, eye) - seen_as(y.colour, eye)))
            assert apart > 12 or x.hatch != y.hatch, (a, b, apart)
    for name, look in style.LOOKS.items():
        assert all(np.linalg.norm(seen_as(look.colour, eye) - seen_as("white", eye)) > 20 for eye in DICHROMATS), name
    assert len({repr(look.marker) for look in style.LOOKS.values()}) == len(style.LOOKS)


def test_every_system_has_a_look_of_its_own_everywhere() -> None:
    assert set(registry.names()) <= set(style.LOOKS)
    assert {system.label for system in tables.SYSTEMS} <= set(style.LOOKS)
    changed = named("system", "nimble", fold_batch_norm=True), named("system", "nimble", fuse_elementwise=True)
    variants = [*changed, named("system", "nimble"), named("system", "eager")]
    looks = [style.look(system, variants) for system in variants]
    assert len({(look.colour, look.hatch) for look in looks}) == len({repr(look.marker) for look in looks}) == 4
    assert looks[0].colour == looks[1].colour == looks[2].colour
    assert style.order(variants) == [*reversed(variants[2:]), *changed]
    assert style.look(Choice("nobody's", "nobody's")) == style.OTHER


@given(st.floats(1e-6, 1e6), st.floats(1.0001, 1e8), st.integers(2, 12))
def test_a_logarithmic_axis_has_ticks(low: float, factor: float, most: int) -> None:
    high = low * factor
    ticks = style.log_ticks(low, high, most)
    assert 2 <= len(ticks) <= max(most, 2)
    assert ticks == sorted(set(ticks)) and low * 0.999 <= ticks[0] and ticks[-1] <= high * 1.001


@examples(40)
@given(st.lists(st.sampled_from(["over", "ios", "nimble_single_stream", "(launch_order=depth_first)"]), min_size=1))
def test_a_text_is_broken_where_it_may_be_and_not_sooner(words: list[str]) -> None:
    text = " ".join(words)
    with style.house():
        lines = style.broken(text, 1.0, style.FONT)
        assert " ".join(lines).replace(" ", "") == text.replace(" ", "")
        for line in lines:
            assert style.inches(line, style.FONT) <= 1.0
        for line, after in itertools.pairwise(style.broken(text, 1.0, style.FONT, [style.WORDS])):
            assert style.inches(f"{line} {after.split()[0]}", style.FONT) > 1.0
        assert style.broken(text, style.inches(text, style.FONT), style.FONT) == [text]


@examples(40)
@given(
    st.lists(
        st.sampled_from([name for name in style.LOOKS if name.startswith(("orca", "request"))]), min_size=2, unique=True
    )
)
def test_systems_of_one_hue_have_a_colour_each(names: list[str]) -> None:
    systems = [named("system", name) for name in names]
    looks = [style.look(system, systems) for system in systems]
    assert len({(look.colour, look.hatch) for look in looks}) == len(systems)
    assert len({look.colour for look in looks}) == min(len(systems), len(style.COLOURS) + 1)
    assert looks[-1] == style.LOOKS[names[-1]]
    beside = [*systems, named("system", "eager")]
    assert all(style.look(system, beside).colour == looks[-1].colour for system in systems)


def test_a_variant_that_stands_for_its_choice_alone_looks_as_that_does() -> None:
    padded, ragged = (named("system", f"request_level_{name}", max_batch_size=64) for name in ("padded", "ragged"))
    usual = style.LOOKS["request_level_padded"]
    assert style.look(padded, [padded, ragged, named("system", "eager")]) == usual
    assert style.look(padded, [ragged, padded]) == usual != style.look(ragged, [ragged, padded])
    other = named("system", "request_level_padded", max_batch_size=32)
    assert len({style.look(system, [padded, other]).hatch for system in (padded, other)}) == 2
