"""Decoders for serving: models that generate tokens, made on the device where they will run."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import psutil
import torch
from torch import Tensor, nn

from conf import Value
from models import folder, registry
from models.gpt import GPT, STD, Shape
from models.gpt_part import PartedGPT
from models.model import TF32
from models.qwen3 import Qwen3, Qwen3Shape
from models.registry import FOLDER, SERVED, BadModel
from models.shapes import allocated, on_no_device
from models.t5_generation import T5Generation, T5Shape

DTYPES = {**dict.fromkeys(("fp32", *TF32), torch.float32), "fp16": torch.float16, "bf16": torch.bfloat16}
GIB = 2**30

AnyDecoder: TypeAlias = GPT | Qwen3 | T5Generation


def _gpt(options: dict[str, Value]) -> GPT:
    options = registry.find("gpt").options(options)
    return GPT(Shape(*(int(str(options[key])) for key in ("layers", "hidden", "heads", "positions", "vocabulary"))))


def _qwen3(options: dict[str, Value]) -> Qwen3:
    return Qwen3(Qwen3Shape(**options))  # type: ignore[arg-type]


def _t5_generation(options: dict[str, Value]) -> T5Generation:
    return T5Generation(T5Shape(**options))  # type: ignore[arg-type]


MADE: dict[str, Callable[[dict[str, Value]], AnyDecoder]] = {
    "gpt": _gpt,
    "qwen3": _qwen3,
    "t5_generation": _t5_generation,
}


def decoder_size(name: str, **options: Value) -> AnyDecoder:
    """A decoder without weights, on no device. Raises BadModel as `load_decoder` does."""
    if name == FOLDER:
        return folder.sized(_path(options))
    if name not in MADE:
        served = ", ".join(("gpt", *SERVED))
        raise BadModel(f"model {name} generates no tokens: a server takes {served}, or another size of one as gpt_13b")
    for key, value in options.items():
        if isinstance(value, int) and not isinstance(value, bool) and value < (key != "start_token"):
            raise BadModel(f"option {key} of model {name} must be at least 1, not {value}")
    with on_no_device():
        return MADE[name](dict(options))


def load_decoder(name: str, device: str, precision: str, **options: Value) -> AnyDecoder:
    """A decoder, the same for every system. The host never holds what is for a GPU.

    Its weights are random, or those of a folder (`hf`).

    Args:
        name: "gpt" or one of SERVED.
        device: "cpu" or "cuda".
        precision: a key of DTYPES.
        options: the model's own.

    Raises:
        BadModel: the request is wrong, or the model generates no tokens.
        MemoryError: its weights do not fit.
    """
    decoder = decoder_size(name, **options)
    num_bytes = sum(parameter.numel() for parameter in decoder.parameters()) * DTYPES[precision].itemsize
    free_bytes = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available
    if num_bytes > free_bytes:
        needed, there = num_bytes / GIB, free_bytes / GIB
        raise MemoryError(f"its weights take {needed:.1f} GiB in {precision}, and {there:.1f} GiB are free")
    module = allocated(decoder, device, DTYPES[precision]).eval().requires_grad_(False)
    if name == FOLDER:
        folder.fill(module, _path(options))
    elif isinstance(module, GPT):
        module.draw()
    else:
        draw(module)
    return module


@torch.no_grad()
def draw(module: nn.Module, seed: int = 0) -> None:
    """Fill with random weights, the same for a seed. The caller's random state stays.

    Products into the residual stream are smaller by the root of their number, as GPT-2's. Norms change nothing.
    """
    parameters = list(module.named_parameters())
    num_residual = sum(name.endswith(("out.weight", "down.weight")) for name, _ in parameters)
    for name, parameter in parameters:
        if parameter.dim() == 1:
            parameter.fill_(1.0)
            continue
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        std = STD / math.sqrt(num_residual) if name.endswith(("out.weight", "down.weight")) else STD
        parameter.normal_(0.0, std, generator=generator)


def continued(
    decoder: AnyDecoder | PartedGPT, prompt: Sequence[int], continuation: Sequence[int], dtype: torch.dtype | None
) -> Tensor:
    """Logits of each token of a continuation after all before it, without any cache, [continuation, vocabulary].

    dtype: of the computation; None takes the decoder's own.
    """
    if isinstance(decoder, T5Generation):
        return decoder.continued(prompt, continuation, dtype)
    stream = torch.tensor([*prompt, *continuation[:-1]], device=decoder.device)
    logits = decoder(stream[None])[0] if dtype is None else decoder.forward_in(stream, dtype)
    return logits[len(prompt) - 1 :]


def _path(options: dict[str, Value]) -> Path:
    """Of model.path. Raises BadModel."""
    if not isinstance(path := options.get("path"), str) or not path:
        raise BadModel("model hf needs model.path=FOLDER, with config.json and safetensors as transformers saves them")
    return Path(path).expanduser()
