"""What a program does, whoever holds its weights: for names of what is kept about it."""

import hashlib
import json

import torch
from torch import Tensor

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


def weights(program: Program) -> str:
    """A digest of the tensors that the program is bound to, as far as runs leave them as they are."""
    own = {id(leaf): leaf for call in program.calls for leaf in call.leaves() if isinstance(leaf, Tensor)}
    for changed in program.changed:
        own.pop(id(changed), None)
    of_all = hashlib.sha256()
    for tensor in own.values():
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
        of_all.update(flat.view(torch.uint8).cpu().numpy().data)
    return of_all.hexdigest()[:24]
