"""Encoders of categories as embeddings (dissertation, section 5.2.3): one row a category, which begins as its code."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


class Embeddings(nn.Module):
    """One table a field, side by side: ids [B, fields] -> [B, sum of widths].

    Categories whose codes are equal, such as those that a hash lets collide, have rows of their own, which training parts.

    Args:
        codes: of each field [categories + 1, width]; row 0 is for a category that was not seen.
    """

    def __init__(self, codes: Sequence[NDArray[np.float64]], dtype: torch.dtype):
        super().__init__()
        self.tables = nn.ParameterList([nn.Parameter(torch.as_tensor(code).to(dtype).clone()) for code in codes])

    def reset_parameters(self) -> None:
        """A cold start: as torch's embeddings, of a tenth of their spread."""
        for table in self.tables:
            nn.init.normal_(table, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        """[B, fields] int64 -> [B, sum of widths]"""
        return torch.cat([nn.functional.embedding(ids[:, i], table) for i, table in enumerate(self.tables)], 1)
