"""Correctness of a system that serves: its logits under teacher forcing beside the whole model's, a request at a time.

A few requests go through the server together. Each is fed a given continuation in place of what it samples, so that one
token's rounding cannot make all that follows another text. The reference computes each whole stream alone, without any
cache, in a higher precision. What would be seen: the same tokens after another prompt.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conf.text import counted
from models.decoders import AnyDecoder, continued
from models.gpt_part import PartedGPT
from models.model import TF32
from results.calls import Correctness
from systems.serving.batch import Batch, Row
from systems.serving.engine import Engine, LocalEngine, Returned
from systems.serving.loop import Listed, RealClock
from systems.serving.parallel import ParallelEngine
from systems.serving.peer import PeerServer
from systems.serving.request import Delivery, Request
from systems.serving.system import Server
from systems.tolerance import FLOOR, MULTIPLE, distance

WIDER = {torch.float64: "fp64", torch.float32: "fp32"}


@dataclass(frozen=True)
class Trial:
    """One request with what it is to generate.

    Args:
        prompt, continuation: token ids.
        reference: its logits in the higher precision, [continuation, vocabulary] on the CPU.
        eager: the same in the precision that is measured.
        other: the reference after another prompt with the same last token.
    """

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    reference: Tensor
    eager: Tensor
    other: Tensor


def trials(decoder: AnyDecoder | PartedGPT, lengths: Sequence[tuple[int, int]], seed: int) -> list[Trial]:
    """Requests of these (prompt tokens, new tokens), with the logits that they should have."""
    draw = random.Random(f"{seed}/trials")
    wide = _wider(decoder)

    def drawn(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(decoder.shape.vocabulary) for _ in range(count))

    made = []
    for num_prompt, num_new in lengths:
        prompt, continuation = drawn(num_prompt), drawn(num_new)
        other = (*drawn(num_prompt - 1), prompt[-1])
        made.append(
            Trial(
                prompt,
                continuation,
                _logits(decoder, prompt, continuation, wide),
                _logits(decoder, prompt, continuation, None),
                _logits(decoder, other, continuation, wide),
            )
        )
    return made


def compared(server: Server, trials: Sequence[Trial], decoder: AnyDecoder | PartedGPT, precision: str) -> Correctness:
    """Serve the trials together, and compare."""
    assert isinstance(server.engine, LocalEngine | ParallelEngine)
    server.engine.keeps_logits = True
    forced = ForcedEngine(server.engine, [trial.continuation for trial in trials])
    requests = [Request(i, trial.prompt, len(trial.continuation)) for i, trial in enumerate(trials)]
    replace(server, engine=forced).serve(Listed(requests), lambda deliveries, now_s: None, RealClock())
    server.engine.keeps_logits = False
    served = torch.cat([forced.logits_of(i) for i in range(len(trials))])
    return _judged(served, trials, decoder, precision)


def compared_peer(server: PeerServer, trials: Sequence[Trial], decoder: AnyDecoder, precision: str) -> Correctness:
    """The logits of the module that a peer serves, under teacher forcing; and the tokens that it gives when it serves.

    A served token has to be the likeliest after those before it, but for what logits may be off.
    """
    if not trials or server.peer.logits(trials[0].prompt[:1]) is None:
        reason = "its weights are its own: nothing can be compared"
        return Correctness(True, reason, None, None, None, is_checked=False)
    logits = []
    for trial in trials:
        whole = server.peer.logits((*trial.prompt, *trial.continuation[:-1]))
        assert whole is not None, "it has shown others"
        logits.append(whole[len(trial.prompt) - 1 :].double().cpu())
    judged = _judged(torch.cat(logits), trials, decoder, precision)
    if not judged.is_correct:
        return judged
    assert judged.element_tolerance is not None
    tokens: dict[int, list[int]] = {i: [] for i in range(len(trials))}

    def deliver(deliveries: Sequence[Delivery], now_s: float) -> None:
        for delivery in deliveries:
            tokens[delivery.request_id] += delivery.tokens

    requests = [Request(i, trial.prompt, len(trial.continuation)) for i, trial in enumerate(trials)]
    server.serve(Listed(requests), deliver, RealClock())
    for number, trial in enumerate(trials):
        if len(tokens[number]) != len(trial.continuation):
            reason = f"it gave {counted(len(tokens[number]), 'token')} in the place of {len(trial.continuation)}"
            return replace(judged, is_correct=False, reason=reason)
        expected = _logits(decoder, trial.prompt, tokens[number], _wider(decoder))
        most = expected.max(-1).values
        below = most - expected.gather(-1, torch.tensor(tokens[number])[:, None]).squeeze(-1)
        # two logits, each off by the tolerance
        if bool((below > 2 * judged.element_tolerance * expected.abs().max()).any()):
            reason = f"it gave a token whose logit is {float(below.max()):.1e} below the largest"
            return replace(judged, is_correct=False, reason=reason)
    return judged


def _judged(served: Tensor, trials: Sequence[Trial], decoder: AnyDecoder | PartedGPT, precision: str) -> Correctness:
    """served: logits of all trials' continuations, one after another, [N, vocabulary]."""
    reference, eager, other = (
        torch.cat([getattr(trial, name) for trial in trials]) for name in ("reference", "eager", "other")
    )
    multiple = MULTIPLE["fp32" if precision in TF32 else precision]
    least = FLOOR * torch.finfo(decoder.dtype).eps
    error, rounding, effect = (distance(values, reference) for values in (served, eager, other))
    tolerance, element_tolerance = (max(least, multiple * value) for value in rounding)
    is_near = error.norm <= tolerance and error.element <= element_tolerance
    is_checked = effect.norm > tolerance
    reason = None
    if not is_near:
        reason = f"its logits are {error.norm:.1e} from the model's, of {precision} at most {tolerance:.1e}"
    elif not is_checked:
        reason = f"its logits depend too little on what is before the last token to compare them ({effect.norm:.1e})"
    return Correctness(
        is_correct=is_near and is_checked,
        reason=reason,
        relative_error=error.norm,
        rounding=rounding.norm,
        tolerance=tolerance,
        inputs=len(trials),
        is_checked=is_checked or not is_near,
        reference=WIDER.get(_wider(decoder), precision),
        element_error=error.element,
        element_tolerance=element_tolerance,
        input_effect=effect.norm,
    )


class ForcedEngine(Engine):
    """An engine whose requests are given their tokens, and whose logits are kept.

    Args:
        engine: that computes.
        continuations: by request.
    """

    def __init__(self, engine: LocalEngine | ParallelEngine, continuations: Sequence[tuple[int, ...]]):
        self.engine, self.continuations = engine, continuations
        self.logits: dict[tuple[int, int], Tensor] = {}  # by request and place in its continuation

    @property
    def num_in_flight(self) -> int:
        return self.engine.num_in_flight

    def submit(self, batch: Batch) -> None:
        if batch.has_pending:  # the device has sampled its own
            batch = replace(batch, rows=tuple(self._given(row) for row in batch.rows))
        self.engine.submit(batch)
        assert self.engine.logits is not None, "it has just computed them"
        # A row that ends within its prompt is of place 0 too: the one that ends it comes last, and stays.
        for row, logits in zip(batch.rows, self.engine.logits.double().cpu(), strict=True):
            self.logits[row.request_id, row.draw] = logits

    def _given(self, row: Row) -> Row:
        """The same row, which feeds the token of its continuation."""
        return row._replace(tokens=(self._forced(row.request_id, row.draw - 1),)) if row.tokens[0] < 0 else row

    def has_returned(self) -> bool:
        return self.engine.has_returned()

    def collect(self) -> Returned:
        batch = self.engine.collect().batch
        return Returned(batch, [self._forced(row.request_id, row.draw) for row in batch.rows])

    def _forced(self, request_id: int, draw: int) -> int:
        """A row of a finished request is computed on in a static batch; its token goes nowhere."""
        continuation = self.continuations[request_id]
        return continuation[min(draw, len(continuation) - 1)]

    def logits_of(self, request_id: int) -> Tensor:
        """[continuation, vocabulary]."""
        return torch.stack([self.logits[request_id, i] for i in range(len(self.continuations[request_id]))])


@torch.inference_mode()
def _logits(
    decoder: AnyDecoder | PartedGPT, prompt: Sequence[int], continuation: Sequence[int], dtype: torch.dtype | None
) -> Tensor:
    """Of the tokens of a continuation, each after all before it; [continuation, vocabulary], float64 on the CPU."""
    return continued(decoder, prompt, continuation, dtype).double().cpu()


def _wider(decoder: AnyDecoder | PartedGPT) -> torch.dtype:
    """Of the reference: float64 for float32 and wider, float32 for the halves."""
    is_half = decoder.dtype.itemsize < 4
    return torch.float32 if is_half else torch.float64
