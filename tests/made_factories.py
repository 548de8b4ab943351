"""Files of a user's own with a function that makes a model, most of them odd in one way."""

from random import Random

HEAD = """
import sys, warnings
import torch
from torch import nn


class Odd(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), act

    def forward(self, x, *more):
        return self.act(self.linear(x) if x.is_floating_point() and x.shape[-1:] == (4,) else x)


class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")


class Quiet(BaseException):
    pass


def throw(error):
    raise error


def make(batch):
"""
ERRORS = (
    *("Mute()", "Quiet('x')", "SystemExit(3)", "SystemExit('bye')", "ValueError()", "ValueError('a\\nb\\x1b[31m')"),
    *("KeyError(())", "RuntimeError('x' * 100_000)", "MemoryError()", "StopIteration()", "RecursionError()"),
    *("UnicodeError('\\ud800')", "AssertionError", "GeneratorExit()", "RuntimeError('CUDA out of memory')"),
    "ExceptionGroup('g', [ValueError('a')])",
)
MADE = (
    *("None", "3", "()", "Odd(torch.relu)", "(Odd(torch.relu),)", "(Odd(torch.relu), ())"),
    *("(Odd(torch.relu), torch.ones(2, 4))", "(Odd, (torch.ones(2, 4),))", "(torch.relu, (torch.ones(2, 4),))"),
    *("(Odd(torch.relu), (None,))", "[1, 2]", "iter(())", "(Odd(torch.relu), ([torch.ones(2, 4)],))"),
    *("(Odd(torch.relu), {'x': torch.ones(2, 4)})", "make", "batch / 0"),
)
INPUTS = (
    *("torch.ones(batch, 4)", "torch.ones(())", "torch.ones(0, 4)", "torch.ones(batch, 4, dtype=torch.bool)"),
    *("torch.arange(4)", "torch.ones(batch, 4, dtype=torch.cfloat)", "torch.ones(batch, 4).to_sparse()"),
    *("torch.ones(4, batch).t()", "torch.ones(batch, 4, requires_grad=True)"),
    *("torch.ones(batch, 4, dtype=torch.float64)", "torch.full((batch, 4), torch.nan)"),
    *("torch.ones(batch, 1).expand(batch, 4)", "torch.ones(batch, 4, device='meta')"),
    *("nn.Parameter(torch.ones(batch, 4))", "torch.ones(batch, 3)", "torch.full((batch, 4), torch.inf)"),
    "torch.ones(batch, 4, dtype=torch.float16)",
)
ACTS = (
    *("torch.relu", "lambda x: None", "lambda x: 3", "lambda x: 'text'", "lambda x: ()", "lambda x: {'a': [x, (x,)]}"),
    *("lambda x: [x]", "lambda x: x.add_(1)", "lambda x: x if x.sum() > 0 else -x", "lambda x: torch.rand(3)"),
    *("lambda x: x.nonzero()", "lambda x: x", "lambda x: x.tolist()", "lambda x: x.sum().item()"),
    *("lambda x: x.numpy()", "lambda x: x * float('nan')", "lambda x: x.shape", "lambda x: (x, x, x.relu())"),
    *("lambda x: x[:0]", "lambda x: x.double()", "lambda x: {3: x, None: x}", "lambda x: x.detach()"),
    *("lambda x: print('y' * 1000)", "lambda x: warnings.warn('odd')", "lambda x: sys.exit(1)", "lambda x: x @ x"),
    "lambda x: x > 0",
)


def factory(seed: int) -> str:
    """The file of a seed, whose function `make` takes a batch."""
    chance = Random(seed)
    kind = ("raises", "raises", "makes", "inputs", "acts", "acts", "fails", "both")[seed % 8]
    error, made, tensor, act = (chance.choice(pool) for pool in (ERRORS, MADE, INPUTS, ACTS))
    body = {
        "raises": f"raise {error}",
        "makes": f"return {made}",
        "inputs": f"return Odd(torch.relu), ({tensor},)",
        "acts": f"return Odd({act}), (torch.ones(batch, 4),)",
        "fails": f"return Odd(lambda x: throw({error})), (torch.ones(batch, 4),)",
        "both": f"return Odd({act}), ({tensor}, {tensor})",
    }
    return f"{HEAD}    {body[kind]}\n"
