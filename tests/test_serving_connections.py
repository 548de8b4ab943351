"""Connections to an endpoint: slow, broken, too many, and at its end."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from served_endpoint import SOON_S, Running

import systems
from models.decoders import load_decoder
from runners.serving.text import Bytes, Text
from systems.serving.system import ServingSystem

pytest.importorskip("aiohttp", reason="the endpoint needs aiohttp")
openai = pytest.importorskip("openai", reason="it is tested with OpenAI's client")

from runners.serving.endpoint import Endpoint  # noqa: E402


def spoken_to(
    text: Text, client: Callable[[Endpoint, socket.socket], None], choice: str = "orca", buffer_bytes: int = 0
) -> list[str]:
    """Serves the small model while a client speaks, in a thread of its own; what the endpoint tells.

    Args:
        text: the model's.
        client: takes the endpoint and a connection to it.
        choice: of the system.
        buffer_bytes: what the system is to buffer of what a client has not read, about; 0 is what it likes.
    """
    system = systems.load(choice)
    assert isinstance(system, ServingSystem)
    lines: list[str] = []
    server = system.prepare_serving(load_decoder("gpt", "cpu", "fp32", layers=1, hidden=64, heads=2))
    endpoint = Endpoint(server, "gpt", text, lines.append)

    async def both() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            if buffer_bytes:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
            listening = asyncio.Event()
            serving = asyncio.create_task(endpoint.run(listener, listening.set))
            await listening.wait()
            with socket.create_connection(listener.getsockname(), timeout=SOON_S) as connection:
                await asyncio.to_thread(client, endpoint, connection)
                endpoint.drain()
                assert await serving is None

    asyncio.run(both())
    return lines


def head(number: int) -> bytes:
    """Of a body of so many bytes; the endpoint answers 100 once it reads it."""
    return f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: {number}\r\n\r\n".encode()


def begin_body(connection: socket.socket) -> None:
    """Send a head, and of the body of 100 bytes the first."""
    connection.sendall(head(100))
    assert connection.recv(100).startswith(b"HTTP/1.1 100")
    connection.sendall(b"{")


def test_half_a_body_holds_the_end_up_for_a_moment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runners.serving.endpoint.SHUTDOWN_S", 0.2)

    def client(endpoint: Endpoint, connection: socket.socket) -> None:
        begin_body(connection)

    begun = time.monotonic()
    assert spoken_to(Bytes(), client) == ["ending; new requests are refused"]
    assert time.monotonic() - begun < SOON_S


def test_a_body_that_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runners.serving.endpoint.BODY_S", 0.2)

    def client(endpoint: Endpoint, connection: socket.socket) -> None:
        begin_body(connection)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 408 and "has not come within" in json.loads(answer.read())["error"]["message"]
        assert connection.recv(1) == b""

    assert spoken_to(Bytes(), client) == ["ending; new requests are refused"]


@pytest.mark.parametrize("first", [b"", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"])
def test_headers_that_do_not_end_have_their_connection_closed(first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """first: a request that is answered on the same connection."""
    monkeypatch.setattr("runners.serving.endpoint.HEADERS_S", 0.4)

    def client(endpoint: Endpoint, connection: socket.socket) -> None:
        connection.sendall(first)
        if first:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        connection.settimeout(0.05)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nX: ")
        deadline = time.monotonic() + SOON_S
        while time.monotonic() < deadline:  # a letter now and then, which begins no time anew
            try:
                assert connection.recv(1) == b""
                return
            except TimeoutError:
                connection.sendall(b"a")
            except (BrokenPipeError, ConnectionResetError):
                return
        raise AssertionError("the connection is still open")

    assert spoken_to(Bytes(), client) == ["ending; new requests are refused"]


@pytest.mark.slow
def test_an_answer_takes_longer_than_headers_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a connection's first request and on its next."""
    monkeypatch.setattr("runners.serving.endpoint.HEADERS_S", 0.1)

    def client(endpoint: Endpoint, connection: socket.socket) -> None:
        http_connection = http.client.HTTPConnection(*connection.getpeername(), timeout=SOON_S)
        with contextlib.closing(http_connection):
            http_connection.connect()
            opened = http_connection.sock
            for _ in range(2):
                begun = time.monotonic()
                http_connection.request("POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 1500, "stream": true}')
                assert http_connection.getresponse().read().endswith(b"data: [DONE]\n\n")
                assert http_connection.sock is opened and time.monotonic() - begun > 2 * 0.1

    spoken_to(Bytes(), client)


def test_a_body_that_is_complete_after_the_signal_is_refused() -> None:
    """While another request is answered to its end."""

    def client(endpoint: Endpoint, connection: socket.socket) -> None:
        body = b'{"prompt": "a", "max_tokens": 1}'
        connection.sendall(head(len(body)))
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        connection.sendall(body[:9])
        other = http.client.HTTPConnection(*connection.getpeername(), timeout=SOON_S)
        with contextlib.closing(other):
            other.request("POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 1000, "stream": true}')
            streamed = other.getresponse()
            endpoint.bridge.events.call_soon_threadsafe(endpoint.drain)
            while not endpoint.is_draining:
                time.sleep(0.01)
            connection.sendall(body[9:])
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert answer.status == 503 and "is shutting down" in json.loads(answer.read())["error"]["message"]
            assert streamed.read().endswith(b"data: [DONE]\n\n")

    spoken_to(Bytes(), client)


def test_what_is_no_http_is_one_line() -> None:
    def client(endpoint: Endpoint, connection: socket.socket) -> None:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.0 400")

    line, _ = spoken_to(Bytes(), client)
    assert line.startswith(
        "Error handling request from 127.0.0.1: BadHttpMessage: 400, message: Invalid character in Content-Length"
    )


def test_an_error_of_the_server_is_json_and_one_line() -> None:
    class Failing(Bytes):
        def encoded(self, text: str) -> tuple[int, ...]:
            raise OSError("the vocabulary\nis gone")

    def client(endpoint: Endpoint, connection: socket.socket) -> None:
        user = openai.OpenAI(
            base_url="http://{}:{}/v1".format(*connection.getpeername()), api_key="none", max_retries=0, timeout=SOON_S
        )
        with user, pytest.raises(openai.InternalServerError) as caught:
            user.completions.create(model="gpt", prompt="a")
        error = {"message": "the server fails: the vocabulary", "type": "server_error", "param": None, "code": None}
        assert caught.value.status_code == 500 and caught.value.body == error

    line = spoken_to(Failing(), client)[0]
    assert line == "POST /v1/completions fails: OSError: the vocabulary is gone"


def test_a_long_text_holds_up_no_stream() -> None:
    """Its tokenizer ends only once a stream beside it has."""
    has_streamed = threading.Event()

    class Slow(Bytes):
        def encoded(self, text: str) -> tuple[int, ...]:
            assert text != "long" or has_streamed.wait(SOON_S), "the stream has waited for the tokenizer"
            return super().encoded(text)

    def client(endpoint: Endpoint, connection: socket.socket) -> None:
        def asked(prompt: str) -> http.client.HTTPConnection:
            other = http.client.HTTPConnection(*connection.getpeername(), timeout=2 * SOON_S)
            other.request("POST", "/v1/completions", json.dumps({"prompt": prompt, "max_tokens": 40, "stream": True}))
            return other

        with contextlib.closing(asked("long")) as long, contextlib.closing(asked("a")) as short:
            assert short.getresponse().read().count(b"data: ") == 41
            assert endpoint.num_completions == 1
            has_streamed.set()
            assert long.getresponse().read().count(b"data: ") == 41

    assert spoken_to(Slow(), client) == ["ending; new requests are refused"]


def test_what_is_tokenized_when_the_signal_comes_is_refused() -> None:
    """It is not lost, as one that the engine takes no more."""
    begun, has_drained = threading.Event(), threading.Event()

    class Slow(Bytes):
        def encoded(self, text: str) -> tuple[int, ...]:
            begun.set()
            assert has_drained.wait(SOON_S)
            return super().encoded(text)

    def client(endpoint: Endpoint, connection: socket.socket) -> None:
        other = http.client.HTTPConnection(*connection.getpeername(), timeout=SOON_S)
        with contextlib.closing(other):
            other.request("POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 1}')
            assert begun.wait(SOON_S)
            endpoint.bridge.events.call_soon_threadsafe(endpoint.drain)
            endpoint.bridge.thread.join(SOON_S)
            has_drained.set()
            answer = other.getresponse()
            assert answer.status == 503 and "is shutting down" in json.loads(answer.read())["error"]["message"]

    spoken_to(Slow(), client)


@pytest.mark.parametrize(("few", "most", "lines"), [(90, 90, 1), (90, 1000, 0)])
@pytest.mark.slow
def test_more_connections_than_files_wait_and_are_told_of_in_a_line(tmp_path: Path, few: int, most: int, lines: int) -> None:
    """The limit is raised as far as the system lets it be."""
    running = Running(tmp_path, limits=(few, most))
    address = urlsplit(running.address)
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(150):
                stack.enter_context(socket.create_connection((address.hostname, address.port), timeout=SOON_S))
            if not lines:
                assert running.get("/health")[0] == 200
            deadline = time.monotonic() + SOON_S
            while running.output.read_text().count("accept() out of system resource: OSError: ") < lines:
                assert time.monotonic() < deadline, running.output.read_text()
                time.sleep(0.05)
        assert len(running.tokens(prompt=[1], max_tokens=2)) == 2
        said = running.output.read_text()
        assert "Traceback" not in said and said.count("accept() out of system resource") == lines
        assert said.count("1000 files may be open at once in place of 90: a connection is one") == 1 - lines
    finally:
        running.process.kill()
        running.process.wait()
