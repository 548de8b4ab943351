"""Whether a server's tokens are right: wrong executions are seen, and a model that shows nothing is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from serving_cells import small

from models.gpt import GPT
from runners.serving.correctness import compared, trials
from systems.serving.attention import split
from systems.serving.system import Server


def checked(decoder: GPT, prepared: Server) -> tuple[bool, bool]:
    """Whether the server is seen to be correct, and whether it could be."""
    part = compared(prepared, trials(decoder, [(9, 4), (5, 3), (12, 2)], seed=0), decoder, "fp32")
    return part.is_correct, part.is_checked


@pytest.mark.parametrize(
    "choice", ["orca", "orca_paged", "orca_chunked", "request_level", "request_level_padded", "request_level_ragged"]
)
def test_every_serving_system_is_seen_to_be_correct(choice: str) -> None:
    options = {"max_num_batched_tokens": 4} if choice == "orca_chunked" else {}
    assert checked(*small(choice, **options)) == (True, True)


MUTANTS = {
    "no mask": ("systems.serving.attention.split._mask", lambda row, device: None),
    "keys one place off": (
        "systems.serving.attention.split.store",
        lambda k, v, cache, layout, right=split.store: right(
            k, v, cache, replace(layout, slots=(layout.slots - 1).clamp(0))
        ),
    ),
    "nothing is stored": ("systems.serving.attention.split.store", lambda k, v, cache, layout: None),
    "places start at 1": ("models.gpt.GPT.hidden", None),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_execution_is_seen(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, prepared = small()
    wanted = trials(decoder, [(9, 4), (5, 3), (12, 2)], seed=0)
    target, wrong = MUTANTS[mutant]
    if wrong is None:
        original = GPT.hidden
        wrong = lambda self, tokens, places, attention: original(self, tokens, places + 1, attention)  # noqa: E731
    monkeypatch.setattr(target, wrong)
    part = compared(prepared, wanted, decoder, "fp32")
    assert not part.is_correct and part.is_checked and part.reason is not None and "from the model's" in part.reason


def test_a_model_that_does_not_look_back_cannot_be_checked() -> None:
    decoder, prepared = small()
    with torch.no_grad():
        for block in decoder.blocks:
            block.out.weight.zero_()  # type: ignore[union-attr, operator]
    assert checked(decoder, prepared) == (False, False)
