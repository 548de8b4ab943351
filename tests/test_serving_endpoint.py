"""runner=serve: the real program, spoken to with OpenAI's client."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import pytest
from conftest import Run
from served_endpoint import MODEL, SOON_S, Running, openai
from test_serving_engine import alone

import systems
from models.decoders import load_decoder
from runners.serving.text import decoded, encoded
from systems.serving.loop import Listed, RealClock
from systems.serving.peer import PeerFailed, PeerServer
from systems.serving.request import Delivery, Request
from systems.serving.system import AnyServingSystem


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    started = Running(tmp_path_factory.mktemp("serve"))
    yield started
    started.process.kill()
    started.process.wait()


def test_greedy_tokens_are_those_of_the_model(running: Running) -> None:
    module = load_decoder("gpt", "cpu", "fp32", layers=1, hidden=64, heads=2)
    for prompt in ([7, 8, 9, 300], [5], list(encoded("héllo"))):
        expected = alone(module, Request(0, tuple(prompt), 9))
        assert running.tokens(prompt=prompt, max_tokens=9, temperature=0) == expected
    completion = running.client.completions.create(model="gpt", prompt="héllo", max_tokens=9, temperature=0)
    assert completion.choices[0].text == decoded(expected) and completion.choices[0].finish_reason == "length"
    usage = completion.usage
    assert usage and (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 9, 15)


def test_a_stream_is_the_whole_answer_in_pieces(running: Running) -> None:
    parameters = {"model": "gpt", "prompt": [1, 2, 3], "max_tokens": 20, "temperature": 1.0, "seed": 4, "top_p": 0.9}
    whole = running.client.completions.create(**parameters)
    pieces = list(running.client.completions.create(**parameters, stream=True))
    assert len(pieces) == 20 and "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert [token for piece in pieces for token in piece.choices[0].token_ids] == whole.choices[0].token_ids
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * 19 + ["length"]
    assert (
        running.tokens(**{k: v for k, v in parameters.items() if k != "model"} | {"seed": 5}) != whole.choices[0].token_ids
    )


def test_answers_at_the_same_time_have_ids_of_their_own(running: Running) -> None:
    """Every piece of a stream has the id of its stream, whatever comes meanwhile; its last one counts the tokens."""
    parameters = {"model": "gpt", "max_tokens": 40, "stream": True, "stream_options": {"include_usage": True}}
    streams = [iter(running.client.completions.create(prompt=prompt, **parameters)) for prompt in ("ab", ["c", "de"])]
    pieces: list[list[openai.types.Completion]] = [[], []]
    for number in (0, 1):
        pieces[number].append(next(streams[number]))
    other = running.client.completions.create(model="gpt", prompt="f", max_tokens=1)
    for number in (0, 1):
        pieces[number] += streams[number]
    ids = [{piece.id for piece in of} for of in pieces]
    assert all(len(of) == 1 for of in ids) and len(ids[0] | ids[1] | {other.id}) == 3
    usages = [of[-1].usage for of in pieces]
    assert [(u.prompt_tokens, u.completion_tokens) for u in usages if u] == [(2, 40), (3, 80)]
    assert all(of[-1].choices == [] for of in pieces) and all(piece.usage is None for piece in pieces[0][:-1])


def test_our_load_reaches_any_endpoint_by_its_address(running: Running) -> None:
    """system=endpoint against a server: its tokens are those of the model there."""
    module = load_decoder("gpt", "cpu", "fp32", layers=1, hidden=64, heads=2)
    system = systems.load("endpoint", url=running.address)
    assert isinstance(system, AnyServingSystem)
    server = system.prepare_serving(module)
    assert isinstance(server, PeerServer) and server.peer.logits((1,)) is None
    tokens: dict[int, list[int]] = {0: [], 1: []}

    def deliver(deliveries: Sequence[Delivery], now_s: float) -> None:
        for delivery in deliveries:
            tokens[delivery.request_id] += delivery.tokens

    requests = [Request(0, (7, 8, 9, 300), 9), Request(1, (5,), 3)]
    server.serve(Listed(requests), deliver, RealClock())
    assert tokens == {request.id: alone(module, request) for request in requests}
    with pytest.raises(PeerFailed, match="answers 400"):
        server.serve(Listed([Request(2, (5,), 5000)]), deliver, RealClock())
    server.peer.close()


def test_a_request_waits_for_a_connection_as_long_as_it_takes(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("systems.peers.endpoint.CONNECT_S", 0.1)
    system = systems.load("endpoint", url=running.address, max_batch_size=1)
    assert isinstance(system, AnyServingSystem)
    server = system.prepare_serving(load_decoder("gpt", "cpu", "fp32", layers=1, hidden=64, heads=2))
    assert isinstance(server, PeerServer)
    last: list[int] = []

    def deliver(deliveries: Sequence[Delivery], now_s: float) -> None:
        last.extend(delivery.request_id for delivery in deliveries if delivery.is_last)

    begun = time.monotonic()
    server.serve(Listed([Request(number, (5,), 300) for number in range(3)]), deliver, RealClock())
    server.peer.close()
    assert sorted(last) == [0, 1, 2] and time.monotonic() - begun > 0.3


def test_several_prompts_are_several_choices_in_their_order(running: Running) -> None:
    parameters = {"model": "gpt", "max_tokens": 4, "temperature": 0}
    texts = [choice.text for choice in running.client.completions.create(prompt=["ab", "c", "abc"], **parameters).choices]
    assert texts == [running.client.completions.create(prompt=p, **parameters).choices[0].text for p in ("ab", "c", "abc")]


def test_equal_prompts_have_samples_of_their_own(running: Running) -> None:
    parameters = {"model": "gpt", "max_tokens": 8, "temperature": 1.0}
    choices = running.client.completions.create(prompt=["ab", "ab", "ab"], seed=4, **parameters).choices
    alone = [running.client.completions.create(prompt="ab", seed=seed, **parameters).choices[0] for seed in (4, 5, 6)]
    assert [choice.text for choice in choices] == [choice.text for choice in alone] and len({c.text for c in alone}) == 3


def test_a_stop_text_ends_the_answer_before_it(running: Running) -> None:
    parameters = {"model": "gpt", "prompt": "ab", "max_tokens": 30, "temperature": 1.0, "seed": 2}
    text = running.client.completions.create(**parameters).choices[0].text
    stop = text[8:11]
    for is_streaming in (False, True):
        answer = running.client.completions.create(**parameters, stop=[stop, "\x00\x01"], stream=is_streaming)
        choices = [piece.choices[0] for piece in answer] if is_streaming else answer.choices
        assert "".join(choice.text for choice in choices) == text[: text.find(stop)]
        assert choices[-1].finish_reason == "stop"
    running.until("requests_unfinished", 0)
    running.until("kv_slots_reserved", 0)


def test_a_stop_token_is_the_last_of_the_answer(running: Running) -> None:
    parameters = {"model": "gpt", "prompt": "ab", "max_tokens": 30, "temperature": 1.0, "seed": 2}
    tokens = running.client.completions.create(**parameters).choices[0].token_ids
    extra_body = {"stop_token_ids": [tokens[8], 10**6], "ignore_eos": True}
    choice = running.client.completions.create(**parameters, extra_body=extra_body).choices[0]
    assert choice.token_ids == tokens[: tokens.index(tokens[8]) + 1] and choice.finish_reason == "stop"
    assert choice.text == decoded(choice.token_ids[:-1])  # what ends a text is no part of it


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": []}, "neither a text"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": [600]}, "token id 600 is not in the vocabulary of 512"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens=0"),
        ({"prompt": "a", "max_tokens": 2048}, "2048 positions"),
        ({"prompt": "a", "max_tokens": 2.0}, "max_tokens=2.0 is not a whole number of at least 1"),
        ({"prompt": "a", "n": 2}, "n=2 is not served"),
        ({"prompt": "a", "extra_body": {"stop_token_ids": [3, "b"]}}, "stop_token_ids=[3, 'b'] is no list of token ids"),
        ({"prompt": "a", "extra_body": {"stop_token_ids": 0}}, "stop_token_ids=0 is no list of token ids"),
        ({"prompt": "a", "extra_body": {"chat_template_kwargs": {"x": 1}}}, "'chat_template_kwargs' is not known here"),
        ({"prompt": "a", "extra_body": {"reasoning_effort": "low"}}, "reasoning_effort='low' is not served"),
        ({"prompt": "a", "stop": [""]}, "stop="),
        ({"prompt": "a", "temperature": -1}, "temperature=-1.0 is not from 0 to 2"),
        ({"prompt": "a", "temperature": 2.1}, "temperature=2.1 is not from 0 to 2"),
        ({"prompt": "a", "top_p": 0}, "top_p=0.0 is not above 0"),
        ({"prompt": "a", "top_p": 1.1}, "top_p=1.1 is not above 0 and up to 1"),
        ({"prompt": None}, "prompt is missing"),
        ({"prompt": "a", "seed": 2**64}, "is not an integer of 64 bits"),
        ({"prompt": "a", "seed": 1.5}, "seed=1.5 is not a whole number"),
        ({"prompt": "a", "stop": {}}, "stop={} is neither a text nor a list of texts"),
        ({"prompt": "a", "stop": False}, "stop=False is neither a text nor a list of texts"),
        ({"prompt": "a", "stop": ["z"] * 17}, "has more than 16 texts, or one of more than 1000 letters"),
        ({"prompt": "a", "stop": "z" * 1001}, "has more than 16 texts, or one of more than 1000 letters"),
        ({"prompt": [[1]] * 2049}, "prompt is a list of 2,049, and 2,048 are served at once"),
        ({"prompt": "a", "extra_body": {"use_beam_search": True}}, "use_beam_search=True is not served here"),
        ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty=0.5 is not served"),
        ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias="),
        ({"prompt": "a", "extra_body": {"top_k": 5}}, "top_k=5 is not served"),
        ({"prompt": "a", "extra_body": {"ignore_eos": "no"}}, "ignore_eos='no' is neither true nor false"),
        ({"prompt": "a", "extra_body": {"stream": "yes"}}, "stream='yes' is neither true nor false"),
        ({"prompt": "a", "extra_body": {"stream_options": 3}}, "stream_options=3"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "they need stream=true"),
        ({"prompt": "a", "stream_options": {}}, "stream_options are of a stream: they need stream=true"),
        (
            {"prompt": "a", "stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation=True is not served here",
        ),
        (
            {"prompt": "a", "stream_options": {"continuous_usage_stats": True}},
            "stream_options.'continuous_usage_stats' is not",
        ),
        ({"prompt": "a", "extra_body": {"typical_p": 0.5}}, "'typical_p' is not known here"),
        ({"prompt": "a", "extra_body": {"k" * 5000: 1}}, "kkk' is not known here"),
        ({"prompt": "a", "extra_body": {"messages": []}}, "'messages' is not known here"),
        ({"prompt": "a", "extra_body": {"max_completion_tokens": 3}}, "'max_completion_tokens' is not known here"),
        ({"prompt": "a", "echo": True}, "echo=True is not served here"),
        ({"prompt": "a", "logprobs": 2}, "logprobs=2 is not served here"),
        ({"prompt": "a", "extra_body": {"tool_choice": "required"}}, "tool_choice='required' is not served here"),
    ],
)
def test_a_body_that_asks_for_what_cannot_be_is_told_so(running: Running, body: dict[str, object], words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        running.client.completions.create(model="gpt", **body)  # type: ignore[call-overload]
    message = caught.value.body["message"]  # type: ignore[index, call-overload]
    assert words in message and "\n" not in message


def test_a_body_too_large_and_one_that_is_no_json_are_refused(running: Running) -> None:
    large, other = b'{"prompt":"%b"}' % (b"x" * (9 << 20)), b'{"prompt": "a", "model": "gpt_13b"}'
    for body, status in ((b"x" * 100, 400), (b"[1]", 400), (large, 413), (other, 404)):
        connection = http.client.HTTPConnection(urlsplit(running.address).netloc, timeout=SOON_S)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", body)
            response = connection.getresponse()
            message = json.loads(response.read())["error"]["message"]
            assert response.status == status and message and "\n" not in message


NESTED = b'{"prompt": %b1%b}'


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b'{"prompt": [1], "seed": 1e400}', {}),
        (b'{"prompt": [1], "temperature": NaN}', {}),
        (b'{"prompt": "\\ud800"}', {}),
        (b'{"prompt": "a"}', {"Content-Type": "application/json; charset=foo"}),
        (b'{"prompt": "a"}', {"Content-Encoding": "gzip"}),
        (NESTED % (b"[" * 900, b"]" * 900), {}),
        (NESTED % (b"[" * 50_000, b"]" * 50_000), {}),
        (b'{"prompt": "a", "n": ' + b"[" * 900 + b"]" * 900 + b"}", {}),
        (b'{"prompt": [1%b]}' % (b"0" * 5000), {}),
    ],
)
def test_whatever_a_body_is_its_refusal_is_one_line_of_json(running: Running, body: bytes, headers: dict[str, str]) -> None:
    connection = http.client.HTTPConnection(urlsplit(running.address).netloc, timeout=SOON_S)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"} | headers)
        response = connection.getresponse()
        error = json.loads(response.read())["error"]
        assert response.status == 400 and error["type"] == "invalid_request_error"
        assert 0 < len(error["message"]) < 400 and "\n" not in error["message"] and error["message"][-1] != ":"
    assert "Traceback" not in running.output.read_text()


@pytest.mark.parametrize("wish", [b'"model": null', b'"suffix": ""', b'"stop": ""', b'"max_tokens": null', b'"n": 1'])
def test_what_is_no_wish_is_answered(running: Running, wish: bytes) -> None:
    assert running.sent("POST", "/v1/completions", b'{"prompt": "a", %b}' % wish)[0] == 200


def test_a_stop_text_that_is_half_a_character_is_refused(running: Running) -> None:
    status, _, text = running.sent("POST", "/v1/completions", b'{"prompt": "a", "stop": ["b", "\\ud800"]}')
    assert status == 400 and "has half a character" in json.loads(text)["error"]["message"]


def test_each_event_of_a_stream_with_usage_has_the_key(running: Running) -> None:
    """As OpenAI has it: null in all but the last; without stream_options in none."""
    for options, values in ((b'{"include_usage": true}', [None, None, 3]), (b"null", ["none"] * 2)):
        body = b'{"prompt": "a", "max_tokens": 2, "stream": true, "stream_options": %b}' % options
        lines = running.sent("POST", "/v1/completions", body)[2].split("\n\n")
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
        usages = [event.get("usage", "none") for event in events]
        assert [usage["total_tokens"] if isinstance(usage, dict) else usage for usage in usages] == values


def test_other_paths(running: Running) -> None:
    assert [model.id for model in running.client.models.list()] == ["gpt"] == [running.client.models.retrieve("gpt").id]
    with pytest.raises(openai.NotFoundError, match="model 'other' is not served here, which is gpt"):
        running.client.models.retrieve("other")
    assert running.get("/health")[0] == 200
    for path, status in (("/nothing", 404), ("/v1/completions", 405)):
        answer = running.get(path)
        assert answer[0] == status and json.loads(answer[1])["error"]["type"] == "invalid_request_error"
    status, headers, _ = running.sent("PUT", "/v1/models")
    assert status == 405 and headers["Allow"] == "GET,HEAD"
    with pytest.raises(openai.NotFoundError, match="model 'other' is not served here, which is gpt"):
        running.client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        running.client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "a"}])


def test_a_client_that_goes_away_gives_its_slots_back(running: Running) -> None:
    num_before = running.metric("tokens_total")
    stream = running.client.completions.create(model="gpt", prompt="a", max_tokens=2000, stream=True)
    next(iter(stream))
    assert running.metric("kv_slots_reserved") == 2001 and running.metric("preemptions_total") == 0
    stream.close()
    running.until("kv_slots_reserved", 0)
    running.until("requests_unfinished", 0)
    assert running.metric("tokens_total") < num_before + 2000, "it was served to its end"


def test_a_client_that_goes_away_before_its_answer_gives_its_slots_back(running: Running) -> None:
    num_before = running.metric("tokens_total")
    connection = http.client.HTTPConnection(urlsplit(running.address).netloc, timeout=SOON_S)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 2040}))
    running.until("kv_slots_reserved", 2041)
    connection.close()
    running.until("kv_slots_reserved", 0)
    running.until("requests_unfinished", 0)
    assert running.metric("tokens_total") < num_before + 2040, "it was served to its end"


@pytest.mark.slow
def test_two_hundred_streams_at_once_are_each_that_of_its_prompt_alone(running: Running) -> None:
    """A client beside them that does not read loses nothing, and holds up nobody."""
    module = load_decoder("gpt", "cpu", "fp32", layers=1, hidden=64, heads=2)
    parameters = {"max_tokens": 8, "temperature": 0, "top_p": 0.3, "stream": True}

    async def streamed(client: openai.AsyncOpenAI, number: int) -> list[int]:
        stream = await client.completions.create(model="gpt", prompt=[number, 300], **parameters)
        return [token async for piece in stream for token in piece.choices[0].token_ids]

    async def all_streamed() -> list[list[int]]:
        async with openai.AsyncOpenAI(base_url=running.client.base_url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(streamed(client, number) for number in range(200)))

    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        address = urlsplit(running.address)
        slow.connect((address.hostname, address.port))
        body = b'{"prompt": "a", "max_tokens": 1500, "stream": true}'
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        tokens = asyncio.run(all_streamed())
        answer = http.client.HTTPResponse(slow)
        answer.begin()
        assert answer.read().count(b"data: ") == 1501
    assert tokens == [alone(module, Request(0, (number, 300), 8)) for number in range(200)]


def test_a_port_that_is_taken_is_one_line(running: Running, run_here: Run) -> None:
    port = urlsplit(running.address).port
    done = run_here("runner=serve", f"runner.port={port}", "system=orca", *MODEL)
    assert done.returncode == 2 and done.stderr.strip().splitlines() == [
        f"opweave: runner.port={port}: nothing can listen at 127.0.0.1:{port}: Address already in use"
    ]


def test_a_signal_lets_what_has_come_be_answered(running: Running) -> None:
    """The last test: the program ends."""
    stream = iter(running.client.completions.create(model="gpt", prompt="a", max_tokens=250, stream=True))
    tokens = list(next(stream).choices[0].token_ids)
    running.process.send_signal(signal.SIGTERM)
    with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
        for _ in range(100):  # until the signal has arrived
            running.client.completions.create(model="gpt", prompt="b", max_tokens=1)
    for piece in stream:
        tokens += piece.choices[0].token_ids
    assert len(tokens) == 250 and running.process.wait(SOON_S) == 0
    output = running.output.read_text()
    assert "Traceback" not in output and output.count("opweave: ending once 1 request more is answered") == 1
