"""Which process has which part of a model, and what it has room for; decided before anything is loaded.

Rank `stage * tensor + r` has part r of a stage: the parts of a stage are neighbours, since they exchange the most.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .engine import DecoderShape

REDUCTIONS = ("direct", "nccl")  # of tensors: by each GPU from the others' memory, or by NCCL
CONTROLS = ("pipe", "nccl")  # channels of control messages: of their own, or behind tensors
GIB = 2**30
SHARE = 0.95  # of a device's memory that is free beside the weights, for keys and values
CONTEXT_BYTES = GIB  # of a GPU: CUDA's own, and the buffers of NCCL


@dataclass(frozen=True)
class Parts:
    """How a model is split. pipeline: stages. tensor: parts of each."""

    pipeline: int = 1
    tensor: int = 1

    def __str__(self) -> str:
        return f"pipeline_parallel={self.pipeline}, tensor_parallel={self.tensor}"

    @property
    def num_ranks(self) -> int:
        return self.pipeline * self.tensor

    def within(self, count: int) -> Parts:
        """As many stages of them as `count` processes can have, and then the most parts of each that divide its number."""
        pipeline = min(self.pipeline, count)
        degrees = [degree for degree in range(1, self.tensor + 1) if not self.tensor % degree]
        return Parts(pipeline, max(degree for degree in degrees if degree * pipeline <= count))

    def place(self, rank: int) -> tuple[int, int]:
        """(stage, part within it) of a rank."""
        return divmod(rank, self.tensor)

    def named(self, rank: int) -> str:
        """A rank in a message."""
        stage, part = self.place(rank)
        return f"rank {rank} of {self.num_ranks} (stage {stage}, part {part})"


def environment(most_batches: int) -> dict[str, str]:
    """Of processes of one host that exchange tensors; what is set already stays.

    NCCL need not support graphs beside other calls where one batch is in flight, which is faster. With more, an iteration
    that no graph is for may be launched while a graph of the same communicator runs.

    Args:
        most_batches: in flight at once.
    """
    usual = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if most_batches == 1:
        usual["NCCL_GRAPH_MIXING_SUPPORT"] = "0"
    return usual | dict(os.environ) | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}


class PartedDecoder(Protocol):
    """A decoder that no process has as a whole: its parts are made by workers.

    Attributes:
        shape: of the whole.
        device, dtype: of the parts.
        maker: "module:function" that makes a part: (arguments, rank, parts, device) -> a Decoder with `join`.
        arguments: of the maker, as JSON.
    """

    @property
    def shape(self) -> DecoderShape: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def start_token(self) -> int | None: ...
    @property
    def maker(self) -> str: ...
    @property
    def arguments(self) -> str: ...
    def weights(self, num_stages: int, degree: int) -> list[int]: ...


@dataclass(frozen=True)
class Room:
    """What the GPU of a rank holds, in bytes.

    Args:
        weights: of its part.
        spare: for what an iteration computes, and CUDA itself.
        slot: of a token's keys and values in its layers and heads.
        whole: of the GPU.
    """

    weights: int
    spare: int
    slot: int
    whole: int

    @property
    def num_slots(self) -> int:
        """That fit; below 1 where not even the weights do."""
        return int((self.whole - self.weights - self.spare) * SHARE) // self.slot


def slot_bytes(shape: DecoderShape, item_bytes: int, parts: Parts = Parts()) -> int:
    """Of a token's keys and values in a part. A head that several parts share, as queries may, is in each.

    Args:
        shape: of the whole model; of a part, where `parts` is left out.
        item_bytes: of a number.
        parts: how the model is split; its numbers divide the layers and the heads of queries.
    """
    kv_heads = -(-shape.kv_heads // parts.tensor)
    return 2 * (shape.layers // parts.pipeline) * kv_heads * shape.head_size * item_bytes


def rooms(shape: DecoderShape, parts: Parts, weights: Sequence[int], item_bytes: int, spare: int, whole: int) -> list[Room]:
    """The room of each rank.

    Args:
        shape: of the whole model.
        parts: how it is split; its numbers divide the model's.
        weights: bytes of each rank's part.
        item_bytes: of a number.
        spare: bytes for what an iteration computes.
        whole: bytes of a GPU.
    """
    slot = slot_bytes(shape, item_bytes, parts)
    return [Room(each, spare + CONTEXT_BYTES, slot, whole) for each in weights]


def lack(parts: Parts, rooms: Sequence[Room]) -> str | None:
    """Why a model does not fit, in one line, or None."""
    for rank, room in enumerate(rooms):
        if room.num_slots < 1:
            needed, there = (room.weights + room.spare + room.slot) / GIB, room.whole / GIB
            weights = room.weights / GIB
            return (
                f"{parts.named(rank)} needs {needed:.1f} GiB, {weights:.1f} of them for weights, and its GPU has {there:.1f}"
            )
    return None
