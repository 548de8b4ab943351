"""A module or a thread that changed since prepare: what is written in place is used, and all else is told."""

import copy
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import systems
from systems.base import Unsupported
from systems.nimble import Nimble
from systems.scheduling.execution.members import MOST, Members

pytestmark = pytest.mark.usefixtures("cache_folder")


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).eval()


def add_all(module: nn.Module) -> None:
    with torch.no_grad():
        for x in (*module.parameters(), *module.buffers()):
            x.add_(1)


def step(module: nn.Module) -> None:
    module.train()
    module(torch.randn(3, 4)).sum().backward()
    torch.optim.AdamW(module.parameters(), lr=0.1).step()
    module.eval()


IN_PLACE: dict[str, Callable[[nn.Sequential], object]] = {
    "add_": add_all,
    "step": step,
    "load_state_dict": lambda m: m.load_state_dict({k: x + 1 for k, x in m.state_dict().items()}),
    "requires_grad_": lambda m: m.requires_grad_(False),
}
ANOTHER: dict[str, tuple[Callable[[nn.Sequential], object], str]] = {
    "assign": (lambda m: setattr(m[3], "bias", nn.Parameter(torch.ones(2))), "3.bias of the module is another"),
    "a bias in the place of none": (lambda m: setattr(m[0], "bias", nn.Parameter(torch.ones(4))), "0.bias of the module"),
    "load": (lambda m: m.load_state_dict({k: x + 1 for k, x in m.state_dict().items()}, assign=True), "0.weight of the"),
    "data": (lambda m: setattr(m[0].weight, "data", torch.ones(4, 4)), "0.weight of the module is another"),
    "submodule": (lambda m: m.__setitem__(3, nn.Linear(4, 2)), "3 of the module is another"),
    "double": (lambda m: m.double(), "0.weight of the module is another"),
    "parametrization": (lambda m: parametrizations.weight_norm(m[3]), "3.weight of the module is another"),
    "train": (lambda m: m.train(), "the module was in eval form in prepare: call eval(), or"),
    "dropout": (lambda m: m[2].train(), "2 of the module was in eval form in prepare: call eval(), or"),
}


@pytest.mark.parametrize("choice", ["nimble", "nimble_fused", "ios"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_written_in_place_is_used(name: str, choice: str) -> None:
    module, x = small(), torch.randn(3, 4)
    prepared = systems.load(choice).prepare(module, (x,))
    for _ in range(2):
        IN_PLACE[name](module)
        torch.testing.assert_close(prepared(x), module(x))
    prepared.close()


@pytest.mark.parametrize("choice", ["nimble", "ios"])
@pytest.mark.parametrize("name", ANOTHER)
def test_what_is_another_is_told(name: str, choice: str) -> None:
    module, x = small(), torch.randn(3, 4)
    prepared = systems.load(choice).prepare(module, (x,))
    change, says = ANOTHER[name]
    change(module)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"^{re.escape(says)}.*prepare again$"):
            prepared(x)
    prepared.close()


def large() -> nn.Sequential:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(150)))
    return module.eval()


def busy_never() -> bool:
    return False


def _put(module: nn.Module, name: str, value: object) -> None:
    module._parameters[name] = value  # type: ignore[assignment]


@pytest.mark.parametrize("place", (0, 76, 149))
@pytest.mark.parametrize(
    "change",
    [
        lambda part: setattr(part[0].weight, "data", torch.ones(2, 2)),
        lambda part: _put(part[0], "bias", nn.Parameter(torch.ones(2))),
        lambda part: part[1].train(),
    ],
    ids=["data", "dict", "form"],
)
def test_a_single_change_is_told_once_each_share_was_looked_at(place: int, change: Callable[[nn.Module], object]) -> None:
    module = large()
    members = Members(module)
    members.check(busy_never)
    change(module[place])
    assert len(members.shares) > 3
    with pytest.raises(RuntimeError):
        for _ in members.shares:
            members.check(busy_never)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"^{place}[. ]"):
            members.check(busy_never)


@pytest.mark.parametrize("busy", [0, 1, 2, 99])
def test_a_check_ends_in_time(busy: int) -> None:
    """It asks before each share but the first, and no more once it was told to end."""
    members = Members(large())
    answers: list[bool] = []

    def may_go_on() -> bool:
        answers.append(len(answers) < busy)
        return answers[-1]

    members.check(may_go_on)
    assert members.due == min(busy + 1, MOST) < len(members.shares) and len(answers) == min(busy + 1, MOST - 1)
    members.check()
    assert members.due == min(busy + 1, MOST)  # all of them


@pytest.mark.parametrize("place", (0, 76, 149))
def test_all_that_is_changed_by_name_is_told_at_once(place: int) -> None:
    module = large()
    members = Members(module)
    module[place][1].running_mean = torch.ones(2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"^{place}\.1\.running_mean of the module is another"):
            members.check(busy_never)


@pytest.mark.parametrize("change", [nn.Module.double, nn.Module.train], ids=["double", "train"])
def test_what_changes_many_parts_is_told_at_once(change: Callable[[nn.Module], object]) -> None:
    module = large()
    members = Members(module)
    for due in range(len(members.shares)):
        members.due = due
        members.check(busy_never)
    change(module)
    for due in range(len(members.shares)):
        members.due = due
        with pytest.raises(RuntimeError, match=r"prepare again$"):
            members.check(busy_never)


def test_a_cast_is_told_at_once_though_few_parts_hold_tensors() -> None:
    module = nn.Sequential(*(nn.Linear(2, 2) if i % 20 == 0 else nn.ReLU() for i in range(200))).eval()
    members = Members(module)
    assert len(members.shares) > 20
    module.double()
    for due in range(len(members.shares)):
        members.due = due
        with pytest.raises(RuntimeError, match=r"^0\.weight of the module is another"):
            members.check(busy_never)


def test_a_module_that_is_made_beside_changes_nothing() -> None:
    module = large()
    members = Members(module)
    nn.Linear(2, 2)
    for _ in range(3):
        members.check(busy_never)


def test_a_module_in_training_form_is_executed_in_it() -> None:
    module, x = small().train(), torch.randn(3, 4)
    prepared = systems.load("nimble").prepare(module, (x,))
    torch.manual_seed(1)
    out: Tensor = prepared(x)
    module[1].reset_running_stats()
    torch.manual_seed(1)
    torch.testing.assert_close(out, module(x))
    module.eval()
    with pytest.raises(
        RuntimeError, match=r"^the module was in training form in prepare: call train\(\), or prepare again$"
    ):
        prepared(x)
    prepared.close()


def test_a_part_in_training_form_is_none_of_a_nimbles() -> None:
    """It is the module in eval form, as its prepare says."""
    module, x = small(), torch.randn(3, 4)
    module[3] = nn.Linear(4, 2)
    fast = Nimble(module).prepare(x)
    torch.testing.assert_close(fast(x), module(x))
    fast.close()


class Mixed(nn.Module):
    """Computes a part without autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.conv(x)).relu().mean((2, 3))
        with torch.autocast("cpu", enabled=False):
            exact = self.head(y.float())
        return self.head(y) + 1, exact


@pytest.mark.parametrize("choice", ["nimble_single_stream", "nimble", "nimble_fused"])
def test_autocast_is_that_of_prepare(choice: str) -> None:
    module, x = Mixed().eval(), torch.randn(2, 3, 8, 8)
    half = torch.autocast("cpu", dtype=torch.bfloat16)
    with half:
        prepared = systems.load(choice).prepare(module, (x,))
        for out, expected in zip(prepared(x), module(x), strict=True):
            torch.testing.assert_close(out, expected)
    says = "it was prepared under autocast to bfloat16 on cpu and is called without autocast: prepare again"
    with pytest.raises(RuntimeError, match=f"^{says}$"):
        prepared(x)
    prepared.close()
    prepared = systems.load(choice).prepare(module, (x,))
    with (
        half,
        pytest.raises(RuntimeError, match=r"^it was prepared without autocast and is called under autocast to bfloat16"),
    ):
        prepared(x)
    torch.testing.assert_close(prepared(x), module(x))
    prepared.close()


def test_what_inference_mode_prepared_serves_outside_it() -> None:
    """Where weights are folded, these are written again."""
    module, x = Mixed().eval(), torch.randn(2, 3, 8, 8)
    with torch.inference_mode():
        prepared = systems.load("nimble", fold_batch_norm=True).prepare(module, (x,))
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            module.conv.weight.mul_(2)
            for out, expected in zip(prepared(x), module(x), strict=True):
                torch.testing.assert_close(out, expected)
    prepared.close()


def test_an_input_that_is_no_dense_tensor_is_refused() -> None:
    x = torch.randn(3, 4)
    prepared = systems.load("nimble").prepare(small(), (x,))
    with pytest.raises(
        ValueError, match=r"^input 0 is sparse_coo float32\[3, 4\] on cpu, but this was prepared for float32"
    ):
        prepared(x.to_sparse())
    prepared.close()


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("choice", ["eager", "nimble", "torchscript", "Nimble"])
def test_a_copy_is_refused(choice: str, act: Callable[[object], object]) -> None:
    """It would share threads and device memory with what it is of, or have another's weights."""
    x = torch.randn(3, 4)
    prepared = Nimble(small()).prepare(x) if choice == "Nimble" else systems.load(choice).prepare(small(), (x,))
    with pytest.raises(TypeError, match=r"^a \w+ cannot be copied or pickled: (prepare|wrap) a copy of its module"):
        act(prepared)
    prepared.close()


@pytest.mark.parametrize("what", [None, torch.relu, nn.Linear])
def test_what_is_no_module_is_told(what: object) -> None:
    with pytest.raises(TypeError, match=r"^module is a \w+, and no module of PyTorch$"):
        Nimble(what)  # type: ignore[arg-type]


def test_a_larger_module_is_prepared_with_the_module_that_it_holds() -> None:
    x = torch.randn(3, 4)
    inner = Nimble(small()).prepare(x)
    module = nn.Sequential(inner, nn.ReLU()).eval()
    prepared = systems.load("nimble").prepare(module, (x,))
    torch.testing.assert_close(prepared(x), module(x))
    prepared.close()
    inner.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("choice", ["cuda_graph", "tvm_cuda_graph", "onnxruntime_cuda_graph"])
def test_a_device_that_a_system_does_not_run_on_is_told(choice: str) -> None:
    module, x = small(), torch.randn(3, 4)
    with pytest.raises(Unsupported, match=r"^a CUDA Graph needs a CUDA device$"):
        systems.load(choice).prepare(module, (x,))
    if choice == "cuda_graph":
        optimizer = torch.optim.SGD(module.parameters())
        with pytest.raises(Unsupported, match=r"^a CUDA Graph needs a CUDA device$"):
            systems.load(choice).prepare_training(module, optimizer, nn.functional.mse_loss, (x,), torch.randn(3, 2))
