"""system=tabm and system=ft_transformer: today's networks for tables, by their authors' packages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from systems.base import Loss

from .learner import SMALL_BATCH, SMALL_EPOCHS, Learned, Learner, Task, check_options
from .steps import AUTO, Rows, Steps, check_executor, optimizer_options, system_for

CHUNK = 16_384


@dataclass(frozen=True, eq=False)
class Built:
    """A network before its training.

    Attributes:
        network: inputs [B, ...] -> logits [B, members].
        inputs: of a table, on the device.
        trained: what a step of training runs, over the network's parameters: training [B, ...] -> what `loss` takes.
        training: of the training rows, [rows, ...] each.
        loss: (what `trained` gives, labels [B]) -> one number.
    """

    network: nn.Module
    inputs: Callable[[Any], tuple[Tensor, ...]]
    trained: nn.Module
    training: tuple[Tensor, ...]
    loss: Loss


class NetworkLearner(Learner):
    """AdamW, and early stopping by the validation AUC.

    Args:
        learning_rate, weight_decay: of AdamW.
        batch_size: rows of a step.
        max_epochs: at most.
        patience: epochs without a better validation AUC after which it ends.
        executor: of the steps of full batches, a system of conf/system; "auto" is cuda_graph on a GPU and eager on a CPU.
    """

    def __init__(
        self,
        learning_rate: float = 1e-3,
        weight_decay: float = 1e-5,
        batch_size: int = 1024,
        max_epochs: int = 100,
        patience: int = 5,
        executor: str = AUTO,
    ):
        check_executor(executor)
        check_options(
            {"learning_rate": learning_rate},
            {"weight_decay": weight_decay},
            {"batch_size": batch_size, "max_epochs": max_epochs, "patience": patience},
        )
        self.learning_rate, self.weight_decay, self.batch_size = learning_rate, weight_decay, batch_size
        self.max_epochs, self.patience, self.executor = max_epochs, patience, executor

    @abstractmethod
    def built(self, task: Task) -> Built:
        """The network and its inputs; what is drawn is drawn from torch's generator, which holds the task's seed."""

    def learn_from(self, task: Task) -> Learned:
        from sklearn.metrics import roc_auc_score

        begin = perf_counter()
        torch.manual_seed(task.seed)
        built = self.built(task)
        network, validation = built.network, built.inputs(task.validation[0])
        parameters = list(network.parameters())
        training = Rows(built.training, torch.as_tensor(task.training[1], dtype=torch.float32, device=task.device))
        options = {"weight_decay": self.weight_decay, **optimizer_options(parameters)}
        optimizer = torch.optim.AdamW(parameters, self.learning_rate, **options)
        best, best_state, best_epoch, epochs = -np.inf, {k: v.clone() for k, v in network.state_dict().items()}, 0, 0
        batch_size = min(self.batch_size, SMALL_BATCH) if task.is_small else self.batch_size
        built.trained.train()
        steps = Steps(built.trained, optimizer, built.loss, training, batch_size, system_for(self.executor, task.device))
        for epoch in range(min(self.max_epochs, SMALL_EPOCHS) if task.is_small else self.max_epochs):
            built.trained.train()
            steps.epoch()
            epochs = epoch + 1
            metric = float(roc_auc_score(task.validation[1], _positive(network, validation)))
            task.report(f"{self.name}, epoch {epochs}: validation {metric:.5f}")
            if metric > best:
                best, best_epoch = metric, epoch
                best_state = {k: v.clone() for k, v in network.state_dict().items()}
            if epoch - best_epoch >= self.patience:
                break
        steps.close()
        network.load_state_dict(best_state)
        fit_s = perf_counter() - begin
        positive, predict_us = self.timed(lambda rows: _positive(network, built.inputs(rows)), task.test)
        return Learned(positive, fit_s, 0.0, sum(p.numel() for p in parameters), epochs, predict_us=predict_us)


@torch.no_grad()
def _positive(network: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    """The mean over members of the probability of label 1, [B]."""
    network.eval()
    pieces = [network(*piece).sigmoid().mean(1) for piece in zip(*(x.split(CHUNK) for x in inputs), strict=True)]
    return torch.cat(pieces).double().cpu().numpy()


class Ids:
    """Categories as numbers, [B, fields] int64; one that the training rows do not have is 0."""

    def __init__(self, task: Task):
        rows = task.training[0]
        self.known = {name: np.asarray(rows[name].dropna().unique()) for name in task.dataset.categorical}
        self.sizes = [len(categories) + 1 for categories in self.known.values()]

    def __call__(self, table: Any) -> Tensor:
        from models.tabular.encoders import places

        ids = [places(categories, np.asarray(table[name])) for name, categories in self.known.items()]
        return torch.from_numpy(np.stack(ids, 1) if ids else np.zeros((len(table), 0), np.int64))


class _TableNetwork(NetworkLearner):
    """Over the columns themselves, whatever the pipeline: numbers standardized, categories as ids."""

    @abstractmethod
    def network(self, num_numeric: int, sizes: list[int], is_small: bool) -> nn.Module:
        """A module of (numbers [B, numeric], ids [B, fields]) -> logits [B, members]; a small one for a small task."""

    def built(self, task: Task) -> Built:
        rows, numeric = task.training[0], list(task.dataset.numeric)
        mean, deviation = rows[numeric].mean(), rows[numeric].std().replace(0, 1)
        ids = Ids(task)

        def tensors(table: Any) -> tuple[Tensor, ...]:
            numbers = ((table[numeric] - mean) / deviation).fillna(0).to_numpy(dtype=np.float32)
            return torch.from_numpy(numbers).to(task.device), ids(table).to(task.device)

        network = self.network(len(numeric), ids.sizes, task.is_small).to(task.device)

        def loss(logits: Tensor, target: Tensor) -> Tensor:
            return binary_cross_entropy_with_logits(logits, target[:, None].expand_as(logits))

        return Built(network, tensors, network, tensors(rows), loss)


class TabM(_TableNetwork):
    """TabM (Gorishniy et al. 2025): 32 networks in one, 8 narrow ones for a small task."""

    name = "tabm"
    needs = ("sklearn", "tabm")

    def network(self, num_numeric: int, sizes: list[int], is_small: bool) -> nn.Module:
        import tabm

        few = {"k": 8, "d_block": 64} if is_small else {}

        class Members(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = tabm.TabM.make(n_num_features=num_numeric, cat_cardinalities=sizes, d_out=1, **few)

            def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
                logits: Tensor = self.inner(numbers if num_numeric else None, ids if sizes else None)
                return logits[..., 0]

        return Members()


class FTTransformer(_TableNetwork):
    """FT-Transformer (Gorishniy et al. 2021), with its authors' defaults of three blocks, of one for a small task."""

    name = "ft_transformer"
    needs = ("sklearn", "rtdl_revisiting_models")

    def __init__(
        self,
        learning_rate: float = 1e-4,
        weight_decay: float = 1e-5,
        batch_size: int = 1024,
        max_epochs: int = 100,
        patience: int = 5,
        executor: str = AUTO,
    ):
        super().__init__(learning_rate, weight_decay, batch_size, max_epochs, patience, executor)

    def network(self, num_numeric: int, sizes: list[int], is_small: bool) -> nn.Module:
        import rtdl_revisiting_models as rtdl

        class One(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                defaults = rtdl.FTTransformer.get_default_kwargs(1 if is_small else 3)
                self.inner = rtdl.FTTransformer(n_cont_features=num_numeric, cat_cardinalities=sizes, d_out=1, **defaults)

            def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
                logits: Tensor = self.inner(numbers if num_numeric else None, ids if sizes else None)
                return logits

        return One()
