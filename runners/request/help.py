"""The choices and keys that --help shows: what each key takes, and what it means by the comment beside it in conf/."""

import json
import shutil
import textwrap

from omegaconf import DictConfig, OmegaConf

from conf import FOLDER, GROUPS, choices, comments, kind, listed, meanings, options

from .explain import CHOSEN, LAUNCHER, settable_keys

GROUP_WIDTH, KEY_WIDTH = 18, 34  # characters of the column before the text
LEAST_WIDTH, MOST_WIDTH = 72, 125  # of a line


def register() -> None:
    """Make ${opweave.choices:} and ${opweave.keys:} of the help's template in conf/config.yaml stand for these texts."""
    OmegaConf.register_new_resolver("opweave.choices", choices_text, replace=True)
    OmegaConf.register_new_resolver("opweave.keys", keys_text, replace=True)


def choices_text() -> str:
    """Every choice of every group, a paragraph a group."""
    return "".join(_entry(f"{group}=", " | ".join(choices(group)), GROUP_WIDTH) for group in (*GROUPS, LAUNCHER))


def keys_text(*, _root_: DictConfig) -> str:
    """Each key of a composed config with its value, what it takes, and its meaning; then the keys of each choice."""
    beside = comments((FOLDER / "config.yaml").read_text(encoding="utf-8"))
    keys = [key for key in beside if key in settable_keys()]
    text = "".join(_entry(f"{key}={_shown(_root_[key])}", meaning(beside[key], _root_[key])) for key in keys)
    for group in CHOSEN:
        choice = _root_.hydra.runtime.choices[group]
        defaults, beside = options(group, choice), meanings(group, choice)
        keys = [key for key in beside if key != "name"]
        text += f"\n  {group}={choice}{'' if keys else ' has no keys of its own'}\n" + "".join(
            _entry(f"{group}.{key}={_shown(_root_[group][key])}", meaning(beside[key], defaults[key])) for key in keys
        )
    return text


def meaning(comment: str, default: object) -> str:
    """What a key takes, and what it means.

    Args:
        comment: that beside the key.
        default: of the key; it says what other values are, unless the comment lists them all.
    """
    takes = None if listed(comment) or isinstance(default, str) else kind(default)
    return f"{takes}: {comment}" if takes and comment else takes or comment


def _shown(value: object) -> str:
    """A value as the command line takes it."""
    if isinstance(value, str):
        return value
    return json.dumps(OmegaConf.to_container(value) if OmegaConf.is_config(value) else value)


def _entry(key: str, text: str, key_width: int = KEY_WIDTH) -> str:
    """The line of a key, and those that its text takes beside it."""
    margin = " " * (key_width + 2)
    lines = textwrap.wrap(
        text,
        max(LEAST_WIDTH, min(shutil.get_terminal_size().columns, MOST_WIDTH)),
        initial_indent=margin,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )
    first = f"  {key:{key_width - 1}} "
    lines = [first + lines[0].lstrip(), *lines[1:]] if lines and len(first) == len(margin) else [first.rstrip(), *lines]
    return "\n".join(lines).replace("$", "$$") + "\n"  # Hydra puts the text through string.Template
