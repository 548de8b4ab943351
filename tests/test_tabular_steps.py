"""Epochs of training over rows on the device, whose last batch may be short."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from systems.tabular.steps import Rows, Steps

pytestmark = pytest.mark.usefixtures("one_thread")


@given(st.integers(1, 12), st.integers(1, 13), st.integers(0, 1000))
def test_the_loss_of_an_epoch_is_the_mean_over_rows(num_rows: int, batch_size: int, seed: int) -> None:
    """However few rows the last batch has: nothing learns, so that every batch meets the same network."""
    torch.manual_seed(seed)
    network, rows = nn.Linear(3, 1), Rows((torch.randn(num_rows, 3),), torch.randn(num_rows, 1))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    steps = Steps(network, optimizer, functional.mse_loss, rows, batch_size, "eager")
    expected = functional.mse_loss(network(*rows.inputs), rows.target)
    assert steps.epoch() == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("batch_size", [4, 5, 11])
def test_a_systems_steps_and_the_short_last_one_learn_as_eager_ones(batch_size: int) -> None:
    """Of 11 rows; both update the same parameters and the same momentum."""
    losses, weights = [], []
    for system in ("eager", "nimble"):
        torch.manual_seed(0)
        network, rows = nn.Linear(3, 1), Rows((torch.randn(11, 3),), torch.randn(11, 1))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        steps = Steps(network, optimizer, functional.mse_loss, rows, batch_size, system)
        assert (steps.prepared is None) is (system == "eager")
        torch.manual_seed(1)  # of the order of rows
        losses.append([steps.epoch() for _ in range(3)])
        weights.append(network.weight.detach().clone())
        steps.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(*weights)
