"""What every scheduler of requests is, whichever clock it runs under: an engine's, a virtual one, or a test's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from .batch import Batch
from .request import Delivery, Request


class Scheduler(ABC):
    """Decides which rows the engine computes next.

    The caller adds requests as they arrive, submits each batch that `next_batch` gives to an engine of `num_in_flight_max`
    places, and hands the tokens back in the order of submission. All state of requests is the scheduler's.

    num_in_flight_max: batches that may be in flight at once.
    num_short: selections in which a request found no slots, or gave up its own.
    num_preempted: times that a request gave up its slots.
    reads_prompts: what it decides depends on their tokens, and not on how many they are alone.
    """

    num_in_flight_max: int
    reads_prompts = False

    def __init__(self) -> None:
        self.num_in_flight = self.num_short = self.num_preempted = 0

    @property
    def is_full(self) -> bool:
        """Must a batch return before another can go?"""
        return self.num_in_flight >= self.num_in_flight_max

    @property
    @abstractmethod
    def num_reserved(self) -> int:
        """Slots that requests hold."""

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Requests that have never been scheduled."""

    @property
    @abstractmethod
    def num_unfinished(self) -> int:
        """Requests that the scheduler has not let go."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Take a request that has arrived. It can be served: `refusal` has been asked."""

    @abstractmethod
    def cancel(self, request_id: int) -> list[Delivery]:
        """Drop a request, wherever it is; one that is in flight goes when its batch returns. Unknown ids are passed over.

        Returns what goes to other clients, who have waited for it.
        """

    @abstractmethod
    def next_batch(self) -> Batch | None:
        """The batch to submit now; None where all places are taken or nothing can be selected."""

    @abstractmethod
    def take_back(self, batch: Batch, tokens: Sequence[int]) -> list[Delivery]:
        """A batch has returned.

        Args:
            batch: the one submitted earliest of those in flight.
            tokens: a sampled token for each row; a row that ends within its prompt has one that means nothing.

        Returns:
            What goes to clients.
        """
