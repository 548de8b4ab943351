"""Batch-norm statistics for networks on random weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def calibrate(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """Set the running statistics of batch norms to those of one forward pass on `inputs`, in place.

    Only those that hold their initial statistics change: others were trained. Under initial statistics (mean 0, variance 1)
    a batch norm does nothing. The activations of a deep network on random
    weights then vanish or overflow: every system agrees with eager on zeros, or disagrees on infinities.

    Only the batch norms run in train mode, so that dropout and auxiliary heads stay as they are. Afterwards all modes and
    momenta are restored. cuDNN times no algorithms meanwhile: timing takes seconds, and the rounding of the statistics
    would differ from process to process.
    """
    norms = [norm for norm in module.modules() if isinstance(norm, _BatchNorm) and _is_initial(norm)]
    if not norms:
        return
    states = [(norm, norm.training, norm.momentum) for norm in norms]
    is_timing = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    hooks = [norm.register_forward_pre_hook(_without_spread) for norm in norms]
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a cumulative average, which after one pass is the statistics of that pass
            norm.train()
        with torch.no_grad():
            module(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
        torch.backends.cudnn.benchmark = is_timing
        for norm, training, momentum in states:
            norm.momentum = momentum
            norm.train(training)


def _is_initial(norm: _BatchNorm) -> bool:
    mean, variance = norm.running_mean, norm.running_var
    return mean is not None and variance is not None and bool((mean == 0).all() and (variance == 1).all())


def _without_spread(norm: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
    """One value a channel has no variance, which train mode refuses; that of all channels stands in."""
    assert isinstance(norm, _BatchNorm) and norm.running_var is not None
    (x,) = arguments  # [B, C, ...]
    if x.numel() == x.shape[1]:
        norm.eval()
        norm.running_var.fill_(x.float().var(correction=0) if x.numel() > 1 else 1.0)
