"""Attention of PyTorch's modules, captured as eager execution computes it."""

import threading
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from drawing import examples
from hypothesis import assume, example, given
from hypothesis import strategies as st
from rewriting import agrees, names
from torch import Tensor, nn

import models
from systems.base import Unsupported
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.fast_attention import fast_attention
from systems.scheduling.graph.program import Program

FAST = "_native_multi_head_attention"
PLAIN = ["linear", "split", *["view", "transpose"] * 3, "scaled_dot_product_attention", "transpose", "view", "linear"]
FEATURES, HEADS = 32, 4


class Attends(nn.Module):
    """Attention of what it computes, so that a trace knows that queries, keys and values are one tensor."""

    def __init__(
        self, heads: int = HEADS, is_self: bool = True, mask: str = "none", need_weights: bool = False, **options: object
    ):
        super().__init__()
        torch.manual_seed(0)
        options = {name: value for name, value in options.items() if name not in ("is_batched", "is_training")}
        self.attention = nn.MultiheadAttention(FEATURES, heads, **options)  # type: ignore[arg-type]
        self.is_self, self.mask, self.need_weights = is_self, mask, need_weights

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        other = y if self.is_self else x * 3
        rows = (x if self.attention.batch_first or x.dim() == 2 else x.transpose(0, 1)).shape[:-1]
        masks: dict[str, Tensor] = {}
        if self.mask == "attention":
            masks["attn_mask"] = torch.ones(rows[-1], rows[-1], dtype=torch.bool).triu(1)
        elif self.mask == "padding":
            masks["key_padding_mask"] = torch.arange(rows[-1]).expand(rows) > 2
        out, weights = self.attention(y, other, other, need_weights=self.need_weights, **masks)
        return (out, weights) if self.need_weights else (out,)


def calls_fast_path(module: nn.Module, x: Tensor) -> bool:
    """Does eager execution call it?"""
    with torch.no_grad(), patch.object(torch, FAST, wraps=getattr(torch, FAST)) as called:
        module(x)
    return called.called


def agrees_but_for_strides(module: nn.Module, program: Program, x: Tensor) -> None:
    """A fast path that computes scores returns contiguous tensors, and the trace of the slow path a view."""
    with torch.no_grad():
        torch.testing.assert_close(tuple(program.run((x,))), module(x), check_stride=False)


ALONE: dict[str, list[object]] = {
    "batch_first": [False],
    "bias": [False],
    "add_bias_kv": [True],
    "add_zero_attn": [True],
    "heads": [1, 2],
    "is_self": [False],
    "is_batched": [False],
    "is_training": [True],
    "mask": ["attention", "padding"],
    "need_weights": [True],
}
OPTIONS = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in ALONE.items()})


def each_alone(test: Callable[..., None]) -> Callable[..., None]:
    for name, values in ALONE.items():
        for value in values:
            test = example({name: value})(test)
    return example({})(test)


@given(OPTIONS)
@each_alone
@examples(60)
def test_the_capture_is_plain_where_eager_execution_takes_its_fast_path(options: dict[str, object]) -> None:
    assume(not {"bias", "add_bias_kv"} <= options.keys())  # PyTorch's module itself fails
    module = Attends(**{"batch_first": True, **options}).train("is_training" in options)  # type: ignore[arg-type]
    x = torch.randn(3, 6, FEATURES)[0 if "is_batched" in options else slice(None)]
    is_plain = calls_fast_path(module, x) and not {"mask", "need_weights"} & options.keys()
    program = capture(module, (x,))
    assert (names(program)[-len(PLAIN) :] == PLAIN) == is_plain
    (agrees if is_plain else agrees_but_for_strides)(module, program, x)


@pytest.mark.parametrize("shape", [(0, 6), (3, 0), (1, 1)])
def test_a_batch_may_be_of_any_size(shape: tuple[int, int]) -> None:
    module, x = Attends(batch_first=True).eval(), torch.randn(*shape, FEATURES)
    program = capture(module, (x,))
    with torch.no_grad():
        torch.testing.assert_close(tuple(program.run((x,))), module(x))


def test_a_head_that_fused_kernels_do_not_take_is_captured_as_traced() -> None:
    """Eager execution calls the fast path, which then computes scores, as the trace does not."""
    torch.manual_seed(0)
    x, module = torch.randn(2, 5, FEATURES), Attends(heads=8, batch_first=True).eval()
    program = capture(module, (x,))
    assert calls_fast_path(module, x) and names(program)[-len(PLAIN) :] != PLAIN
    agrees_but_for_strides(module, program, x)


@pytest.mark.parametrize("is_first", [False, True])
def test_encoders_copy_nothing(is_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(FEATURES, HEADS, 64, batch_first=True, norm_first=is_first)
    module, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(3, 6, FEATURES)
    program = capture(module, (x,))
    assert "clone" not in names(program) and names(program).count("scaled_dot_product_attention") == 2
    agrees(module, program, x, tolerance=1e-5)


def test_a_real_network_copies_no_tokens() -> None:
    model = models.load("vit_b16", 2, device="cpu", size="small")
    program = capture(model.module, model.inputs)
    assert "clone" not in names(program)
    agrees(model.module, program, *model.inputs, tolerance=1e-4)


SWITCHES: dict[str, Callable[[], object]] = {
    "as a whole": lambda: patch.object(torch.backends.mha, "get_fastpath_enabled", lambda: False),
    "by autocast": lambda: patch.object(torch, "is_autocast_enabled", lambda *_: True),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_fast_path_that_is_switched_off_is_not_captured(switch: str) -> None:
    module, x = Attends(batch_first=True).eval(), torch.randn(3, 6, FEATURES)
    assert names(capture(module, (x,)))[-len(PLAIN) :] == PLAIN
    with SWITCHES[switch]():  # type: ignore[attr-defined]
        assert names(capture(module, (x,)))[-len(PLAIN) :] != PLAIN


def test_a_capture_leaves_the_module_as_it_was() -> None:
    slow = nn.MultiheadAttention.forward
    capture(Attends(batch_first=True).eval(), (torch.randn(3, 6, FEATURES),))
    assert nn.MultiheadAttention.forward is slow
    with pytest.raises(Unsupported):
        capture(Attends(batch_first=True).eval(), (torch.randn(3, 6, FEATURES - 1),))
    assert nn.MultiheadAttention.forward is slow


def test_other_threads_take_their_own_way() -> None:
    module, x = Attends(batch_first=True).eval(), torch.randn(3, 6, FEATURES)
    seen: dict[str, bool] = {}

    def call(who: str) -> None:
        seen[who] = calls_fast_path(module, x)

    with fast_attention():
        call("own")
        other = threading.Thread(target=call, args=["other"])
        other.start()
        other.join()
    assert seen == {"own": False, "other": True}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_capture_runs_the_kernels_of_eager_execution(dtype: torch.dtype) -> None:
    def kernels(call: Callable[[], object]) -> list[str]:
        call()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        return sorted(event.name for event in profile.events() if event.device_type.name == "CUDA")

    module = Attends(batch_first=True).eval().to("cuda", dtype)
    x = torch.randn(3, 64, FEATURES, device="cuda", dtype=dtype)
    program = capture(module, (x,))
    with torch.no_grad():
        assert kernels(lambda: program.run((x,))) == kernels(lambda: module(x))
