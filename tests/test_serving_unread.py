"""Clients of the endpoint that read late, or never: real sockets, whose buffers are small."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

pytest.importorskip("aiohttp", reason="the endpoint needs aiohttp")
pytest.importorskip("openai", reason="it is tested with OpenAI's client")

from aiohttp import web
from served_endpoint import SOON_S
from test_serving_connections import spoken_to

from runners.serving import unread
from runners.serving.endpoint import Endpoint
from runners.serving.text import Bytes

BUFFER_BYTES = 4096
NUM_PROMPTS, LIMIT_S = 16, 0.5


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runners.serving.unread.LIMIT_S", LIMIT_S)
    monkeypatch.setattr("runners.serving.unread.LOOK_S", LIMIT_S / 10)


def asked(connection: socket.socket, body: dict[str, object], headers: str = "") -> socket.socket:
    """Another client, that has asked and read nothing."""
    text = json.dumps({"prompt": [[number] for number in range(NUM_PROMPTS)], **body})
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    client.settimeout(SOON_S)
    client.connect(connection.getpeername())
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\n{headers}Content-Length: {len(text)}\r\n\r\n"
    client.sendall((head + text).encode())
    return client


def read_whole(client: socket.socket, pause_s: float = 0.0) -> bytes:
    """What comes until the connection is closed. pause_s: before each look at it."""
    pieces = []
    while piece := client.recv(1 << 15):
        pieces.append(piece)
        time.sleep(pause_s)
    return b"".join(pieces)


def is_open(client: socket.socket) -> bool:
    """Has this process the server's end of a connection still?"""
    port = client.getsockname()[1]
    return any(there.raddr and there.raddr.port == port for there in psutil.Process().net_connections("tcp"))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_stream_that_nobody_reads_is_cancelled_and_its_connection_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before its last token, however many choices are written to the connection."""
    most_bytes, look = 0, unread.looked_at

    def looked_at(*arguments: Any) -> dict[Any, unread.Unread]:
        nonlocal most_bytes
        after = look(*arguments)
        most_bytes = max([most_bytes, *(waiting.num_bytes for waiting in after.values())])
        return after

    monkeypatch.setattr(unread, "looked_at", looked_at)

    def client(endpoint: Endpoint, connection: socket.socket) -> None:
        with asked(connection, {"max_tokens": 2000, "stream": True}) as slow:
            wait_until(lambda: endpoint.server.scheduler.num_reserved > 0)
            assert is_open(slow)
            wait_until(lambda: not is_open(slow))
            wait_until(lambda: not endpoint.bridge.answers and endpoint.server.scheduler.num_reserved == 0)
        assert endpoint.bridge.totals.num_tokens < NUM_PROMPTS * 2000
        assert 0 < most_bytes < 3 << 16

    spoken_to(Bytes(), client, buffer_bytes=BUFFER_BYTES)


@pytest.mark.parametrize("headers", ["", "Connection: close\r\n"])
def test_an_answer_that_nobody_reads_is_not_kept(headers: str) -> None:
    def client(endpoint: Endpoint, connection: socket.socket) -> None:
        with asked(connection, {"max_tokens": 150}, headers) as slow:
            wait_until(lambda: endpoint.bridge.num_requests == NUM_PROMPTS)
            wait_until(lambda: not is_open(slow))
            assert not endpoint.bridge.answers

    spoken_to(Bytes(), client, buffer_bytes=BUFFER_BYTES)


def test_whoever_reads_slowly_has_the_whole_answer() -> None:
    def client(endpoint: Endpoint, connection: socket.socket) -> None:
        with asked(connection, {"max_tokens": 50, "stream": True}, "Connection: close\r\n") as slow:
            begun = time.monotonic()
            text = read_whole(slow, pause_s=0.1)
            assert time.monotonic() - begun > 2 * LIMIT_S
        assert text.count(b"data: ") == 50 * NUM_PROMPTS + 1

    spoken_to(Bytes(), client, buffer_bytes=BUFFER_BYTES)


def test_where_one_choice_cannot_be_written_no_other_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more choices than a batch has rows. The connection breaks at a write."""
    indexes, write = list[int](), web.StreamResponse.write

    async def breaking(response: web.StreamResponse, text: bytes) -> None:
        indexes.append(json.loads(text.removeprefix(b"data: "))["choices"][0]["index"])
        if len(indexes) == 100:
            raise ConnectionResetError
        await write(response, text)

    monkeypatch.setattr(web.StreamResponse, "write", breaking)

    def client(endpoint: Endpoint, connection: socket.socket) -> None:
        with asked(connection, {"prompt": ["a"] * 200, "max_tokens": 1000, "stream": True}) as broken:
            assert 99 <= read_whole(broken).count(b"data: ") < 300
            wait_until(lambda: not endpoint.bridge.answers and endpoint.server.scheduler.num_reserved == 0)
            assert endpoint.bridge.num_requests == 200

    spoken_to(Bytes(), client)
    assert max(indexes) < 64
