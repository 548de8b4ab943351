"""Real weights from a folder, as transformers saves them: config.json, safetensors, and a tokenizer where there is one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from conf.text import first_line
from models.exchange import decoder_of, pairs_of
from models.registry import BadModel
from models.shapes import on_no_device

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from models.gpt import GPT
    from models.qwen3 import Qwen3
    from models.t5_generation import T5Generation

CONFIG, INDEX, WHOLE = "config.json", "model.safetensors.index.json", "model.safetensors"
GENERATION = "generation_config.json"
SERVED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # what a folder's weights may be
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "spiece.model", "vocab.json")


def sized(path: Path) -> GPT | Qwen3 | T5Generation:
    """The decoder of a folder's configuration, without weights. Raises BadModel."""
    if not (path / CONFIG).is_file():
        raise BadModel(f"model.path={path} has no {CONFIG}: it is no folder of a model as transformers saves it")
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # whatever transformers raises of what stands there
        raise BadModel(f"model.path={path}: its {CONFIG} cannot be read: {first_line(error)}") from error
    try:
        with on_no_device():
            return decoder_of(config)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise BadModel(f"model.path={path}: {first_line(error)}") from error


def fill(decoder: nn.Module, path: Path) -> None:
    """Put a folder's weights into a decoder, a tensor at a time.

    Raises:
        BadModel: one lacks, has another shape, or cannot be read.
    """
    with _reading(path, "weights"):
        files = dict(_files(path))
    state = decoder.state_dict()
    for pair in pairs_of(decoder):
        name = next((name for name in (pair.theirs, *pair.others) if name in files), None)
        if name is None:
            raise BadModel(f"model.path={path} has no weight named {pair.theirs}")
        ours = state[pair.ours]
        with _reading(path, "weights"):
            theirs = pair.take(_read(files[name], name))
        if pair.ours == "tokens.weight" and len(theirs) < len(ours):
            ours[len(theirs) :].zero_()  # rows that pad the embedding
            ours = ours[: len(theirs)]
        if theirs.dtype not in SERVED:
            raise BadModel(f"model.path={path}: {name} holds {theirs.dtype}, and quantized weights are not served here")
        if ours.shape != theirs.shape:
            raise BadModel(f"model.path={path}: {name} is {tuple(theirs.shape)} and not {tuple(ours.shape)}")
        with torch.no_grad():
            ours.copy_(theirs)


@contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    """Within, a file of a folder that cannot be read is a BadModel."""
    from safetensors import SafetensorError

    try:
        yield
    except BadModel:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = first_line(error) or type(error).__name__
        raise BadModel(f"model.path={path}: its {what} cannot be read: {reason}") from error


def ends_of(path: Path) -> frozenset[int]:
    """Ids that end a text, as the configurations of a folder name them: one, several or none each. Raises BadModel."""
    ends: set[int] = set()
    for file in (path / CONFIG, path / GENERATION):
        if file.is_file():
            with _reading(path, file.name):
                named = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
                ends.update(map(int, [] if named is None else named if isinstance(named, list) else [named]))
    return frozenset(ends)


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """Every tensor's name with its file. Raises BadModel."""
    from safetensors import safe_open

    if (index := path / INDEX).is_file():
        for name, file in json.loads(index.read_text())["weight_map"].items():
            yield name, path / file
    elif (path / WHOLE).is_file():
        with safe_open(path / WHOLE, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 -- it is no dictionary
                yield name, path / WHOLE
    else:
        raise BadModel(f"model.path={path} has no {WHOLE}: weights are read from safetensors alone")


def _read(file: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(file, "pt") as tensors:
        tensor: Tensor = tensors.get_tensor(name)
    return tensor


class Tokenizer:
    """A folder's tokenizer."""

    def __init__(self, path: Path):
        from transformers import AutoTokenizer

        self.inner: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, local_files_only=True)
        self.ends = ends_of(path)

    @cached_property
    def stop_tokens(self) -> frozenset[int]:
        """Ids that end a text: the tokenizer's, and those of the configurations."""
        own = self.inner.eos_token_id
        return self.ends if own is None else self.ends | {int(own)}

    @property
    def has_chat_template(self) -> bool:
        return bool(self.inner.chat_template)

    def encoded(self, text: str) -> tuple[int, ...]:
        """The ids of a text."""
        return tuple(self.inner.encode(text))

    def decoded(self, tokens: Sequence[int]) -> str:
        """The text of some ids."""
        return str(self.inner.decode(list(tokens), skip_special_tokens=True))

    def chat(self, messages: Sequence[dict[str, str]], variables: Mapping[str, object]) -> tuple[int, ...]:
        """The ids of a conversation, up to where the answer begins. Raises ValueError where the template refuses it.

        Args:
            messages: the role and the content of each.
            variables: of the template. Raises ValueError for a parameter of transformers, such as another template.
        """
        apply = self.inner.apply_chat_template
        if taken := sorted(variables.keys() & signature(apply).parameters.keys()):
            raise ValueError(f"{taken[0]} is no variable of a chat template")
        try:
            text = str(apply(list(messages), tokenize=False, add_generation_prompt=True, **variables))
            text.encode()  # a variable may have half a character
        except Exception as error:  # a template is a program: it may raise anything
            raise ValueError(f"the chat template refuses these messages: {first_line(error)}") from error
        return tuple(self.inner.encode(text, add_special_tokens=False))


def tokenizer_of(path: Path) -> Tokenizer | None:
    """The tokenizer of a folder, None where it has none. Raises BadModel for one that cannot be read."""
    if not any((path / name).is_file() for name in TOKENIZERS):
        return None
    try:
        return Tokenizer(path)
    except Exception as error:  # whatever transformers raises of what stands there
        raise BadModel(f"model.path={path}: its tokenizer cannot be read: {first_line(error)}") from error
