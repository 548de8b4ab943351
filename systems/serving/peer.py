"""A library's own engine in the place of ours: it takes requests and gives tokens, and what is between is its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from systems.preparing import collector_spared

from .loop import Clock, Course, Inbox
from .request import Delivery, Request


class PeerFailed(RuntimeError):
    """The library has failed a request, or itself."""


class Peer(ABC):
    """An engine that schedules by itself."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Take a request that can be served. It is decoded greedily."""

    @abstractmethod
    def take(self) -> list[Delivery]:
        """What has come since the last call; waits a while for something where a request is unfinished. Raises
        PeerFailed."""

    def logits(self, tokens: Sequence[int]) -> Tensor | None:
        """Of a stream by the module that it serves, [S, vocabulary]; None where its weights are not the decoder's."""
        return None

    def close(self) -> None:
        """Give back memory, threads and processes."""


@dataclass(frozen=True)
class PeerServer:
    """A peer, ready to serve. bounds: K/V slots, positions and vocabulary, as a Server's."""

    peer: Peer
    bounds: tuple[int, int, int]

    @property
    def num_slots(self) -> int:
        return self.bounds[0]

    def serve(
        self,
        inbox: Inbox,
        deliver: Callable[[Sequence[Delivery], float], None],
        clock: Clock,
        course: Course | None = None,
    ) -> Course:
        """As a Server's. The course is empty: a peer does not say what its iterations are."""
        with collector_spared():
            self._serve(inbox, deliver, clock)
        return course or Course()

    def _serve(self, inbox: Inbox, deliver: Callable[[Sequence[Delivery], float], None], clock: Clock) -> None:
        unfinished: set[int] = set()
        while True:
            for request in inbox.arrived(clock.now()):
                self.peer.add(request)
                unfinished.add(request.id)
            if unfinished:
                if deliveries := self.peer.take():
                    deliver(deliveries, clock.now())
                    unfinished -= {delivery.request_id for delivery in deliveries if delivery.is_last}
            elif inbox.is_closed:
                return
            else:
                inbox.wait()
