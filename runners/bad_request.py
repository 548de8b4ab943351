"""What is wrong with a request, in one line: what it is, what would be right, the nearest valid name."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

CONF = Path(__file__).resolve().parent.parent / "conf"


class BadRequest(Exception):
    """The request cannot be carried out as it stands; the message is one line."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


def nearest(name: str, valid: Iterable[str]) -> str:
    """ "did you mean ...?" or what there is to choose from."""
    choices = list(valid)
    close = get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"there is {', '.join(choices)}"


def choices(group: str) -> list[str]:
    """The names that `group=` takes."""
    return sorted(file.relative_to(CONF / group).with_suffix("").as_posix() for file in (CONF / group).rglob("*.yaml"))


def explain(error: Exception) -> str:
    """One line for an exception of a request, of Hydra or of OmegaConf."""
    if isinstance(error, BadRequest):
        return str(error)
    text = str(error)
    if match := re.search(r"Could not find '([a-z]+)/([^']*)'", text):
        group, name = match.groups()
        return f"no {group} is named {name!r}: {nearest(name, choices(group))}"
    if match := re.search(r"Could not override '([^']+)'", text):
        return f"there is no key {match[1]!r}: {nearest(match[1], known_keys(match[1]))}"
    if match := re.search(r"Key '(\w+)' is not in struct\s+full_key: (\S+)", text):
        return f"there is no key {match[2]!r}: {nearest(match[2], known_keys(match[2]))}"
    if match := re.search(r"Could not append to config. An item is already at '([^']+)'", text):
        return f"{match[1]} is there already: write {match[1]}=... without the plus sign"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def known_keys(like: str) -> list[str]:
    """Every key that some choice of config has, of the group of `like` if it names one (system.multistream)."""
    from omegaconf import OmegaConf

    group = like.partition(".")[0]
    if "." in like and (CONF / group).is_dir():
        files = [OmegaConf.load(file) for file in sorted((CONF / group).glob("*.yaml"))]
        return sorted({f"{group}.{key!s}" for file in files for key in file if key != "name"})
    top = OmegaConf.load(CONF / "config.yaml")
    return sorted({str(k) for k in top if k not in ("defaults", "hydra")} | {"model", "system", "runner", "experiment"})
