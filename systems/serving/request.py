"""A request for the life that it has in the server, and what is delivered of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from reprlib import repr as shown
from typing import NamedTuple

from conf.text import counted

from .slots import Region


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits.

    Args:
        temperature: 0, and all below 1e-5, takes the largest logit.
        top_p: the least likely tokens beyond this share of probability are left out; 1 leaves out none.
        seed: of the request's own random numbers.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(eq=False)
class Request:
    """What a client asks for, and how far it is.

    A request's stream is its prompt followed by what it has generated. The last generated token is never fed to the model.

    Args:
        id: unique in a server.
        prompt: token ids.
        max_new_tokens: tokens to generate (the chapter's max_gen_tokens).
        arrival_s: when it arrived, on the server's clock.
        stop_tokens: ids that end the generation early.
        num_fed: tokens of the stream that the model has taken.
        region: where its keys and values lie; None before it is scheduled, and while it is preempted.
        is_cancelled: its client wants no more of it.
        num_in_flight: batches in flight that it is in.
        num_pending: tokens that those will append to its stream.
        num_source: tokens of the prompt that an encoder takes; 0 where there is none.
        digests: of the whole blocks of its stream, where blocks are shared.
    """

    id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    arrival_s: float = 0.0
    sampling: Sampling = Sampling()
    stop_tokens: frozenset[int] = frozenset()
    generated: list[int] = field(default_factory=list)
    num_fed: int = 0
    region: Region | None = None
    is_cancelled: bool = False
    num_in_flight: int = 0
    num_pending: int = 0
    num_source: int = 0
    digests: list[bytes] = field(default_factory=list)

    @property
    def max_tokens(self) -> int:
        """The most tokens that it can have after processing: the slots that it reserves."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def num_tokens(self) -> int:
        """Of the stream."""
        return len(self.prompt) + len(self.generated)

    @property
    def is_complete(self) -> bool:
        """Has it all its tokens, or is it cancelled?"""
        generated = self.generated
        if self.is_cancelled or len(generated) >= self.max_new_tokens:
            return True
        return bool(self.stop_tokens and generated) and generated[-1] in self.stop_tokens

    @property
    def num_left(self) -> int:
        """Tokens of the stream that the model has not taken, those among them that are still on the device."""
        return len(self.prompt) + len(self.generated) + self.num_pending - self.num_fed

    def may_run(self, num_ahead: int) -> bool:
        """Can a batch have it now, if it has slots or can have them?

        Args:
            num_ahead: batches in flight that it may be in already; 0 is Algorithm 2's.
        """
        if self.num_in_flight == 0:
            return True
        if self.num_in_flight > num_ahead:
            return False
        return len(self.generated) + self.num_pending < self.max_new_tokens and not self.is_complete

    def fed_next(self, count: int) -> tuple[int, ...]:
        """The next tokens to feed. A request that is complete repeats its last token: static batches compute such rows."""
        if count == 1 and self.num_fed == len(self.prompt) + len(self.generated) - 1 and self.generated:  # an increment
            return (self.generated[-1],)
        begin, end, num_prompt = self.num_fed, self.num_fed + count, len(self.prompt)
        tokens = (*self.prompt[begin:end], *self.generated[max(begin - num_prompt, 0) : max(end - num_prompt, 0)])
        return tokens + (count - len(tokens)) * tuple((self.generated or self.prompt)[-1:])

    def accept(self, token: int, num_context: int) -> bool:
        """Append a sampled token, unless it is of a place that the stream has already or of a complete request.

        Args:
            token: its id.
            num_context: tokens of the stream that it follows.
        """
        is_next = num_context == len(self.prompt) + len(self.generated) and not self.is_complete
        if is_next:
            self.generated.append(token)
        return is_next


def take_out(requests: list[Request], request_id: int) -> bool:
    """Take a request out of a list; is it there? It is looked for from the front: a body of many is given up in order."""
    for at, request in enumerate(requests):
        if request.id == request_id:
            del requests[at]
            return True
    return False


class Delivery(NamedTuple):
    """Tokens that go to a client. is_last: the request is finished."""

    request_id: int
    tokens: tuple[int, ...]
    is_last: bool


def refusal(request: Request, num_slots: int, num_positions: int, vocabulary: int) -> str | None:
    """Why a request can never be served, in one line, or None. Let in, it would block the queue for ever.

    Args:
        request: before it is scheduled.
        num_slots: of the K/V manager.
        num_positions: the longest sequence that the model takes.
        vocabulary: token ids are below it.
    """
    if not request.prompt:
        return "the prompt is empty: it needs one token at least"
    if request.max_new_tokens < 1:
        return f"max_tokens={shown(request.max_new_tokens)} is not a positive number of tokens to generate"
    if wrong := [token for token in request.prompt if not 0 <= token < vocabulary]:
        return f"token id {shown(wrong[0])} is not in the vocabulary of {vocabulary}"
    length = f"{counted(len(request.prompt), 'prompt token')} and {shown(request.max_new_tokens)} to generate"
    if request.max_tokens > num_positions:
        return f"{length} are more than the model's {num_positions} positions"
    if request.max_tokens > num_slots:
        return f"{length} are more than the {num_slots} K/V slots"
    sampling = request.sampling
    if not 0 <= sampling.temperature < float("inf"):
        return f"temperature={sampling.temperature} is not 0 or more"
    if not 0 < sampling.top_p <= 1:
        return f"top_p={sampling.top_p} is not above 0 and up to 1"
    if not -(2**63) <= sampling.seed < 2**63:  # a control message has no room for it
        return f"seed={shown(sampling.seed)} is not an integer of 64 bits"
    return None
