"""What a scheduler hands to an engine for one iteration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .request import Request, Sampling
from .slots import Region


class Row(NamedTuple):
    """The tokens of one request in one iteration.

    Args:
        request_id: whose tokens they are.
        region: where its keys and values lie.
        begin: the place of the first token in the region; those before it are stored there.
        tokens: token ids to feed; all of the prompt, one, or a chunk. -1 - i is what row i of the batch before has sampled,
            which the host does not know yet.
        num_padding: places at the region's start that hold padding, which no other place attends to.
        num_useful: of `tokens`, those that a request needs; the others are padding, or of a finished request.
        draw: which of the request's random numbers samples its next token.
        sampling: how it does.
        num_source: places at the region's start that are of an encoder's prompt, which is fed whole; 0 where there is none.
    """

    request_id: int
    region: Region
    begin: int
    tokens: tuple[int, ...]
    num_padding: int
    num_useful: int
    draw: int
    sampling: Sampling
    num_source: int = 0

    @property
    def num_context(self) -> int:
        """Places of the region that are filled after this iteration."""
        return self.begin + len(self.tokens)

    @property
    def num_stream(self) -> int:
        """Tokens of the stream that are fed after this iteration."""
        return self.begin + len(self.tokens) - self.num_padding


@dataclass(frozen=True)
class Batch:
    """The rows of one iteration. id: batches of a scheduler count from 0."""

    id: int
    rows: tuple[Row, ...]

    @cached_property
    def num_tokens(self) -> int:
        return sum([len(row.tokens) for row in self.rows])

    @cached_property
    def num_useful(self) -> int:
        return sum([row.num_useful for row in self.rows])

    @cached_property
    def has_pending(self) -> bool:
        """Does it feed tokens that the batch before samples?"""
        return any(row.tokens[0] < 0 for row in self.rows)


def row_of(request: Request, region: Region, num_tokens: int, num_padding: int = 0, row_before: int = 0) -> Row:
    """The next tokens of a request; its padding comes before its first.

    row_before: its row in the batch before, which samples the token that is fed now if that is not known.
    """
    num_fed = request.num_fed
    if request.num_pending and num_fed == request.num_tokens:
        tokens: tuple[int, ...] = (-1 - row_before,)
    else:
        tokens = request.fed_next(num_tokens)
        if num_fed == 0 and num_padding:
            tokens = (0,) * num_padding + tokens
    begin = num_padding + num_fed if num_fed else 0
    num_useful = 0 if request.is_complete else num_tokens
    draw = len(request.generated) + request.num_pending
    return Row(request.id, region, begin, tokens, num_padding, num_useful, draw, request.sampling, request.num_source)
