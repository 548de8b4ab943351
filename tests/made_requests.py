"""Command lines that are right, and the same with one thing wrong."""

from dataclasses import dataclass
from random import Random
from typing import Any

import conf
from runners.request.explain import settable_keys

RIGHT: dict[str, tuple[str, ...]] = {  # values of keys that are of no group
    "batch": ("1", "3", "128"),
    "device": ("auto", "cpu"),
    "precision": ("fp32", "tf32", "fp16", "bf16"),
    "layout": ("contiguous", "channels_last"),
    "algorithms": ("heuristic", "timed"),
    "seed": ("0", "7"),
    "rounds": ("0", "5"),
    "timeout": ("1", "0.5", "3600"),
    "memory_gib": ("null", "8", "0.5"),
    "max_load": ("0", "1", "0.25"),
    "force": ("true", "false"),
    "gpus": ("all", "0"),  # others are refused where all cells are of the CPU
    "results": ("r", "a/b", "'a b'"),
}
# No key takes one of these, but for those of text and paths, which take several.
STRANGE = (
    *(
        "-1",
        "nan",
        "[]",
        "[[1]]",
        "{}",
        "{a: 1}",
        "''",
        "${nothing}",
        "${oc.env:NO_SUCH}",
        "1e400",
        "no such",
        "\\",
        "=",
        "'",
    ),
    *('"', "[1", "{", "a\\nb", "é✓", "x" * 3000, "glob(*)", "../../x", "%s", "$(id)", "choice()", "range(1)", "0x"),
)
NUMBERS = ("batch", "seed", "rounds", "timeout", "max_load", "max_cells", "force")
NAMES = ("precision", "layout", "algorithms", "device")
MODELS = tuple(c for c in conf.choices("model") if conf.options("model", c)["name"] not in ("custom", "pipeline", "hf"))
SYSTEMS = tuple(name for name in conf.choices("system") if name != "custom")
SHOWINGS = (
    "advise",
    "cache",
    "calibrate",
    "iteration_costs",
    "list",
    "placement",
    "profile",
    "schedule",
    "serve",
    "simulate",
    "timeline",
)
OF_TABLES = ("accuracy", "simulated")  # takes other models, or a file
RUNNERS = tuple(name for name in conf.choices("runner") if name not in (*SHOWINGS, *OF_TABLES))
FORMS = ("key", "choice", "option", "value", "value", "group", "flag", "delete", "add", "sweep", "bytes")


@dataclass(frozen=True)
class Asked:
    """A command line. is_right: whether it can be carried out; None where either may be said."""

    arguments: tuple[str, ...]
    is_right: bool | None


def slip(name: str, chance: Random) -> str:
    """A name with one letter changed to one that no name has."""
    at = chance.randrange(len(name))
    return f"{name[:at]}Q{name[at + 1 :]}"


def right(chance: Random) -> list[str]:
    """A request of one cell, or with -m of several."""
    system = chance.choice(SYSTEMS)
    arguments = [f"model={chance.choice(MODELS)}", f"system={system}", f"runner={chance.choice(RUNNERS)}"]
    arguments += [f"{key}={chance.choice(RIGHT[key])}" for key in chance.sample(sorted(RIGHT), chance.randrange(4))]
    options = [(key, listed) for key, text in conf.meanings("system", system).items() if (listed := conf.listed(text))]
    arguments += [f"system.{key}={conf.options('system', system)[key]}" for key, _ in options[: chance.randrange(2)]]
    if chance.random() < 0.3:
        arguments += ["-m", "batch=1,2"] if not any(a.startswith("batch=") for a in arguments) else ["-m"]
    chance.shuffle(arguments)
    return arguments


def request_of(seed: int) -> Asked:
    """The request of a seed: one in three is right, the others have one thing wrong."""
    chance = Random(seed)
    arguments = right(chance)
    if seed % 3 == 0:
        return Asked(tuple(arguments), True)
    group = chance.choice(("model", "system", "runner"))
    others = [argument for argument in arguments if not argument.startswith(f"{group}=")]
    wrong: Any = {
        "key": [*arguments, f"{slip(chance.choice(settable_keys()), chance)}=1"],
        "choice": [*others, f"{group}={slip(chance.choice(conf.choices(group)), chance)}"],
        "option": [*arguments, f"{group}.{slip('samples', chance)}=1"],
        "value": [*arguments, f"{chance.choice(NUMBERS + NAMES)}={chance.choice(STRANGE)}"],
        "group": [*others, f"{group}={chance.choice(STRANGE)}"],
        "flag": [*arguments, chance.choice(("--no-such", "-q", "--experimental-rerun=x", "---", "--multirn"))],
        "delete": [*arguments, f"~{chance.choice(('batch', 'seed', 'runner', 'model.name', 'qqq'))}"],
        "add": [*arguments, f"+{chance.choice(('batch', 'qqq', 'system.qqq', 'model.name'))}=1"],
        "sweep": [*arguments, "-m", f"{chance.choice(('max_cells', 'rounds', 'results'))}=1,2"],
        "bytes": [*arguments, "".join(chance.choice("=,[]{}()$'\"~+@:./\\ ab0") for _ in range(chance.randrange(1, 12)))],
    }
    form = chance.choice(FORMS)
    return Asked(tuple(wrong[form]), None if form == "bytes" else False)
