"""Batch-norm statistics for networks on random weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def calibrate(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """Set the running statistics of every batch norm to those of one forward pass on `inputs`, in place.

    Under its initial statistics (mean 0, variance 1) a batch norm does nothing. The activations of a deep network on random
    weights then vanish or overflow: every system agrees with eager on zeros, or disagrees on infinities.

    Only the batch norms run in train mode, so that dropout and auxiliary heads stay as they are. Afterwards all modes and
    momenta are restored. cuDNN times no algorithms meanwhile: timing takes seconds, and the rounding of the statistics
    would differ from process to process.
    """
    norms = [norm for norm in module.modules() if isinstance(norm, _BatchNorm)]
    if not norms:
        return
    states = [(norm, norm.training, norm.momentum) for norm in norms]
    is_timing = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a cumulative average, which after one pass is the statistics of that pass
            norm.train()
        with torch.no_grad():
            module(*inputs)
    finally:
        torch.backends.cudnn.benchmark = is_timing
        for norm, training, momentum in states:
            norm.momentum = momentum
            norm.train(training)
