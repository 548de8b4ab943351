"""What is wrong with a request, in one line: what it is, what would be right, the nearest valid name."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from pathlib import Path

CONF = Path(__file__).resolve().parent.parent.parent / "conf"
GROUPS = ("model", "system", "runner", "experiment")
LAUNCHER = "hydra/launcher"


class BadRequest(Exception):
    """The request cannot be carried out as it stands; the message is one line."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


def nearest(name: str, valid: Iterable[str]) -> str:
    """ "did you mean ...?" or what there is to choose from."""
    choices = sorted(valid)
    close = get_close_matches(name, choices, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]}?"
    return f"there is {', '.join(choices)}" if choices else "there is none"


def choices(group: str) -> list[str]:
    """The names that `group=` takes."""
    return sorted(file.relative_to(CONF / group).with_suffix("").as_posix() for file in (CONF / group).rglob("*.yaml"))


def check_arguments(arguments: Iterable[str]) -> None:
    """Raise BadRequest for what Hydra would take and Opweave does not."""
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key.startswith("--e"):  # argparse takes any beginning of --experimental-rerun
            raise BadRequest("--experimental-rerun reads a pickle, which can run code: write the overrides instead")
        if key in GROUPS and value.startswith("["):  # Hydra would merge the files of the list into one config
            raise BadRequest(f"{argument} is a list: {key}={value.strip('[]')} with -m sweeps over them")


def explain(error: Exception) -> str:
    """One line for an exception that Hydra or OmegaConf raised over a request."""
    text = str(error)
    if override := getattr(error, "override", None):  # of the parser: its own words are those of a grammar
        return f"{override!r} is not of the form key=value (quote what the shell or Hydra's grammar takes for its own)"
    if match := re.search(rf"Could not find '({'|'.join((*GROUPS, LAUNCHER))})/([^']*)'", text):
        group, name = match.groups()
        return f"no {group} is named {name!r}: {nearest(name, choices(group))}"
    if match := re.search(r"Could not override '([^']+)'", text) or re.search(r"is not in struct\s+full_key: (\S+)", text):
        return unknown_key(match[1])
    if match := re.search(r"Could not append to config. An item is already at '([^']+)'", text):
        return f"{match[1]} is there already: write {match[1]}=... without the plus sign"
    if match := re.search(r"Ambiguous value for argument '([^']+)'", text):
        return f"{match[1]} names several values: add -m for a sweep over them"
    if "Config group override must be" in text:
        return f"{', '.join(GROUPS[:-1])} and {GROUPS[-1]} take a name each: {GROUPS[0]}=nasnet, say"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def unknown_key(key: str) -> str:
    """One line for a key that does not exist, or that is no single value."""
    if key in GROUPS:
        return f"{key} takes a name: {', '.join(choices(key))}"
    if having := choices_with(key):
        group = key.partition(".")[0]
        return f"there is no key {key!r} with the {group} that was chosen: it is one of {group}={', '.join(having)}"
    return f"there is no key {key!r}: {nearest(key, known_keys(key))}"


@cache
def top_keys() -> list[str]:
    """The keys of a request that hold values, and those that choose a file of conf/."""
    from omegaconf import OmegaConf

    top = OmegaConf.load(CONF / "config.yaml")
    return sorted({str(key) for key in top} - {"defaults", "hydra"} | set(GROUPS))


@cache
def keys_by_choice(group: str) -> dict[str, list[str]]:
    """For each choice of `group`, the keys that it has (system.multi_stream, ...)."""
    from omegaconf import OmegaConf

    files = {file.stem: OmegaConf.load(file) for file in sorted((CONF / group).glob("*.yaml"))}
    return {choice: [f"{group}.{key!s}" for key in file if key != "name"] for choice, file in files.items()}


def group_keys(group: str) -> list[str]:
    """Every key that some choice of `group` has."""
    return sorted({key for keys in keys_by_choice(group).values() for key in keys})


def choices_with(key: str) -> list[str]:
    """The choices of its group that have `key`; none for what is no key of any."""
    return [choice for choice, keys in keys_by_choice(key.partition(".")[0]).items() if key in keys]


def known_keys(like: str) -> list[str]:
    """The keys that `like` may stand for: of its group if it names one, of every group if it has a dot or stands in one."""
    group, dot, _ = like.partition(".")
    options = {g: group_keys(g) for g in GROUPS if g != "experiment"}
    if dot and group in options:
        return options[group]
    if dot:
        return [key for keys in options.values() for key in keys] + top_keys()
    same = [key for keys in options.values() for key in keys if key.partition(".")[2] == like]
    return same or top_keys()
