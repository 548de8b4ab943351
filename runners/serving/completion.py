"""What the body of a completion or of a conversation asks for."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from reprlib import repr as shown

from systems.serving.request import Sampling

from .text import Bytes, Text

NOT_SERVED: dict[str, tuple[object, ...]] = {  # and the values that are no wish
    **{"n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (False,), "top_logprobs": (0,)},
    **{"presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},)},
    **{"top_k": (-1, 0), "min_p": (0,), "tools": ([],), "response_format": ({"type": "text"},)},
    **{"min_tokens": (0,), "continue_final_message": (False,), "add_generation_prompt": (True,), "reasoning_effort": ()},
    **{"use_beam_search": (False,), "allowed_token_ids": ([],), "bad_words": ([],), "prompt_logprobs": ()},
    **{"truncate_prompt_tokens": (), "skip_special_tokens": (True,), "include_stop_str_in_output": (False,)},
    **{"functions": ([],), "chat_template": (), "modalities": (["text"],), "guided_json": (), "guided_regex": ()},
    **{"guided_choice": (), "guided_grammar": (), "structured_outputs": (), "store": (False,), "verbosity": ("medium",)},
    **{"tool_choice": ("none", "auto"), "function_call": ("none", "auto"), "parallel_tool_calls": (True, False)},
    **{"service_tier": ("auto", "default"), "length_penalty": (1,), "early_stopping": (False,), "priority": (0,)},
    **{"detokenize": (True,), "spaces_between_special_tokens": (True,), "audio": (), "moderation": (), "prediction": ()},
    **{"web_search_options": ()},
}
# Which change no answer.
LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options")
SERVED = frozenset(
    (
        *("model", "max_tokens", "temperature", "top_p", "seed", "stop", "stop_token_ids", "ignore_eos", "stream"),
        *("stream_options", *LABELS, *NOT_SERVED),
    )
)
OF_PROMPTS = SERVED | {"prompt", "return_token_ids"}  # its answers have them, whoever asks
OF_CHATS = SERVED | {"messages", "max_completion_tokens", "chat_template_kwargs"}
STREAM_OPTIONS = frozenset(("include_usage", "include_obfuscation"))
MOST_TEMPERATURE = 2  # as OpenAI's
MOST_STOPS, LONGEST_STOP = 16, 1000  # stop texts of a body, and letters of one: each token is compared with all
MOST_PROMPTS = 2048  # of a body

BYTES = Bytes()


class BadBody(ValueError):
    """The body asks for what cannot be; the message is one line."""


@dataclass(frozen=True)
class Completion:
    """What a body asks for.

    Args:
        prompts: token ids of each.
        max_tokens: to generate.
        sampling: of the first prompt; each of the others has the next seed.
        stops: texts that end the generation, without being part of it.
        is_streaming: tokens go to the client as they come.
        is_chat: the answer is a message.
        stop_tokens: ids that end the generation.
        has_usage: a stream ends with how many tokens there were.
    """

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    sampling: Sampling
    stops: tuple[str, ...]
    is_streaming: bool
    is_chat: bool = False
    stop_tokens: frozenset[int] = frozenset()
    has_usage: bool = False

    def sampling_of(self, index: int) -> Sampling:
        """Of a prompt. Equal prompts have seeds that differ, and so samples of their own."""
        if not index:
            return self.sampling
        return replace(self.sampling, seed=(self.sampling.seed + index + 2**63) % 2**64 - 2**63)  # of 64 bits

    @classmethod
    def of(cls, body: object, text: Text = BYTES, room: int | None = None) -> Completion:
        """What a body asks for. Raises BadBody.

        Args:
            body: as JSON has it.
            text: the model's.
            room: tokens of a conversation and its answer; None where the body is no conversation.
        """
        if not isinstance(body, dict):
            raise BadBody("the body is not a JSON object")
        for key, wishless in NOT_SERVED.items():
            value = body.get(key)
            if value is not None and not any(_is_same(value, wish) for wish in wishless):
                raise BadBody(f"{key}={shown(value)} is not served here")
        _check_known(body, OF_PROMPTS if room is None else OF_CHATS)
        stop = body.get("stop")
        stops = [] if stop in (None, "") else [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(each, str) and _whole(each) for each in stops):
            raise BadBody(f"stop={shown(stop)} is neither a text nor a list of texts")
        if len(stops) > MOST_STOPS or any(len(each) > LONGEST_STOP for each in stops):
            raise BadBody(f"stop={shown(stop)} has more than {MOST_STOPS} texts, or one of more than {LONGEST_STOP} letters")
        temperature, top_p = (float(_number(body, key, 1.0)) for key in ("temperature", "top_p"))
        if not 0 <= temperature <= MOST_TEMPERATURE:
            raise BadBody(f"temperature={temperature} is not from 0 to {MOST_TEMPERATURE}")
        seed = _number(body, "seed", time.time_ns())
        if seed != int(seed):
            raise BadBody(f"seed={seed} is not a whole number")
        sampling = Sampling(temperature, top_p, int(seed))
        variables = _object(body, "chat_template_kwargs")
        prompts = _prompts(body.get("prompt"), text) if room is None else (_chat(body.get("messages"), text, variables),)
        usual = 16 if room is None else max(room - len(prompts[0]), 1)
        keys = [key for key in ("max_completion_tokens", "max_tokens") if body.get(key) is not None]
        if len(keys) > 1:
            raise BadBody("max_tokens and max_completion_tokens are two names of one wish: say one")
        max_tokens = body[keys[0]] if keys else usual
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise BadBody(f"{keys[0]}={shown(max_tokens)} is not a whole number of at least 1")
        ids = body.get("stop_token_ids")
        if ids not in (None, []) and not _are_ids(ids):
            raise BadBody(f"stop_token_ids={shown(ids)} is no list of token ids")
        stop_tokens = frozenset(ids or ()) | (frozenset() if _is_set(body, "ignore_eos") else text.stop_tokens)
        options = _object(body, "stream_options")
        _check_known(options, STREAM_OPTIONS, "stream_options.")
        is_streaming, has_usage = _is_set(body, "stream"), _is_set(options, "include_usage")
        if body.get("stream_options") is not None and not is_streaming:
            raise BadBody("stream_options are of a stream: they need stream=true")
        if _is_set(options, "include_obfuscation"):
            raise BadBody("stream_options.include_obfuscation=True is not served here: what is sent is as long as its text")
        return cls(prompts, max_tokens, sampling, tuple(stops), is_streaming, room is not None, stop_tokens, has_usage)


def _check_known(body: dict[str, object], known: frozenset[str], where: str = "") -> None:
    """Raises BadBody for a key that nobody reads: its wish would be passed over."""
    if unknown := sorted(key for key, value in body.items() if key not in known and value is not None):
        raise BadBody(f"{where}{shown(unknown[0])} is not known here")


def _is_same(value: object, wish: object) -> bool:
    """A number is no truth value, though Python takes 0 for False."""
    return value == wish and isinstance(value, bool) == isinstance(wish, bool)


def _object(body: dict[str, object], key: str) -> dict[str, object]:
    value = body.get(key)
    if value is not None and not isinstance(value, dict):
        raise BadBody(f"{key}={shown(value)} is not a JSON object")
    return value or {}


def _is_set(body: dict[str, object], key: str) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise BadBody(f"{key}={shown(value)} is neither true nor false")
    return bool(value)


def _number(body: dict[str, object], key: str, default: float) -> float:
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise BadBody(f"{key}={shown(value)} is not a number")
    return value


def _is_finite(value: float) -> bool:
    """Also of an integer: is it one that a float can be?"""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _whole(text: str) -> str:
    """A text as it is. Raises BadBody for one with half a character, which JSON can write and nobody can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadBody(f"a text has half a character: {error}") from error
    return text


def _chat(messages: object, text: Text, variables: dict[str, object]) -> tuple[int, ...]:
    """The ids of a conversation. variables: of the template."""
    if not isinstance(messages, list) or not messages:
        raise BadBody("messages is no list of messages")
    said = []
    for message in messages:
        role, content = (message.get(key) for key in ("role", "content")) if isinstance(message, dict) else (None, None)
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            texts = [part.get("text") for part in content]
            content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise BadBody("a message has a role and a content, both texts")
        if others := [key for key, value in message.items() if key not in ("role", "content") and value not in (None, [])]:
            raise BadBody(f"{shown(others[0])} of a message is not served here")
        said.append({"role": _whole(role), "content": _whole(content)})
    try:
        return text.chat(said, variables)
    except ValueError as error:
        raise BadBody(str(error)) from error


def _prompts(prompt: object, text: Text) -> tuple[tuple[int, ...], ...]:
    """A text, ids, or a list of either."""
    if isinstance(prompt, str):
        return (text.encoded(_whole(prompt)),)
    if isinstance(prompt, list) and len(prompt) > MOST_PROMPTS and not _are_ids(prompt):
        raise BadBody(f"prompt is a list of {len(prompt):,}, and {MOST_PROMPTS:,} are served at once")
    if isinstance(prompt, list) and prompt:
        if _are_ids(prompt):
            return (tuple(prompt),)
        if all(isinstance(part, str) for part in prompt):
            return tuple(text.encoded(_whole(part)) for part in prompt)
        if all(_are_ids(part) for part in prompt):
            return tuple(map(tuple, prompt))
    if prompt is None:
        raise BadBody("prompt is missing")
    raise BadBody("prompt is neither a text, nor token ids, nor a list of either")


def _are_ids(tokens: object) -> bool:
    """Is it a list of token ids, at least one?"""
    if not isinstance(tokens, list) or not tokens:
        return False
    return all(isinstance(token, int) and not isinstance(token, bool) for token in tokens)
