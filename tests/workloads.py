"""Made workloads of requests, what serves them turn by turn without a model, and books of slots."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st
from serving_parts import slot_of

from systems.serving.batch import Batch
from systems.serving.request import Delivery, Request
from systems.serving.scheduler import Scheduler
from systems.serving.slots import ContiguousSlots, PagedSlots, Slots

NUM_SLOTS, NUM_POSITIONS = 40, 12


@dataclass
class Asked:
    """A request of a made workload.

    Args:
        prompt: tokens of its prompt, which begins as every other's.
        new: tokens that it generates at most.
        turn: of the loop, in which it arrives.
        cancelled: the turn in which it is dropped.
        stop: tokens that it generates until a stop token, this one included.
    """

    prompt: int
    new: int
    turn: int
    cancelled: int | None = None
    stop: int | None = None

    @property
    def length(self) -> int:
        """Tokens that it generates."""
        return min(self.new, self.stop or self.new)

    def request(self, number: int) -> Request:
        stop_tokens = frozenset({token_of(number, self.stop - 1)} if self.stop else ())
        return Request(number, tuple(range(self.prompt)), self.new, float(self.turn), stop_tokens=stop_tokens)


@st.composite
def workloads(draw: st.DrawFn, is_cancelling: bool = False, most: int = 12) -> list[Asked]:
    """Requests that come soon after each other, some of them dropped soon after they came, or just before."""
    stop = st.none() | st.integers(1, 4)
    one = st.builds(Asked, st.integers(1, 8), st.integers(1, 4), st.integers(0, 8), stop=stop)
    workload = draw(st.lists(one, min_size=1, max_size=most))
    if is_cancelling:
        for each in workload:
            delay = draw(st.none() | st.integers(-1, 6))
            each.cancelled = None if delay is None else each.turn + delay
    return workload


@dataclass
class Run:
    """What a scheduler did with a workload."""

    batches: list[Batch] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    last_turn: dict[int, int] = field(default_factory=dict)  # in which a request's last token was delivered
    deliveries: list[Delivery] = field(default_factory=list)


def token_of(request_id: int, index: int) -> int:
    """What the made engine samples."""
    return 1000 * request_id + index


def run(scheduler: Scheduler, workload: Sequence[Asked]) -> Run:
    """Serve a workload turn by turn. In a turn requests arrive, all batches go that may, and the earliest returns."""
    requests = [asked.request(i) for i, asked in enumerate(workload)]
    flight: deque[Batch] = deque()
    done, turn = Run(), 0

    def deliver(deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            done.deliveries.append(delivery)
            done.tokens.setdefault(delivery.request_id, []).extend(delivery.tokens)
            if delivery.is_last:
                done.last_turn[delivery.request_id] = turn

    while turn <= 40 or scheduler.num_unfinished:
        for i, client_request in enumerate(workload):
            if client_request.turn == turn and (client_request.cancelled is None or client_request.cancelled > turn):
                scheduler.add(requests[i])
            if client_request.cancelled == turn:
                deliver(scheduler.cancel(i))
        while (batch := scheduler.next_batch()) is not None:
            flight.append(batch)
            done.batches.append(batch)
            assert len(flight) <= scheduler.num_in_flight_max
            regions = [request.region for request in requests if request.region is not None]
            places = {slot_of(region, at) for region in regions for at in range(region.num_slots)}
            assert scheduler.num_reserved == len(places), "some are of nobody, or of two"
        if flight:
            batch = flight.popleft()
            deliver(scheduler.take_back(batch, [token_of(row.request_id, row.draw) for row in batch.rows]))
        turn += 1
        assert turn < 2000, "nothing moves any more"
    assert scheduler.num_in_flight == scheduler.num_reserved == scheduler.num_waiting == 0
    return done


def books() -> st.SearchStrategy[Slots]:
    paged = st.integers(1, 6).map(lambda size: PagedSlots.all_free(NUM_SLOTS, size))
    return st.just(ContiguousSlots.all_free(NUM_SLOTS)) | paged
