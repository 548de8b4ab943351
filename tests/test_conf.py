"""The options of a choice are those that Hydra composes for it."""

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import conf


@pytest.mark.parametrize("group", ["model", "system", "runner"])
def test_options_are_those_that_hydra_composes(group: str) -> None:
    assert conf.choices(group)
    with initialize_config_dir(str(conf.FOLDER), version_base="1.3"):
        for choice in conf.choices(group):
            composed = compose("config", overrides=[f"{group}={choice}"])[group]
            hydras = {k: v for k, v in OmegaConf.to_container(composed).items() if v != "???"}  # type: ignore[union-attr]
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
