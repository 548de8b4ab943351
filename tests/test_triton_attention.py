"""The kernel of attention: against PyTorch, and in the programs in which its pass puts it."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from drawing import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from rewriting import Function, takes_new_weights
from torch import Tensor, nn
from torch.nn import functional
from triton_cases import device_with_kernels, favour

from systems.profiling.intensity import work
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.scheduling.passes import library_attention, own_kernels, select_attention
from systems.scheduling.passes.attention_places import attention_places
from systems.scheduling.passes.context import Context

device = device_with_kernels


@pytest.mark.parametrize("kind", ["plain", "causal", "added", "bool"])
@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), is_token_major=st.booleans())
def test_an_attention_computes_what_pytorch_does(device: str, data: st.DataObject, kind: str, is_token_major: bool) -> None:
    """Of fewer keys than queries and of more, with masks that are broadcast, and of a query that sees nothing."""
    draw = data.draw
    n, kv_heads, group, size, value_size = (draw(st.integers(1, most)) for most in (2, 2, 3, 40, 40))
    heads = kv_heads * group
    num_queries, num_keys = draw(st.integers(1, 90)), draw(st.integers(1, 300))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, *([torch.bfloat16] if device == "cuda" else [])]))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def tensor(heads: int, tokens: int, numbers: int) -> Tensor:
        """Of heads beside each other, or of tokens."""
        if draw(st.booleans()):
            return torch.randn(n, tokens, heads, numbers, generator=random).transpose(1, 2).to(device, dtype)
        return torch.randn(n, heads, tokens, numbers, generator=random).to(device, dtype)

    query = tensor(heads, num_queries, size)
    key, value = tensor(kv_heads, num_keys, size), tensor(kv_heads, num_keys, value_size)
    mask: Tensor | None = None
    if kind in ("added", "bool"):
        shape = draw(st.sampled_from([(num_queries, num_keys), (1, heads, 1, num_keys), (n, 1, num_queries, num_keys)]))
        mask = torch.randn(*shape, generator=random).to(device, dtype)
        if kind == "bool":
            mask = mask > 0.3
            mask[..., -1, :] = False
    attention = import_module("systems.kernels.attention")
    small = attention.AttentionTile(16, 16, 1)  # many steps of few keys
    tile = draw(st.just(small) | st.sampled_from([*attention.TILES, *attention.LONG, *attention.SHARED]))
    tile = replace(tile, splits=draw(st.sampled_from([1, 1, 2, 3, 5])))
    scale = draw(st.sampled_from([0.2, 1.0]))
    precision = draw(st.sampled_from(["ieee", "tf32x3"] if dtype is torch.float32 else ["tf32"]))
    kernel = attention.Attention(scale, kind == "causal", precision, is_token_major, tile)
    wide = (each.double() for each in (query, *(each.repeat_interleave(group, 1) for each in (key, value))))
    seen = mask.double() if mask is not None and kind == "added" else mask
    expected = functional.scaled_dot_product_attention(*wide, attn_mask=seen, is_causal=kind == "causal", scale=scale)
    shared = torch.zeros(tile.num_blocks(num_queries, n * heads), dtype=torch.int32, device=device)
    out = kernel(query, key, value, mask, shared if tile.splits > 1 else None)
    assert not shared.any()
    assert out.shape == expected.shape and (out.transpose(1, 2) if is_token_major else out).is_contiguous()
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=4 * tolerance)


class Attending(nn.Module):
    """Two equal attentions, and one of a head that no kernel of ours takes."""

    def forward(self, x: Tensor, wide: Tensor) -> tuple[Tensor, ...]:
        heads = x.view(2, 20, 3, 16).transpose(1, 2)
        attend = functional.scaled_dot_product_attention
        first = attend(heads, heads, heads, is_causal=True)
        return first, attend(first, first, first, is_causal=True), attend(wide, wide, wide)


def test_attentions_take_the_kernel_that_is_faster(device: str) -> None:
    x, wide = torch.randn(2, 20, 48, device=device), torch.randn(1, 1, 4, 300, device=device)
    with torch.no_grad():
        captured = capture(Attending().eval(), (x, wide))
    cost = favour("opweave.attention")
    program, decisions = select_attention.select_attention(captured, Context(cost, cost))
    assert [d.chosen != select_attention.LIBRARY for d in decisions] == [True, True]
    assert sum("opweave.attention" in operator.target for operator in program.graph.operators) == 2
    for got, expected in zip(program.run([x, wide]), captured.run([x, wide]), strict=True):
        torch.testing.assert_close(got, expected)
        assert got.stride() == expected.stride()
    assert [work(program, v)[0] for v in decisions[0].operators] == [work(captured, v)[0] for v in decisions[0].operators]
    cost = favour("aten")
    kept, decisions = select_attention.select_attention(captured, Context(cost, cost))
    assert kept.calls == captured.calls and {d.chosen for d in decisions} == {select_attention.LIBRARY}


def test_an_attention_with_dropout_stays(device: str) -> None:
    x = torch.randn(1, 2, 8, 16, device=device)
    with torch.no_grad():
        captured = capture(Function(lambda _, x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)), (x,))
    program, decisions = select_attention.select_attention(captured, Context(favour("opweave"), favour("opweave")))
    assert program.calls == captured.calls and not decisions


def test_an_attention_of_fewer_keys_heads_has_a_kernel(device: str) -> None:
    x, few = torch.randn(1, 4, 8, 16, device=device), torch.randn(1, 2, 8, 16, device=device)
    attend = functional.scaled_dot_product_attention
    with torch.no_grad():
        captured = capture(Function(lambda _, x, few: attend(x, few, few, enable_gqa=True)), (x, few))
    program, (decision,) = select_attention.select_attention(captured, Context(favour("opweave"), favour("opweave")))
    assert decision.chosen != select_attention.LIBRARY
    torch.testing.assert_close(program.run([x, few]), captured.run([x, few]))


def test_blocks_share_the_keys_of_one_query(device: str) -> None:
    """As of a decoding step. Two attentions of a program, and two runs, each find the tickets as they were."""
    query, keys = torch.randn(1, 2, 1, 16, device=device), torch.randn(1, 2, 300, 16, device=device)
    attend = functional.scaled_dot_product_attention
    with torch.no_grad():
        captured = capture(Function(lambda _, q, k: (attend(q, k, k), attend(-q, k, k))), (query, keys))
    cost = favour("split by")
    program, decisions = select_attention.select_attention(captured, Context(cost, cost))
    assert len(decisions) == 2 and all("split by" in decision.chosen for decision in decisions)
    for _ in range(2):
        torch.testing.assert_close(program.run([query, keys]), captured.run([query, keys]))


class Windows(nn.Module):
    """Attention step by step, as of windows: a bias of its own, and a mask that each window has another row of."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, 2, 6, 6))
        self.mask = nn.Parameter(torch.randn(1, 4, 1, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = x.view(8, 6, 3, 2, 16).permute(2, 0, 3, 1, 4)
        scores = ((query * 0.5) @ key.transpose(-2, -1) * 0.5 + self.bias) * 2
        scores = (scores.view(2, 4, 2, 6, 6) + self.mask).view(8, 2, 6, 6)
        return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("which", ["a.bias", "a.mask"])
def test_attention_step_by_step_becomes_one_kernel(device: str, which: str) -> None:
    torch.manual_seed(0)
    module = Function(lambda p, x: p["a"](x), a=Windows()).eval().to(device)
    x = torch.randn(8, 6, 96, device=device)
    with torch.no_grad():
        captured = capture(module, (x,))
    program, (decision,) = select_attention.select_attention(captured, Context(favour("opweave"), favour("opweave")))
    names = [operator.name for operator in program.graph.operators]
    assert not {"matmul", "softmax", "add", "mul"} & set(names) and decision.chosen != own_kernels.SEPARATE
    torch.testing.assert_close(program.run([x]), captured.run([x]), rtol=1e-4, atol=1e-4)
    takes_new_weights(program, module, x, which)
    kept, (decision,) = select_attention.select_attention(captured, Context(favour("aten"), favour("aten")))
    assert kept.calls == captured.calls and decision.chosen == own_kernels.SEPARATE


class Wide(nn.Module):
    """Attention in half precision whose scores are wide, as GPT-J's: with a mask that each call brings, or its own."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.register_buffer("mask", torch.zeros(20, 20).masked_fill(torch.ones(20, 20).triu(1).bool(), -1e4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = x.view(2, 20, 3, 2, 16).permute(2, 0, 3, 1, 4)
        if self.how == "softmax":
            return ((query @ key.transpose(-2, -1) / 4).softmax(-1, torch.float32).to(x.dtype) @ value).transpose(1, 2)
        scores = query.float() @ key.float().transpose(-1, -2) / 4
        scores = scores + (mask.float() if self.how == "given" else self.mask)
        shares = nn.functional.softmax(scores, -1).to(value.dtype)
        return (shares @ value).permute(0, 2, 1, 3).contiguous().view(2, 20, 32)


@pytest.mark.parametrize("how", ["own", "given", "softmax"])
def test_an_attention_whose_scores_are_wide_becomes_one_kernel(device: str, how: str) -> None:
    x, mask = torch.randn(2, 20, 96, device=device).half(), torch.randn(2, 1, 20, 20, device=device).half()
    with torch.no_grad():
        captured = capture(Wide(how).to(device).eval(), (x, mask))
    program, (decision,) = select_attention.select_attention(captured, Context(favour("opweave"), favour("opweave")))
    names = [operator.name for operator in program.graph.operators]
    assert not {"matmul", "softmax", "clone", "div"} & set(names) and names.count("_to_copy") == (how == "given")
    assert decision.chosen != own_kernels.SEPARATE
    x, mask = torch.randn_like(x), torch.randn_like(mask)
    ((got,), (expected,)) = program.run([x, mask]), captured.run([x, mask])
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=5e-3)
    assert got.stride() == expected.stride()


def is_copied(program: Program) -> bool:
    """Is there a copy beside that of the heads?"""
    return [operator.name for operator in program.graph.operators].count("clone") > 1


@pytest.mark.parametrize(
    ("move", "is_moved"),
    [
        (lambda y: y.transpose(1, 2).contiguous(), True),
        (lambda y: y.permute(0, 2, 1, 3).contiguous().flatten(2), True),
        (lambda y: y.transpose(2, 1).reshape(2, 20, 48) * 2, True),
        (lambda y: y.transpose(1, 2) + 1, False),
        (lambda y: y.transpose(2, 3).contiguous(), False),
        (lambda y: (y + 1, y.transpose(1, 2).contiguous()), False),
        (lambda y: ((z := y.transpose(1, 2)) + 1, z.contiguous()), False),
    ],
)
def test_a_copy_of_the_output_is_part_of_the_attention(device: str, move: Callable[..., object], is_moved: bool) -> None:
    def forward(_: object, x: Tensor) -> object:
        heads = x.view(2, 20, 3, 16).transpose(1, 2).contiguous()
        return move(functional.scaled_dot_product_attention(heads, heads, heads))

    x = torch.randn(2, 20, 48, device=device)
    with torch.no_grad():
        captured = capture(Function(forward), (x,))
    program, (decision,) = select_attention.select_attention(captured, Context(favour("opweave"), favour("opweave")))
    # A GPU's attention may write its output as it is read, without a copy.
    assert (len(decision.operators) == 3) is (is_moved and is_copied(captured))
    assert not (is_moved and is_copied(program))
    (kernel,) = [v for v, call in enumerate(program.calls) if "opweave.attention" in program.graph.operators[v].target]
    assert work(program, kernel)[0] == work(captured, decision.operators[0])[0]
    for got, expected in zip(program.run([x]), captured.run([x]), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        assert got.stride() == expected.stride()


@pytest.mark.parametrize(
    "forward",
    [
        lambda q, k, v, m: (q @ k.transpose(-2, -1)).softmax(-2) @ v,
        lambda q, k, v, m: ((q @ k.transpose(-2, -1) + m) * 2).softmax(-1) @ v,  # a mask that would change in each call
        lambda q, k, v, m: (q @ k.transpose(-2, -1) + m + q).softmax(-1) @ v,
        lambda q, k, v, m: ((q @ k.transpose(-2, -1)).view(1, 4, 16, 16) + m[:1, :1]).view(2, 2, 16, 16).softmax(-1) @ v,
        lambda q, k, v, m: (q @ k.transpose(-2, -1) + 1).softmax(-1) @ v,
        lambda q, k, v, m: (q @ k.transpose(-2, -1)).softmax(-1, torch.float64) @ v.double(),
        lambda q, k, v, m: (q.double() @ k.double().transpose(-2, -1)).softmax(-1).float() @ v,
        lambda q, k, v, m: ((scores := q @ k.transpose(-2, -1)).softmax(-1) @ v, scores),
        lambda q, k, v, m: ((shares := (q @ k.transpose(-2, -1)).softmax(-1)) @ v, shares),
        lambda q, k, v, m: (q @ k).softmax(-1) @ v,
        lambda q, k, v, m: (q @ k.transpose(0, 1)).softmax(-1) @ v,
        lambda q, k, v, m: v @ (q @ k.transpose(-2, -1)).softmax(-1),
        lambda q, k, v, m: (q @ k.transpose(-2, -1)).relu().softmax(-1) @ v,
    ],
)
def test_what_is_no_attention_step_by_step_stays(device: str, forward: Callable[..., object]) -> None:
    q, k, v, m = (torch.randn(2, 2, 16, 16, device=device) for _ in range(4))
    with torch.no_grad():
        captured = capture(Function(lambda _, *tensors: forward(*tensors)), (q, k, v, m))
    program, decisions = select_attention.select_attention(captured, Context(favour("opweave"), favour("opweave")))
    assert program.calls == captured.calls and not decisions


class Tokens(nn.Module):
    """Attention whose heads of a token lie beside each other, before and after it, as of a transformer."""

    def __init__(self, is_causal: bool):
        super().__init__()
        self.is_causal = is_causal

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = x.view(2, 50, 3, 4, 16).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal, scale=0.3)
        return attended.transpose(1, 2).reshape(2, 50, 64)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", library_attention.KERNELS)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_each_kernel_of_the_library_attends(name: str, is_causal: bool) -> None:
    x = torch.randn(2, 50, 192, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        captured = capture(Tokens(is_causal).eval(), (x,))
    cost = favour(f"opweave.{name}_attention")
    program, (decision,) = select_attention.select_attention(captured, Context(cost, cost))
    assert decision.chosen == name
    assert any(name in operator.target for operator in program.graph.operators)
    (got,), (expected,) = program.run([x]), captured.run([x])
    assert got.stride() == expected.stride()
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("is_moved", [False, True])
@pytest.mark.parametrize("name", library_attention.KERNELS)
def test_a_kernel_of_the_library_keeps_the_order_of_heads(name: str, is_moved: bool) -> None:
    heads = torch.empty(2, 50, 4, 16, dtype=torch.float16, device="meta").transpose(1, 2)
    out = library_attention.LibraryAttention(name, 0.3, False, is_moved)(heads, heads, heads)
    assert (out if is_moved else out.transpose(1, 2)).is_contiguous() and out.dtype is torch.float16


def test_the_library_has_one_kernel_for_each_attention_on_a_cpu() -> None:
    x = torch.randn(2, 50, 192, dtype=torch.float16)
    with torch.no_grad():
        captured = capture(Tokens(False).eval(), (x,))
    (place,) = attention_places(captured, 256)
    assert library_attention.library_attentions(captured, place) == {}
