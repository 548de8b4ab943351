"""Models from folders: weights, texts' ends, tokenizers, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_serving_models import alone, server_of, tokens_of

from models.decoders import continued, load_decoder
from models.exchange import config_of
from models.folder import Tokenizer, ends_of, tokenizer_of
from models.gpt import GPT
from models.qwen3 import Qwen3, Qwen3Shape
from models.registry import BadModel
from models.t5_generation import T5Generation, T5Shape
from runners.serving.text import Bytes
from systems.serving.request import Request


def saved(folder: Path, kind: str) -> torch.nn.Module:
    """A tiny model that transformers has made and saved; what it computes."""
    import transformers

    torch.manual_seed(0)
    name = {
        "gpt2": "GPT2LMHeadModel",
        "qwen3": "Qwen3ForCausalLM",
        "t5": "T5ForConditionalGeneration",
    }[kind]
    config = {
        "gpt2": lambda: transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=64, vocab_size=300),
        "qwen3": lambda: config_of(Qwen3(Qwen3Shape(2, 32, 4, 2, 8, 48, 64, 300, is_tied=False))),
        "t5": lambda: config_of(T5Generation(T5Shape(2, 32, 4, 8, 48, 64, 300))),
    }[kind]()
    module = getattr(transformers, name)(config).eval()
    module.save_pretrained(folder)
    return module


@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "t5"])
def test_a_folder_that_transformers_saved_is_served(kind: str, tmp_path: Path) -> None:
    theirs = saved(tmp_path, kind)
    module = load_decoder("hf", "cpu", "fp32", path=str(tmp_path))
    prompt, continuation = (5, 7, 250, 3), (9, 1, 2)
    with torch.no_grad():
        ours = continued(module, prompt, continuation, None)
        if kind == "t5":
            fed = torch.tensor([[0, *continuation[:-1]]])
            expected = theirs(input_ids=torch.tensor([prompt]), decoder_input_ids=fed).logits[0]
        else:
            expected = theirs(torch.tensor([[*prompt, *continuation[:-1]]])).logits[0, 3:]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    request = Request(0, prompt, 5)
    assert tokens_of(server_of("orca", module), [request]) == {0: alone(module, request)}


def test_weights_in_several_files_are_found(tmp_path: Path) -> None:
    theirs = saved(tmp_path, "gpt2")
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")  # type: ignore[operator]
    (tmp_path / "model.safetensors").unlink()
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    module = load_decoder("hf", "cpu", "fp32", path=str(tmp_path))
    assert isinstance(module, GPT)
    torch.testing.assert_close(module.norm.weight, theirs.transformer.ln_f.weight)  # type: ignore[union-attr]


def test_a_folder_that_is_none_is_refused_in_one_line(tmp_path: Path) -> None:
    def refused(words: str, path: object = tmp_path) -> None:
        with pytest.raises(BadModel) as caught:
            load_decoder("hf", "cpu", "fp32", path=path)  # type: ignore[arg-type]
        assert words in str(caught.value) and "\n" not in str(caught.value)

    refused("needs model.path=FOLDER", None)
    refused("has no config.json", str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    refused("its config.json cannot be read", str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    refused("a model of type bert is not served here: gpt2, qwen3 and t5 are", str(tmp_path))
    saved(tmp_path, "gpt2")
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"gelu_new"', '"relu"'))
    refused("activation_function=relu of a gpt2 is not served here", str(tmp_path))
    (tmp_path / "config.json").write_text(config.replace('"n_layer": 2', '"n_layer": 3'))
    refused("has no weight named transformer.h.2.ln_1.weight", str(tmp_path))
    (tmp_path / "config.json").write_text(config.replace('"n_positions": 64', '"n_positions": 65'))
    refused("transformer.wpe.weight is (64, 32) and not (65, 32)", str(tmp_path))
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").unlink()
    refused("has no model.safetensors", str(tmp_path))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", b"\x10"),
        ("model.safetensors", None),  # half of it
        ("model.safetensors.index.json", b"{"),
        ("model.safetensors.index.json", b"{}"),
        ("model.safetensors.index.json", b'{"weight_map": {"transformer.wte.weight": "model-1.safetensors"}}'),
    ],
)
def test_weights_that_cannot_be_read_are_refused_in_one_line(file: str, content: bytes | None, tmp_path: Path) -> None:
    saved(tmp_path, "gpt2")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / file).write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(BadModel, match=r"its weights cannot be read: .") as caught:
        load_decoder("hf", "cpu", "fp32", path=str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_text_ends_where_any_file_of_a_folder_says(tmp_path: Path) -> None:
    saved(tmp_path, "gpt2")
    assert ends_of(tmp_path) == {50256}  # the default of its configuration
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 250]}')
    assert ends_of(tmp_path) == Bytes(ends_of(tmp_path)).stop_tokens == {7, 250, 50256}
    tokenizer_in(tmp_path, TEMPLATE)
    tokenizer = tokenizer_of(tmp_path)
    assert isinstance(tokenizer, Tokenizer) and tokenizer.stop_tokens == {1, 7, 250, 50256}
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(BadModel, match=r"its generation_config.json cannot be read"):
        ends_of(tmp_path)


def tokenizer_in(folder: Path, template: str | None) -> None:
    """A tokenizer of words, as transformers saves it."""
    from tokenizers import Tokenizer as Fast
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<end>", "hello", "world", "user:", "assistant:", *(f"w{i}" for i in range(200))]
    fast = Fast(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    fast.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>", eos_token="<end>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}{{ thought }}"
)


def test_a_folders_tokenizer_is_read(tmp_path: Path) -> None:
    assert tokenizer_of(tmp_path) is None
    tokenizer_in(tmp_path, TEMPLATE)
    tokenizer = tokenizer_of(tmp_path)
    assert isinstance(tokenizer, Tokenizer) and tokenizer.has_chat_template and tokenizer.stop_tokens == {1}
    assert tokenizer.encoded("hello world w3") == (2, 3, 9) and tokenizer.decoded([2, 9]) == "hello w3"
    assert tokenizer.chat([{"role": "user", "content": "hello"}], {}) == (4, 2, 5)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages[0]['content'] + 1 }}", "can only concatenate str"),
        ("{{ raise_exception('no system\nmessage') }}", "no system"),
        ("{{ messages[7]['content']['x'] }}", "has no element 7"),
        ("{% for %}", "Expected an expression"),
        ("{{ half }}", "surrogates not allowed"),
    ],
)
def test_whatever_a_template_raises_it_refuses_the_messages(tmp_path: Path, template: str, words: str) -> None:
    tokenizer_in(tmp_path, template)
    tokenizer = tokenizer_of(tmp_path)
    assert tokenizer is not None
    with pytest.raises(ValueError, match=f"^the chat template refuses these messages: .*{words}") as caught:
        tokenizer.chat([{"role": "user", "content": "hello"}], {"half": "\ud800"})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings=False of a gpt2 is not served here"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False of a gpt2 is not served here"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act=gelu of a qwen3 is not served here"),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "quantized weights are not served here"),
    ],
)
def test_what_changes_the_tokens_is_refused(kind: str, options: dict[str, object], message: str, tmp_path: Path) -> None:
    saved(tmp_path, kind)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | options))
    with pytest.raises(BadModel, match=message):
        load_decoder("hf", "cpu", "fp32", path=str(tmp_path))


def test_weights_of_eight_bits_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved(tmp_path, "qwen3")
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    save_file(weights | {name: weights[name].to(torch.float8_e4m3fn)}, file)
    with pytest.raises(BadModel, match=r"q_proj\.weight holds torch\.float8_e4m3fn, and quantized weights are not served"):
        load_decoder("hf", "cpu", "fp32", path=str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen3", {"hidden_size": "x"}),
        ("gpt2", {"n_head": 0}),
        ("qwen3", {"num_key_value_heads": 0}),
        ("qwen3", {"rope_theta": "x", "rope_parameters": {"rope_type": "default", "rope_theta": "x"}}),
    ],
)
def test_numbers_that_are_none_are_told_in_one_line(kind: str, options: dict[str, object], tmp_path: Path) -> None:
    saved(tmp_path, kind)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | options))
    with pytest.raises(BadModel) as caught:
        load_decoder("hf", "cpu", "fp32", path=str(tmp_path))
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"model.path={tmp_path}")


@pytest.mark.parametrize("content", ["[]", '{"tokenizer_class": 5}'])
def test_a_tokenizer_of_another_form_is_told_in_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(BadModel, match="its tokenizer cannot be read: "):
        tokenizer_of(tmp_path)
