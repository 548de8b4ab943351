"""Transformers, from their configuration only: random weights, no tokenizer, no cache, plain tensors in and out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface
from transformers.models.bert import BertConfig, BertModel
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel
from transformers.models.t5 import T5Config, T5ForConditionalGeneration
from transformers.utils import logging

from models.registry import BadModel, Input, register

# Tracing touches properties that warn of a loss nobody asks for.
logging.set_verbosity_error()

# Transformers' SDPA attention under a name that it knows no mask for. Nothing here is padded, so that a mask says
# nothing; under its own name it makes one when exported and none when called, which would be two different networks.
AttentionInterface.register("sdpa_without_mask", sdpa_attention_forward)
ATTENTION: dict[str, Any] = {"attn_implementation": "sdpa_without_mask"}

BERT_VOCABULARY = BertConfig().vocab_size
GPT2_VOCABULARY = GPT2Config().vocab_size
T5_VOCABULARY = T5Config().vocab_size


class Bert(nn.Module):
    """Token ids [B, S] -> (last hidden state [B, S, hidden], pooled first token [B, hidden])."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.bert = BertModel(config)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.bert(tokens)
        return output.last_hidden_state, output.pooler_output


class GPT2(nn.Module):
    """Token ids [B, S] -> logits [B, S, vocabulary]."""

    def __init__(self, config: GPT2Config):
        super().__init__()
        self.gpt2 = GPT2LMHeadModel(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.gpt2(tokens, use_cache=False).logits


class T5(nn.Module):
    """Token ids of the encoder [B, S] and of the decoder [B, D] -> logits [B, D, vocabulary]."""

    causal: torch.Tensor

    def __init__(self, config: T5Config, decoder_sequence: int):
        super().__init__()
        self.t5 = T5ForConditionalGeneration(config)
        # Transformers would put minus infinity into the position bias from a scalar on the CPU, at every call: a copy
        # to the device, which a CUDA Graph cannot capture. A mask of four dimensions is added as it is.
        above = torch.full((decoder_sequence, decoder_sequence), float("-inf")).triu(1)
        self.register_buffer("causal", above[None, None], persistent=False)

    def forward(self, tokens: torch.Tensor, decoder_tokens: torch.Tensor) -> torch.Tensor:
        output = self.t5(tokens, decoder_input_ids=decoder_tokens, decoder_attention_mask=self.causal, use_cache=False)
        return output.logits


@register(lambda sequence, **_: (Input((sequence,), BERT_VOCABULARY),))
def bert(training: bool, *, sequence: int = 128, layers: int = 12, hidden: int = 768, heads: int = 12) -> nn.Module:
    """BERT (base), with its pooler. A `sequence` beyond its 512 positions gets that many."""
    if hidden % heads:
        raise BadModel(f"option hidden of model bert must be a multiple of heads ({heads}), not {hidden}")
    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_attention_heads=heads,
        max_position_embeddings=max(512, sequence),
        **ATTENTION,
    )
    return Bert(config)


@register(lambda sequence: (Input((sequence,), GPT2_VOCABULARY),))
def gpt2(training: bool, *, sequence: int = 128) -> nn.Module:
    """GPT-2 (the smallest, 12 layers), with its language-model head. A `sequence` beyond 1024 gets its positions."""
    return GPT2(GPT2Config(n_positions=max(1024, sequence), use_cache=False, **ATTENTION))


@register(lambda sequence, decoder_sequence: (Input((sequence,), T5_VOCABULARY), Input((decoder_sequence,), T5_VOCABULARY)))
def t5(training: bool, *, sequence: int = 128, decoder_sequence: int = 128) -> nn.Module:
    """T5 (small), encoder and decoder, with its language-model head, which shares the embedding's weights."""
    # The defaults of T5Config are t5-small's.
    return T5(T5Config(use_cache=False, **ATTENTION), decoder_sequence)
