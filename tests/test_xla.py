"""XLA by torchax: against eager where both import, and its reasons where they do not."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import ROOT
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

import models
import systems
from systems.arithmetic import without_tf32
from systems.base import Unsupported
from systems.compilers.exported import Exported
from systems.xla import system as xla
from systems.xla.translation import translated

REASON = systems.load("xla").unsupported("cpu")
RUNS = pytest.mark.skipif(REASON is not None, reason=str(REASON))
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


@RUNS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["squeezenet", "mobilenet_v2_cifar10", "bert"])
def test_it_computes_what_eager_does(name: str, device: str) -> None:
    """In fp32, since in TF32 the two round differently, by more than the bound."""
    size = {"layers": 2} if name == "bert" else {}
    loaded = models.load(name, 2, device=device, **size)
    with without_tf32():
        prepared = systems.load("xla").prepare(loaded.module, loaded.inputs)
        for inputs in (loaded.inputs, tuple(x.flip(0) for x in loaded.inputs)):
            with torch.no_grad():
                expected = tree_leaves(loaded.module(*inputs))
            for out, reference in zip(tree_leaves(prepared(*inputs)), expected, strict=True):
                torch.testing.assert_close(out, reference, rtol=1e-2, atol=1e-3 * float(reference.abs().max()))
            assert not expected[0][0].equal(expected[0][1])  # what is flipped differs
    prepared.close()
    with pytest.raises(RuntimeError, match="closed"):
        prepared(*loaded.inputs)


class Sizes(nn.Module):
    """It returns integers of 64 bits, beside a mapping."""

    def forward(self, x: Tensor, i: Tensor) -> dict[str, Tensor]:
        return {"largest": x.argmax(1), "rows": x[i] * 2}


@RUNS
def test_types_and_structure_are_eagers() -> None:
    x, i = torch.randn(4, 3), torch.tensor([3, 0])
    out = systems.load("xla").prepare(Sizes().eval(), (x, i))(x, i)
    expected = Sizes()(x, i)
    assert list(out) == list(expected) and out["largest"].dtype == torch.int64
    assert all(out[key].equal(expected[key]) for key in expected)


class Masked(nn.Module):
    """A buffer, beside numbers that torch.export makes constants of."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.randint(5, (7,)))

    def forward(self, x: Tensor) -> Tensor:
        mask = x.new_zeros(5)
        mask[1:3], mask[4:] = 2, 3
        return x + mask + x[self.places].sum()


@RUNS
def test_buffers_and_constants_are_told_apart_wherever_they_stand() -> None:
    """Those of the second module come after the first one's constants."""
    module, x = nn.Sequential(Masked(), Masked()).eval(), torch.randn(5)
    torch.testing.assert_close(systems.load("xla").prepare(module, (x,))(x), module(x))


@dataclass
class Pair:
    """Its like torch.export can return, and not save."""

    first: Tensor
    second: int


torch.export.register_dataclass(Pair)


class Weights(nn.Module):
    """They are tied, in other layouts, empty, no parameters, or part of no state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.tied = self.linear.weight
        self.plain = torch.randn(3, 4).t()
        self.register_buffer("added", torch.randn(4, 3), persistent=False)
        self.register_buffer("pairs", torch.randn(3, 2))
        self.register_buffer("empty", torch.randn(0, 3))

    def forward(self, x: Tensor) -> Pair:
        product = self.linear(x) @ self.tied + self.plain.t().view(12)[:3]
        steps = torch.arange(3, device=x.device)[None] + torch.view_as_complex(self.pairs).abs()
        return Pair(torch.cat([product, self.added, self.empty, steps]), 3)


@RUNS
def test_weights_are_those_of_the_module_also_after_they_change() -> None:
    module, x = Weights().eval(), torch.randn(2, 3)
    prepared = systems.load("xla").prepare(module, (x,))
    for _ in range(2):
        out = prepared(x)
        assert out.second == 3
        torch.testing.assert_close(out.first, module(x).first)
        with torch.no_grad():
            module.linear.weight.mul_(2)
            module.added.add_(1)


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor(0.5)


@RUNS
@pytest.mark.parametrize("device", DEVICES)
def test_a_constant_may_be_on_the_cpu(device: str) -> None:
    x = torch.randn(2, 3, device=device)
    assert systems.load("xla").prepare(Halved(), (x,))(x).equal(x * 0.5)


class Bags(nn.Module):
    """Of one size each, and of sizes that the inputs tell."""

    def __init__(self) -> None:
        super().__init__()
        modes = ("sum", "mean", "max")
        self.equal = nn.ModuleList(nn.EmbeddingBag(20, 4, mode=mode) for mode in modes)
        self.padded = nn.ModuleList(nn.EmbeddingBag(20, 4, mode=mode, padding_idx=3) for mode in modes)
        self.ended = nn.ModuleList(nn.EmbeddingBag(20, 4, mode=mode, include_last_offset=True) for mode in modes)

    def forward(self, table: Tensor, indices: Tensor, offsets: Tensor, factors: Tensor) -> list[Tensor]:
        of_table = [bag(table) for bag in (*self.equal, *self.padded)]
        of_offsets = [bag(indices, offsets) for bag in (*self.equal, *self.padded, *self.ended)]
        return [*of_table, *of_offsets, self.equal[0](indices, offsets, factors)]


@RUNS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offsets", [(0, 2, 2, 4, 7, 8), (0, 0, 1, 3, 8, 8)])
def test_bags_of_embeddings_are_those_of_eager(offsets: tuple[int, ...], device: str) -> None:
    """Bags may be empty, at the end too, and hold the row of padding alone."""
    module = Bags().eval().to(device)
    table, indices = torch.randint(0, 20, (5, 3)), torch.tensor([3, 7, 3, 3, 19, 0, 7, 11])
    table[1] = 3
    inputs = tuple(x.to(device) for x in (table, indices, torch.tensor(offsets), torch.randn(8)))
    prepared = systems.load("xla").prepare(module, inputs)
    with torch.no_grad():
        expected = module(*inputs)
    for out, reference in zip(prepared(*inputs), expected, strict=True):
        torch.testing.assert_close(out, reference)


class Mixture(nn.Module):
    """Rows in groups, each by its own weight, and how many rows each group has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16, 8, dtype=torch.bfloat16))

    def forward(self, x: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        counts = torch.histc(groups.int() if groups.is_cuda else groups.float(), 4, 0, 3)
        return torch._grouped_mm(x, self.weight, offs=counts.cumsum(0, dtype=torch.int32)), counts.int()


@RUNS
@pytest.mark.parametrize("device", DEVICES)
def test_products_of_groups_are_those_of_eager(device: str) -> None:
    """One group is empty. On a GPU integers are counted."""
    x, groups = torch.randn(24, 16), torch.tensor([0] * 5 + [1] * 12 + [3] * 7)
    module = Mixture().eval().to(device)
    inputs = x.to(device, torch.bfloat16), groups.to(device)
    prepared = systems.load("xla").prepare(module, inputs)
    with torch.no_grad():
        expected = module(*inputs)
    for out, reference in zip(prepared(*inputs), expected, strict=True):
        torch.testing.assert_close(out, reference)
    assert expected[1].tolist() == [5, 12, 0, 7]


@RUNS
@pytest.mark.parametrize("of", ["weights", "groups", "bags"])
def test_a_program_for_a_gpu_is_translated_without_one(of: str) -> None:
    """Its tensors are fake. The function is that for a CPU."""
    import jax.export

    def function(device: str) -> Any:
        with FakeTensorMode(), torch.device(device):
            if of == "weights":
                exported = Exported(Weights().eval(), (torch.randn(2, 3),))
            elif of == "bags":
                exported = Exported(nn.EmbeddingBag(20, 4, mode="sum").eval(), (torch.ones(5, 3, dtype=torch.int64),))
            else:
                inputs = torch.randn(24, 16, dtype=torch.bfloat16), torch.ones(24, dtype=torch.int32)
                exported = Exported(Mixture().eval(), inputs)
        return jax.export.deserialize(translated(exported).function)

    on_gpu, on_cpu = function("cuda"), function("cpu")
    assert (on_gpu.platforms, on_cpu.platforms) == (("cuda",), ("cpu",))
    assert on_gpu.in_avals == on_cpu.in_avals and on_gpu.out_avals == on_cpu.out_avals


@RUNS
def test_products_have_the_precision_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax.export

    precisions = []
    for allow_tf32 in (False, True):
        monkeypatch.setattr(Exported, "allow_tf32", allow_tf32)
        function = translated(Exported(nn.Linear(3, 2).eval(), (torch.randn(4, 3),))).function
        text = jax.export.deserialize(function).mlir_module()
        precisions.append({word for word in ("HIGHEST", "HIGH") if f"[{word}, {word}]" in text})
    assert precisions == [{"HIGHEST"}, {"HIGH"}]


@torch.library.custom_op("opweave_test::own", mutates_args=())
def own_operator(x: Tensor) -> Tensor:
    return x + 1


own_operator.register_fake(torch.empty_like)


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return own_operator(x)


class Batches(Mixture):
    """A batch of rows in the place of groups."""

    def forward(self, x: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        return torch._grouped_mm(x, self.weight), groups


@RUNS
def test_what_it_cannot_compile_has_a_reason() -> None:
    class Rare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.special.airy_ai(x)

    with pytest.raises(Unsupported, match=r"^torchax cannot translate it: [^\n]*airy_ai[^\n]*$"):
        systems.load("xla").prepare(Rare().eval(), (torch.randn(3),))
    batches = torch.randn(4, 6, 16, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
    with pytest.raises(Unsupported, match="NotImplementedError: a product of groups of another form"):
        systems.load("xla").prepare(Batches().eval(), batches)
    with pytest.raises(
        Unsupported, match=r"^torchax cannot translate it: LookupError: opweave_test::own is no operator of torch$"
    ):
        systems.load("xla").prepare(Own().eval(), (torch.randn(3),))
    with pytest.raises(Unsupported, match="JAX would round float64 to 32 bits"):
        systems.load("xla").prepare(nn.ReLU(), (torch.randn(3, dtype=torch.float64),))


STATE = """
import os, sys
import torch
from torch import nn
import systems

VARIABLES = ("XLA_PYTHON_CLIENT_PREALLOCATE", "JAX_PLATFORMS", "PYTHONPATH")
for variable in VARIABLES:
    os.environ.pop(variable, None)

def state():
    name = torch._C._get_privateuse1_backend_name()
    return name, hasattr(torch, "jax"), torch.backends.mha.get_fastpath_enabled(), [v for v in VARIABLES if v in os.environ]

before, ready = state(), systems.load("xla")
device = "cuda" if torch.cuda.is_available() and ready.unsupported("cuda") is None else "cpu"
assert ready.unsupported(device) is None
x = torch.randn(4, 3, device=device)
ready.prepare(nn.Linear(3, 2).eval().to(device), (x,))(x)
torch.ones(1, device=device).requires_grad_().mul(2).sum().backward()
if device == "cuda":
    torch.ones(1).pin_memory()
    torch.accelerator.current_stream()
assert state() == before, (before, state())
assert not [name for name in sys.modules if name.partition(".")[0] == "torchax"]
"""


@RUNS
def test_the_process_keeps_its_state() -> None:
    """That which importing torchax changes."""
    done = subprocess.run([sys.executable, "-c", STATE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    xla._missing.cache_clear()
    monkeypatch.setattr(xla, "find_spec", lambda name: None)
    expected = f"jax and torchax and flatbuffers not installed: pip install {xla.PACKAGES}"
    assert systems.load("xla").unsupported("cpu") == expected
    xla._missing.cache_clear()


@pytest.fixture
def torchax(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The file of a module in the place of torchax."""
    monkeypatch.setattr(xla, "find_spec", lambda name: name)
    monkeypatch.syspath_prepend(tmp_path)
    xla._missing.cache_clear()
    yield tmp_path / "torchax.py"
    xla._missing.cache_clear()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise AttributeError('no such\\nbackend')", "AttributeError: no such backend"),
        pytest.param(
            "import os; os.kill(os.getpid(), 9)", "the process of torchax ended by SIGKILL", marks=pytest.mark.slow
        ),  # as below
        ("import os; os.write(2, b'it broke\\n\\n'); os._exit(3)", "the process of torchax ended with status 3: it broke"),
    ],
)
def test_a_torchax_that_does_not_import_is_a_reason(torchax: Path, source: str, reason: str) -> None:
    """As beside a newer torch."""
    torchax.write_text(source)
    assert systems.load("xla").unsupported("cpu") == f"torchax does not import beside torch {torch.__version__}: {reason}"


def test_a_program_whose_translation_dies_is_no_unsupported_one(torchax: Path) -> None:
    torchax.write_text("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(ChildProcessError, match=r"^the process of torchax ended by SIGKILL$"):
        translated(Exported(Weights().eval(), (torch.randn(2, 3),)))


def soon(is_so: Callable[[], bool], within: float) -> bool:
    end = time.monotonic() + within
    while not (answer := is_so()) and time.monotonic() < end:
        time.sleep(0.05)
    return answer


KILLED = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from systems.compilers.exported import Exported
from systems.xla.translation import translated
translated(Exported(torch.nn.ReLU().eval(), (torch.zeros(3),)))
"""


@pytest.mark.slow
def test_a_translation_that_is_killed_ends_its_process_and_leaves_nothing(torchax: Path) -> None:
    number, temporary, inductor = (torchax.parent / name for name in ("number", "temporary", "inductor"))
    temporary.mkdir()
    settings = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(inductor)}  # a folder of PyTorch's own
    torchax.write_text(f"import os, time; open({str(number)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    command = [sys.executable, "-c", KILLED, str(torchax.parent)]
    parent = subprocess.Popen(command, cwd=ROOT, env=os.environ | settings)
    assert soon(lambda: number.exists() and number.read_text() != "", within=120)
    child = psutil.Process(int(number.read_text()))
    parent.kill()
    parent.wait()
    assert soon(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, within=20)
    assert list(temporary.iterdir()) == []
