"""A matrix product with a weight, and its bias, of few rows; in THRICE of many too.

It is a convolution of one tap whose pixels are the rows, by the same kernel. So a sum can be split among blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .dense import THRICE, Dense, DenseTile, split, tiles
from .kernel import Kernel, Launch
from .tile import check_activations, power_of_two

ONE, NONE = (1, 1), (0, 0)
LARGEST = 64  # rows and outputs of a tile for few rows
WIDE = (DenseTile(64, 32, 32, 4, 4), DenseTile(64, 64, 32, 4, 4), DenseTile(16, 32, 64, 4, 5))
HALF = (
    DenseTile(128, 128, 64, 8, 3),
    DenseTile(128, 128, 64, 4, 3),
    DenseTile(128, 256, 64, 8, 3),
    DenseTile(64, 128, 64, 4, 4),
    DenseTile(128, 64, 64, 4, 4),
)
# For so few rows that reading the weight is what takes the time: the most bytes on their way.
STREAMED = (
    DenseTile(16, 32, 128, 4, 4),
    DenseTile(16, 64, 128, 4, 4),
    DenseTile(16, 128, 64, 4, 4),
    DenseTile(64, 64, 128, 4, 3),
    DenseTile(128, 64, 64, 4, 4),
    DenseTile(128, 64, 128, 4, 3),
    DenseTile(128, 128, 64, 8, 4),
)
MOST_STREAMED = 256  # rows
LARGE = (DenseTile(64, 32, 32, 4, 3), DenseTile(64, 64, 32, 4, 3), DenseTile(128, 128, 32, 8, 4))


@dataclass(frozen=True)
class Product(Kernel):
    """out = after(x @ weight.T + bias).

    Args:
        precision: of the product of fp32 tensors, one of PRECISIONS.
        tile: how the output [rows, outputs] is cut.
        after: one of ACTIVATIONS. Raises ValueError for another.
    """

    precision: str
    tile: DenseTile
    after: str = "none"

    def __post_init__(self) -> None:
        check_activations(self.after)

    def __str__(self) -> str:
        return ", ".join([f"after {self.after}"] * (self.after != "none") + [self.precision, str(self.tile)])

    def launch(  # type: ignore[override]
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tickets: Tensor | None,
        rest: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Launch:
        """Args:
        x: [..., features], contiguous.
        weight: [outputs, features], contiguous, rounded to TF32 where that is the precision or THRICE.
        bias: [outputs], contiguous.
        tickets, rest: as `Dense`'s.
        out: [..., outputs], contiguous, where it writes; a new tensor where there is none.
        """
        if out is None:
            out = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)
        dense = Dense(ONE, ONE, NONE, ONE, "none", self.after, self.precision, False, self.tile, is_early=self.is_early)
        # Rows are the pixels of one image, a line of them.
        lines = [tensor.view(1, 1, -1, tensor.shape[-1]).permute(0, 3, 1, 2) for tensor in (x, out)]
        launch = dense.launch(lines[0], weight, bias, None, tickets, lines[1], rest)
        return replace(launch, out=out)


def tiles_of(
    num_rows: int,
    outputs: int,
    features: int,
    precision: str,
    num_cores: int,
    is_half: bool = False,
    has_activation: bool = False,
) -> list[DenseTile]:
    """The tiles worth a trial.

    A library's kernel for a product that fills the GPU is faster, with three exceptions. In fp32 it takes no tensor cores
    (THRICE does); it leaves an activation to a kernel of its own; and of few rows it reads the weight more slowly.

    Args:
        precision: one of PRECISIONS.
        num_cores: multiprocessors of the GPU.
        is_half: numbers have 16 bits.
        has_activation: the kernel would compute an activation too.
    """
    is_filled = DenseTile(LARGEST, LARGEST, LARGEST, 4, 3).num_blocks(num_rows, outputs) >= 2 * num_cores
    if is_filled and not is_half:
        return [*LARGE] if precision == THRICE else []
    widest = power_of_two(num_rows), power_of_two(outputs)
    if is_filled:
        candidates = [tile for tile in HALF if has_activation and tile.pixels <= widest[0]]
    else:
        candidates = [t for t in tiles(num_rows, outputs, features, 1, num_cores) if max(t.pixels, t.channels) <= LARGEST]
    for tile in (*(WIDE if not is_filled else ()), *(STREAMED if is_half and num_rows <= MOST_STREAMED else ())):
        is_narrow = tile in STREAMED and 2 * tile.pixels < widest[0]  # it reads the weight for every few rows
        if tile.pixels <= widest[0] and tile.channels <= widest[1] and not is_narrow:
            candidates += split(tile, tile.num_blocks(num_rows, outputs), -(-features // tile.depth), num_cores)
    return list(dict.fromkeys(candidates))
