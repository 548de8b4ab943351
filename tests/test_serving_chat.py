"""Conversations with an endpoint whose model is of a folder with a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from served_endpoint import Running, openai
from test_serving_engine import alone
from test_serving_folders import TEMPLATE, saved, tokenizer_in

from models.decoders import load_decoder
from models.folder import tokenizer_of
from systems.serving.request import Request


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Real weights from a folder, whose tokenizer has a form for conversations."""
    folder = tmp_path_factory.mktemp("model")
    saved(folder, "gpt2")
    tokenizer_in(folder, TEMPLATE)
    started = Running(tmp_path_factory.mktemp("serve"), ["model=hf", f"model.path={folder}", "device=cpu", "precision=fp32"])
    started.folder = folder
    yield started
    started.process.kill()
    started.process.wait()


def test_a_conversation_is_answered_by_the_folders_template(with_tokenizer: Running) -> None:
    module = load_decoder("hf", "cpu", "fp32", path=str(with_tokenizer.folder))
    tokenizer = tokenizer_of(with_tokenizer.folder)
    assert tokenizer is not None
    messages = [{"role": "user", "content": "hello w7"}]
    expected = alone(module, Request(0, tokenizer.chat(messages, {}), 6))
    chat = with_tokenizer.client.chat.completions
    parameters = {"model": with_tokenizer.folder.name, "messages": messages, "max_completion_tokens": 6, "temperature": 0}
    answer = chat.create(**parameters, extra_body={"ignore_eos": True})
    assert answer.choices[0].message.content == tokenizer.decoded(expected) != ""
    assert answer.object == "chat.completion" and answer.choices[0].finish_reason == "length"
    assert answer.usage and answer.usage.prompt_tokens == 4 and answer.usage.completion_tokens == 6
    pieces = list(chat.create(**parameters, stream=True, extra_body={"ignore_eos": True}))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == answer.choices[0].message.content
    assert [piece.choices[0].delta.role for piece in pieces] == ["assistant", *[None] * (len(pieces) - 1)]
    with chat.stream(**parameters, extra_body={"ignore_eos": True}) as stream:
        stream.until_done()
        put_together = stream.current_completion_snapshot
    assert put_together.choices[0].message.role == "assistant"
    assert put_together.choices[0].message.content == answer.choices[0].message.content
    assert all(of.id.startswith("chatcmpl-") for of in (answer, put_together, *pieces))
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "w7"}]}]
    again = chat.create(**parameters | {"messages": parts}, extra_body={"ignore_eos": True})
    assert again.choices[0].message.content == answer.choices[0].message.content
    text = with_tokenizer.client.completions.create(
        model=with_tokenizer.folder.name, prompt="hello w7", max_tokens=3, temperature=0
    )
    assert text.usage and text.usage.prompt_tokens == 2


def test_the_end_of_a_text_ends_an_answer(with_tokenizer: Running) -> None:
    """Drawn often enough, the id that ends a text comes; ignore_eos goes on."""
    parameters = {"model": with_tokenizer.folder.name, "prompt": "hello", "max_tokens": 50, "temperature": 2.0}
    answers = [with_tokenizer.client.completions.create(**parameters, seed=seed).choices[0] for seed in range(30)]
    stopped = [choice for choice in answers if choice.finish_reason == "stop"]
    assert stopped and all(choice.token_ids[-1] == 1 and 1 not in choice.token_ids[:-1] for choice in stopped)
    assert all(len(choice.token_ids) == 50 for choice in answers if choice.finish_reason == "length")


def test_a_template_takes_variables_and_nothing_else(with_tokenizer: Running) -> None:
    messages = [{"role": "user", "content": "hello"}]

    def num_prompt(**body: object) -> int:
        chat = with_tokenizer.client.chat.completions.create(
            model=with_tokenizer.folder.name, messages=messages, max_tokens=1, extra_body=body  # type: ignore[arg-type]
        )  # fmt: skip
        assert chat.usage
        return chat.usage.prompt_tokens

    assert num_prompt() == num_prompt(add_generation_prompt=True, continue_final_message=False, reasoning_effort=None) == 3
    assert num_prompt(chat_template_kwargs={"thought": "w1 w2"}) == 5
    for body, words in (
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template is no variable of a chat template"),
        ({"chat_template_kwargs": {"messages": []}}, "the chat template refuses these messages: "),
        ({"chat_template_kwargs": [1]}, r"chat_template_kwargs=\[1\] is not a JSON object"),
        ({"add_generation_prompt": False}, "add_generation_prompt=False is not served"),
        ({"continue_final_message": True}, "continue_final_message=True is not served"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            num_prompt(**body)


@pytest.mark.parametrize(
    "messages",
    [
        *([], "hello", [{"role": "user"}], [{"role": "user", "content": 3}], [3]),
        [{"role": "user", "content": "hello", "name": "w1"}],
        [{"role": "user", "content": [{"type": "text"}]}],
    ],
)
def test_a_conversation_that_is_none_is_refused(with_tokenizer: Running, messages: object) -> None:
    with pytest.raises(openai.BadRequestError, match="message"):
        with_tokenizer.client.chat.completions.create(model=with_tokenizer.folder.name, messages=messages)  # type: ignore[call-overload]


def test_a_conversations_most_tokens_are_refused_by_their_name(with_tokenizer: Running) -> None:
    messages = [{"role": "user", "content": "hello"}]
    for value in (0, 2.5, True):
        with pytest.raises(openai.BadRequestError, match=f" max_completion_tokens={value} is not a whole number of at"):
            with_tokenizer.client.chat.completions.create(
                model=with_tokenizer.folder.name, messages=messages, max_completion_tokens=value  # type: ignore[arg-type]
            )  # fmt: skip
