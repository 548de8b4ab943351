"""Sampling on the device: greedy, by temperature, and from the likeliest tokens alone (top-p)."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from .batch import Row

COLD = 1e-5  # a temperature below it is 0: logits over it could not be told from each other


def sampled(logits: Tensor, rows: tuple[Row, ...]) -> Tensor:
    """A token for each row, [R] int64, on the logits' device.

    A row's random number depends on its request's seed and on how many tokens that has: the same under any schedule.

    Args:
        logits: [R, vocabulary].
        rows: how each samples.
    """
    greedy = logits.argmax(-1)
    if all(row.sampling.temperature < COLD for row in rows):
        return greedy
    numbers = torch.tensor([(row.sampling.temperature, row.sampling.top_p, _uniform(row)) for row in rows])
    if logits.is_cuda:
        numbers = numbers.pin_memory().to(logits.device, non_blocking=True)  # else the host waits for the iteration
    temperature, top_p, uniform = numbers.T[:, :, None]  # each [R, 1]
    scaled = logits.float() / torch.where(temperature < COLD, 1.0, temperature)
    shares, order = scaled.softmax(-1).sort(-1, descending=True)
    before = shares.cumsum(-1) - shares
    shares = torch.where((before < top_p) | (before == 0), shares, 0.0)  # the first is never left out
    cumulated = shares.cumsum(-1)
    at = (cumulated <= uniform * cumulated[:, -1:]).sum(-1, keepdim=True)
    at = at.minimum((shares > 0).sum(-1, keepdim=True) - 1)  # a uniform number may be rounded to 1
    drawn = order.gather(-1, at).squeeze(-1)
    return torch.where(temperature.squeeze(-1) < COLD, greedy, drawn)


def _uniform(row: Row) -> float:
    """Between 0 and 1."""
    return random.Random(f"{row.sampling.seed}/{row.draw}").random()
