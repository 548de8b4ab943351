"""What an operator's requests are planned for, against torch's way of choosing among an operator's free segments."""

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

import models
from systems.scheduling.execution.cuda_memory import interchangeable
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.plans.schedule import Schedule, sequential
from systems.scheduling.plans.stream_assignment import assign_streams

Segment = tuple[int, int]  # (operator, bytes)


def run(
    steps: Sequence[tuple[str, int]], address: Sequence[int]
) -> tuple[list[int], list[Segment], list[tuple[str, int, int]]]:
    """An operator that allocates and frees: what segment serves each request, the segments, and the allocator's events.

    steps: ("alloc", bytes), or ("free", k) for the k-th of the blocks that are alive, modulo their number. A request is
    served from the smallest free segment that it fits into; of several, from the one at the lowest address.
    """
    segments: list[Segment] = []
    alive: list[int] = []
    free: set[int] = set()
    served, events = [], []
    for action, number in steps:
        if action == "alloc":
            fitting = [i for i in free if segments[i][1] >= number]
            if fitting:
                i = min(fitting, key=lambda i: (segments[i][1], address[i]))
                free.remove(i)
            else:
                i = len(segments)
                segments.append((0, number))
            alive.append(i)
            served.append(i)
            events.append(("alloc", i, number))
        elif alive:
            i = alive.pop(number % len(alive))
            free.add(i)
            events += [("free_requested", i, segments[i][1]), ("free_completed", i, segments[i][1])]
    return served, segments, events


steps = st.lists(
    st.one_of(st.tuples(st.just("alloc"), st.integers(1, 3)), st.tuples(st.just("free"), st.integers(0, 5))), max_size=40
)


@given(steps, st.permutations(range(40)))
def test_whatever_the_addresses_a_request_is_served_from_what_was_planned_for_it(
    steps: list[tuple[str, int]], address: list[int]
) -> None:
    recorded, segments, events = run(steps, range(40))
    executed, again, _ = run(steps, address)
    assert again == segments
    alike = interchangeable(segments, events)
    for i, j in zip(recorded, executed, strict=True):
        assert j in alike[i]
    for i, group in enumerate(alike):
        assert i in group and len({segments[j] for j in group}) == 1


def test_segments_that_torch_had_no_choice_among_are_planned_apart() -> None:
    one_after_the_other = [("alloc", 1), ("free", 0), ("alloc", 1), ("alloc", 1)]
    _, segments, events = run(one_after_the_other, range(40))
    assert interchangeable(segments, events) == [[0], [1]]
    a_choice = [("alloc", 1), ("alloc", 1), ("free", 0), ("free", 0), ("alloc", 1)]
    _, segments, events = run(a_choice, range(40))
    assert interchangeable(segments, events) == [[0, 1], [0, 1]]


def in_random_order(graph: OperatorGraph, streams: int, draw: random.Random) -> Schedule:
    """Any order that the data allows, on streams drawn at random, with a wait for every edge between streams."""
    missing = [len(p) for p in graph.producers]
    ready = [v for v in range(len(graph)) if not missing[v]]
    order: list[int] = []
    while ready:
        v = ready.pop(draw.randrange(len(ready)))
        order.append(v)
        for w in graph.consumers[v]:
            missing[w] -= 1
            if not missing[w]:
                ready.append(w)
    on = [draw.randrange(streams) for _ in order]
    number = {s: i for i, s in enumerate(dict.fromkeys(on[v] for v in order))}
    waits = tuple(e for e in graph.edges if on[e[0]] != on[e[1]])
    return Schedule(graph, "random", tuple(order), tuple(number[s] for s in on), waits)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["t5", "inception_v3"])
def test_any_schedule_computes_what_eager_does(name: str) -> None:
    """T5's attention frees several segments of one size within one operator."""
    from systems.scheduling.execution.cuda_executor import CudaExecutor

    model = models.load(name, 1, device="cuda")
    program = capture(model.module, model.inputs)
    with torch.no_grad():
        expected = tree_leaves(model.module(*model.inputs))
    for seed in range(4):
        draw = random.Random(seed)
        executor = CudaExecutor(program, in_random_order(program.graph, draw.randint(2, 5), draw))
        for a, b in zip(tree_leaves(executor(*model.inputs)), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        executor.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_blocks_one_after_the_other_share_their_workspaces() -> None:
    """BERT's projections are on 25 streams, of which three at most run side by side."""
    from systems.scheduling.execution.cuda_executor import CudaExecutor

    model = models.load("bert", 1, device="cuda")
    program = capture(model.module, model.inputs)
    bytes_by_streams = {}
    for schedule in (sequential(program.graph), assign_streams(program.graph)):
        executor = CudaExecutor(program, schedule)
        with torch.no_grad():
            expected = tree_leaves(model.module(*model.inputs))
        for a, b in zip(tree_leaves(executor(*model.inputs)), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        bytes_by_streams[schedule.stream_count] = executor.memory["workspaces"]
        executor.close()
    (_, one), (count, several) = sorted(bytes_by_streams.items())
    assert count > 20 and one < several <= 3 * one
