"""Selects for each group norm the faster kernels: as captured, or two of our own with what stands around it."""

from conf.text import first_line
from systems.scheduling.decision import Decision
from systems.scheduling.graph.part import part
from systems.scheduling.graph.patterns import users
from systems.scheduling.graph.program import Program
from systems.scheduling.graph.rewrite import Replacement, replace

from .context import Context, Rewritten
from .norm_places import NormPlace, norm_place, own_norm
from .own_kernels import SEPARATE, has_kernels
from .patterns import name_operators, shape_of

OWN = "own kernels"


def select_norms(program: Program, context: Context) -> Rewritten:
    """Give each group norm the kernels that are faster (in none of the papers), of:
        - separate: the norm as captured, what is added before and the activation as the later passes leave them.
        - own kernels: two, of `systems.kernels.group_norm`, which read and write either layout.

    Invariant: of a place the last operator alone is read from outside. Equal places are measured once and treated alike.
    """
    if not has_kernels(program.device):
        return program, []
    readers = users(program)
    places = [p for v in range(len(program.graph)) if (p := norm_place(program, readers, v)) is not None]
    by_signature: dict[str, tuple[dict[str, float | None], dict[str, str]]] = {}
    replacements: list[Replacement] = []
    decisions: list[Decision] = []
    for place in places:
        separate = part(program, place.operators)
        signature = "; ".join(separate.signature(i) for i in range(len(place.operators)))
        if signature not in by_signature:
            by_signature[signature] = _measured(program, place, separate, context)
        times, reasons = by_signature[signature]
        pattern = f"{name_operators(program, place.operators)} of {shape_of(program.value(place.x))}"
        decisions.append(context.decide("select_norms", pattern, place.operators, signature, times, reasons))
        if decisions[-1].chosen == OWN:
            replacements.append(own_norm(program, place))
    return replace(program, replacements)[0], decisions


def _measured(
    program: Program, place: NormPlace, separate: Program, context: Context
) -> tuple[dict[str, float | None], dict[str, str]]:
    times: dict[str, float | None] = {SEPARATE: context.cost(context.later(separate))}
    within = norm_place(separate, users(separate), place.operators.index(place.norm))
    assert within is not None  # the same place, with inputs for what it reads
    try:
        times[OWN] = context.cost(replace(separate, [own_norm(separate, within)])[0])
    except Exception as error:  # whatever Triton raises of a kernel that does not fit
        return {**times, OWN: None}, {OWN: first_line(error)}
    return times, {}
