"""Selects for each attention the fastest kernel: the library's or one of our own."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from systems.scheduling.decision import Decision
from systems.scheduling.graph.part import part
from systems.scheduling.graph.program import Call, Program
from systems.scheduling.graph.rewrite import Replacement, replace

from .context import Context, Rewritten, fastest
from .own_kernels import compile_unmeasured, has_kernels, is_plain, milliseconds_of, num_cores, target_of
from .patterns import shape_of

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")  # in their order
LIBRARY = "library"
MIN_GAIN = 1.03  # less may be scatter


def select_attention(program: Program, context: Context) -> Rewritten:
    """Give each attention the kernel that is the fastest (in none of the papers): the library's, or one of
    `systems.kernels` by the name of its tile. The library's is made for many queries, and takes no tensor cores for fp32.

    Invariants:
        - Equal attentions are measured once, alone, and treated alike.
        - The captured form stays unless a kernel of our own is `MIN_GAIN` times as fast.
    """
    if not has_kernels(program.device):
        return program, []
    own_by_signature: dict[str, dict[str, Call]] = {}
    equal_by_signature: dict[str, list[int]] = {}
    for v in range(len(program.graph)):
        if program.calls[v].function is ATTENTION and (own := _own(program, v)):
            signature = program.signature(v)
            own_by_signature.setdefault(signature, own)
            equal_by_signature.setdefault(signature, []).append(v)
    compile_unmeasured(program, (call for own in own_by_signature.values() for call in own.values()), context)
    replacements: list[Replacement] = []
    decisions: list[Decision] = []
    for signature, equal in equal_by_signature.items():
        times: dict[str, float | None] = {LIBRARY: context.cost(part(program, [equal[0]]))}
        by_own, reasons = milliseconds_of(program, own_by_signature[signature], context)
        times |= by_own
        chosen = _chosen({name: t for name, t in times.items() if t is not None})
        query, key = (program.value(program.calls[equal[0]].args[i]) for i in range(2))
        pattern = f"attention of {shape_of(query)} to {shape_of(key)}"
        decisions += [context.decide("select_attention", pattern, (v,), signature, times, reasons, chosen) for v in equal]
        for v in equal if decisions[-1].chosen != LIBRARY else []:
            call = _own(program, v)[decisions[-1].chosen]
            name = program.graph.operators[v].name
            replacements.append(Replacement((v,), name, target_of(call), call, {v: None}))
    return replace(program, replacements)[0], decisions


def _chosen(times: dict[str, float]) -> str:
    """The alternative that the pass takes by its own rule."""
    best = fastest(times)
    return best if times[LIBRARY] >= MIN_GAIN * times[best] else LIBRARY


def _own(program: Program, v: int) -> dict[str, Call]:
    """The kernels of our own for attention v, by the names of their tiles; none where none takes it."""
    asked = _asked(program, v)
    if asked is None:
        return {}
    from systems.kernels.attention import Attention, tiles  # imports Triton
    from systems.kernels.dense import THRICE

    is_fp32 = asked.produces.dtype is torch.float32
    precision = THRICE if is_fp32 and not torch.backends.cuda.matmul.allow_tf32 else "tf32"
    own: dict[str, Call] = {}
    for tile in tiles(asked.num_queries, asked.num_keys, asked.num_heads, num_cores(program.device)):
        kernel = Attention(asked.scale, asked.is_causal, precision, asked.is_token_major, tile)
        own[str(tile)] = Call(kernel, asked.tensors, {}, asked.produces)
    return own


@dataclass(frozen=True)
class _Asked:
    """What an attention computes. Its arguments but `tensors` and `produces` are `Attention`'s.

    Args:
        tensors: references to query, key, value and mask.
        produces: its output.
        num_heads: of queries, of all samples.
    """

    tensors: tuple[Any, ...]
    produces: Tensor
    num_heads: int
    num_queries: int
    num_keys: int
    scale: float
    is_causal: bool
    is_token_major: bool


def _asked(program: Program, v: int) -> _Asked | None:
    """None where a kernel of ours does not take the attention."""
    from systems.kernels.attention import LARGEST_HEAD  # imports Triton

    call = program.calls[v]
    given = dict(zip(ARGUMENTS, call.args, strict=False)) | call.kwargs
    if given.get("dropout_p"):
        return None
    references = tuple(given.get(name) for name in ARGUMENTS[:4])
    query, key, value, mask = (program.value(a) if a is not None else None for a in references)
    out = call.produces
    if query is None or key is None or value is None:
        return None
    for tensor in (query, key, value, out):
        if not is_plain(tensor) or tensor.stride(3) != 1 or tensor.dtype is not out.dtype:
            return None
    (n, heads, num_queries, size), (kv_heads, num_keys, value_size) = query.shape, value.shape[1:]
    is_grouped = kv_heads == heads or (given.get("enable_gqa") and heads % kv_heads == 0)
    is_shaped = key.shape == (n, kv_heads, num_keys, size) and value.shape[0] == n
    if not is_grouped or not is_shaped or max(size, value_size) > LARGEST_HEAD:
        return None
    if mask is not None and (mask.dtype not in (out.dtype, torch.bool) or mask.numel() >= 2**31):
        return None
    is_token_major = out.transpose(1, 2).is_contiguous()
    if not is_token_major and not out.is_contiguous():
        return None
    scale = given.get("scale")
    scale = size**-0.5 if scale is None else float(scale)
    return _Asked(references, out, n * heads, num_queries, num_keys, scale, bool(given.get("is_causal")), is_token_major)
