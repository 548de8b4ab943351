"""Transformers, from their configuration only: random weights, no tokenizer, no cache, plain tensors in and out."""

from __future__ import annotations

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface
from transformers.models.bert import BertConfig, BertModel
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel
from transformers.models.t5 import T5Config, T5ForConditionalGeneration
from transformers.utils import logging

from models.registry import BadModel, Input, register

# Tracing reads properties that warn of a missing loss; no loss is computed here.
logging.set_verbosity_error()

# Transformers' SDPA attention under a second name, for which it builds no mask. Nothing here is padded, so no mask is
# needed. Under its own name it builds a mask when exported and none when called: two different networks.
ATTENTION = "sdpa_without_mask"
AttentionInterface.register(ATTENTION, sdpa_attention_forward)

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
        # Without this mask Transformers copies a scalar (minus infinity) from the CPU at every call, and a CUDA Graph
        # cannot capture that copy. A mask of four dimensions is added as it is.
        above = torch.full((decoder_sequence, decoder_sequence), float("-inf")).triu(1)
        self.register_buffer("causal", above[None, None], persistent=False)

    def forward(self, tokens: torch.Tensor, decoder_tokens: torch.Tensor) -> torch.Tensor:
        output = self.t5(tokens, decoder_input_ids=decoder_tokens, decoder_attention_mask=self.causal, use_cache=False)
        return output.logits


@register(lambda sequence, **_: (Input((sequence,), BERT_VOCABULARY),))
def bert(training: bool, *, sequence: int = 128, layers: int = 12, hidden: int = 768, heads: int = 12) -> nn.Module:
    """BERT (base), with its pooler. A `sequence` above 512 gets as many positions."""
    if hidden % heads:
        raise BadModel(f"option hidden of model bert must be a multiple of heads ({heads}), not {hidden}")
    config = BertConfig(  # type: ignore[call-arg] # attn_implementation is of every configuration's base class
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_attention_heads=heads,
        max_position_embeddings=max(512, sequence),
        attn_implementation=ATTENTION,
    )
    return Bert(config)


@register(lambda sequence: (Input((sequence,), GPT2_VOCABULARY),))
def gpt2(training: bool, *, sequence: int = 128) -> nn.Module:
    """GPT-2 (the smallest, 12 layers), with its language-model head. A `sequence` above 1024 gets as many positions."""
    config = GPT2Config(  # type: ignore[call-arg]
        n_positions=max(1024, sequence), use_cache=False, attn_implementation=ATTENTION
    )
    return GPT2(config)


@register(lambda sequence, decoder_sequence: (Input((sequence,), T5_VOCABULARY), Input((decoder_sequence,), T5_VOCABULARY)))
def t5(training: bool, *, sequence: int = 128, decoder_sequence: int = 128) -> nn.Module:
    """T5 (small): encoder, decoder, and a language-model head on the embedding's weights."""
    # The defaults of T5Config are t5-small's.
    config = T5Config(use_cache=False, attn_implementation=ATTENTION)  # type: ignore[call-arg]
    return T5(config, decoder_sequence)
