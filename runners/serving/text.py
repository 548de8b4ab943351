"""Text and token ids of a model that has no tokenizer: ids below 256 are the bytes of UTF-8."""

from __future__ import annotations

from collections.abc import Sequence

NUM_BYTES = 256


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
