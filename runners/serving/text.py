"""Text and token ids: a tokenizer's, or without one ids below 256 are the bytes of UTF-8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

NUM_BYTES = 256
REPLACED = "\ufffd"  # stands for bytes that are no text, or not yet
CONTEXT, STEP = 8, 32  # tokens that are decoded again, and after how many a text is taken to be sure


class Text(Protocol):
    """Between texts and token ids.

    stop_tokens: ids that end a text.
    has_chat_template: conversations have a form.
    """

    @property
    def stop_tokens(self) -> frozenset[int]: ...
    @property
    def has_chat_template(self) -> bool: ...
    def encoded(self, text: str) -> tuple[int, ...]: ...
    def decoded(self, tokens: Sequence[int]) -> str: ...
    def chat(self, messages: Sequence[dict[str, str]], variables: Mapping[str, object]) -> tuple[int, ...]:
        """The ids of a conversation, up to where the answer begins. Raises ValueError where it has no such form.

        Args:
            messages: the role and the content of each.
            variables: what a template takes beside them.
        """


class Bytes:
    """Of a model that has no tokenizer."""

    has_chat_template = False

    def __init__(self, stop_tokens: frozenset[int] = frozenset()):
        self.ends = stop_tokens

    @property
    def stop_tokens(self) -> frozenset[int]:
        return self.ends

    def encoded(self, text: str) -> tuple[int, ...]:
        return encoded(text)

    def decoded(self, tokens: Sequence[int]) -> str:
        return decoded(tokens)

    def chat(self, messages: Sequence[dict[str, str]], variables: Mapping[str, object]) -> tuple[int, ...]:
        raise ValueError("bytes have no form for conversations")


class Growing:
    """The text of tokens that come a few at a time: what `decoded` gives of all of them.

    A text is sure up to a token where it ends with a whole character, and where the tokens before decode to its end alone.
    Tokens after it are decoded with those alone.
    """

    def __init__(self, text: Text):
        self.text, self.tokens = text, list[int]()
        self.sure, self.known = "", ""  # the text up to the last sure token, and what of it is decoded again
        self.begin = self.end = 0  # of the tokens that are decoded again

    def more(self, tokens: Sequence[int]) -> str:
        """The whole text, with more tokens."""
        self.tokens += tokens
        whole = self.sure + self.text.decoded(self.tokens[self.begin :])[len(self.known) :]
        count = len(self.tokens)
        if count >= self.end + STEP and not whole.endswith(REPLACED):
            known = self.text.decoded(self.tokens[count - CONTEXT :])
            if known and whole.endswith(known):
                self.sure, self.known, self.begin, self.end = whole, known, count - CONTEXT, count
        return whole


def encoded(text: str) -> tuple[int, ...]:
    """The ids of a text."""
    return tuple(text.encode())


def decoded(tokens: Sequence[int]) -> str:
    """The text of some ids. One that is no byte is <id>; bytes that are no text are replaced."""
    pieces: list[str] = []
    run = bytearray()
    for token in tokens:
        if token < NUM_BYTES:
            run.append(token)
            continue
        pieces += [run.decode(errors="replace"), f"<{token}>"]
        run = bytearray()
    return "".join([*pieces, run.decode(errors="replace")])
