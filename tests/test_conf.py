"""The options of a choice are those that Hydra composes for it."""

import math

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

import conf
from hydra_plugins.opweave_sweeper import OpweaveSweeper, check_number
from runners.checks import BadRequest


def test_options_are_those_that_hydra_composes() -> None:
    """Thirty choices at a time, each in a package of its own: Hydra's time grows faster than their number."""
    chosen = [(group, choice) for group in ("model", "system", "runner") for choice in conf.choices(group)]
    assert {group for group, _ in chosen} == {"model", "system", "runner"}
    with initialize_config_dir(str(conf.FOLDER), version_base="1.3"):
        for begin in range(0, len(chosen), 30):
            some = chosen[begin : begin + 30]
            composed = compose("config", [f"+{group}@all.{group}.{choice}={choice}" for group, choice in some])["all"]
            for group, choice in some:
                hydras = {k: v for k, v in OmegaConf.to_container(composed[group][choice]).items() if v != "???"}  # type: ignore[union-attr]
                ours = {k: v for k, v in conf.options(group, choice).items() if v != "???"}
                assert ours == hydras, choice


def test_a_choice_that_is_not_there_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="nimbel"):
        conf.options("system", "nimbel")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("nimbel", "did you mean nimble?"), ("zzz", "there is eager, nimble"), ("nimble", "did you mean nimble?")],
)
def test_the_nearest_name_is_offered(name: str, hint: str) -> None:
    assert conf.nearest(name, ["nimble", "eager"]) == hint


def test_without_any_name_the_hint_says_so() -> None:
    assert conf.nearest("a", []) == "there is none"


@pytest.mark.parametrize(
    ("overrides", "number"),
    [
        (["batch=1", "seed=0"], 1),
        (["batch=1,2,3", "seed=range(0,4)"], 12),
        (["batch=range(10,0,-3)"], 4),
        (["batch=range(0,1,0.3)"], 4),
        (["batch=range(0,10,0)"], math.inf),
        (["batch=range(0,inf)"], math.inf),
        (["batch=range(1,1000000000)", "seed=range(1,1000000000)"], 999999999**2),
        (["batch=range(5,1)"], 0),
        (["batch=1,2", "batch=3"], 1),
        (["+batch=choice(1,2)"], 2),
    ],
)
def test_cells_are_counted_before_they_are_made(overrides: list[str], number: float) -> None:
    parsed = OverridesParser.create().parse_overrides(overrides)
    if 0 < number < 10**6:
        check_number(parsed, number)
        made = OpweaveSweeper.split_arguments(parsed, None)[0]
        assert len(made) == number
    for most in [number - 1] if 1 < number < math.inf else [] if number == 1 else [10**6]:
        with pytest.raises(BadRequest, match=f"{number:,} cells" if number else "names no value"):
            check_number(parsed, most)


@pytest.mark.parametrize("name", conf.choices("experiment"))
def test_every_preset_is_within_the_limit(name: str) -> None:
    document = yaml.safe_load((conf.FOLDER / "experiment" / f"{name}.yaml").read_text(encoding="utf-8"))
    params = document.get("hydra", {}).get("sweeper", {}).get("params", {})
    limit = yaml.safe_load((conf.FOLDER / "config.yaml").read_text(encoding="utf-8"))["max_cells"]
    check_number(OverridesParser.create().parse_overrides([f"{key}={value}" for key, value in params.items()]), limit)


def test_the_preset_whose_speedups_over_eager_the_page_has_read_measures_eager() -> None:
    page = (conf.FOLDER / "README.md").read_text(encoding="utf-8")
    assert "experiment=reference/best" in page and "the column `over eager`" in page
    preset = yaml.safe_load((conf.FOLDER / "experiment" / "reference" / "best.yaml").read_text(encoding="utf-8"))
    assert "eager" in preset["hydra"]["sweeper"]["params"]["system"].split(",")
