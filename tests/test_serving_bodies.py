"""Bodies of requests to an endpoint: what each of OpenAI's parameters comes to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import ModuleType

import pytest

from runners.serving.text import Bytes

pytest.importorskip("aiohttp", reason="the endpoint needs aiohttp")
openai = pytest.importorskip("openai", reason="it is tested with OpenAI's client")

from runners.serving.completion import BadBody, Completion  # noqa: E402


@pytest.mark.parametrize(
    "body",
    [
        3,
        {"prompt": [1, "a"]},
        {"prompt": [True]},
        {"prompt": "a", "max_tokens": "x"},
        {"prompt": [["a", "b"], ["c"]]},
        {"prompt": [["a"]]},
        {"prompt": [[[1, 2], [3]]]},
        {"prompt": [[1], []]},
        {"prompt": "a\ud800"},
        {"prompt": ["a", "\udc00"]},
        {"prompt": "a", "logprobs": 0},
        {"prompt": "a", "n": True},
        *(
            {"prompt": "a", key: value}
            for key in ("seed", "temperature", "top_p")
            for value in (math.inf, math.nan, 10**400)
        ),
    ],
)
def test_a_strange_body_is_refused(body: object) -> None:
    with pytest.raises(BadBody) as caught:
        Completion.of(body)
    assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)


def test_whole_numbers_are_numbers_and_lists_of_ids_are_prompts() -> None:
    labels = {"user": "me", "metadata": {"a": "b"}, "anything": None}
    body = {"prompt": [[1, 2], [3]], "temperature": 2, "presence_penalty": 0.0, "logprobs": False}
    completion = Completion.of(body | labels)
    assert completion.prompts == ((1, 2), (3,)) and isinstance(completion.sampling.temperature, float)


SERVED = {"prompt", "messages", "model", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "stream_options"}


OF_CHATS_ALONE = {"messages", "max_completion_tokens"}


LABELS = {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}


WISHES = {"tool_choice": "required", "function_call": {"name": "f"}, "parallel_tool_calls": "yes", "service_tier": "flex"}


@pytest.mark.parametrize(
    "documented", [openai.types.completion_create_params, openai.types.chat.completion_create_params], ids=["text", "chat"]
)
def test_every_parameter_that_openai_documents_is_served_or_refused_or_changes_no_answer(documented: ModuleType) -> None:
    class Talking(Bytes):
        def chat(self, messages: Sequence[dict[str, str]], variables: Mapping[str, object]) -> tuple[int, ...]:
            return (1, 2)

    is_chat = documented is openai.types.chat.completion_create_params
    body = {"messages": [{"role": "user", "content": "a"}]} if is_chat else {"prompt": "a"}
    room = 100 if is_chat else None
    usual = Completion.of(body | {"seed": 1}, Talking(), room)
    for key in documented.CompletionCreateParamsBase.__annotations__:
        if key in LABELS:
            assert Completion.of(body | {"seed": 1, key: "a"}, Talking(), room) == usual
        elif key not in SERVED | OF_CHATS_ALONE:
            for wish in (WISHES.get(key, {"a": 1}), 7, "xyz"):
                with pytest.raises(BadBody, match=f"^{key}=.* is not served here$"):
                    Completion.of(body | {key: wish}, Talking(), room)
    if is_chat:
        assert Completion.of(body | {"max_completion_tokens": 5}, Talking(), room).max_tokens == 5
        with pytest.raises(BadBody, match="max_tokens and max_completion_tokens are two names"):
            Completion.of(body | {"max_completion_tokens": 5, "max_tokens": 5}, Talking(), room)
