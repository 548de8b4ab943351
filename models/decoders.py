"""Decoders for serving: the models of the zoo that generate tokens, made on the device where they will run."""

from __future__ import annotations

import psutil
import torch

from conf import Value
from models import registry
from models.gpt import GPT, Shape, made
from models.model import TF32
from models.registry import BadModel

DTYPES = {**dict.fromkeys(("fp32", *TF32), torch.float32), "fp16": torch.float16, "bf16": torch.bfloat16}
GIB = 2**30


def decoder_size(name: str, **options: Value) -> GPT:
    """A decoder without weights, on no device. Raises BadModel as `load_decoder` does."""
    if name != "gpt":
        raise BadModel(f"model {name} generates no tokens: a server takes model=gpt, or another size of it as gpt_13b")
    whole = registry.find(name).options(options)
    shape = Shape(*(int(str(whole[key])) for key in ("layers", "hidden", "heads", "positions", "vocabulary")))
    with torch.device("meta"):
        return GPT(shape)


def load_decoder(name: str, device: str, precision: str, **options: Value) -> GPT:
    """A decoder on random weights, the same for every system. The host never holds what is for a GPU.

    Args:
        name: of the zoo.
        device: "cpu" or "cuda".
        precision: a key of DTYPES.
        options: the model's own.

    Raises:
        BadModel: the request is wrong, or the model generates no tokens.
        MemoryError: its weights do not fit.
    """
    sized = decoder_size(name, **options)
    num_bytes = sum(parameter.numel() for parameter in sized.parameters()) * DTYPES[precision].itemsize
    free_bytes = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available
    if num_bytes > free_bytes:
        needed, there = num_bytes / GIB, free_bytes / GIB
        raise MemoryError(f"its weights take {needed:.1f} GiB in {precision}, and {there:.1f} GiB are free")
    return made(sized.shape, device, DTYPES[precision])
