"""Selects for each attention the fastest kernel: as captured, another of the library's or one of our own."""

import torch

from systems.scheduling.decision import Decision
from systems.scheduling.graph.part import part
from systems.scheduling.graph.program import Call, Program
from systems.scheduling.graph.rewrite import Replacement, replace

from .attention_places import AttentionPlace, attention_places
from .context import Context, Rewritten, fastest
from .library_attention import library_attentions
from .own_kernels import SEPARATE, by_signature, compile_unmeasured, has_kernels, milliseconds_of, num_cores, target_of
from .patterns import shape_of

LIBRARY = "library"
MIN_GAIN = 1.03  # less may be scatter
NAME = "scaled_dot_product_attention"  # of the operator, by which its work is counted


def select_attention(program: Program, context: Context) -> Rewritten:
    """Give each attention the kernel that is the fastest (in none of the papers), of:
        - library: the operator as captured, which is made for many queries, and takes no tensor cores for fp32.
        - flash, efficient, cudnn: a kernel of the library's by its name, in half precision and without a mask.
        - separate: two products, a softmax and what is between them, as captured and as the later passes leave it.
        - a kernel of `systems.kernels` by the name of its tile.

    Invariants:
        - Equal attentions are measured once, alone, and treated alike.
        - The captured form stays unless another is `MIN_GAIN` times as fast.
        - What is added to scores between their product and a softmax is computed once, of the module's own tensors.
    """
    if not has_kernels(program.device):
        return program, []
    from systems.kernels.attention import LARGEST_HEAD  # imports Triton

    equal_by_signature = by_signature(program, attention_places(program, LARGEST_HEAD))
    own_by_signature = {signature: _own(program, equal[0]) for signature, equal in equal_by_signature.items()}
    compile_unmeasured(program, (call for own in own_by_signature.values() for call in own.values()), context)
    replacements: list[Replacement] = []
    decisions: list[Decision] = []
    for signature, equal in equal_by_signature.items():
        place, captured = equal[0], part(program, equal[0].operators)
        usual = LIBRARY if place.is_whole else SEPARATE
        times: dict[str, float | None] = {usual: context.cost(captured if place.is_whole else context.later(captured))}
        others = library_attentions(program, place) | own_by_signature[signature]
        by_others, reasons = milliseconds_of(program, others, context)
        times |= by_others
        known = {name: t for name, t in times.items() if t is not None}
        best = fastest(known)
        chosen = best if known[usual] >= MIN_GAIN * known[best] else usual
        pattern = f"attention of {shape_of(program.value(place.query))} to {shape_of(program.value(place.key))}"
        for each in equal:
            decided = context.decide("select_attention", pattern, each.operators, signature, times, reasons, chosen)
            decisions.append(decided)
            if decided.chosen != usual:
                call = (library_attentions(program, each) | _own(program, each))[decided.chosen]
                results: dict[int, int | None] = {each.operators[-1]: None}
                replacements.append(Replacement(each.operators, NAME, target_of(call), call, results, each.derived))
    return replace(program, replacements)[0], decisions


def _own(program: Program, place: AttentionPlace) -> dict[str, Call]:
    """The kernels of our own for a place, by the names of their tiles."""
    from systems.kernels.attention import Attention, tiles  # imports Triton
    from systems.kernels.dense import THRICE

    is_fp32 = place.produces.dtype is torch.float32
    precision = THRICE if is_fp32 and not torch.backends.cuda.matmul.allow_tf32 else "tf32"
    is_token_major = place.is_moved or place.produces.transpose(1, 2).is_contiguous()
    n, heads, num_queries, _ = program.value(place.query).shape
    num_keys = program.value(place.key).shape[2]
    own: dict[str, Call] = {}
    for tile in tiles(num_queries, num_keys, n * heads, num_cores(program.device)):
        kernel = Attention(place.scale, place.is_causal, precision, is_token_major, tile, place.is_moved)
        num_blocks = tile.num_blocks(num_queries, n * heads)
        shared = torch.zeros(num_blocks, dtype=torch.int32, device=program.device) if tile.splits > 1 else None
        own[str(tile)] = Call(kernel, (place.query, place.key, place.value, place.mask, shared), {}, place.produces)
    return own
