"""Our decoders beside transformers' classes: which parameter is which, so that both have the same weights.

Invariant: a correspondence works both ways, and names each parameter of either side once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from models.gpt import GPT, Shape
from models.qwen3 import Qwen3, Qwen3Shape
from models.shapes import on_no_device
from models.t5_generation import T5Generation, T5Shape

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Pair:
    """A parameter of ours and theirs.

    Args:
        ours, theirs: names.
        give: ours as theirs.
        take: theirs as ours.
        others: further names of theirs, by which files have it.
    """

    ours: str
    theirs: str
    give: Callable[[Tensor], Tensor] = lambda tensor: tensor
    take: Callable[[Tensor], Tensor] = lambda tensor: tensor
    others: tuple[str, ...] = ()


def gpt_pairs(shape: Shape) -> Iterator[Pair]:
    """Of GPT and GPT2LMHeadModel."""
    kinds = (shape.heads, 3, shape.head_size)

    def give_kinds(tensor: Tensor) -> Tensor:
        """Rows by head and kind [heads x 3 x size, ...] become columns by kind and head [..., 3 x heads x size]."""
        return tensor.unflatten(0, kinds).transpose(0, 1).flatten(0, 2).t()

    def take_kinds(tensor: Tensor) -> Tensor:
        return tensor.t().unflatten(0, (3, shape.heads, shape.head_size)).transpose(0, 1).flatten(0, 2)

    yield Pair("tokens.weight", "transformer.wte.weight", lambda tensor: tensor[: shape.vocabulary])
    yield Pair("places.weight", "transformer.wpe.weight")
    for i in range(shape.layers):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
        for name, their_name in (("norm_attention", "ln_1"), ("norm_mlp", "ln_2")):
            for kind in ("weight", "bias"):
                yield Pair(f"{ours}.{name}.{kind}", f"{theirs}.{their_name}.{kind}")
        for kind in ("weight", "bias"):
            yield Pair(f"{ours}.qkv.{kind}", f"{theirs}.attn.c_attn.{kind}", give_kinds, take_kinds)
        for name, their_name in (("out", "attn.c_proj"), ("up", "mlp.c_fc"), ("down", "mlp.c_proj")):
            yield Pair(f"{ours}.{name}.weight", f"{theirs}.{their_name}.weight", Tensor.t, Tensor.t)
            yield Pair(f"{ours}.{name}.bias", f"{theirs}.{their_name}.bias")
    for kind in ("weight", "bias"):
        yield Pair(f"norm.{kind}", f"transformer.ln_f.{kind}")


def gpt_config(shape: Shape) -> PretrainedConfig:
    """Of a GPT2LMHeadModel of that size."""
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=shape.positions,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        bos_token_id=0,
        eos_token_id=0,
        architectures=["GPT2LMHeadModel"],
    )


def qwen3_pairs(shape: Qwen3Shape) -> Iterator[Pair]:
    """Of Qwen3 and Qwen3ForCausalLM."""
    yield Pair("tokens.weight", "model.embed_tokens.weight")
    names = {
        **{"norm_attention": "input_layernorm", "norm_mlp": "post_attention_layernorm"},
        **{"norm_q": "self_attn.q_norm", "norm_k": "self_attn.k_norm"},
        **{"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "out": "self_attn.o_proj"},
        **{"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"},
    }
    for i in range(shape.layers):
        for ours, theirs in names.items():
            yield Pair(f"blocks.{i}.{ours}.weight", f"model.layers.{i}.{theirs}.weight")
    yield Pair("norm.weight", "model.norm.weight")
    if not shape.is_tied:
        yield Pair("head.weight", "lm_head.weight")


def qwen3_config(shape: Qwen3Shape) -> PretrainedConfig:
    """Of a Qwen3ForCausalLM of that size."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=shape.positions,
        rms_norm_eps=shape.epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_base},
        tie_word_embeddings=shape.is_tied,
        architectures=["Qwen3ForCausalLM"],
    )


def t5_pairs(shape: T5Shape) -> Iterator[Pair]:
    """Of T5Generation and T5ForConditionalGeneration."""
    yield Pair(*("tokens.weight", "shared.weight"), others=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"))
    for stack in ("encoder", "decoder"):
        first = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield Pair(f"{stack}.places.weight", first)
        parts = [("own", "SelfAttention"), ("across", "EncDecAttention")][: 1 + (stack == "decoder")]
        for i in range(shape.layers):
            ours, theirs = f"{stack}.blocks.{i}", f"{stack}.block.{i}.layer"
            for at, (name, their_name) in enumerate(parts):
                for product, their_product in (("q", "q"), ("k", "k"), ("v", "v"), ("out", "o")):
                    yield Pair(f"{ours}.{name}.{product}.weight", f"{theirs}.{at}.{their_name}.{their_product}.weight")
                yield Pair(f"{ours}.norm_{name}.weight", f"{theirs}.{at}.layer_norm.weight")
            last = f"{theirs}.{len(parts)}"
            inner = {"gate": "wi_0", "up": "wi_1"} if shape.is_gated else {"up": "wi"}
            for product, their_product in {**inner, "down": "wo"}.items():
                yield Pair(f"{ours}.mlp.{product}.weight", f"{last}.DenseReluDense.{their_product}.weight")
            yield Pair(f"{ours}.norm_mlp.weight", f"{last}.layer_norm.weight")
        yield Pair(f"{stack}.norm.weight", f"{stack}.final_layer_norm.weight")


def t5_config(shape: T5Shape) -> PretrainedConfig:
    """Of a T5ForConditionalGeneration of that size."""
    from transformers import T5Config

    return T5Config(
        vocab_size=shape.vocabulary,
        d_model=shape.hidden,
        d_kv=shape.head_size,
        d_ff=shape.inner,
        num_layers=shape.layers,
        num_heads=shape.heads,
        relative_attention_num_buckets=shape.buckets,
        relative_attention_max_distance=shape.distance,
        layer_norm_epsilon=shape.epsilon,
        feed_forward_proj="gated-gelu" if shape.is_gated else "relu",
        tie_word_embeddings=True,
        decoder_start_token_id=shape.start_token,
        architectures=["T5ForConditionalGeneration"],
    )


POSITIONS_OF_T5 = 1024  # of a prompt and its answer: relative positions have no end, and a server needs one


def decoder_of(config: PretrainedConfig) -> GPT | Qwen3 | T5Generation:
    """Our decoder of a configuration of transformers. Raises TypeError, in one line, for what none of ours computes."""
    kind = config.model_type
    if getattr(config, "quantization_config", None) is not None:
        raise TypeError("quantized weights are not served here")
    if kind == "gpt2":
        wrong = [
            *("scale_attn_by_inverse_layer_idx",) * bool(config.scale_attn_by_inverse_layer_idx),
            *("scale_attn_weights",) * (not config.scale_attn_weights),
            *("tie_word_embeddings",) * (not config.tie_word_embeddings),
            *("activation_function",) * (config.activation_function not in ("gelu_new", "gelu_pytorch_tanh")),
            *("n_inner",) * (config.n_inner not in (None, 4 * config.n_embd)),
            *("layer_norm_epsilon",) * (config.layer_norm_epsilon != 1e-5),
        ]
        if wrong:
            raise TypeError(f"{wrong[0]}={getattr(config, wrong[0])} of a gpt2 is not served here")
        return GPT(Shape(config.n_layer, config.n_embd, config.n_head, config.n_positions, config.vocab_size))
    if kind == "qwen3":
        rope = dict(config.rope_parameters or {})
        if config.hidden_act != "silu":
            raise TypeError(f"hidden_act={config.hidden_act} of a qwen3 is not served here")
        if config.attention_bias or config.use_sliding_window or rope.get("rope_type", "default") != "default":
            raise TypeError(
                "biases of attention, scaled rotary positions and sliding windows of a qwen3 are not served here"
            )
        return Qwen3(
            Qwen3Shape(
                layers=config.num_hidden_layers,
                hidden=config.hidden_size,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_size=config.head_dim,
                inner=config.intermediate_size,
                positions=config.max_position_embeddings,
                vocabulary=config.vocab_size,
                rope_base=float(rope.get("rope_theta", 1e6)),
                epsilon=config.rms_norm_eps,
                is_tied=bool(config.tie_word_embeddings),
            )
        )
    if kind == "t5":
        if config.num_layers != config.num_decoder_layers:
            raise TypeError(
                f"a t5 with {config.num_decoder_layers} layers to decode of {config.num_layers} is not served here"
            )
        if config.feed_forward_proj not in ("relu", "gated-gelu"):
            raise TypeError(f"feed_forward_proj={config.feed_forward_proj} of a t5 is not served here")
        if not getattr(config, "scale_decoder_outputs", config.tie_word_embeddings):
            raise TypeError("a t5 whose last product has a weight of its own is not served here")
        return T5Generation(
            T5Shape(
                layers=config.num_layers,
                hidden=config.d_model,
                heads=config.num_heads,
                head_size=config.d_kv,
                inner=config.d_ff,
                positions=POSITIONS_OF_T5,
                vocabulary=config.vocab_size,
                buckets=config.relative_attention_num_buckets,
                distance=config.relative_attention_max_distance,
                epsilon=config.layer_norm_epsilon,
                is_gated=config.feed_forward_proj == "gated-gelu",
                start_token=int(config.decoder_start_token_id or 0),
            )
        )
    raise TypeError(f"a model of type {kind} is not served here: gpt2, qwen3 and t5 are")


def config_of(decoder: nn.Module) -> PretrainedConfig:
    """The configuration of the class of transformers that a decoder is. Raises TypeError where there is none."""
    if isinstance(decoder, GPT):
        return gpt_config(decoder.shape)
    if isinstance(decoder, Qwen3):
        return qwen3_config(decoder.shape)
    if isinstance(decoder, T5Generation):
        return t5_config(decoder.shape)
    raise TypeError(f"transformers has no class for {type(decoder).__name__}")


def pairs_of(decoder: nn.Module) -> Iterator[Pair]:
    """All parameters of a decoder. Raises TypeError where transformers has no class for it."""
    if isinstance(decoder, GPT):
        return gpt_pairs(decoder.shape)
    if isinstance(decoder, Qwen3):
        return qwen3_pairs(decoder.shape)
    if isinstance(decoder, T5Generation):
        return t5_pairs(decoder.shape)
    raise TypeError(f"transformers has no class for {type(decoder).__name__}")


def as_transformers(decoder: nn.Module) -> PreTrainedModel:
    """transformers' model with a decoder's weights, on its device; those that need no copy are shared."""
    import transformers

    weight = next(decoder.parameters())
    config = config_of(decoder)
    (name,) = config.architectures
    auto: Any = getattr(transformers, name)
    with on_no_device():
        model: PreTrainedModel = auto._from_config(config, dtype=weight.dtype)
    state = decoder.state_dict()
    weights = {pair.theirs: pair.give(state[pair.ours]) for pair in pairs_of(decoder)}
    _, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    assert not unexpected, unexpected
    if isinstance(decoder, Qwen3):  # its frequencies are no weights
        inner: Any = model.model
        inner.rotary_emb = type(inner.rotary_emb)(config).to(weight.device)
    names_on_meta = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    assert not names_on_meta, f"no weight was given to {names_on_meta}"
    return model.eval()
