"""A factorization machine and a matrix factorization as scikit-learn estimators."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.preprocessing import LabelEncoder
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from .encoders import columns_of, places


class _Product(torch.autograd.Function):
    """Sparse rows times a table. Its gradient multiplies with the transposed rows, which are sparse too."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, x: scipy.sparse.csr_matrix) -> Tensor:
        ctx.x = x
        product: Tensor = _on_device(x, table) @ table
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return _on_device(ctx.x.T.tocsr(), gradient) @ gradient, None


def _on_device(x: scipy.sparse.csr_matrix, like: Tensor) -> Tensor:
    starts, columns = (torch.from_numpy(part.astype(np.int64)) for part in (x.indptr, x.indices))
    return torch.sparse_csr_tensor(starts, columns, torch.from_numpy(x.data), x.shape, check_invariants=False).to(like)


def _machine(weight: Tensor, factors: Tensor, bias: Tensor, x: scipy.sparse.csr_matrix) -> Tensor:
    """A factorization machine over sparse rows, which touches what is not 0 alone: -> [B]."""
    both: Tensor = _Product.apply(torch.cat([weight[:, None], factors], 1), x)  # type: ignore[no-untyped-call]
    squares: Tensor = _Product.apply(factors.square().sum(1, keepdim=True), x.power(2))  # type: ignore[no-untyped-call]
    return bias + both[:, 0] + (both[:, 1:].square().sum(1) - squares[:, 0]) / 2


class _Factorization(BaseEstimator):
    """Fits by Adam on mini-batches; see the classes below for the arguments."""

    def __init__(
        self,
        rank: int = 20,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
        epochs: int = 5,
        batch_size: int = 4096,
        random_state: int = 0,
        device: str = "cpu",
    ):
        self.rank = rank
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.epochs = epochs
        self.batch_size = batch_size
        self.random_state = random_state
        self.device = device

    def _fit(self, x: scipy.sparse.csr_matrix, target: NDArray[np.float64], is_binary: bool) -> None:
        generator = torch.Generator().manual_seed(self.random_state)
        weight = torch.zeros(x.shape[1], device=self.device, requires_grad=True)
        factors = (torch.randn(x.shape[1], self.rank, generator=generator) * 0.01).to(self.device).requires_grad_(True)
        mean = float(target.mean())
        start = np.log(mean) - np.log1p(-mean) if is_binary else mean
        bias = torch.tensor([float(start)], device=self.device, requires_grad=True)
        optimizer = torch.optim.Adam([weight, factors, bias], self.learning_rate, weight_decay=self.weight_decay)
        loss = binary_cross_entropy_with_logits if is_binary else mse_loss
        goal = torch.as_tensor(target, dtype=torch.float32).to(self.device)
        for _ in range(self.epochs):
            order = torch.randperm(len(target), generator=generator)
            for rows in order.split(self.batch_size):
                optimizer.zero_grad()
                loss(_machine(weight, factors, bias, x[rows.numpy()]), goal[rows]).backward()
                optimizer.step()
        self.coef_, self.factors_ = (p.detach().double().cpu().numpy() for p in (weight, factors))
        self.intercept_ = float(bias.detach())

    def _scores(self, x: scipy.sparse.csr_matrix) -> NDArray[np.float64]:
        pairs = np.asarray(x @ self.factors_) ** 2 - x.multiply(x) @ self.factors_**2
        return np.asarray(x @ self.coef_) + np.asarray(pairs).sum(1) / 2 + self.intercept_


class FactorizationMachine(ClassifierMixin, _Factorization):
    """A factorization machine for two classes (Rendle 2010), for dense or sparse rows.

    Args:
        rank: of the factors; the chapter takes 20.
        learning_rate, weight_decay, epochs, batch_size: of Adam; the chapter takes 1e-3.
        random_state: of the first factors and of the order of rows.
        device: that it is fitted on.
    """

    def fit(self, x: Any, y: Any) -> Self:
        """Fit to rows [B, F] and labels [B] of two classes."""
        x, y = validate_data(self, x, y, accept_sparse="csr", dtype=np.float32)
        check_classification_targets(y)
        encoder = LabelEncoder().fit(y)
        self.classes_ = encoder.classes_
        if len(self.classes_) > 2:
            raise ValueError(f"Only binary classification is supported. The type of the target is {type_of_target(y)}.")
        if len(self.classes_) < 2:
            raise ValueError("FactorizationMachine takes two classes; y has one class")
        self._fit(scipy.sparse.csr_matrix(x), encoder.transform(y).astype(np.float64), is_binary=True)
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        tags.input_tags.sparse = True
        return tags

    def decision_function(self, x: Any) -> NDArray[np.float64]:
        """Raw scores, [B]."""
        check_is_fitted(self)
        return self._scores(
            scipy.sparse.csr_matrix(validate_data(self, x, accept_sparse="csr", dtype=np.float64, reset=False))
        )

    def predict_proba(self, x: Any) -> NDArray[np.float64]:
        """Probabilities, [B, 2]."""
        positive = 1 / (1 + np.exp(-self.decision_function(x)))
        return np.stack([1 - positive, positive], 1)

    def predict(self, x: Any) -> NDArray[Any]:
        """Classes, [B]."""
        scores = self.decision_function(x)
        return np.asarray(self.classes_[(scores > 0).astype(int)])


class MatrixFactorization(RegressorMixin, _Factorization):
    """mean + a bias for each user and item + <user, item>, over two columns of ids; an id not seen counts for nothing.

    It is a factorization machine over two one-hot fields. Arguments as FactorizationMachine.
    """

    def _one_hot(self, x: Any) -> scipy.sparse.csr_matrix:
        ids = [places(c, column) for c, column in zip(self.categories_, columns_of(x), strict=True)]
        columns = np.stack([ids[0] - 1, ids[1] - 1 + len(self.categories_[0])], 1)
        is_known = np.stack([i > 0 for i in ids], 1)
        rows = np.broadcast_to(np.arange(len(columns))[:, None], columns.shape)
        shape = (len(columns), sum(len(c) for c in self.categories_))
        return scipy.sparse.csr_matrix((np.ones(is_known.sum(), np.float32), (rows[is_known], columns[is_known])), shape)

    def fit(self, x: Any, y: Any) -> Self:
        """Fit to pairs of ids [B, 2] and ratings [B]."""
        x, y = validate_data(self, x, y, dtype=None, y_numeric=True)
        if x.shape[1] != 2:
            raise ValueError(f"MatrixFactorization takes two columns of ids, not {x.shape[1]}")
        self.categories_ = [np.unique(column) for column in columns_of(x)]
        self._fit(self._one_hot(x), np.asarray(y, dtype=np.float64), is_binary=False)
        return self

    def predict(self, x: Any) -> NDArray[np.float64]:
        """Ratings, [B]."""
        check_is_fitted(self)
        return self._scores(self._one_hot(validate_data(self, x, dtype=None, reset=False)))
