"""Speech: the encoder of a recogniser, which runs once for 30 seconds of sound."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.models.whisper import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from models.language import ATTENTION
from models.registry import Input, is_small, register

BANDS = 80  # of the spectrogram
HEAD = 64  # width of a head of attention
FRAMES, SMALL_FRAMES = 1500, 50  # of the encoder, each of two of the spectrogram


class Encoder(nn.Module):
    """Log-mel spectrograms [B, 80, 2 * frames] -> states [B, frames, width]."""

    def __init__(self, config: WhisperConfig):
        super().__init__()
        self.encoder = WhisperEncoder(config)

    def forward(self, spectrogram: Tensor) -> Tensor:
        states: Tensor = self.encoder(spectrogram).last_hidden_state
        return states


def configured(size: str) -> WhisperConfig:
    """The configuration of the whole recogniser."""
    width, layers, frames = (128, 2, SMALL_FRAMES) if is_small(size) else (768, 12, FRAMES)
    heads, inner = width // HEAD, 4 * width
    return WhisperConfig(  # type: ignore[call-arg]
        d_model=width,
        encoder_layers=layers,
        encoder_attention_heads=heads,
        encoder_ffn_dim=inner,
        decoder_layers=layers,
        decoder_attention_heads=heads,
        decoder_ffn_dim=inner,
        num_mel_bins=BANDS,
        max_source_positions=frames,
        attn_implementation=ATTENTION,
    )


@register(lambda size: (Input((BANDS, 2 * (SMALL_FRAMES if is_small(size) else FRAMES))),))
def whisper_small(training: bool, *, size: str = "full") -> nn.Module:
    """The encoder of Whisper (small) (Radford et al. 2022)."""
    return Encoder(configured(size))
