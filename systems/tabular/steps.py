"""Epochs of training over rows that lie on the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import conf
from systems.base import BadOption, Loss, Prepared
from systems.registry import load

AUTO = "auto"


@dataclass(frozen=True)
class Rows:
    """Rows on the device: the network's inputs, and classes [B] int64 or values [B]."""

    inputs: tuple[Tensor, ...]
    target: Tensor

    def __len__(self) -> int:
        return len(self.target)

    def at(self, rows: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        return tuple(tensor[rows] for tensor in self.inputs), self.target[rows]


class Steps:
    """Steps of training: those of full batches by a system, the rest of an epoch eagerly.

    Invariant: both update the same parameters and the same state of the optimizer.

    Args:
        network: in training form.
        optimizer: over its parameters; see `optimizer_options`.
        loss: of the network's output and the target.
        training: rows.
        batch_size: rows of a step.
        system: of conf/system; "eager", "cuda_graph", "nimble", ...
    """

    def __init__(
        self, network: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, training: Rows, batch_size: int, system: str
    ):
        self.network, self.optimizer, self.loss, self.training = network, optimizer, loss, training
        self.batch_size = batch_size
        self.prepared: Prepared | None = None
        if system != "eager" and len(training) >= batch_size:
            inputs, target = training.at(torch.arange(batch_size, device=training.target.device))
            self.prepared = load(system).prepare_training(network, optimizer, loss, inputs, target)

    def epoch(self) -> float:
        """All rows once in a random order; returns the mean loss over rows, when the device has it."""
        device = self.training.target.device
        total = torch.zeros((), device=device)
        for rows in torch.randperm(len(self.training), device=device).split(self.batch_size):
            inputs, target = self.training.at(rows)
            if self.prepared is not None and len(rows) == self.batch_size:
                value = self.prepared(*inputs, target)
            else:
                self.optimizer.zero_grad()
                value = self.loss(self.network(*inputs), target)
                value.backward()
                self.optimizer.step()
            total += value.detach() * len(rows)
        return float(total) / len(self.training)

    def close(self) -> None:
        if self.prepared is not None:
            self.prepared.close()


def check_executor(executor: str, key: str = "system.executor") -> None:
    """Raises BadOption, which names the key, where neither `auto` nor a system of conf/system has this name."""
    if executor != AUTO and executor not in conf.choices("system"):
        raise BadOption(f"{key}={executor} names no system: {conf.nearest(executor, conf.choices('system'))}")


def system_for(executor: str, device: torch.device | str) -> str:
    """The system that executes: `auto` is cuda_graph on a GPU, where small batches wait for the host, else eager."""
    if executor != AUTO:
        return executor
    return "cuda_graph" if torch.device(device).type == "cuda" else "eager"


def optimizer_options(parameters: Iterable[Tensor]) -> dict[str, Any]:
    """Of torch.optim's Adam and AdamW, so that captured steps and eager ones share their state."""
    is_cuda = all(parameter.is_cuda for parameter in parameters)
    return {"fused": is_cuda, "capturable": is_cuda}
