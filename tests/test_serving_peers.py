"""Peers: transformers on our weights, and what is said where one is not installed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from serving_cells import OPTIONS
from test_serving_engine import SHAPE, alone, requests_of, telling
from torch import Tensor, nn

import systems
from models.exchange import as_transformers, pairs_of
from models.gpt import GPT
from results.cell import Cell, Conditions, choose
from runners.serving import session, traffic
from runners.serving.correctness import compared_peer, trials
from runners.serving.metrics import UNSEEN
from runners.serving.session import ServingSession
from systems.base import BadOption, Unsupported
from systems.peers.transformers import GeneratePeer
from systems.serving.loop import Listed, RealClock
from systems.serving.peer import PeerFailed, PeerServer
from systems.serving.request import Delivery, Request
from systems.serving.system import AnyServingSystem, Server

NAMES = ("transformers_continuous_batching", "transformers_generate")
LENGTHS = [(5, 6), (9, 3), (2, 6), (12, 1), (7, 5)]


def server_of(name: str, decoder: GPT, **options: int) -> PeerServer:
    system = systems.load(name, max_batch_size=3, **options)
    assert isinstance(system, AnyServingSystem)
    server = system.prepare_serving(decoder)
    assert isinstance(server, PeerServer)
    return server


def test_transformers_has_our_weights_and_our_logits() -> None:
    decoder = telling()
    theirs = as_transformers(decoder)
    tokens = torch.randint(SHAPE.vocabulary, (3, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, decoder(tokens), rtol=1e-10, atol=1e-10)
    assert {pair.ours for pair in pairs_of(decoder)} == {name for name, _ in decoder.named_parameters()}


def test_what_is_given_comes_back() -> None:
    decoder = telling()
    state = decoder.state_dict()
    for pair in pairs_of(decoder):
        ours = state[pair.ours][: SHAPE.vocabulary] if pair.ours == "tokens.weight" else state[pair.ours]
        assert torch.equal(pair.take(pair.give(state[pair.ours])), ours), pair.ours


@pytest.mark.parametrize("name", NAMES)
def test_a_peer_gives_each_request_its_own_tokens(name: str) -> None:
    decoder = telling(torch.float32)
    server = server_of(name, decoder)
    tokens: dict[int, list[int]] = {}
    last: list[int] = []

    def deliver(deliveries: list[Delivery], now_s: float) -> None:
        for delivery in deliveries:
            tokens.setdefault(delivery.request_id, []).extend(delivery.tokens)
            last.extend([delivery.request_id] * delivery.is_last)

    try:
        requests = [Request(r.id, r.prompt, r.max_new_tokens) for r in requests_of(LENGTHS)]
        server.serve(Listed(requests), deliver, RealClock())
        assert tokens == {request.id: alone(decoder, request) for request in requests}
        assert sorted(last) == [0, 1, 2, 3, 4]
        assert compared_peer(server, trials(decoder, LENGTHS[:3], 0), decoder, "fp32").is_correct
    finally:
        server.peer.close()


class Forgetful(GeneratePeer):
    """Its module is right, and what it serves is of another prompt."""

    def add(self, request: Request) -> None:
        super().add(Request(request.id, (request.prompt[0] ^ 1, *request.prompt[1:]), request.max_new_tokens))


class Short(GeneratePeer):
    """It leaves out a token."""

    def take(self) -> list[Delivery]:
        return [Delivery(d.request_id, d.tokens[1:], d.is_last) for d in super().take()]


@pytest.mark.parametrize(
    ("peer", "words"), [(Forgetful, "below the largest"), (Short, "tokens in the place of"), (None, "its logits are")]
)
def test_a_peer_that_serves_wrong_is_seen(peer: type[GeneratePeer] | None, words: str) -> None:
    decoder = telling(torch.float32)
    made_peer = (peer or GeneratePeer)(decoder, 3)
    if peer is None:
        with torch.no_grad():
            made_peer.module.transformer.wpe.weight.mul_(1.01)
        decoder = telling(torch.float32)  # of the same weights, which the module has changed
    judged = compared_peer(PeerServer(made_peer, (99, 40, 50)), trials(decoder, LENGTHS[:3], 0), decoder, "fp32")
    assert not judged.is_correct and words in str(judged.reason)


def test_a_peer_with_weights_of_its_own_is_compared_with_nothing() -> None:
    class Own(GeneratePeer):
        def logits(self, tokens: object) -> Tensor | None:  # type: ignore[override]
            return None

    decoder = telling(torch.float32)
    judged = compared_peer(PeerServer(Own(decoder, 3), (99, 40, 50)), trials(decoder, LENGTHS[:1], 0), decoder, "fp32")
    assert judged.is_correct and not judged.is_checked and "its weights are its own" in str(judged.reason)


def test_nobody_is_told_to_install_a_peer_that_is_refused_anyway() -> None:
    cell = Cell(choose("model", "gpt"), choose("system", "vllm"), choose("runner", "serve"), Conditions(1, "cpu", "fp32"))
    with pytest.raises(Unsupported, match=r"^vllm is measured as a peer: runner=serve has our own"):
        session.server_of(cell)


@pytest.mark.parametrize(("name", "library"), [("vllm", "vllm"), ("nano_vllm", "nanovllm")])
def test_a_peer_that_is_not_installed_says_what_to_install(name: str, library: str) -> None:
    reason = systems.load(name).unsupported("cpu")
    assert reason is not None and "\n" not in reason
    if find_spec(library) is None:
        assert "is not installed: pip install" in reason


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", ""])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(BadOption, match=r"system\.url="):
        systems.load("endpoint", url=url)


def test_where_nothing_answers_the_reason_says_so() -> None:
    system = systems.load("endpoint", url="http://127.0.0.1:9")
    assert isinstance(system, AnyServingSystem)
    with pytest.raises(Unsupported, match=r"nothing that speaks OpenAI's API answers at http://127\.0\.0\.1:9"):
        system.prepare_serving(telling())


KEY = "sk-of-nobody"


class Locked(BaseHTTPRequestHandler):
    """An endpoint that answers whoever has the key, and says in its errors which key it was given."""

    def _answer(self, status: int, document: object, **headers: str) -> None:
        body = document.encode() if isinstance(document, str) else json.dumps(document).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        given = self.headers["Authorization"]
        if given != f"Bearer {KEY}" or self.path != "/v1/models":
            return self._answer(401, f"wrong key {given} at {self.path}")
        return self._answer(200, {"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        said = f"{self.headers['Authorization']} has no credit"
        if prompt == [1]:
            return self._answer(429, said)
        if prompt == [2]:
            return self._answer(307, "", Location=self.path)  # for ever
        if prompt == [3]:
            return self._answer(200, f'data: {{"error": "{said}"}}\n\n')
        piece = 'data: {"error": null, "choices": [{"text": "a"}]}\n\n'
        return self._answer(200, piece + "data: [DONE]\n\n" * (prompt == [5]))

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def locked() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Locked) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("end", ["", "/v1/", *(pytest.param(end, marks=pytest.mark.slow) for end in ("/", "/v1"))])
def test_the_key_of_an_endpoint_is_sent_and_never_said(locked: str, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\n")
    system = systems.load("endpoint", url=locked + end)
    assert isinstance(system, AnyServingSystem)
    server = system.prepare_serving(telling())
    assert isinstance(server, PeerServer)
    for token, words in ((1, "answers 429"), (2, "TooManyRedirects"), (3, "fails a request"), (4, "breaks off")):
        with pytest.raises(PeerFailed, match=words) as caught:
            server.serve(Listed([Request(token, (token,), 1)]), lambda deliveries, now_s: None, RealClock())
        assert KEY not in str(caught.value)
    came: list[Delivery] = []
    server.serve(Listed([Request(5, (5,), 1)]), lambda deliveries, now_s: came.extend(deliveries), RealClock())
    assert came == [Delivery(5, (0,), False), Delivery(5, (), True)]
    server.peer.close()


def test_an_endpoint_without_its_key_is_unsupported(locked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    system = systems.load("endpoint", url=locked)
    assert isinstance(system, AnyServingSystem)
    with pytest.raises(Unsupported, match="401"):
        system.prepare_serving(telling())


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_is_served_by_a_peer_as_by_ours(name: str) -> None:
    """The real load generator sends it; what only a scheduler of ours knows has a reason in the place of a number."""
    model, system = choose("model", "gpt", layers=1, positions=64), choose("system", name, max_batch_size=3)
    cell = Cell(model, system, choose("runner", "serving", **OPTIONS), Conditions(1, "cpu", "fp32"))
    session = ServingSession(cell, "0", lambda phase: None)
    session.before_preparing()
    session.prepare()
    try:
        assert session.compare().is_correct
        served = session.serve()
    finally:
        assert isinstance(session.server, PeerServer)
        session.server.peer.close()
    (trace,) = served.traces
    assert [len(token_s) for token_s in trace.requests.token_s] == list(trace.requests.max_new_tokens)
    made = {quantity.name: quantity for quantity in served.quantities}
    assert made["request_throughput"].value and made["batch_size"].value is None and made["batch_size"].reason == UNSEEN
    assert made["queued_p50_ms"].value is None


def test_a_peers_slo_is_of_our_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that takes twice as long alone would else be held to an SLO twice as long."""
    model, system = (
        choose("model", "gpt", layers=1, positions=64),
        choose("system", "transformers_generate", max_batch_size=3),
    )
    cell = Cell(model, system, choose("runner", "capacity", **OPTIONS | {"steps": 1}), Conditions(1, "cpu", "fp32"))
    session = ServingSession(cell, "0", lambda phase: None)
    session.before_preparing()
    session.prepare()
    servers: list[object] = []
    run = traffic.run

    def seen(server: Server | PeerServer, *arguments: Any, **options: Any) -> Any:
        servers.append(server)
        return run(server, *arguments, **options)

    monkeypatch.setattr(traffic, "run", seen)
    assert isinstance(session.server, PeerServer)
    try:
        assert session.alone_ms(8, 4) > 0
        assert len(servers) == 1 and isinstance(servers[0], Server)
        monkeypatch.setattr(type(session.serving_system), "needs_weights", False)
        with pytest.raises(BadOption, match=r"system=transformers_generate keeps its weights: say an SLO, runner\.slo_ms="):
            session.alone_ms(8, 4)
    finally:
        session.server.peer.close()


def test_an_unknown_class_is_no_model_of_transformers() -> None:
    with pytest.raises(TypeError, match="Linear"):
        as_transformers(nn.Linear(2, 2))
