"""Any server that speaks OpenAI's completions, by its URL: our load against whatever answers there. It needs aiohttp."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import threading
from importlib.util import find_spec
from urllib.parse import urlsplit

from conf.text import named_line
from systems.base import BadOption, Unsupported
from systems.serving.engine import Decoder
from systems.serving.peer import Peer, PeerFailed, PeerServer
from systems.serving.request import Delivery, Request
from systems.serving.system import AnyServingSystem, not_below

WAIT_S = 0.05  # for a token
KEY = "OPENAI_API_KEY"  # of the environment, where the server asks for one: no record and no message has it
CONNECT_S = 10.0  # for the server to accept a connection
UNKNOWN = 0  # the id of a token that the server shows as text alone


class Endpoint(AnyServingSystem):
    """A server that somebody else has started.

    Args:
        url: of it, with /v1 or without.
        served_model: the name by which it knows its model; none takes the first that it lists.
        max_batch_size: requests that are under way at once, at most.
    """

    name = "endpoint"
    needs_weights = False

    def __init__(self, url: str = "http://127.0.0.1:8000", served_model: str = "", max_batch_size: int = 256):
        not_below("max_batch_size", max_batch_size, 1)
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise BadOption(f"system.url={url} is no address of a server, as http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self.served_model, self.max_batch_size = served_model, max_batch_size

    def unsupported(self, device: str) -> str | None:
        if find_spec("aiohttp") is None:
            return "an endpoint is spoken to with aiohttp, which is not installed: pip install 'opweave[serving]'"
        return None

    def prepare_serving(self, decoder: Decoder) -> PeerServer:
        shape = decoder.shape
        peer = HttpPeer(self.url, self.served_model, self.max_batch_size)
        return PeerServer(peer, (self.max_batch_size * shape.positions, shape.positions, shape.vocabulary))


class HttpPeer(Peer):
    """Streams completions in a thread of its own. Raises Unsupported where nothing answers."""

    def __init__(self, url: str, model: str, num_connections: int):
        self.url, self.num_connections, self.key = url, num_connections, os.environ.get(KEY, "").strip()
        self.came: queue.SimpleQueue[Delivery | PeerFailed] = queue.SimpleQueue()
        self.events = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.events.run_forever, name="endpoint", daemon=True)
        self.thread.start()
        try:
            listed = asyncio.run_coroutine_threadsafe(self._open(), self.events).result()
        except Exception as error:  # whatever keeps it from answering
            self.close()
            why = self._shown(named_line(error))
            raise Unsupported(f"nothing that speaks OpenAI's API answers at {url}: {why}") from error
        self.model = model or listed

    async def _open(self) -> str:
        """The first model that the server lists."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)  # a wait for others to end has no limit
        connector = aiohttp.TCPConnector(limit=self.num_connections)
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else None
        self.session = aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers)
        async with self.session.get(f"{self.url}/v1/models") as response:
            response.raise_for_status()
            return str((await response.json())["data"][0]["id"])

    def add(self, request: Request) -> None:
        asyncio.run_coroutine_threadsafe(self._complete(request), self.events)

    async def _complete(self, request: Request) -> None:
        body = {
            **{"model": self.model, "prompt": list(request.prompt), "max_tokens": request.max_new_tokens},
            **{"temperature": 0, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}},
        }
        num_tokens, num_said, is_whole = 0, 0, False
        try:
            async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
                if response.status != 200:
                    text = await response.text()
                    raise PeerFailed(f"{self.url} answers {response.status}: {self._shown(text)[:200]}")
                async for line in response.content:
                    event = line.decode().removeprefix("data:").strip()
                    is_whole |= event == "[DONE]"
                    if not event or event == "[DONE]":
                        continue
                    document = json.loads(event)
                    if document.get("error"):
                        raise PeerFailed(f"{self.url} fails a request: {self._shown(str(document['error']))}")
                    num_said = (document.get("usage") or {}).get("completion_tokens", num_said)
                    for choice in document.get("choices") or ():
                        # a piece without ids is of one token, as servers send them; the last says how many there were
                        tokens = tuple(choice.get("token_ids") or ((UNKNOWN,) if choice.get("text") else ()))
                        num_tokens += len(tokens)
                        if tokens:
                            self.came.put(Delivery(request.id, tokens, False))
            if not is_whole:
                raise PeerFailed(f"{self.url} breaks off a stream after {num_tokens} tokens")
            missing = max(num_said - num_tokens, 0 if num_tokens else 1)
            self.came.put(Delivery(request.id, (UNKNOWN,) * missing, True))
        except Exception as error:  # it is raised where the loop waits
            failed = PeerFailed(f"{self.url}: {self._shown(named_line(error))}")  # repr would show the headers
            self.came.put(error if isinstance(error, PeerFailed) else failed)

    def _shown(self, text: str) -> str:
        """A text without the key, which a server may say."""
        return text.replace(self.key, "[key]") if self.key else text

    def take(self) -> list[Delivery]:
        deliveries: list[Delivery] = []
        try:
            deliveries.append(self._checked(self.came.get(timeout=WAIT_S)))
            while True:
                deliveries.append(self._checked(self.came.get_nowait()))
        except queue.Empty:
            return deliveries

    def _checked(self, came: Delivery | PeerFailed) -> Delivery:
        if isinstance(came, PeerFailed):
            raise came
        return came

    def close(self) -> None:
        async def close() -> None:
            if hasattr(self, "session"):
                await self.session.close()

        asyncio.run_coroutine_threadsafe(close(), self.events).result()
        self.events.call_soon_threadsafe(self.events.stop)
        self.thread.join()
