"""system=tabm and system=ft_transformer: today's networks for tables, by their authors' packages."""

from __future__ import annotations

from abc import abstractmethod
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from .learner import SMALL_BATCH, SMALL_EPOCHS, Learned, Learner, Task

CHUNK = 16_384


class _Network(Learner):
    """AdamW, early stopping by the validation AUC; numbers standardized, categories as ids, an unknown one as 0."""

    def __init__(
        self,
        learning_rate: float = 1e-3,
        weight_decay: float = 1e-5,
        batch_size: int = 1024,
        max_epochs: int = 100,
        patience: int = 5,
    ):
        self.learning_rate, self.weight_decay, self.batch_size = learning_rate, weight_decay, batch_size
        self.max_epochs, self.patience = max_epochs, patience

    @abstractmethod
    def network(self, num_numeric: int, sizes: list[int]) -> nn.Module:
        """A module of (numbers [B, numeric], ids [B, fields]) -> logits [B, members]."""

    def learn_from(self, task: Task) -> Learned:
        from sklearn.metrics import roc_auc_score

        from models.tabular.encoders import places

        begin = perf_counter()
        rows, label = task.training
        numeric, categorical = list(task.dataset.numeric), list(task.dataset.categorical)
        mean, deviation = rows[numeric].mean(), rows[numeric].std().replace(0, 1)
        known = {name: np.asarray(rows[name].dropna().unique()) for name in categorical}

        def tensors(table: Any) -> tuple[Tensor, Tensor]:
            numbers = ((table[numeric] - mean) / deviation).fillna(0).to_numpy(dtype=np.float32)
            ids = [places(known[name], np.asarray(table[name])) for name in categorical]
            stacked = np.stack(ids, 1) if ids else np.zeros((len(table), 0), np.int64)
            return torch.from_numpy(numbers).to(task.device), torch.from_numpy(stacked).to(task.device)

        training, validation, test = (tensors(table) for table in (rows, task.validation[0], task.test))
        target = torch.as_tensor(label, dtype=torch.float32, device=task.device)
        torch.manual_seed(task.seed)
        network = self.network(len(numeric), [len(c) + 1 for c in known.values()]).to(task.device)
        optimizer = torch.optim.AdamW(network.parameters(), self.learning_rate, weight_decay=self.weight_decay)
        best, best_state, best_epoch, epochs = -np.inf, {k: v.clone() for k, v in network.state_dict().items()}, 0, 0
        batch_size = min(self.batch_size, SMALL_BATCH) if task.is_small else self.batch_size
        for epoch in range(min(self.max_epochs, SMALL_EPOCHS) if task.is_small else self.max_epochs):
            network.train()
            for places_ in torch.randperm(len(target), device=task.device).split(batch_size):
                logits = network(training[0][places_], training[1][places_])
                loss = binary_cross_entropy_with_logits(logits, target[places_, None].expand_as(logits))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            epochs = epoch + 1
            metric = float(roc_auc_score(task.validation[1], _positive(network, validation)))
            task.report(f"{self.name}, epoch {epochs}: validation {metric:.5f}")
            if metric > best:
                best, best_epoch = metric, epoch
                best_state = {k: v.clone() for k, v in network.state_dict().items()}
            if epoch - best_epoch >= self.patience:
                break
        network.load_state_dict(best_state)
        parameters = sum(p.numel() for p in network.parameters())
        return Learned(_positive(network, test), perf_counter() - begin, 0.0, parameters, epochs)


@torch.no_grad()
def _positive(network: nn.Module, rows: tuple[Tensor, Tensor]) -> Any:
    """The mean over members of the probability of label 1, [B]."""
    network.eval()
    pieces = [network(a, b).sigmoid().mean(1) for a, b in zip(rows[0].split(CHUNK), rows[1].split(CHUNK), strict=True)]
    return torch.cat(pieces).double().cpu().numpy()


class TabM(_Network):
    """TabM (Gorishniy et al. 2025): 32 networks in one."""

    name = "tabm"
    needs = ("sklearn", "tabm")

    def network(self, num_numeric: int, sizes: list[int]) -> nn.Module:
        import tabm

        class Members(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = tabm.TabM.make(n_num_features=num_numeric, cat_cardinalities=sizes, d_out=1)

            def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
                logits: Tensor = self.inner(numbers if num_numeric else None, ids if sizes else None)
                return logits[..., 0]

        return Members()


class FTTransformer(_Network):
    """FT-Transformer (Gorishniy et al. 2021), with its authors' defaults."""

    name = "ft_transformer"
    needs = ("sklearn", "rtdl_revisiting_models")

    def __init__(
        self,
        learning_rate: float = 1e-4,
        weight_decay: float = 1e-5,
        batch_size: int = 1024,
        max_epochs: int = 100,
        patience: int = 5,
    ):
        super().__init__(learning_rate, weight_decay, batch_size, max_epochs, patience)

    def network(self, num_numeric: int, sizes: list[int]) -> nn.Module:
        import rtdl_revisiting_models as rtdl

        class One(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                defaults = rtdl.FTTransformer.get_default_kwargs()
                self.inner = rtdl.FTTransformer(n_cont_features=num_numeric, cat_cardinalities=sizes, d_out=1, **defaults)

            def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
                logits: Tensor = self.inner(numbers if num_numeric else None, ids if sizes else None)
                return logits

        return One()
