"""Qwen3 and T5: the engine beside transformers' own classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from test_serving_engine import GPU, requests_of
from test_serving_kernels import fused_differs

import systems
from conf import options
from models.decoders import AnyDecoder, continued, draw, load_decoder
from models.exchange import as_transformers, config_of, decoder_of, pairs_of
from models.qwen3 import Qwen3, Qwen3Shape
from models.t5_generation import T5Generation, T5Shape, bucket
from runners.serving.correctness import ForcedEngine, compared, trials
from runners.serving.session import warm_up
from systems.base import Unsupported
from systems.serving.engine import LocalEngine
from systems.serving.loop import Listed, RealClock
from systems.serving.request import Delivery, Request
from systems.serving.system import Server, ServingSystem

QWEN3 = Qwen3Shape(layers=2, hidden=32, heads=4, kv_heads=2, head_size=12, inner=48, positions=48, vocabulary=50)
T5 = T5Shape(2, 32, 4, 12, 48, positions=48, vocabulary=50, buckets=8, distance=16, start_token=3)
SHAPES = {
    "qwen3": QWEN3,
    "qwen3, untied": Qwen3Shape(2, 32, 4, 1, 12, 48, 48, 50, is_tied=False),
    "t5": T5,
    "t5, gated": T5Shape(2, 32, 4, 12, 48, 48, 50, 8, 16, is_gated=True),
}
KINDS: dict[str, dict[str, object]] = {
    "orca": {},
    "orca, paged": {"block_size": 4},
    "orca, asynchronous": {"asynchronous": True},
    "orca, preempting": {"block_size": 2, "preemption": "recompute", "slots": 30},
    "request_level, ragged": {"batching": "ragged"},
}
DECODER_KINDS: dict[str, dict[str, object]] = {
    "orca, chunked": {"block_size": 4, "max_num_batched_tokens": 5},
    "orca, prefixes": {"block_size": 2, "prefix_caching": True},
    "request_level, padded": {"batching": "padded"},
    "request_level": {},
}
SIZES = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6)), min_size=1, max_size=4)


def made(shape: Qwen3Shape | T5Shape, dtype: torch.dtype = torch.float64) -> Qwen3 | T5Generation:
    """A decoder whose next token depends on all before it."""
    module = Qwen3(shape) if isinstance(shape, Qwen3Shape) else T5Generation(shape)
    module = module.to(dtype).eval().requires_grad_(False)
    draw(module)
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:  # the last token is repeated where its embedding is as large as what is added to it
            parameter.mul_(2 if name == "tokens.weight" else 12)
    return module


MODULES = {name: made(shape) for name, shape in SHAPES.items()}


def alone(module: AnyDecoder, request: Request) -> list[int]:
    """Greedy generation of one request without any cache."""
    tokens: list[int] = []
    for _ in range(request.max_new_tokens):
        tokens.append(int(continued(module, request.prompt, [*tokens, 0], None)[-1].argmax()))
    return tokens


def server_of(kind: str, module: AnyDecoder) -> Server:
    choices = {**KINDS, **DECODER_KINDS}[kind]
    system = systems.load(kind.partition(",")[0], **{"slots": 150, "max_batch_size": 3, **choices})  # type: ignore[arg-type]
    assert isinstance(system, ServingSystem)
    return system.prepare_serving(module)


def tokens_of(server: Server, requests: Sequence[Request]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}

    def deliver(deliveries: Sequence[Delivery], now_s: float) -> None:
        for delivery in deliveries:
            tokens.setdefault(delivery.request_id, []).extend(delivery.tokens)

    server.serve(Listed(requests), deliver, RealClock())
    return tokens


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=[pytest.mark.slow] * (", " in name and kind not in ("orca", "orca, paged")))
        for kind in (*KINDS, *DECODER_KINDS)
        for name in SHAPES
    ],
)
@examples(3)
@given(SIZES)
def test_tokens_of_any_mix_are_those_of_each_request_alone(kind: str, name: str, sizes: list[tuple[int, int]]) -> None:
    """In float64 and greedily, under every schedule that the architecture takes."""
    module = MODULES[name]
    if module.start_token is not None and kind in DECODER_KINDS:
        with pytest.raises(Unsupported, match="an encoder takes whole prompts"):
            server_of(kind, module)
        return
    server = server_of(kind, module)
    requests = [Request(r.id, r.prompt, r.max_new_tokens) for r in requests_of(sizes)]
    assert tokens_of(server, requests) == {request.id: alone(module, request) for request in requests}
    assert server.scheduler.num_reserved == 0


@pytest.mark.parametrize("name", SHAPES)
def test_the_tokens_depend_on_the_whole_prompt(name: str) -> None:
    """Else the test above could not see a wrong attention."""
    (request,) = requests_of([(12, 6)])
    other = Request(0, ((request.prompt[0] + 1) % 50, *request.prompt[1:]), 6)
    assert alone(MODULES[name], request) != alone(MODULES[name], other)


@pytest.mark.parametrize("name", SHAPES)
def test_the_engines_logits_are_those_of_transformers_class(name: str) -> None:
    """With the same random weights, under teacher forcing, while requests of several lengths are served together."""
    module = made(SHAPES[name], torch.float32)
    theirs = as_transformers(module)
    requests = [Request(r.id, r.prompt, r.max_new_tokens) for r in requests_of([(5, 6), (12, 4), (1, 8)])]
    generator = torch.Generator().manual_seed(1)
    continuations = [tuple(torch.randint(50, (r.max_new_tokens,), generator=generator).tolist()) for r in requests]
    server = server_of("orca", module)
    forced = ForcedEngine(server.engine, continuations)  # type: ignore[arg-type]
    replace(server, engine=forced).serve(Listed(requests), lambda deliveries, now_s: None, RealClock())
    for request, continuation in zip(requests, continuations, strict=True):
        stream = torch.tensor([[*request.prompt, *continuation[:-1]]])
        with torch.no_grad():
            if module.start_token is None:
                expected = theirs(stream).logits[0, len(request.prompt) - 1 :]
            else:
                fed = torch.tensor([[module.start_token, *continuation[:-1]]])
                expected = theirs(input_ids=torch.tensor([request.prompt]), decoder_input_ids=fed).logits[0]
        torch.testing.assert_close(forced.logits_of(request.id).float(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SHAPES)
def test_the_check_of_a_session_accepts_what_is_right_and_sees_what_is_not(name: str) -> None:
    module = made(SHAPES[name], torch.float32)
    tried = trials(module, [(5, 4), (9, 3)], 0)
    assert compared(server_of("orca", module), tried, module, "fp32").is_correct
    wrong = server_of("orca", module)
    next(parameter for parameter in module.parameters() if parameter.dim() == 1).mul_(1.05)
    assert not compared(wrong, tried, module, "fp32").is_correct


@pytest.mark.parametrize("name", SHAPES)
def test_each_parameter_has_one_of_transformers_class(name: str) -> None:
    module = MODULES[name]
    assert {pair.ours for pair in pairs_of(module)} == {parameter for parameter, _ in module.named_parameters()}
    back = decoder_of(config_of(module))
    assert type(back) is type(module) and {**vars(back.shape), "positions": 0} == {**vars(module.shape), "positions": 0}


@given(st.integers(-300, 300), st.booleans(), st.sampled_from([(32, 128), (8, 16)]))
def test_buckets_are_transformers(relative: int, is_bidirectional: bool, size: tuple[int, int]) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    at = torch.tensor([[relative]])
    expected = T5Attention._relative_position_bucket(at, is_bidirectional, *size)
    assert torch.equal(bucket(at, is_bidirectional, *size), expected)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("kind", ["orca", "orca, paged"])
def test_a_gpu_serves_an_encoder_decoder_by_kernels_and_graphs(kind: str, device: str) -> None:
    """Increments are replays, and no batch compiles a kernel anew, however many tokens and rows it has."""
    from systems.serving.attention import cross_fused

    module = made(T5, torch.float32).to(device)
    server = server_of(kind, module)
    assert isinstance(server.engine, LocalEngine)
    assert server.engine.graphs and not server.engine.prompt_graphs
    caches = [getattr(cross_fused, name).device_caches for name in ("_encode_kernel", "_decode_kernel")]
    counts = []
    for sizes in ([(5, 3), (6, 2)], [(7, 6), (12, 3), (2, 6), (9, 5), (3, 1)]):
        requests = [Request(r.id, r.prompt, r.max_new_tokens) for r in requests_of(sizes)]
        assert tokens_of(server, requests) == {request.id: alone(module, request) for request in requests}
        counts.append([len(cache[torch.cuda.current_device()][0]) for cache in caches])
    assert counts[0] == counts[1] and min(counts[0]) > 0


def test_sizes_are_those_that_their_papers_say() -> None:
    def parameters(choice: str) -> float:
        from models.decoders import decoder_size

        chosen = options("model", choice)
        return sum(p.numel() for p in decoder_size(str(chosen.pop("name")), **chosen).parameters())

    assert parameters("qwen3_0b6") == pytest.approx(0.596e9, rel=0.01)  # 0.6 B, and 0.44 B without the embedding
    assert parameters("qwen3_8b") == pytest.approx(8.19e9, rel=0.01)
    assert parameters("t5_small_generation") == pytest.approx(60.5e6, rel=0.01)
    assert parameters("t5_3b_generation") == pytest.approx(2.85e9, rel=0.01)  # "2.8 billion" in the paper's section 3.7


@pytest.mark.parametrize("dtype", [pytest.param(torch.float16, marks=GPU)])
def test_heads_in_groups_have_the_fused_attention_of_a_gpu(dtype: torch.dtype) -> None:
    module = load_decoder("qwen3", "cuda", "fp16", **{k: v for k, v in options("model", "qwen3").items() if k != "name"})
    system = systems.load("orca", slots=400, max_batch_size=4)
    assert isinstance(system, ServingSystem) and all(d < 4e-3 for d in fused_differs("cuda", dtype))
    tried = trials(module, [(40, 4), (9, 6)], 0)
    assert compared(system.prepare_serving(module), tried, module, "fp16").is_correct


@pytest.mark.parametrize("name", ["qwen3", "t5_generation"])
def test_a_vocabulary_of_three_is_warmed_up(name: str) -> None:
    module = load_decoder(
        name, "cpu", "fp32", **{k: v for k, v in (options("model", name) | {"vocabulary": 3}).items() if k != "name"}
    )
    system = systems.load("orca")
    assert isinstance(system, ServingSystem)
    warm_up(system.prepare_serving(module), 8)
