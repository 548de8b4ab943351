"""Attention of PyTorch's modules, captured as eager execution computes it."""

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from drawing import examples
from hypothesis import assume, example, given
from hypothesis import strategies as st
from rewriting import Function, agrees, names
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import models
from systems.base import Unsupported
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.fast_attention import fast_attention
from systems.scheduling.graph.program import Program

FAST = "_native_multi_head_attention"
PLAIN = ["linear", "split", *["view", "transpose"] * 3, "scaled_dot_product_attention", "transpose", "view", "linear"]
FEATURES, HEADS = 32, 4


MASKS: dict[str, Callable[[torch.Size], dict[str, Tensor]]] = {  # of [batch, sequence], or of [sequence]
    "none": lambda rows: {},
    "attention": lambda rows: {"attn_mask": torch.ones(rows[-1], rows[-1], dtype=torch.bool).triu(1)},
    "padding": lambda rows: {"key_padding_mask": torch.arange(rows[-1]).expand(rows) > 2},
    "both": lambda rows: MASKS["attention"](rows) | MASKS["padding"](rows),
    "of heads": lambda rows: {
        "attn_mask": torch.arange(rows[0] * HEADS * rows[-1] ** 2).view(-1, rows[-1], rows[-1]) % 5 == 1
    },
    "of all": lambda rows: {"key_padding_mask": torch.ones(rows, dtype=torch.bool)},
    "of numbers": lambda rows: {"attn_mask": torch.ones(rows[-1], rows[-1]).triu(1)},
}


class Attends(nn.Module):
    """Attention of what it computes, so that a trace knows that queries, keys and values are one tensor."""

    def __init__(
        self,
        heads: int = HEADS,
        is_self: bool = True,
        mask: str = "none",
        need_weights: bool = False,
        average_attn_weights: bool = True,
        **options: object,
    ):
        super().__init__()
        torch.manual_seed(0)
        options = {name: value for name, value in options.items() if name not in ("is_batched", "is_training")}
        self.attention = nn.MultiheadAttention(FEATURES, heads, **options)  # type: ignore[arg-type]
        self.is_self, self.mask = is_self, mask
        self.weights = {"need_weights": need_weights, "average_attn_weights": average_attn_weights}

    def forward(self, x: Tensor) -> tuple[Tensor | None, ...]:
        y = x * 2
        other = y if self.is_self else x * 3
        rows = (x if self.attention.batch_first or x.dim() == 2 else x.transpose(0, 1)).shape[:-1]
        return self.attention(y, other, other, **self.weights, **MASKS[self.mask](rows))  # type: ignore[no-any-return]


def calls_fast_path(module: nn.Module, x: Tensor) -> bool:
    """Does eager execution call it?"""
    with torch.no_grad(), patch.object(torch, FAST, wraps=getattr(torch, FAST)) as called:
        module(x)
    return called.called


def runs_as_eager(module: nn.Module, *inputs: Tensor) -> Program:
    """The captured program, once it has returned what the module returns, with the strides that it is planned with."""
    program = capture(module, inputs)
    with torch.no_grad():
        returned, expected = program.run(inputs), tree_leaves(module(*inputs))
    torch.testing.assert_close(returned, expected, equal_nan=True)
    planned = [program.value(reference) for reference in program.outputs]
    for each in (returned, planned):
        assert [x.stride() for x in each if x is not None] == [x.stride() for x in expected if x is not None]
    return program


ALONE: dict[str, list[object]] = {
    "batch_first": [False],
    "bias": [False],
    "add_bias_kv": [True],
    "add_zero_attn": [True],
    "heads": [1, 2, 8],
    "is_self": [False],
    "is_batched": [False],
    "is_training": [True],
    "mask": [*MASKS],
    "need_weights": [True],
    "average_attn_weights": [False],
}
OPTIONS = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in ALONE.items()})


def each_alone(test: Callable[..., None]) -> Callable[..., None]:
    for name, values in ALONE.items():
        for value in values:
            test = example({name: value})(test)
    return example({})(test)


@given(OPTIONS)
@each_alone
@example({"mask": "padding", "need_weights": True, "average_attn_weights": False})
@examples(60)
def test_the_capture_is_plain_where_eager_execution_takes_its_fast_path(options: dict[str, object]) -> None:
    assume(not {"bias", "add_bias_kv"} <= options.keys())  # PyTorch's module itself fails
    assume(options.get("mask") != "of heads" or not {"heads", "is_batched"} & options.keys())  # it has another shape
    module = Attends(**{"batch_first": True, **options}).train("is_training" in options)  # type: ignore[arg-type]
    x = torch.randn(3, 6, FEATURES)[0 if "is_batched" in options else slice(None)]
    is_plain = calls_fast_path(module, x) and options.get("mask", "none") == "none" and "need_weights" not in options
    assert (names(runs_as_eager(module, x))[-len(PLAIN) :] == PLAIN) == is_plain


@pytest.mark.parametrize("options", [{}, {"need_weights": True}, {"mask": "attention"}, {"mask": "padding"}, {"heads": 8}])
def test_a_caller_may_view_what_a_fast_path_returns(options: dict[str, Any]) -> None:
    attends = Attends(batch_first=True, **options)
    runs_as_eager(
        Function(lambda parts, x: parts["a"](x)[0].view(len(x), -1), a=attends).eval(), torch.randn(3, 6, FEATURES)
    )


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("shape", [(0, 6), (3, 0), (1, 1)])
def test_a_batch_may_be_of_any_size(shape: tuple[int, int], need_weights: bool) -> None:
    module = Attends(batch_first=True, need_weights=need_weights).eval()
    runs_as_eager(module, torch.randn(*shape, FEATURES))


LAYER_MASKS: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {  # from a mask [batch, sequence] of truths or numbers
    "none": lambda mask: {},
    "padding": lambda mask: {"src_key_padding_mask": mask},
    "attention": lambda mask: {"src_mask": mask[:1].expand(mask.shape[1], -1)},
    "both": lambda mask: {name: value for key in ("padding", "attention") for name, value in LAYER_MASKS[key](mask).items()},
}


@given(
    st.sampled_from([*LAYER_MASKS]),
    st.lists(st.sampled_from([0.0, -0.5, 1.0, -torch.inf]), min_size=18, max_size=18),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["relu", "gelu", torch.tanh]),
)
@example("padding", [0.0, -torch.inf, 1.0] * 6, False, False, False, "relu")
@example("padding", [0.0, -torch.inf, 1.0] * 6, False, False, True, "relu")
@example("padding", [0.0, -torch.inf, 1.0] * 6, False, False, False, torch.tanh)
@example("attention", [-torch.inf] * 18, True, True, False, "gelu")
@examples(60)
def test_a_mask_of_a_layer_means_what_eager_execution_takes_it_for(
    kind: str, numbers: list[float], is_logical: bool, is_first: bool, is_hooked: bool, activation: Any
) -> None:
    """Its fast path leaves out a key for each number but 0, and its slow one adds the number."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(FEATURES, HEADS, 64, 0.1, activation, batch_first=True, norm_first=is_first).eval()
    if is_hooked:
        layer.linear1.register_forward_hook(lambda *_: None)
    mask = torch.tensor(numbers).view(3, 6)
    module = Function(lambda parts, x, mask: parts["a"](x, **LAYER_MASKS[kind](mask)), a=layer).eval()
    runs_as_eager(module, torch.randn(3, 6, FEATURES), mask != 0 if is_logical else mask)


PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [False] + [True] * 5])


@pytest.mark.parametrize("mask_check", [False, True])
def test_an_encoder_that_packs_what_a_mask_leaves_is_refused(mask_check: bool) -> None:
    layer = nn.TransformerEncoderLayer(FEATURES, HEADS, 64, batch_first=True)
    encoder, x = nn.TransformerEncoder(layer, 2, mask_check=mask_check), torch.randn(3, 6, FEATURES)
    module = Function(lambda parts, x, mask: parts["a"](x, src_key_padding_mask=mask), a=encoder).eval()
    with pytest.raises(Unsupported, match=r"chooses by the data of src_key_padding_mask .*: set use_nested_tensor = False"):
        capture(module, (x, PADDING))
    with pytest.raises(Unsupported, match="src_key_padding_mask"):
        capture(Function(lambda parts, x: parts["a"](x, src_key_padding_mask=PADDING), a=encoder).eval(), (x,))
    runs_as_eager(Function(lambda parts, x: parts["a"](x), a=encoder).eval(), x)
    encoder.use_nested_tensor = False
    runs_as_eager(module, x, PADDING)


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

    with fast_attention(module):
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
