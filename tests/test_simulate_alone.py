"""A kernel's time where it stands: between warm and cold, by the weights that its program reads."""

from dataclasses import replace

import pytest
from dags import from_edges
from simulated import GPU, kernel, operator, profile_of

from systems.profiling.profile import OperatorProfile
from systems.scheduling.simulate.alone import alone_us, weight_bytes
from systems.scheduling.simulate.kernels import Kernels

CHAIN = from_edges(3, [(0, 1), (1, 2)])


def measured(read: int, written: int) -> OperatorProfile:
    """4 us in sequence, 2 warm, 10 cold."""
    timed = replace(kernel(4, 10, 128, 32, 0), warm_ms=0.002, cold_ms=0.010)
    return replace(operator(timed), bytes_read=read, bytes_written=written)


def test_weights_are_what_no_operator_has_written() -> None:
    profile = profile_of([measured(100, 10), measured(10 + 40, 20), measured(20, 5)])
    assert weight_bytes(CHAIN, profile) == [100, 40, 0]


def test_who_reads_a_view_reads_what_was_written_before_it() -> None:
    profile = profile_of([measured(100, 30), operator(), measured(30 + 7, 5)])
    assert weight_bytes(CHAIN, profile) == [100, 0, 7]


@pytest.mark.parametrize(("state", "us"), [("warm", 2), ("cold", 10), ("sequence", 4), ("mixed", 2)])
def test_small_weights_stay_in_l2(state: str, us: float) -> None:
    profile = profile_of([measured(100, 10)] * 3)
    assert alone_us(CHAIN, profile, GPU, state) == [[pytest.approx(us)]] * 3


def test_large_weights_are_read_anew_in_each_replay() -> None:
    """Of what the second operator moves three quarters are weights, of the third nothing is."""
    large = GPU.l2_bytes
    profile = profile_of([measured(0, large), measured(large + 6 * large, large), measured(large, large)])
    assert alone_us(CHAIN, profile, GPU)[1:] == [[pytest.approx(2 + 0.75 * 8)], [pytest.approx(2)]]


def test_without_states_the_time_in_sequence_stands() -> None:
    profile = profile_of([operator(kernel(4, 10, 128, 32, 0))] * 3)
    assert alone_us(CHAIN, profile, GPU, "cold") == [[pytest.approx(4)]] * 3


@pytest.mark.parametrize("name", ["embedding", "gather", "linear"])
def test_of_a_table_some_rows_are_read(name: str) -> None:
    """As many bytes as are written: so a lookup is warm, and leaves memory to others. A product reads its whole weight."""
    table, row = 10 * GPU.l2_bytes, 4_800  # a row is 1e-3 us of memory
    graph, profile = from_edges(1, [], name=name), profile_of([measured(table, row)])
    is_lookup = name != "linear"
    assert weight_bytes(graph, profile) == [row if is_lookup else table]
    (node,) = Kernels.of(graph, profile, GPU).nodes
    assert node.alone_us == pytest.approx(2 if is_lookup else 2 + table / (table + row) * 8)
    assert node.bandwidth == pytest.approx(2 * 1e-3 / 2 if is_lookup else 1)
