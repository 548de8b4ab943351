"""One line for whatever Hydra or OmegaConf says is wrong with a request, with the nearest valid name."""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import yaml

from conf import FOLDER, GROUPS, choices, nearest, options
from runners.checks import BadRequest

CHOSEN = ("model", "system", "runner")
LAUNCHER = "hydra/launcher"
LISTS = ("runner.measurements", "runner.schedules", "runner.rates")  # keys whose value is several words, with spaces between


def check_arguments(arguments: Iterable[str]) -> None:
    """Raise BadRequest for what Hydra would take and Opweave does not."""
    for argument in arguments:
        key, _, value = argument.partition("=")
        if not key.strip("+~ "):
            raise BadRequest(f"{argument!r} is not of the form key=value")
        if key.startswith("--e"):  # argparse takes any beginning of --experimental-rerun
            raise BadRequest("--experimental-rerun reads a pickle, which can run code: write the overrides instead")
        if key in GROUPS and value.startswith("["):  # Hydra would merge the files of the list into one config
            raise BadRequest(f"{argument} is a list: {key}={value.strip('[]')} with -m sweeps over them")


def check_files(folder: Path) -> None:
    """Raise BadRequest for a file of a person's own that holds no choice."""
    for group in CHOSEN:
        for file in sorted((folder / group).rglob("*.yaml")):
            try:
                own = options(group, file.relative_to(folder / group).with_suffix("").as_posix())
            except (KeyError, ValueError, OSError, RecursionError) as error:
                reason = str(error.args[0]) if isinstance(error, KeyError) else str(error)
                raise BadRequest(reason if str(file) in reason else f"{file}: {reason}") from error
            if "name" not in own:
                raise BadRequest(
                    f"{file} has no name: it needs a defaults list with a choice of conf/{group}, such as custom"
                )


def explain(error: Exception, arguments: Iterable[str] = ()) -> str:
    """One line for an exception that Hydra or OmegaConf raised over a request with these arguments."""
    text = str(error)
    if override := getattr(error, "override", None):  # of the parser: its own words are those of a grammar
        return f"{override!r} is not of the form key=value (quote what the shell or Hydra's grammar takes for its own)"
    if match := re.search(rf"Could not find '({'|'.join((*GROUPS, LAUNCHER))})/([^']*)'", text):
        group, name = match.groups()
        return f"no {group} is named {name!r}: {nearest(name, choices(group))}"
    if match := re.search(r"Could not override '([^']+)'", text) or re.search(r"is not in struct\s+full_key: (\S+)", text):
        return unknown_key(match[1], arguments)
    if match := re.search(r"Could not append to config. An item is already at '([^']+)'", text):
        return f"{match[1]} is there already: write {match[1]}=... without the plus sign"
    if match := re.search(r"Ambiguous value for argument '([^']+)'", text):
        is_list = match[1].partition("=")[0] in LISTS
        at_once = f'write "{match[1].replace(",", " ")}" for all of them at once, or ' if is_list else ""
        return f"{match[1]} names several values: {at_once}add -m for a sweep over them"
    if "Config group override must be" in text:
        return f"{', '.join(GROUPS[:-1])} and {GROUPS[-1]} take a name each: {GROUPS[0]}=nasnet, say"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def unknown_key(key: str, arguments: Iterable[str] = ()) -> str:
    """One line for a key that does not exist, or that is no single value. Those of what `arguments` choose come first."""
    if key.startswith("hydra.launcher."):
        return f"there is no key {key!r}: {_launcher_hint(key, arguments)}"
    if key in GROUPS:
        return f"{key} takes a name: {', '.join(choices(key))}"
    if owners := choices_with(key):
        group = key.partition(".")[0]
        return f"there is no key {key!r} with the {group} that was chosen: it is one of {group}={', '.join(owners)}"
    own = keys_chosen(key.partition(".")[0], arguments)
    if own and nearest(key, own).startswith("did you mean"):
        return f"there is no key {key!r}: {nearest(key, own)}"
    if same := keys_named(key, arguments):
        if len(same) > 1 or same[0] in keys_chosen(same[0].partition(".")[0], arguments):
            return f"there is no key {key!r}: did you mean {' or '.join(same)}?"
        hint = f"did you mean {same[0]}?"
    else:
        hint = nearest(key, known_keys(key))
    if own and not hint.startswith("did you mean"):  # all keys that its group has would be too many to name
        hint = nearest(key, own)
    if (meant := hint.removeprefix("did you mean ").removesuffix("?")) == hint and "." not in key:
        hint = nearest(key, settable_keys())  # all keys there are would be too many to name
    owners = choices_with(meant)
    owned = f" It is of {meant.partition('.')[0]}={', '.join(owners)}" if owners else ""
    return f"there is no key {key!r}: {hint}{owned}"


def _launcher_hint(key: str, arguments: Iterable[str]) -> str:
    """What the launcher that `arguments` choose has in the place of a key."""
    named = [argument.partition("=")[2] for argument in arguments if argument.startswith(f"{LAUNCHER}=")]
    files = [FOLDER / LAUNCHER / f"{name}.yaml" for name in named[-1:] if name in choices(LAUNCHER)]
    if not files:
        return f"choose {LAUNCHER}={' or '.join(choices(LAUNCHER))} first"
    options = yaml.safe_load(files[0].read_text(encoding="utf-8"))
    group = key.split(".")[2]
    if isinstance(inner := options.get(group), dict):  # arguments of Ray's or sbatch's, which may have others too
        hint = nearest(key, [f"hydra.launcher.{group}.{name}" for name in inner])
        return hint if hint.startswith("did you mean") else f"+{key}=... adds it to {group}"
    return nearest(key, [f"hydra.launcher.{name}" for name in options if name != "_target_"])


@cache
def top_keys() -> list[str]:
    """The keys of a request that hold values, and those that choose a file of conf/."""
    document = yaml.safe_load((FOLDER / "config.yaml").read_text(encoding="utf-8"))
    return sorted({str(key) for key in document} - {"defaults", "hydra"} | set(GROUPS))


@cache
def keys_by_choice(group: str) -> dict[str, list[str]]:
    """For each choice of `group`, the keys that it has (system.multi_stream, ...)."""
    return {choice: [f"{group}.{key}" for key in options(group, choice) if key != "name"] for choice in choices(group)}


def group_keys(group: str) -> list[str]:
    """Every key that some choice of `group` has."""
    return sorted({key for keys in keys_by_choice(group).values() for key in keys})


def keys_chosen(group: str, arguments: Iterable[str]) -> list[str]:
    """The keys of what `arguments` choose for `group`; none where they leave it to the default."""
    named = [argument.partition("=")[2].split(",") for argument in arguments if argument.startswith(f"{group}=")]
    keys_of = keys_by_choice(group) if group in CHOSEN else {}
    return sorted({key for names in named for name in names for key in keys_of.get(name, [])})


def keys_named(name: str, arguments: Iterable[str]) -> list[str]:
    """The keys of that name in a group: those of what `arguments` choose, or of any choice where none of these has one."""
    named = [key for group in CHOSEN for key in group_keys(group) if key == f"{group}.{name}"]
    chosen = [key for group in CHOSEN for key in keys_chosen(group, arguments)]
    return [key for key in named if key in chosen] or named


def choices_with(key: str) -> list[str]:
    """The choices of its group that have `key`; none for what is no key of any."""
    group = key.partition(".")[0]
    if group not in CHOSEN:
        return []
    return [choice for choice, keys in keys_by_choice(group).items() if key in keys]


def settable_keys() -> list[str]:
    """The top keys that the command line is for."""
    return [key for key in top_keys() if key != "exhibit"]


def known_keys(like: str) -> list[str]:
    """The keys that `like` may stand for: those of its group if it names one, or all."""
    group, dot, _ = like.partition(".")
    keys_by_group = {g: group_keys(g) for g in CHOSEN}
    if dot and group in keys_by_group:
        return keys_by_group[group]
    return [key for keys in keys_by_group.values() for key in keys] + settable_keys()
