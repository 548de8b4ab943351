"""Documents with one thing wrong: in their data, or in the bytes of their files."""

import copy
import json
from collections.abc import Iterator
from random import Random
from typing import Any

VALUES = (
    *(None, True, 0, -1, -1.5, 1e-300, 1e300, float("nan"), float("inf"), 10**400, 2**70, "", "x", "../../x"),
    *("\ud800", "\x1b[31mred", "a\nb", "$\\frac{$", "{x}", "[/b]", "y" * 5000, [], [[]], [0.0], ["x"], {}, {"x": 1}),
)


def places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Each container of a document with each of its keys; of a list its first entries alone."""
    if isinstance(document, dict | list):
        for key in list(document) if isinstance(document, dict) else range(min(3, len(document))):
            yield document, key
            yield from places(document[key])


def mutated(document: Any, seed: int) -> bytes:
    """The file of a document with one thing changed, which the seed chooses."""
    random, changed = Random(seed), copy.deepcopy(document)
    container, key = random.choice(list(places(changed)))
    match random.choice(("remove", "replace", "replace", "replace", "double", "rename", "bytes")):
        case "remove":
            del container[key]
        case "replace":
            container[key] = random.choice(VALUES)
        case "double":
            container[key] = [container[key], container[key]]
        case "rename" if isinstance(container, dict):
            container[random.choice(("x", "name", ""))] = container.pop(key)
        case _:
            whole = bytearray(json.dumps(document).encode())
            begin = random.randrange(len(whole))
            whole[begin : begin + random.choice((1, 9))] = random.choice((b"", b"\xff", b"9" * 5000, b"[" * 200_000, b"\0"))
            return bytes(whole)
    return json.dumps(changed).encode()
