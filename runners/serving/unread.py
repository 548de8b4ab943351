"""Ends connections whose clients do not read.

What a client has not read waits in this process once the system's buffers are full. Where none of it has gone for LIMIT_S,
the connection is closed. Whatever it asks for is cancelled then, as where a client goes away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

LIMIT_S = 60.0  # without a byte that goes; proxies wait as long
LOOK_S = 1.0  # between two looks


@dataclass(frozen=True)
class Unread:
    """Of a connection. num_bytes: that wait for its client. since_s: when their number was another."""

    transport: asyncio.Transport
    num_bytes: int
    since_s: float


async def end_unread(server: web.Server) -> None:
    """Look at all connections of a server, until it is cancelled."""
    unread: dict[web.RequestHandler, Unread] = {}
    while True:
        await asyncio.sleep(LOOK_S)
        unread = looked_at(server.connections, unread, asyncio.get_running_loop().time())


def looked_at(
    connections: Sequence[web.RequestHandler], before: dict[web.RequestHandler, Unread], now_s: float
) -> dict[web.RequestHandler, Unread]:
    """What waits by now; a connection of which nothing has gone for too long is closed. before: of the last look."""
    after = {}
    for connection in connections:
        known = before.get(connection)
        transport = connection.transport or (known.transport if known else None)  # aiohttp forgets one that it closes
        if transport is None:
            continue
        num_bytes = transport.get_write_buffer_size()
        if known is None or not num_bytes or num_bytes != known.num_bytes:
            known = Unread(transport, num_bytes, now_s)
        elif now_s - known.since_s >= LIMIT_S:
            transport.abort()
            continue
        after[connection] = known
    return after
