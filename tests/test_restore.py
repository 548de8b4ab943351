"""What forward passes change is undone, in a scripted module too."""

import pytest
import torch
from torch import Tensor, nn

import systems
from systems.training.restore import state_kept


class Counting(nn.Module):
    """It assigns a buffer anew in each call."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return self.linear(x) + self.count


@pytest.mark.parametrize("form", ["eager", "scripted", "in part"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_buffer_that_forward_assigns_is_the_one_of_before(form: str) -> None:
    counting = Counting()
    own = counting if form == "eager" else torch.jit.script(counting)
    module = nn.Sequential(own, nn.ReLU()) if form == "in part" else own
    before = own.count
    with state_kept(module):
        module(torch.ones(2, 3))
        assert torch.equal(own.count, torch.ones(3))
    assert own.count is before and torch.equal(before, torch.zeros(3))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_takes_a_module_with_a_scripted_part() -> None:
    module = nn.Sequential(torch.jit.script(nn.Linear(3, 3)), nn.ReLU()).eval()
    x = torch.randn(2, 3)
    prepared = systems.load("torchscript").prepare(module, (x,))
    torch.testing.assert_close(prepared(x), module(x).detach())
