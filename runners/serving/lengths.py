"""Are a trace's requests short enough for the model and for the K/V slots?"""

from __future__ import annotations

from collections.abc import Sequence

from conf.text import counted
from results.cell import Cell
from systems.base import BadOption

from .workload import Arrival


def check_lengths(cell: Cell, traces: Sequence[Sequence[Arrival]], most: int, what: str, key: str, num_more: int) -> None:
    """Raises BadOption where a request has more tokens than there is room for. It names what can be set.

    Args:
        cell: what was asked for.
        traces: its requests.
        most: tokens of a stream.
        what: the room is of, as words.
        key: the option of the model or of the system that gives it; not every one has it.
        num_more: tokens of a stream beside those of its request.
    """
    largest = max((arrival for trace in traces for arrival in trace), key=lambda arrival: arrival.max_tokens)
    if (least := largest.max_tokens + num_more) <= most:
        return
    group, option = key.split(".")
    has_option = option in (cell.model if group == "model" else cell.system).options
    block = int(cell.system.options.get("block_size") or 1) if group == "system" else 1
    wider = f"{key} has to be {-(-least // block) * block} or more"
    shorter = "runner.prompt_tokens or runner.new_tokens" if cell.runner.get("trace") is None else "runner.trace"
    advice = f"{wider}, or {shorter} smaller" if has_option else f"{shorter} has to be smaller"
    tokens = f"{counted(largest.prompt_tokens, 'prompt token')} and {largest.max_new_tokens} to generate"
    raise BadOption(f"a request has {tokens}, more than the {most - num_more} {what}: {advice}")
