"""What --help says of each key: its meaning, and exactly the values that its check accepts."""

import re
from typing import Any

import yaml
from conftest import ROOT, Run

import conf
import models
import systems
from results.cell import choose
from run import BROKEN
from runners.checks import BadRequest
from runners.command import BAD_REQUEST, INTERRUPTED
from runners.measurements import registry as measurements
from runners.request.resolve import _conditions, _sweep_options
from runners.showings import registry as showings
from runners.sweep.sweep import BAD

CONFIG = (ROOT / "conf" / "config.yaml").read_text()
OPTIONS = [
    (group, choice, key, default)
    for group in ("model", "system", "runner")
    for choice in conf.choices(group)
    for key, default in conf.options(group, choice).items()
    if key != "name"
]
NUM_ENUMERATIONS = 15  # at least: keys that take one of a few values, each counted once


def top() -> dict[str, Any]:
    """The keys of conf/config.yaml that are of no group."""
    return {key: value for key, value in yaml.safe_load(CONFIG).items() if key not in ("defaults", "hydra", "exhibit")}


def refusal(group: str, choice: str, key: str, value: Any) -> str | None:
    """The line in which the key's own check refuses a value, or None."""
    try:
        match group:
            case "":
                _conditions(top() | {key: value})
                _sweep_options(top() | {key: value})
            case "model":
                models.load(str(conf.options("model", choice)["name"]), 1, **{key: value})
            case "system":
                systems.load(choice, **{key: value})
            case "runner":
                runner = choose("runner", choice, **{key: value})
                showings.showing(runner) if showings.is_showing(runner) else measurements.plan(runner)
    except (BadRequest, models.BadModel, systems.base.BadOption) as error:
        return str(error)
    return None


def accepted(group: str, choice: str, key: str, default: Any) -> set[str]:
    """The values that a check names where it refuses one; none where it takes others too."""
    if isinstance(default, bool | float) or not isinstance(default, str | int):
        return set()
    line = refusal(group, choice, key, "no_such" if isinstance(default, str) else -12345) or ""
    match = re.search(rf"\b{key}=\S+ is not one of (.*?)(: did you mean .*)?$", line)
    return set(match[1].split(", ")) if match else set()


def test_every_key_has_a_meaning() -> None:
    beside = conf.comments(CONFIG)
    assert [key for key in top() if len(beside[key]) < 5] == []
    for group, choice, key, _ in OPTIONS:
        assert len(conf.meanings(group, choice)[key]) >= 5, (group, choice, key)
    for file in (ROOT / "conf" / "hydra" / "launcher").glob("*.yaml"):
        meanings = conf.comments(file.read_text())
        assert [key for key, meaning in meanings.items() if key != "_target_" and len(meaning) < 5] == [], file
        assert set(yaml.safe_load(file.read_text())) <= set(meanings)


def test_a_key_lists_exactly_the_values_that_its_check_accepts() -> None:
    beside = conf.comments(CONFIG)
    keys = [("", "", key, default, beside[key]) for key, default in top().items()]
    keys += [(*option, conf.meanings(*option[:2])[option[2]]) for option in OPTIONS if option[1] != "custom"]
    enumerations = set()
    for group, choice, key, default, meaning in keys:
        values = accepted(group, choice, key, default)
        assert set(conf.listed(meaning)) == values, (group, choice, key)
        assert values or " | " not in meaning
        if values:
            enumerations.add((group, key, *sorted(values)))
            assert all(value in values for value in str(default).split())  # runner.measurements takes several
        for value in values if group != "model" else ():  # a model would be built
            assert "is not one of" not in (refusal(group, choice, key, type(default)(value)) or ""), (choice, key, value)
    assert len(enumerations) >= NUM_ENUMERATIONS


def test_a_comment_is_read_with_what_follows_it() -> None:
    text = "a: 'x: y' # what: b (or: c | d) | e | f-1\nb: # of c\n  c: 3\n  # more\n  # and more\n# of all\nd:\n"
    assert conf.comments(text) == {"a": "what: b (or: c | d) | e | f-1", "b": "of c", "c": "more and more", "d": ""}
    assert conf.listed(conf.comments(text)["a"]) == ("b", "e", "f-1")
    assert conf.listed("what: a | b") == ("a", "b") and conf.listed("a | b: c") == conf.listed("of: a") == ()


def test_help_shows_every_choice_and_each_key_of_what_is_chosen(run_here: Run) -> None:
    done = run_here("system=ios", "model=bert", "runner=timeline", "system.r=2", "--help", COLUMNS="125")
    assert done.returncode == 0 and done.stderr == ""
    words = " ".join(done.stdout.split())
    for group in conf.GROUPS:
        assert f"{group}= {' | '.join(conf.choices(group))} " in words
    assert "python run.py system=ios --help" in words
    for group, choice in (("system", "ios"), ("model", "bert"), ("runner", "timeline")):
        for key, meaning in conf.meanings(group, choice).items():
            assert key == "name" or (f" {group}.{key}=" in words and meaning in words), key
    beside = conf.comments(CONFIG)
    assert all(f" {key}=" in words and beside[key] in words for key in top())
    assert " system.r=2 an integer: most units" in words and "system.capture=true true or false: " in words
    assert "exhibit" not in words and max(map(len, done.stdout.splitlines())) <= 125


def test_every_exit_status_is_told() -> None:
    """In --help and on the first page, with each of a cell's that are no success."""
    told = re.search(r"Exit status: (.*?)\n\s*HYDRA", CONFIG, re.DOTALL)
    assert told is not None
    statuses = dict(each.split(" ", 1) for each in " ".join(told[1].split()).rstrip(".").split("; "))
    assert set(statuses) == {"0", "1", str(BAD_REQUEST), str(BROKEN), str(INTERRUPTED)}
    assert all(status in statuses["1"] for status in ("failed", *BAD[BAD.index("incorrect") :]))
    page = " ".join((ROOT / "README.md").read_text().split())
    assert "It is 1 when one failed, and when answers were wrong or could not be checked." in page
