"""Inputs that share memory while a module is made ready: each stays an input of its own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import conf
import systems
from systems.backends import backend
from systems.base import Unsupported
from systems.nimble import Nimble
from systems.scheduling.graph.examples import stand_ins
from systems.training.step import ModuleStep

pytestmark = pytest.mark.usefixtures("cache_folder")
Pair = tuple[Tensor, Tensor]


class Owner(nn.Module):
    """Two inputs, a parameter, a buffer and a constant, of which no two may be taken for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("buffer", torch.randn(4, 4))
        self.constant = torch.randn(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x @ self.weight + 2 * y @ self.buffer + self.constant


def distinct(_: Owner) -> Pair:
    return torch.randn(4, 4), torch.randn(4, 4)


def one_tensor(_: Owner) -> Pair:
    x = torch.randn(4, 4)
    return x, x


def views(_: Owner) -> Pair:
    x = torch.randn(4, 4)
    return x.view(4, 4), x.view(16).view(4, 4)


def parts_of_one(_: Owner) -> Pair:
    x = torch.randn(2, 4, 4)
    return x[0], x[1]


def its_own(owner: Owner) -> Pair:
    return owner.weight, owner.buffer  # type: ignore[return-value]


def its_constant(owner: Owner) -> Pair:
    """And one tensor twice."""
    return owner.constant, owner.constant


def parameters(_: Owner) -> Pair:
    return nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))


INPUTS: list[Callable[[Owner], Pair]] = [distinct, one_tensor, views, parts_of_one, its_own, its_constant, parameters]


@pytest.fixture
def owner() -> Owner:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Owner().eval()


# From tables; they execute no module.
LEARNERS = {"pipeline", "windtunnel", "lightgbm", "tabm", "ft_transformer", "deepgbm", "hummingbird", "translation"}
SERVERS = {"orca", "request_level", "vllm", "nano_vllm", "endpoint"}  # nor do these
SERVERS |= {"transformers_continuous_batching", "transformers_generate"}


def every_system() -> list[object]:
    """Every class that executes modules but custom, which needs an option. Those that call a C++ compiler take long."""
    names = {str(conf.options("system", choice)["name"]) for choice in conf.choices("system")} - {
        "custom",
        *LEARNERS,
        *SERVERS,
    }
    compiling = {"tvm", "torch_compile", "weave_or_peers"}
    return [pytest.param(n, marks=[pytest.mark.slow] * (n in compiling)) for n in sorted(names)]


def agrees_with_all(module: Owner, prepared: Callable[..., Tensor]) -> None:
    for make in INPUTS:
        inputs = make(module)
        with torch.no_grad():
            torch.testing.assert_close(prepared(*inputs), module(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("choice", every_system())
def test_examples_that_share_memory_are_inputs_of_their_own(choice: str, owner: Owner) -> None:
    system = systems.load(choice)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if reason := system.unsupported(device):
        pytest.skip(reason)
    owner.to(device).constant = owner.constant.to(device)
    with torch.device(device):
        for make in (its_constant, its_own):
            prepared = system.prepare(owner, make(owner))
            agrees_with_all(owner, prepared)
            prepared.close()


@pytest.mark.parametrize("make", [one_tensor, its_own, parameters])
def test_a_backend_takes_them_for_inputs_of_their_own(make: Callable[[Owner], Pair], owner: Owner) -> None:
    fast = torch.compile(owner, backend=backend("nimble"), dynamic=False)
    with torch.no_grad():
        fast(*make(owner))
    agrees_with_all(owner, fast)
    owner.constant = torch.randn(4, 4)
    agrees_with_all(owner, fast)


def test_attention_of_a_tensor_to_itself_may_attend_to_another_later() -> None:
    attention, x, other = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    for prepared in (systems.load("nimble").prepare(attention, (x, x, x)), Nimble(attention).prepare((x, x, x))):
        with torch.no_grad():
            torch.testing.assert_close(prepared(x, other, other), attention(x, other, other))


def test_a_target_that_is_the_input_is_a_target_of_its_own(owner: Owner) -> None:
    """As an autoencoder's."""

    def loss(out: Tensor, target: Tensor) -> Tensor:
        return (out - target).square().mean()

    def stepped(prepare: Callable[[nn.Module, torch.optim.Optimizer], Callable[..., Tensor]]) -> list[float]:
        torch.manual_seed(0)
        module = Owner()
        step = prepare(module, torch.optim.SGD(module.parameters(), 0.01))
        return [step(torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 4)).item() for _ in range(3)]

    x = torch.randn(4, 4)
    nimble = systems.load("nimble")
    scheduled = stepped(lambda module, optimizer: nimble.prepare_training(module, optimizer, loss, (x, x), x))
    assert scheduled == pytest.approx(stepped(lambda module, optimizer: ModuleStep(module, optimizer, loss)), rel=1e-5)


def test_a_stand_in_lies_in_memory_as_its_input_does() -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    inputs = (
        x,
        x.t(),
        x[1:, ::2],
        x[:, :1].expand(4, 3),
        x[:0],
        torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last),
    )
    alike = stand_ins(inputs)
    assert [(t.shape, t.stride(), t.dtype) for t in alike] == [(t.shape, t.stride(), t.dtype) for t in inputs]
    storages = {t.untyped_storage()._cdata for t in (*alike, *inputs)}
    assert len(storages) == len(alike) + 2  # the inputs lie in two


@pytest.mark.parametrize("choice", ["nimble", "ios", "opara", "onnxruntime"])
def test_an_input_that_is_no_dense_tensor_is_told_in_one_line(choice: str) -> None:
    dense = torch.eye(3)
    quantized = torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8)
    for x, kind in ((dense.to_sparse(), "sparse_coo"), (dense.to_sparse_csr(), "sparse_csr"), (quantized, "quantized")):
        with pytest.raises(Unsupported, match=f"input 1 is a {kind} tensor, and only dense tensors are captured"):
            systems.load(choice).prepare(Owner().eval(), (dense, x))
    with pytest.raises(Unsupported, match=r"^input 1 is a float, not a tensor$"):
        systems.load(choice).prepare(Owner().eval(), (dense, 1.0))  # type: ignore[arg-type]
