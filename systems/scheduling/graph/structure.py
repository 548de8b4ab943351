"""What a program does, whoever holds its weights: for names of what is kept about it."""

import hashlib
import json

import torch
from torch import Tensor

from .program import Input, Output, Program

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
SUMS = 3  # so that exchanged elements tell


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
    """A digest of the tensors that the program is bound to and leaves as they are. Their own device adds them up."""
    own = {id(leaf): leaf for call in program.calls for leaf in call.leaves() if isinstance(leaf, Tensor)}
    for changed in program.changed:
        own.pop(id(changed), None)
    sums = [_sums(tensor.detach()) for tensor in own.values()]
    return digest([[str(x.dtype), *x.shape] for x in own.values()] + (torch.stack(sums).tolist() if sums else []))


def _sums(tensor: Tensor) -> Tensor:
    """Of a tensor's bits as integers, int64[SUMS]: every SUMS-th, from each of the first on."""
    plain = tensor.resolve_conj().resolve_neg()
    flat = (torch.view_as_real(plain) if plain.is_complex() else plain).contiguous().flatten()
    bits = flat.view(INTEGERS[flat.element_size()])
    return torch.stack([bits[i::SUMS].sum(dtype=torch.int64) for i in range(SUMS)]).cpu()
