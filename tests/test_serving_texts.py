"""Texts of tokens: what is shown of one while it grows, and what a stop text takes back."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from served_endpoint import SOON_S
from test_serving_connections import spoken_to

from runners.serving.text import Bytes, Growing, decoded, encoded

pytest.importorskip("aiohttp", reason="the endpoint needs aiohttp")
openai = pytest.importorskip("openai", reason="it is tested with OpenAI's client")

from runners.serving.endpoint import Endpoint, _first, _unsure  # noqa: E402


@given(st.lists(st.sampled_from("abc"), max_size=12), st.lists(st.text("abc", min_size=1, max_size=3), max_size=2))
def test_pieces_never_show_what_a_stop_text_takes_back(letters: list[str], stops: list[str]) -> None:
    text, sent = "", ""
    for at, letter in enumerate(letters):
        text += letter
        end = _first(text, stops)
        whole = (
            text[:end] if end is not None else text if at == len(letters) - 1 else text[: len(text) - _unsure(text, stops)]
        )
        assert whole.startswith(sent)
        sent = whole
        if end is not None:
            break
    full = "".join(letters)
    ends = [at + len(stop) for stop in stops if (at := full.find(stop)) >= 0]
    seen = full[: min(ends, default=len(full))]  # up to the letter that completes a stop text
    assert sent == seen[: _first(seen, stops)]


@given(st.text("ab", max_size=9), st.text("ab", min_size=1, max_size=9))
def test_no_more_is_held_back_than_a_stop_text_may_begin_with(text: str, stop: str) -> None:
    assert _unsure(text, [stop]) == max(count for count in range(len(stop)) if text.endswith(stop[:count]))


@given(st.text("aé中😀", max_size=8), st.lists(st.text("aé中😀", min_size=1, max_size=3), max_size=2))
def test_what_a_stop_text_takes_back_is_not_shown_while_a_character_comes(full: str, stops: list[str]) -> None:
    """A byte at a time: before its last one the text ends with what stands for half a character."""
    growing, sent = Growing(Bytes()), ""
    for token in encoded(full):
        text = growing.more((token,))
        if (end := _first(text, stops)) is not None:
            assert text[:end].startswith(sent)
            break
        assert text.startswith(sent)
        sent = text[: len(text) - _unsure(text, stops)]


class Written:
    """A tokenizer of a few pieces. decoder: as a kind of tokenizers puts them together."""

    def __init__(self, pieces: list[str], decoder: object):
        tokenizers = pytest.importorskip("tokenizers")
        ids = {piece: at for at, piece in enumerate(["<unk>", "<end>", *pieces])}
        self.inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
        self.inner.add_special_tokens(["<end>"])
        if decoder is not None:
            self.inner.decoder = decoder
        self.num_tokens = len(ids)

    def decoded(self, tokens: Sequence[int]) -> str:
        return str(self.inner.decode(list(tokens)))


def texts() -> dict[str, tuple[object, int]]:
    """Ways to put tokens together, and how many tokens each has."""
    decoders = pytest.importorskip("tokenizers").decoders
    bytes_, spaced = (
        ["a", "b", "\u0120c", "\u00e4", "\u00b8", "\u0143", "\u00f0", "\u0141", "."],
        ["\u2581a", "b", "\u2581", "c.", "\u2581d"],
    )
    written = {
        "words": Written(["a", "b", ".", "n't"], None),
        "bytes of BPE": Written(bytes_, decoders.ByteLevel()),
        "pieces of words": Written(["a", "##b", "##c", ".", "n", "'", "t"], decoders.WordPiece(cleanup=True)),
        "marked spaces": Written(spaced, decoders.Metaspace()),
    }
    return {"bytes": (Bytes(), 300), **{name: (text, text.num_tokens) for name, text in written.items()}}


@pytest.mark.parametrize("name", ["bytes", "words", "bytes of BPE", "pieces of words", "marked spaces"])
@examples(60)
@given(st.data())
def test_a_text_that_grows_is_that_of_all_its_tokens(name: str, data: st.DataObject) -> None:
    text, num_tokens = texts()[name]
    counts = data.draw(st.lists(st.sampled_from([1, 1, 1, 2, 5, 40]), min_size=1, max_size=60))
    draw = data.draw(st.randoms(use_true_random=False))
    usual = draw.sample(range(num_tokens), min(num_tokens, 6))  # so that the same follow each other
    growing, tokens = Growing(text), list[int]()  # type: ignore[arg-type]
    for count in counts:
        new = [draw.choice(usual) if draw.random() < 0.8 else draw.randrange(num_tokens) for _ in range(count)]
        tokens += new
        assert growing.more(new) == text.decoded(tokens)  # type: ignore[attr-defined]


def test_a_text_does_not_grow_from_tokens_that_say_another_text_alone() -> None:
    """Ids that have no text, and bytes of which only all together are characters."""
    decoders = pytest.importorskip("tokenizers").decoders
    words = Written(["a", "b"], None)
    character = ["<0xE4>", "<0xB8>", "<0xAD>"]
    fallen = Written(character, decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]))
    for text, pieces in ((words, [(2,), *[(1,)] * 50, (3,), (2,)]), (fallen, [(2, 3, 4)] * 60)):
        growing, tokens = Growing(text), list[int]()  # type: ignore[arg-type]
        for piece in pieces:
            tokens += piece
            assert growing.more(piece) == text.decoded(tokens)
    assert text.decoded(tokens) == "中" * 60


def test_few_of_many_tokens_are_decoded_again() -> None:
    class Counted(Bytes):
        num_decoded = 0

        def decoded(self, tokens: Sequence[int]) -> str:
            self.num_decoded += len(tokens)
            return super().decoded(tokens)

    text = Counted()
    growing = Growing(text)
    tokens = encoded("hé中 😀" * 300)
    assert [growing.more((token,)) for token in tokens][-1] == decoded(tokens) and text.num_decoded < 40 * len(tokens)


@given(st.text(max_size=20))
def test_a_text_is_its_bytes(text: str) -> None:
    assert decoded(encoded(text)) == text and decoded([97, 300, 98]) == "a<300>b"


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_stop_text_ends_an_answer_at_the_same_token_under_every_schedule(is_streaming: bool) -> None:
    """A static batch gives all tokens at once, those after the stop text too."""
    answers: list[object] = []

    def client(endpoint: Endpoint, connection: socket.socket) -> None:
        address = "http://{}:{}/v1".format(*connection.getpeername())
        with openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=SOON_S) as user:
            parameters = {"model": "gpt", "prompt": "ab", "max_tokens": 30, "temperature": 1.0, "seed": 2}
            stop = user.completions.create(**parameters).choices[0].text[8:11]
            parameters |= {"stop": stop, "stream": is_streaming}
            if is_streaming:
                pieces = list(user.completions.create(**parameters, stream_options={"include_usage": True}))
                choices, usage = [piece.choices[0] for piece in pieces[:-1]], pieces[-1].usage
            else:
                completion = user.completions.create(**parameters)
                choices, usage = completion.choices, completion.usage
            tokens = [token for choice in choices for token in choice.token_ids]
            assert usage.completion_tokens == len(tokens) < 30
            answers.append((tokens, "".join(choice.text for choice in choices), choices[-1].finish_reason))

    for choice in ("orca", "request_level", "request_level_ragged"):
        spoken_to(Bytes(), client, choice)
    assert answers == [answers[0]] * 3
