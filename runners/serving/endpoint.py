"""An endpoint as OpenAI's: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics. It needs aiohttp.

A client that goes away has its request cancelled. One whose headers do not come, or who does not read what comes, has its
connection closed. SIGTERM and SIGINT drain: what has come is answered, and nothing more is taken.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from conf.text import counted, first_line, named_line
from systems.serving.request import Delivery, Request, refusal
from systems.serving.system import Server

from .bridge import Bridge, Stopped
from .completion import BYTES, BadBody, Completion
from .text import REPLACED, Growing, Text
from .unread import end_unread

MOST_BYTES = 8 * 2**20  # of a request's body
BODY_S = 60.0  # for a body to come
HEADERS_S = 75.0  # for all headers of a request to come, on a new connection or after an answer; proxies wait 60 s
ENDING = "the server is shutting down"
SHUTDOWN_S = 5.0  # for clients that are slow to send or to read, once the engine has ended


class Endpoint:
    """Speaks HTTP for one server.

    Args:
        server: with nothing to do.
        model: the name that clients see.
        text: the model's.
        told: takes a line for whoever has started it.
    """

    def __init__(self, server: Server, model: str, text: Text = BYTES, told: Callable[[str], None] = lambda line: None):
        self.server, self.model, self.text, self.told, self.created = server, model, text, told, int(time.time())
        self.is_draining = False
        self.num_completions = 0
        self.error: BaseException | None = None
        self.told_of = ""  # the event loop

    async def run(self, listener: socket.socket, listening: Callable[[], None]) -> BaseException | None:
        """Serve until a signal, and drain; returns what stopped the engine, None where nothing did.

        Args:
            listener: where connections come.
            listening: told that they are taken.
        """
        self.ended = asyncio.Event()
        asyncio.get_running_loop().set_exception_handler(self._tell)
        self.bridge = Bridge(self.server, self._end)
        application = web.Application(client_max_size=MOST_BYTES, middlewares=[self._as_json])
        application.add_routes(
            [
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.chat),
                web.get("/v1/models", self.models),
                web.get("/v1/models/{name:.+}", self.model_of_name),
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
            ]
        )
        log = logging.Logger("http", logging.WARNING)
        log.addHandler(LineHandler(self.told))
        runner = web.AppRunner(
            application,
            handler_cancellation=True,
            logger=log,
            access_log=None,
            keepalive_timeout=HEADERS_S,  # of aiohttp 3.14.4 and later also of a connection's first request
            shutdown_timeout=SHUTDOWN_S,
        )
        await runner.setup()
        await web.SockSite(runner, listener).start()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.drain)
        listening()
        assert runner.server is not None, "it is set up"
        looking = asyncio.create_task(end_unread(runner.server))
        await self.ended.wait()
        looking.cancel()
        await runner.cleanup()  # answers that are being written have SHUTDOWN_S for their end
        return self.error

    def _tell(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Of what nobody waits for, such as a connection for which no file is left. A line that repeats is told once."""
        error = context.get("exception")
        line = context["message"] + (f": {named_line(error)}" if error else "")
        if line != self.told_of:
            self.told_of = line
            self.told(line)

    def drain(self) -> None:
        """Take nothing more; end when all is answered, and say how much that is. Once more ends nothing sooner."""
        if not self.is_draining:
            number = self.bridge.num_unanswered
            once = f" once {counted(number, 'request')} more {'is' if number == 1 else 'are'} answered" if number else ""
            self.told(f"ending{once}; new requests are refused")
        self.is_draining = True
        self.bridge.drain()

    @web.middleware
    async def _as_json(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """A path that is not there, a wrong method, a body too large and a handler's error are refused as all else is."""
        try:
            return await handler(request)
        except web.HTTPClientError as error:
            refused = _refused(error.text or error.reason, error.status)
            if "Allow" in error.headers:  # of a wrong method: those that are right
                refused.headers["Allow"] = error.headers["Allow"]
            return refused
        except Exception as error:
            if request.writer.output_size > 0:  # of an answer that has begun, aiohttp closes the connection
                raise
            self.told(f"{request.method} {request.path} fails: {named_line(error)}")
            return _refused(f"the server fails: {first_line(error)}", 500)

    def _end(self, error: BaseException | None) -> None:
        self.error = error
        self.ended.set()

    async def completions(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        return await self._completed(http, None)

    async def chat(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        if not self.text.has_chat_template:
            return _refused(f"model {self.model} has no chat template: /v1/completions takes a text or token ids", 400)
        return await self._completed(http, min(self.server.bounds[:2]))

    async def _completed(self, http: web.Request, room: int | None) -> web.StreamResponse:
        """room: tokens of a conversation and its answer; None where the body is no conversation."""
        try:
            if not self.is_draining:
                async with asyncio.timeout(BODY_S):
                    body = await http.json()
        except TimeoutError:
            refused = _refused(f"the body has not come within {BODY_S:.0f} s", 408)
            http.content.feed_eof()  # aiohttp would wait for the rest of it
            refused.force_close()
            return refused
        except (ValueError, LookupError, RecursionError, web.RequestPayloadError) as error:  # also of its encodings
            line = first_line(" ".join(str(error).split()) or error)  # aiohttp's are of two lines
            refused = _refused(f"the body is not JSON: {line}", 400)
            if isinstance(error, web.RequestPayloadError):
                http.content.feed_eof()  # aiohttp would read on, and log the same error
                refused.force_close()
            return refused
        if self.is_draining:  # by now
            return _refused(ENDING, 503)
        if isinstance(body, dict) and body.get("model") not in (None, self.model):
            other = f"model {shown(body['model'])} is not served here, which is {self.model}"
            return _refused(other, 404, "model_not_found")
        try:  # a long text takes a tokenizer seconds, in which others have their tokens
            completion, requests = await asyncio.to_thread(self._asked, body, room)
        except BadBody as error:
            return _refused(str(error), 400)
        if self.is_draining:  # by now
            return _refused(ENDING, 503)
        streams = [self._pieces(request, completion.stops) for request in requests]
        self.num_completions += 1
        kind = "chat.completion" if completion.is_chat else "text_completion"
        name = f"{'chatcmpl' if completion.is_chat else 'cmpl'}-{self.num_completions}"
        base: dict[str, object] = {"id": name, "object": kind, "created": int(time.time()), "model": self.model}
        if completion.is_streaming:
            return await self._streamed(http, streams, completion, base)
        try:
            wholes = await asyncio.gather(*map(_whole, streams))
        except Stopped as error:
            return _refused(str(error), 500)
        chosen = _message if completion.is_chat else _choice
        choices = [chosen(i, whole) for i, whole in enumerate(wholes)]
        usage = _usage(completion, sum(len(whole.tokens) for whole in wholes))
        return web.json_response(base | {"choices": choices, "usage": usage})

    def _asked(self, body: object, room: int | None) -> tuple[Completion, list[Request]]:
        """What a body asks for, and a request for each of its prompts. Raises BadBody where one can never be served."""
        completion = Completion.of(body, self.text, room)
        requests = [
            Request(-1, p, completion.max_tokens, sampling=completion.sampling_of(i), stop_tokens=completion.stop_tokens)
            for i, p in enumerate(completion.prompts)
        ]
        for request in requests:
            if reason := refusal(request, *self.server.bounds):
                raise BadBody(reason)
        return completion, requests

    async def _pieces(self, request: Request, stops: Sequence[str]) -> AsyncGenerator[Piece, None]:
        """What comes of a request. Where its client goes away, or a stop text comes, the request is cancelled."""
        queue = self.bridge.submit(request)
        growing = Growing(self.text)
        text = sent = ""
        try:
            while True:
                answer = await queue.get()
                if isinstance(answer, Stopped):
                    raise answer
                assert isinstance(answer, Delivery)
                is_stopped = answer.is_last and not request.stop_tokens.isdisjoint(answer.tokens[-1:])
                shown_tokens = answer.tokens[:-1] if is_stopped else answer.tokens  # as of a stop text, nothing is shown
                # A static batch gives all at once: what comes after a stop text is no part of the answer.
                step = 1 if stops else len(shown_tokens)
                for at in range(0, len(shown_tokens), step or 1):
                    text = growing.more(shown_tokens[at : at + step])
                    if (end := _first(text, stops)) is not None:
                        yield Piece(text[len(sent) : end], answer.tokens[: at + step], "stop")
                        return
                # What may be the beginning of a character, or of a stop text, waits for the rest of it.
                whole = text if answer.is_last else text[: len(text) - _unsure(text, stops)]
                reason = "stop" if is_stopped else "length" if answer.is_last else None
                yield Piece(whole[len(sent) :], answer.tokens, reason)
                sent = whole
                if answer.is_last:
                    return
        finally:
            self.bridge.give_up(request.id)

    async def _streamed(
        self,
        http: web.Request,
        streams: list[AsyncGenerator[Piece, None]],
        completion: Completion,
        base: dict[str, object],
    ) -> web.StreamResponse:
        """Server-sent events, one for each piece of any choice. base: what all of them have."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)
        num_new = 0
        writing = asyncio.Lock()  # aiohttp lets each choice but one write on where the client does not read
        if completion.is_chat:
            base = base | {"object": "chat.completion.chunk"}
        if completion.has_usage:  # each event has the key, the last one its value
            base = base | {"usage": None}

        async def send(document: dict[str, object] | str) -> None:
            text = document if isinstance(document, str) else json.dumps(document)
            async with writing:
                await response.write(f"data: {text}\n\n".encode())

        async def forward(index: int, stream: AsyncGenerator[Piece, None]) -> None:
            nonlocal num_new
            role = {"role": "assistant"}  # of the first delta alone: clients put deltas together
            async with aclosing(stream):
                async for piece in stream:
                    num_new += len(piece.tokens)
                    choice = _delta(index, piece, role) if completion.is_chat else _choice(index, piece)
                    role = {}
                    await send(base | {"choices": [choice]})

        forwarding = [asyncio.create_task(forward(index, stream)) for index, stream in enumerate(streams)]
        try:
            await asyncio.gather(*forwarding)
            if completion.has_usage:
                await send(base | {"choices": [], "usage": _usage(completion, num_new)})
        except Stopped as error:
            await send({"error": {"message": str(error), "type": "server_error"}})
        finally:  # where a client is gone, of all its choices
            for task in forwarding:
                task.cancel()
        await send("[DONE]")
        await response.write_eof()
        return response

    async def models(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/models."""
        return web.json_response({"object": "list", "data": [self._about()]})

    async def model_of_name(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/models/NAME."""
        if (name := http.match_info["name"]) != self.model:
            return _refused(f"model {shown(name)} is not served here, which is {self.model}", 404, "model_not_found")
        return web.json_response(self._about())

    def _about(self) -> dict[str, object]:
        return {"id": self.model, "object": "model", "created": self.created, "owned_by": "opweave"}

    async def health(self, http: web.Request) -> web.StreamResponse:
        """GET /health: 200 while requests are taken."""
        return web.Response(status=503 if self.is_draining else 200)

    async def metrics(self, http: web.Request) -> web.StreamResponse:
        """GET /metrics, in Prometheus's text format."""
        totals, scheduler = self.bridge.totals, self.server.scheduler
        values = {
            "requests_total": ("counter", "requests that have come", self.bridge.num_requests),
            "requests_unfinished": ("gauge", "requests that are not finished", len(self.bridge.answers)),
            "requests_waiting": ("gauge", "requests that have never been scheduled", scheduler.num_waiting),
            "preemptions_total": ("counter", "times that a request gave up its slots", scheduler.num_preempted),
            "iterations_total": ("counter", "iterations that have returned", totals.num_iterations),
            "tokens_total": ("counter", "tokens computed", totals.num_tokens),
            "useful_tokens_total": ("counter", "tokens computed that a request needed", totals.num_useful),
            "kv_slots": ("gauge", "K/V slots", self.server.num_slots),
            "kv_slots_reserved": ("gauge", "K/V slots that requests hold", scheduler.num_reserved),
        }
        lines = [
            f"# HELP opweave_{name} {help_}\n# TYPE opweave_{name} {kind}\nopweave_{name} {value}\n"
            for name, (kind, help_, value) in values.items()
        ]
        return web.Response(text="".join(lines), content_type="text/plain")


class LineHandler(logging.Handler):
    """Tells in a line each what aiohttp logs, such as of a request that is no HTTP.

    Args:
        told: takes the lines.
    """

    def __init__(self, told: Callable[[str], None]):
        super().__init__()
        self.told = told

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.told(" ".join(record.getMessage().split()) + (f": {named_line(error)}" if error else ""))


@dataclass(frozen=True)
class Piece:
    """What comes at a time. reason: why it is the last, "stop" or "length"; None where it is not."""

    text: str
    tokens: tuple[int, ...]
    reason: str | None


async def _whole(stream: AsyncGenerator[Piece, None]) -> Piece:
    """All pieces in one."""
    async with aclosing(stream):
        pieces = [piece async for piece in stream]
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    return Piece("".join(piece.text for piece in pieces), tokens, pieces[-1].reason)


def _choice(index: int, piece: Piece) -> dict[str, object]:
    texts = {"text": piece.text, "token_ids": piece.tokens, "finish_reason": piece.reason}
    return {"index": index, "logprobs": None, **texts}


def _message(index: int, piece: Piece) -> dict[str, object]:
    message = {"role": "assistant", "content": piece.text}
    return {"index": index, "logprobs": None, "message": message, "finish_reason": piece.reason}


def _delta(index: int, piece: Piece, role: dict[str, str]) -> dict[str, object]:
    delta = role | {"content": piece.text}
    return {"index": index, "logprobs": None, "delta": delta, "finish_reason": piece.reason}


def _first(text: str, stops: Sequence[str]) -> int | None:
    """Where the first of the stop texts begins."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)


def _unsure(text: str, stops: Sequence[str]) -> int:
    """Letters at the end of a text that what comes next may change: half a character, half a stop text, or both."""
    whole = text.rstrip(REPLACED)
    begins = (len(known) - _begun(known, stop) for known in (text, whole) for stop in stops)
    return len(text) - min([len(whole), *begins])


def _begun(text: str, stop: str) -> int:
    """The most letters, not all, of a stop text's beginning that a text ends with."""
    count = min(len(stop) - 1, len(text))
    while count > 0 and not text.endswith(stop[:count]):
        count = stop.rfind(text[-1], 0, count - 1) + 1  # the last of them is the text's last
    return count


def _usage(completion: Completion, num_new: int) -> dict[str, int]:
    num_prompt = sum(map(len, completion.prompts))
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


def _refused(message: str, status: int, code: str | None = None) -> web.Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return web.json_response({"error": {"message": message, "type": kind, "param": None, "code": code}}, status=status)
