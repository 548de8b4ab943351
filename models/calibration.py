"""Batch-norm statistics for networks on random weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def calibrate(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """Sets the running statistics of every batch norm to those of one forward pass on `inputs`, in place.

    Under its initial statistics (mean 0, variance 1) a batch norm does nothing, and the activations of a deep network
    on random weights vanish or overflow: every system then agrees with eager on zeros, or disagrees on infinities.
    Only the batch norms run in train mode, so that dropout and auxiliary heads stay as they are. Modes and momenta
    are as before afterwards. cuDNN times no algorithms for it: that takes seconds, for shapes that nobody measures, and
    statistics would differ in their rounding from one process to the next.
    """
    norms = [norm for norm in module.modules() if isinstance(norm, _BatchNorm)]
    if not norms:
        return
    before = [(norm, norm.training, norm.momentum) for norm in norms]
    timing = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a cumulative average: after one pass, that pass's own statistics
            norm.train()
        with torch.no_grad():
            module(*inputs)
    finally:
        torch.backends.cudnn.benchmark = timing
        for norm, training, momentum in before:
            norm.momentum = momentum
            norm.train(training)
