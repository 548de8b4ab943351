"""What is wrong with a user's KEY=VALUE, as far as conf/ tells it. run.py checks the rest, where it runs."""

from collections.abc import Iterator, Mapping, Sequence

import yaml

import conf

from .evidence import parts
from .preset import Preset

GROUPS = ("model", "system", "runner")
USUAL = {"runner": "bench"}  # where a sweep names none
LEAST = {"batch": 1, "rounds": 0, "seed": 0}  # of integers
SIZE = "+size"  # of scripts/reproduce.py alone
NOT_A_PRESETS = ("experiment", "output")  # keys of run.py that a preset has for itself


def hint(key: str) -> str:
    """The key that was probably meant, or all that there are: of run.py's those that a preset can be given, and SIZE."""
    own = yaml.safe_load((conf.FOLDER / "config.yaml").read_text(encoding="utf-8")).keys() - {"defaults", "hydra", "exhibit"}
    return conf.nearest(key, own.difference(NOT_A_PRESETS) | {*GROUPS, SIZE})


def mistake(overrides: Mapping[str, str], presets: Sequence[Preset]) -> str | None:
    """The first thing that is wrong, in one line; None where all of it may be right.

    Args:
        overrides: what the user changes of presets' sweeps, as run.py takes it.
        presets: the exhibits that are asked for. A key has to be of one of them at least.
    """
    return next(_mistakes(overrides, presets), None)


def _mistakes(overrides: Mapping[str, str], presets: Sequence[Preset]) -> Iterator[str]:
    text = (conf.FOLDER / "config.yaml").read_text(encoding="utf-8")
    defaults, comments = yaml.safe_load(text), conf.comments(text)
    keys = defaults.keys() - {"defaults", "hydra", "exhibit"}
    for key, value in overrides.items():
        if isinstance(defaults.get(key), list):  # of numbers, with commas of its own
            continue
        group, _, option = key.partition(".")
        try:
            values = [_value(part) for part in parts(value) or [""]]
        except yaml.YAMLError:
            yield f"{key}={value} is no value, nor several with commas between them"
            continue
        if key in GROUPS:
            unknown = [name for name in parts(value) or [""] if name not in conf.choices(key)]
            yield from (f"no {key} is named {name!r}: {conf.nearest(name, conf.choices(key))}" for name in unknown)
        elif group in GROUPS:
            chosen = parts(overrides[group]) if group in overrides else sorted(_chosen(group, presets))
            yield from _of_option(group, option, values, chosen)
        elif key in keys:
            for one in values:
                if (wrong := _of_value(key, one, defaults[key], conf.listed(comments[key]))) is not None:
                    yield wrong
        elif not key.startswith("hydra"):
            yield f"there is no key {key!r}: {hint(key)}"


def _value(text: str) -> object:
    """A value as YAML has it, and as Hydra has a number like 1e3. Raises YAMLError."""
    value: object = yaml.safe_load(text) if text else ""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _chosen(group: str, presets: Sequence[Preset]) -> set[str]:
    """The choices of conf/ that the presets' sweeps, schedules and timelines are of."""
    sweeps = [preset.sweep | change for preset in presets for change in ({}, preset.small, *preset.also)]
    steps = [*sweeps, *(step for preset in presets for step in (preset.schedules, preset.timeline) if step)]
    return {name for step in steps for name in parts(step.get(group, USUAL.get(group, "")))} & set(conf.choices(group))


def _of_option(group: str, option: str, values: Sequence[object], chosen: Sequence[str]) -> Iterator[str]:
    """What is wrong with an option, which one of the chosen has to have, and with values that suit none of them."""
    known = [conf.options(group, name) for name in chosen if name in conf.choices(group)]
    owners = [options for options in known if option in options and option != "name"]
    if not owners:
        near = conf.nearest(option, {key for options in known for key in options} - {"name"})
        yield f"there is no key '{group}.{option}' with {group}={','.join(chosen)}: {near}"
        return
    for value in values:
        wrong = [conf.mistake(group, options, {option: value}) for options in owners]
        if (first := wrong[0]) is not None and all(wrong):
            yield first


def _of_value(key: str, value: object, default: object, listed: Sequence[str]) -> str | None:
    """What is wrong with the value of a key that is of no group; one whose default is null takes any."""
    if listed:
        return conf.not_one_of(key, value, listed)
    if key in LEAST:
        if isinstance(value, int) and not isinstance(value, bool) and value >= LEAST[key]:
            return None
        return f"{key}={value} is not an integer of at least {LEAST[key]}"
    if default is None or type(value) is type(default):
        return None
    is_number = isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool)
    return None if is_number else f"{key}={value} is not {conf.kind(default)}"
