"""What the load generator and the server say to each other: frames on a socket, each a kind, a length and a body."""

from __future__ import annotations

import json
import socket
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum

from systems.serving.request import Delivery

HEADER = struct.Struct("<BI")
MOST_BYTES = 1 << 20  # read at once


class Kind(IntEnum):
    """Of a frame."""

    PLAN = 1  # JSON, to the client: what to send, and when
    READY = 2  # from the client: it waits for GO
    GO = 3
    REQUEST = 4  # int32: id, most new tokens, the prompt
    TOKENS = 5  # int32, for each delivery: id, 1 for the last, how many, the tokens
    REPORT = 6  # JSON, from the client: what it saw; it wants nothing more


@dataclass(frozen=True)
class Plan:
    """What a client is to send.

    Args:
        arrivals: of each request when it is due, its prompt tokens, and the most new tokens.
        seed: of the prompts: two traces of one seed have the same.
        vocabulary: token ids are below it.
        concurrency: requests that are unfinished at a time; 0 sends each when it is due.
        shared_tokens: at the beginning of each prompt, the same in all.
    """

    arrivals: list[tuple[float, int, int]]
    seed: str
    vocabulary: int
    concurrency: int
    shared_tokens: int = 0


@dataclass(frozen=True)
class Report:
    """What a client saw, seconds since the trace began.

    Args:
        begin: of the trace, on the clock that all processes of the machine share.
        due_s, sent_s: when each request was to be sent, and when it was given to the socket or to what waits for it.
        token_s: when each token of each request came.
    """

    begin: float
    due_s: list[float]
    sent_s: list[float]
    token_s: list[list[float]]


class Closed(Exception):
    """The other side is gone."""


def framed(kind: Kind, body: bytes) -> bytes:
    """A frame."""
    return HEADER.pack(kind, len(body)) + body


def send(connection: socket.socket, kind: Kind, body: bytes = b"") -> None:
    """Raises Closed."""
    try:
        connection.sendall(framed(kind, body))
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Closed from error


def send_json(connection: socket.socket, kind: Kind, part: Plan | Report) -> None:
    """Raises Closed."""
    send(connection, kind, json.dumps(asdict(part)).encode())


def tokens_body(deliveries: Sequence[Delivery]) -> bytes:
    """Of a TOKENS frame."""
    body = array("i")
    for delivery in deliveries:
        body.extend((delivery.request_id, delivery.is_last, len(delivery.tokens), *delivery.tokens))
    return body.tobytes()


def numbers(body: bytes) -> array[int]:
    """The int32 numbers of a body."""
    read = array("i")
    read.frombytes(body)
    return read


class Frames:
    """Takes frames off a socket as they come."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.pending = bytearray()

    def receive(self) -> None:
        """Take what has come, waiting for something where the socket waits. Raises Closed."""
        try:
            received = self.connection.recv(MOST_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError as error:
            raise Closed from error
        if not received:
            raise Closed
        self.pending += received

    def whole(self) -> Iterator[tuple[Kind, bytes]]:
        """The frames that have come whole."""
        while len(self.pending) >= HEADER.size:
            kind, length = HEADER.unpack_from(self.pending)
            end = HEADER.size + length
            if len(self.pending) < end:
                return
            body = bytes(self.pending[HEADER.size : end])
            del self.pending[:end]
            yield Kind(kind), body

    def next(self) -> tuple[Kind, bytes]:
        """The next frame, waiting for it. Raises Closed."""
        while True:
            for frame in self.whole():
                return frame
            self.receive()
