"""What a program does, whoever holds its weights: for names of what is kept about it."""

import hashlib
import json

from .program import Input, Output, Program


def structure(program: Program) -> list[object]:
    """What each operator does and reads, and what the program returns, as data for `json.dumps`."""
    operators = [
        [program.signature(v), *(repr(a) for a in call.leaves() if isinstance(a, Output | Input))]
        for v, call in enumerate(program.calls)
    ]
    return [operators, [repr(o) for o in program.outputs]]


def digest(document: object) -> str:
    """24 hexadecimal digits of data for `json.dumps`."""
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()[:24]
