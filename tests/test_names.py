"""What a hint names: something that exists, and for a small slip what was meant."""

import random
import re
from collections.abc import Callable, Iterable

import pytest

import conf
from runners.request.explain import CHOSEN, LAUNCHER, choices_with, explain, group_keys, settable_keys, unknown_key

LETTERS = "abcdefghijklmnopqrstuvwxyz_0123456789"
LEAST_LETTERS = 5  # of names whose slips are told apart
SHARE = 0.95  # of slips that are understood, at least


def slips(name: str, chance: random.Random) -> list[str]:
    """The name with a letter dropped, doubled, exchanged with the next, or changed."""
    at, before_last = chance.randrange(len(name)), chance.randrange(len(name) - 1)
    return [
        name[:at] + name[at + 1 :],
        name[:at] + name[at] + name[at:],
        name[:before_last] + name[before_last + 1] + name[before_last] + name[before_last + 2 :],
        name[:at] + chance.choice(LETTERS) + name[at + 1 :],
    ]


def of_group(group: str) -> Callable[[str], str]:
    return lambda name: explain(Exception(f"Could not find '{group}/{name}'"))


def of_option(group: str, choice: str) -> Callable[[str], str]:
    defaults = conf.options(group, choice)
    return lambda name: conf.mistake(group, defaults, {name: 1}) or ""


def values() -> set[tuple[str, ...]]:
    """The values of every enumeration of an option."""
    meanings = [conf.meanings(g, choice) for g in CHOSEN for choice in conf.choices(g)]
    return {listed for each in meanings for comment in each.values() if (listed := conf.listed(comment))}


def of_value(valid: Iterable[str]) -> Callable[[str], str]:
    return lambda name: conf.not_one_of("key", name, valid) or ""


KEYS = {*settable_keys(), *(key for group in CHOSEN for key in group_keys(group))}
ASKED: dict[str, tuple[list[str], Callable[[str], str]]] = {
    **{group: (list(conf.choices(group)), of_group(group)) for group in (*conf.GROUPS, LAUNCHER)},
    **{f"{group} keys": (group_keys(group), unknown_key) for group in CHOSEN},
    "keys": (settable_keys(), unknown_key),
    "options of ios": ([key for key in conf.options("system", "ios") if key != "name"], of_option("system", "ios")),
    "options of bert": ([key for key in conf.options("model", "bert") if key != "name"], of_option("model", "bert")),
    **{f"values {' '.join(valid)}": (list(valid), of_value(valid)) for valid in sorted(values())},
}


def test_a_slip_of_one_letter_is_understood() -> None:
    chance, understood, all_of_them = random.Random(0), 0, 0
    for category, (names, hint) in ASKED.items():
        for name in (name for name in names if len(name) > 1):
            for wrong in slips(name, chance):
                if wrong in names:
                    continue
                line = hint(wrong)
                meant = re.search(r"did you mean (\S+)\?", line)
                assert meant is None or meant[1] in (KEYS if hint is unknown_key else names), (category, line)
                assert meant or all(each in line for each in names if hint is not unknown_key), (category, line)
                if len(name) >= LEAST_LETTERS:
                    all_of_them += 1
                    understood += meant is not None and meant[1] == name
    assert all_of_them > 500 and understood >= SHARE * all_of_them, (understood, all_of_them)


@pytest.mark.parametrize("category", ASKED)
def test_what_is_near_nothing_is_told_what_there_is(category: str) -> None:
    names, hint = ASKED[category]
    wrong = f"{names[0].partition('.')[0]}.qqqq" if "." in names[0] else "qqqq"
    line = hint(wrong)
    assert "did you mean" not in line and all(name in line for name in names), line


def test_the_case_of_a_name_is_passed_over() -> None:
    assert conf.nearest("NASNet", conf.choices("model")) == "did you mean nasnet?"
    assert conf.nearest("FP16", ("fp32", "fp16")) == "did you mean fp16?"


def test_a_key_is_named_with_what_has_it() -> None:
    line = unknown_key("system.stratgy")
    assert line.endswith(f"did you mean system.strategy? It is of system={', '.join(choices_with('system.strategy'))}")
    assert unknown_key("multi_strem").startswith("there is no key 'multi_strem': did you mean system.multi_stream?")
    assert "exhibit" not in unknown_key("exhibi")  # which is of presets alone


def test_a_key_without_its_group_is_told_with_it() -> None:
    """However short, and not as a slip of another key: `gpus` is a key too."""
    assert unknown_key("gpu").endswith("did you mean system.gpu or runner.gpu?")
    assert unknown_key("gpu", ["runner=advise"]).endswith("did you mean runner.gpu?")
    assert unknown_key("r", ["system=ios"]).endswith("did you mean system.r?")
    assert "did you mean system.r? It is of system=greedy, ios, " in unknown_key("r")


def test_keys_of_what_is_chosen_come_first() -> None:
    own = ["system.max_part_size", "system.s"]
    line = unknown_key("system.qqqq", ["system=sequential,ios", "batch=1"])
    assert all(key in line for key in own) and "system.learning_rate" not in line
    assert unknown_key("system.schedul", ["system=ios"]).endswith("did you mean system.schedule?")
    assert unknown_key("system.stratgy", ["system=nimble"]) == unknown_key("system.stratgy")  # of another system
    assert unknown_key("model.qqqq", ["model=nasnet"]) == unknown_key("model.qqqq")  # it has no keys
